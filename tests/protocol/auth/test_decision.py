"""Decisions, against a reference that is written from the rules' text without regard to speed."""

import fnmatch
import ipaddress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trimq.protocol.auth.decision import DENIED, NO_MATCH, Verdict, decide, explain, refusal
from trimq.protocol.auth.model import (
    Acl,
    Action,
    Decision,
    Policy,
    PolicyEntry,
    PolicyType,
    Resource,
    ResourceType,
)

HERE = "10.1.2.3"


def entry(resource: str, actions: str, decision: str = "Allow", *ips: str) -> PolicyEntry:
    named = tuple(found for text in actions.split(",") if (found := Action.of(text)))
    given_decision = Decision.of(decision)
    assert named
    assert given_decision
    return PolicyEntry(Resource.parse(resource), named, given_decision, ips)


def acl(*custom: PolicyEntry, default: tuple[PolicyEntry, ...] = ()) -> Acl:
    policies = [(PolicyType.CUSTOM, custom), (PolicyType.DEFAULT, default)]
    return Acl("User:me", tuple(Policy(kind, entries) for kind, entries in policies if entries))


# -- the rows of the facts


@pytest.mark.parametrize(
    ("entries", "allowed"),
    [
        ([], None),
        ([entry("Topic:order", "Pub")], True),
        ([entry("Topic:order", "All")], True),
        ([entry("topic:order", "pub")], True),
        ([entry("Topic:Order", "Pub")], None),
        ([entry("Group:order", "Pub")], None),
        ([entry("Topic:order", "Sub")], None),
        ([entry("*", "Pub")], True),
        ([entry("Topic:*", "Pub", "Deny"), entry("Topic:order", "Pub")], True),
        ([entry("Topic:or*", "Pub", "Deny"), entry("Topic:order", "Pub")], True),
        ([entry("Topic:or*", "Pub", "Deny"), entry("Topic:ord*", "Pub")], True),
        ([entry("Topic:or*", "Pub"), entry("Topic:ord*", "Pub", "Deny")], False),
        ([entry("Topic:or*", "Pub", "Deny"), entry("Topic:*", "Pub")], False),
        ([entry("*", "Pub", "Deny"), entry("Topic:*", "Pub")], True),
        # A more precise entry without the action is no obstacle and no help.
        ([entry("Topic:order", "Sub"), entry("Topic:*", "Pub")], True),
        ([entry("Topic:order", "Sub"), entry("Topic:*", "Pub", "Deny")], False),
        # Duplicates, which only another program stores: Deny first.
        ([entry("Topic:order", "Pub"), entry("Topic:order", "Pub", "Deny")], False),
        ([entry("Topic:order", "Pub", "Allow", "10.1.2.3")], True),
        ([entry("Topic:order", "Pub", "Allow", "10.1.2.4", "10.1.0.0/16")], True),
        ([entry("Topic:order", "Pub", "Allow", "10.1.2.4")], None),
        ([entry("Topic:order", "Pub", "Deny", "10.1.2.4"), entry("Topic:*", "Pub")], True),
    ],
)
def test_custom_entries(entries: list[PolicyEntry], allowed: bool | None) -> None:
    verdict = decide(acl(*entries), Resource.topic("order"), [Action.PUB], HERE)
    assert verdict.allowed is bool(allowed)
    assert verdict.reason == {True: "", False: DENIED, None: NO_MATCH}[allowed]
    assert (verdict.entry is None) is (allowed is None)


def test_default_entries_count_only_if_no_custom_entry_matches() -> None:
    rules = acl(entry("Topic:*", "Pub"), default=(entry("Topic:order", "Pub,Sub", "Deny"), entry("Group:*", "Sub")))
    assert decide(rules, Resource.topic("order"), [Action.PUB], HERE).policy_type is PolicyType.CUSTOM
    assert decide(rules, Resource.topic("order"), [Action.SUB], HERE)[2:] == (PolicyType.DEFAULT, DENIED)
    assert decide(rules, Resource.group("g"), [Action.SUB], HERE).allowed


def test_one_of_several_actions_is_enough() -> None:
    rules = acl(entry("Topic:order", "Get"))
    assert decide(rules, Resource.topic("order"), [Action.SUB, Action.GET], HERE).allowed
    assert decide(rules, Resource.topic("order"), [Action.ANY], HERE).allowed
    assert not decide(rules, Resource.topic("order"), [Action.SUB], HERE).allowed


