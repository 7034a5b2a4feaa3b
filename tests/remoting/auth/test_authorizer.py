"""What a user may do, and that kept decisions are of now."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remoting.auth.stores import filled, rules
from trimq.protocol.auth.decision import decide
from trimq.protocol.auth.model import (
    MOST_RESOURCE_BYTES,
    Action,
    Decision,
    PolicyEntry,
    Resource,
    UserChange,
    UserStatus,
    UserType,
)
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth.authorizer import Authorizer

HERE = "127.0.0.1"
T, G = Resource.topic("T"), Resource.group("G")
PUB, SUB = (Action.PUB,), (Action.SUB,)
Needs = Sequence[tuple[Resource, Sequence[Action]]]


def allow(text: str, *actions: Action, ips: tuple[str, ...] = ()) -> PolicyEntry:
    return PolicyEntry(Resource.parse(text), actions or PUB, Decision.ALLOW, ips)


def refused(what: Authorizer, username: str, needs: Needs, source: str = HERE) -> str:
    with pytest.raises(RemotingError) as caught:
        what.check(username, needs, source)
    assert caught.value.code == 16
    return caught.value.remark


async def test_all_of_several_resources_are_needed_and_the_first_refusal_answers() -> None:
    store, _ = await filled()
    what = Authorizer(store)
    both: Needs = [(T, SUB), (G, SUB)]
    none = "User:me has no permission to access {} from 127.0.0.1, no matched policies."
    assert refused(what, "me", both) == none.format("Topic:T")
    await store.write_acl(rules("me", allow("Topic:T", Action.SUB)))
    assert refused(what, "me", both) == none.format("Group:G")
    await store.write_acl(rules("me", allow("Group:*", Action.SUB)))
    what.check("me", both, HERE)
    what.check("me", [], HERE)
    await store.write_acl(rules("me", PolicyEntry(G, SUB, Decision.DENY)))
    assert refused(what, "me", both) == (
        "User:me has no permission to access Group:G from 127.0.0.1, the decision is deny."
    )
    assert what.refusals == 3


async def test_a_super_may_do_everything_and_others_nothing() -> None:
    store, _ = await filled()
    what = Authorizer(store)
    await store.write_acl(rules("root", PolicyEntry(Resource.parse("*"), (Action.ALL,), Decision.DENY)))
    what.check("root", [(T, PUB)], HERE)
    await store.update_user("me", UserChange(user_type=UserType.SUPER))
    what.check("me", [(T, PUB)], HERE)
    await store.update_user("me", UserChange(user_type=UserType.NORMAL))
    assert "no matched policies" in refused(what, "me", [(T, PUB)])


async def test_a_user_who_is_gone_or_disabled_may_do_nothing() -> None:
    store, _ = await filled()
    what = Authorizer(store)
    await store.write_acl(rules("me", allow("*", Action.ALL)))
    what.check("me", [(T, PUB)], HERE)
    await store.update_user("me", UserChange(user_status=UserStatus.DISABLE))
    assert refused(what, "me", [(T, PUB)]) == "User:me is disabled."
    assert refused(what, "me", []) == "User:me is disabled."
    await store.delete_user("me")
    assert refused(what, "me", [(T, PUB)]) == "User:me is not found."
    assert what.refusals == 3


async def test_a_change_counts_at_once() -> None:
    store, _ = await filled()
    what = Authorizer(store)
    await store.write_acl(rules("me", allow("Topic:T", ips=("127.0.0.0/8",))))
    what.check("me", [(T, PUB)], HERE)
    assert "from 10.0.0.1, no matched" in refused(what, "me", [(T, PUB)], "10.0.0.1")
    await store.delete_acl("User:me")
    assert refused(what, "me", [(T, PUB)])


async def test_kept_decisions_are_bounded() -> None:
    store, _ = await filled()
    what = Authorizer(store, most_decisions=10)
    for number in range(25):
        refused(what, "me", [(Resource.topic(f"T{number}"), PUB)])
    assert len(what._kept) == 5


TEXTS = ["*", "Topic:*", "Topic:a*", "Topic:a", "Group:a"]
ASKED = st.tuples(
    st.sampled_from([Resource.topic("a"), Resource.topic("ab"), Resource.group("a")]),
    st.sampled_from([PUB, SUB, (Action.PUB, Action.SUB)]),
    st.sampled_from([HERE, "10.0.0.1"]),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(TEXTS), st.sampled_from(Decision), st.sampled_from([(), (HERE,)]), st.lists(ASKED, max_size=4)
    ),
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
async def test_kept_decisions_are_those_of_the_policies_of_now(
    steps: list[tuple[str, Decision, tuple[str, ...], list[tuple[Resource, tuple[Action, ...], str]]]],
) -> None:
    store, _ = await filled()
    what = Authorizer(store, most_decisions=3)
    for text, decision, ips, asked in steps:
        await store.write_acl(rules("me", PolicyEntry(Resource.parse(text), PUB, decision, ips)))
        for resource, actions, source in asked:
            for _ in range(2):
                assert what.verdict("me", resource, actions, source) == decide(
                    store.acl("me"), resource, actions, source
                )


async def test_a_name_that_no_policy_can_have_is_not_kept() -> None:
    store, _ = await filled()
    await store.write_acl(rules("me", allow("Topic:*")))
    what = Authorizer(store)
    kept = what._kept
    for name in ("a" * MOST_RESOURCE_BYTES, "a" * (MOST_RESOURCE_BYTES + 1), "b" * 100_000):
        what.check("me", [(Resource.topic(name), PUB)], HERE)
    assert [len(resource.name) for _, resource, _, _ in kept] == [MOST_RESOURCE_BYTES]