def test_all_resources_of_a_type_need_an_entry_for_all_of_them() -> None:
    every = Resource.every(ResourceType.TOPIC)
    for text, allowed in [("Topic:*", True), ("*", True), ("Topic:a*", False), ("Topic:a", False), ("Group:*", False)]:
        assert decide(acl(entry(text, "List")), every, [Action.LIST], HERE).allowed is allowed


@pytest.mark.parametrize(
    "topic",
    ["SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC"],
)
def test_a_topic_with_messages_of_all_topics_has_to_be_named(topic: str) -> None:
    wide = [entry(resource, "All") for resource in ("*", "Topic:*", f"Topic:{topic[:5]}*", f"Topic:{topic}*")]
    assert decide(acl(*wide), Resource.topic(topic), [Action.SUB], HERE) == Verdict(False, None, None, NO_MATCH)
    named = entry(f"Topic:{topic}", "Sub")
    assert decide(acl(*wide, named), Resource.topic(topic), [Action.SUB], HERE).entry == named
    assert decide(acl(*wide), Resource.group(topic), [Action.SUB], HERE).allowed


def test_topics_with_a_prefix_are_not_one_topic() -> None:
    prefix = Resource.parse("Topic:a*")
    for text, covers in [("Topic:a", False), ("Topic:*", True), ("*", True), ("Group:*", False)]:
        assert Resource.parse(text).covers(prefix) is covers


def test_a_topic_that_is_named_like_a_pattern_is_one_topic() -> None:
    assert not decide(acl(entry("Topic:a*", "Pub", "Deny")), Resource.topic("*"), [Action.PUB], HERE).entry
    assert decide(acl(entry("Topic:*", "Pub")), Resource.topic("*"), [Action.PUB], HERE).allowed


@pytest.mark.parametrize(
    ("ip", "source", "matches"),
    [
        ("10.0.0.0/8", "10.255.0.1", True),
        ("10.0.0.7/8", "10.255.0.1", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("10.1.2.3", "::ffff:10.1.2.3", True),
        ("::1", "0:0:0:0:0:0:0:1", True),
        ("fe80::/10", "fe80::1%eth0", True),
        ("0.0.0.0/0", "::1", False),
        ("::/0", "10.0.0.1", False),
    ],
)
def test_source_addresses(ip: str, source: str, matches: bool) -> None:
    assert decide(acl(entry("*", "All", "Allow", ip)), Resource.topic("t"), [Action.PUB], source).allowed is matches


def test_an_unknown_address_is_refused_by_entries_that_ask_for_one() -> None:
    limited = acl(entry("Topic:t", "Pub", "Deny", "10.0.0.0/8"), entry("*", "Pub"))
    assert decide(limited, Resource.topic("t"), [Action.PUB], "local").reason == DENIED
    only = acl(entry("Topic:t", "Pub", "Allow", "0.0.0.0/0", "::/0"))
    assert decide(only, Resource.topic("t"), [Action.PUB], "").reason == NO_MATCH


def test_without_policies() -> None:
    assert decide(None, Resource.topic("t"), [Action.PUB], HERE) == Verdict(False, None, None, NO_MATCH)
    assert explain(None, Resource.topic("t"), [Action.PUB], HERE) == []


def test_the_remark_of_a_refusal() -> None:
    assert refusal("X", Resource.topic("T"), "127.0.0.1", NO_MATCH) == (
        "User:X has no permission to access Topic:T from 127.0.0.1, no matched policies."
    )
    assert refusal("X", Resource.every(ResourceType.GROUP), "127.0.0.1", DENIED) == (
        "User:X has no permission to access Group:* from 127.0.0.1, the decision is deny."
    )


# -- against the reference

NAMES = st.sampled_from(["a", "ab", "abc", "abd", "b", "B"])
KINDS = st.sampled_from(["Topic", "Group", "Cluster"])
PATTERNS = st.one_of(
    st.just("*"),
    st.tuples(KINDS, st.one_of(st.just("*"), NAMES, NAMES.map("{}*".format))).map(":".join),
)
IPS = st.lists(st.sampled_from(["10.1.2.3", "10.1.0.0/16", "10.0.0.0/8", "11.1.1.1"]), max_size=2)
ACTIONS = [action for action in Action if action is not Action.ANY]
ENTRIES = st.lists(
    st.builds(
        lambda text, actions, decision, ips: PolicyEntry(Resource.parse(text), tuple(actions), decision, tuple(ips)),
        PATTERNS,
        st.sets(st.sampled_from(ACTIONS), min_size=1, max_size=3),
        st.sampled_from(Decision),
        IPS,
    ),
    max_size=8,
)
ASKED = st.builds(lambda kind, name: (kind, name), KINDS, NAMES)


def reference(
    custom: list[PolicyEntry], default: list[PolicyEntry], asked: tuple[str, str], actions: set[Action], source: str
) -> str:
    """Allow, Deny or none, from the texts of the entries."""
    text = ":".join(asked)
    for entries in (custom, default):
        matching = [
            one
            for one in entries
            if fnmatch.fnmatchcase(text, one.resource.key)
            and (set(one.actions) & actions or Action.ALL in one.actions)
            and (
                not one.source_ips
                or any(ipaddress.ip_address(source) in ipaddress.ip_network(ip) for ip in one.source_ips)
            )
        ]
        literal = [one for one in matching if one.resource.key == text]
        prefixes = [one for one in matching if one.resource.key not in (text, f"{asked[0]}:*", "*")]
        longest = max((len(one.resource.key) for one in prefixes), default=0)
        ranks = [
            literal,
            [one for one in prefixes if len(one.resource.key) == longest],
            [one for one in matching if one.resource.key == f"{asked[0]}:*"],
            [one for one in matching if one.resource.key == "*"],
        ]
        for rank in ranks:
            if any(one.decision is Decision.DENY for one in rank):
                return "Deny"
            if rank:
                return "Allow"
    return "none"


@settings(max_examples=500)
@given(ENTRIES, ENTRIES, ASKED, st.sets(st.sampled_from(ACTIONS), min_size=1, max_size=2), st.just(HERE))
@example([entry("Topic:a*", "Pub"), entry("Topic:ab*", "Pub", "Deny")], [], ("Topic", "abc"), {Action.PUB}, HERE)
@example([entry("*", "Pub", "Deny")], [entry("Topic:abc", "Pub")], ("Topic", "abc"), {Action.PUB}, HERE)
def test_decisions_are_those_of_the_reference(
    custom: list[PolicyEntry], default: list[PolicyEntry], asked: tuple[str, str], actions: set[Action], source: str
) -> None:
    make = {"Topic": Resource.topic, "Group": Resource.group, "Cluster": Resource.cluster}[asked[0]]
    rules = acl(*custom, default=tuple(default))
    verdict = decide(rules, make(asked[1]), list(actions), source)
    expected = reference(custom, default, asked, actions, source)
    assert verdict.allowed is (expected == "Allow")
    assert verdict.reason == {"Allow": "", "Deny": DENIED, "none": NO_MATCH}[expected]

    # An explanation agrees with the decision: the entry that decides is in it, and matching entries are the matching.
    explained = explain(rules, make(asked[1]), list(actions), source)
    assert len(explained) == len(custom) + len(default)
    deciding = {one.entry for one in explained if one.decides}
    assert deciding == ({verdict.entry} if verdict.entry else set())
    assert any(one.matches for one in explained) is (verdict.entry is not None)


def test_an_explanation_says_why() -> None:
    rules = acl(
        entry("*", "All", "Deny"),
        entry("Topic:ord*", "Pub"),
        entry("Topic:order", "Sub", "Deny", "11.0.0.0/8"),
        entry("Group:g", "Pub"),
        default=(entry("Topic:*", "Pub", "Deny"), entry("Topic:x", "Pub")),
    )
    found = explain(rules, Resource.topic("order"), [Action.PUB, Action.GET], HERE)
    assert [(one.policy_type.value, one.entry.resource.key, one.matches, one.decides, one.why) for one in found] == [
        (
            "Custom",
            "Topic:order",
            False,
            False,
            "is not about Pub or Get: no obstacle and no help; is not about requests from 10.1.2.3",
        ),
        ("Custom", "Group:g", False, False, "is not about Topic:order"),
        ("Custom", "Topic:ord*", True, True, "decides: Allow"),
        ("Custom", "*", True, False, "matches, but Allow Topic:ord* is more precise, or denies at equal rank"),
        ("Default", "Topic:x", False, False, "is not about Topic:order"),
        (
            "Default",
            "Topic:*",
            True,
            False,
            "matches, but Default counts only if no Custom entry matches: Allow Topic:ord* does",
        ),
    ]
