"""Users, policies, how changes merge, and the JSON of requests 3001 to 3010."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.auth import model
from trimq.protocol.auth.body import (
    decode_acl,
    decode_acls,
    decode_user,
    decode_user_change,
    decode_users,
    encode_acl,
    encode_acls,
    encode_user,
    encode_user_change,
    encode_users,
)
from trimq.protocol.auth.model import (
    Acl,
    Action,
    Decision,
    Policy,
    PolicyEntry,
    PolicyType,
    Resource,
    ResourcePattern,
    ResourceType,
    User,
    UserChange,
    UserStatus,
    UserType,
    checked_policies,
    checked_secret,
    checked_username,
    username_of,
)
from trimq.protocol.errors import RemotingError

SECRET = "canary-7f3a"
ALLOW, DENY = Decision.ALLOW, Decision.DENY


def entry(resource: str, *actions: Action, decision: Decision = ALLOW, ips: tuple[str, ...] = ()) -> PolicyEntry:
    return PolicyEntry(Resource.parse(resource), actions or (Action.PUB,), decision, ips)


def custom(*entries: PolicyEntry) -> Policy:
    return Policy(PolicyType.CUSTOM, entries)


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


# -- users


def test_a_password_is_in_no_text() -> None:
    user = User("me", SECRET)
    assert "me" in repr(user)
    assert SECRET not in f"{user!r} {user} {UserChange(SECRET)!r} {[user]}"
    assert SECRET.encode() not in encode_user(user) + encode_users([user])
    assert SECRET.encode() in encode_user(user, with_password=True)


def test_a_change_keeps_what_is_not_given() -> None:
    user = User("me", "old", UserType.SUPER, UserStatus.DISABLE)
    assert UserChange().applied_to(user) == user
    assert UserChange(user_status=UserStatus.ENABLE).applied_to(user) == User("me", "old", UserType.SUPER)
    assert UserChange("new", UserType.NORMAL).applied_to(user) == User("me", "new", UserType.NORMAL, UserStatus.DISABLE)


def test_the_json_of_a_user_is_rocketmqs() -> None:
    user = User("n", "p", UserType.SUPER, UserStatus.DISABLE)
    assert encode_user(user, with_password=True) == (
        b'{"password":"p","userStatus":"disable","userType":"Super","username":"n"}'
    )
    assert encode_user(user) == b'{"userStatus":"disable","userType":"Super","username":"n"}'
    assert decode_user(encode_user(user, with_password=True)) == user
    assert decode_user(encode_user(user)) == User("n", "", UserType.SUPER, UserStatus.DISABLE)
    assert decode_user(b"") is None
    assert decode_users(encode_users([user], with_password=True)) == [user]
    assert decode_users(b"") == []


@pytest.mark.parametrize(
    ("sent", "change"),
    [
        ({}, UserChange()),
        ({"username": "x", "password": "p"}, UserChange("p")),
        ({"password": "", "userType": "", "userStatus": None}, UserChange()),
        ({"userType": "SUPER", "userStatus": "Disable"}, UserChange(None, UserType.SUPER, UserStatus.DISABLE)),
        ({"userType": "normal", "userStatus": "enable"}, UserChange(None, UserType.NORMAL, UserStatus.ENABLE)),
    ],
)
def test_fields_of_a_users_change(sent: dict[str, Any], change: UserChange) -> None:
    assert decode_user_change(body(sent)) == change


def test_a_change_is_read_as_it_was_written() -> None:
    for change in (UserChange(), UserChange("p", UserType.SUPER, UserStatus.DISABLE)):
        assert decode_user_change(encode_user_change("me", change)) == change


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [
        (b"", 1, "The body of user is null"),
        (b"null", 1, "The body of user is null"),
        (b'{"password":"' + SECRET.encode() + b'"', 29, "the body is not the JSON that this request has"),
        (b"[]", 29, "the body is not the JSON that this request has"),
        (b'"%s"' % SECRET.encode(), 29, "the body is not the JSON that this request has"),
        (b"\xff", 29, "the body is not the JSON that this request has"),
        (body({"password": 5}), 16, "password can not be blank"),
        (body({"password": "  "}), 16, "password can not be blank"),
        (body({"password": SECRET * 100}), 16, "password is longer than 1024 bytes"),
        (b'{"password":"\\ud800"}', 29, "the body is not the JSON that this request has"),
        (body({"userType": "root"}), 29, "The userType is illegal; expected Super or Normal"),
        (body({"userType": 1}), 29, "The userType is illegal; expected Super or Normal"),
        (body({"userStatus": "off"}), 29, "The userStatus is illegal; expected enable or disable"),
    ],
)
def test_bodies_of_users_that_are_refused(sent: bytes, code: int, text: str) -> None:
    with pytest.raises(RemotingError) as caught:
        decode_user_change(sent)
    assert (caught.value.code, caught.value.remark) == (code, text)
    assert SECRET not in f"{caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (None, "The username is blank"),
        ("", "The username is blank"),
        (" \t", "The username is blank"),
        ("a\nb", "The username has characters that cannot be printed"),
        ("a\x00", "The username has characters that cannot be printed"),
        ("a\u202eb", "The username has characters that cannot be printed"),
        ("\ud800", "The username is not a valid text"),
        ("ä" * 128, "The username is longer than 255 bytes"),
    ],
)
def test_names_that_are_refused(name: Any, text: str) -> None:
    with pytest.raises(RemotingError) as caught:
        checked_username(name)
    assert (caught.value.code, caught.value.remark) == (29, text)


def test_names_and_secrets_up_to_their_limits() -> None:
    assert checked_username("ä" * 127) == "ä" * 127
    assert checked_username("a b:c*主") == "a b:c*主"
    assert checked_secret("x" * 1024) == "x" * 1024
    with pytest.raises(RemotingError, match="password is not a valid text"):
        checked_secret("\ud800")  # from a file; a body has no such text


def test_subjects() -> None:
    assert username_of("User:a:b") == "a:b"
    assert username_of("user:a") == "a"
    for subject, code in [(None, 29), ("", 29), ("User:", 29), ("User", 29), ("Role:x", 1), ("x", 1)]:
        with pytest.raises(RemotingError) as caught:
            username_of(subject)
        assert caught.value.code == code


# -- resources


@pytest.mark.parametrize(
    ("text", "kind", "pattern", "name", "key"),
    [
        ("*", ResourceType.ANY, ResourcePattern.ANY, "", "*"),
        ("Topic:a", ResourceType.TOPIC, ResourcePattern.LITERAL, "a", "Topic:a"),
        (" topic:a ", ResourceType.TOPIC, ResourcePattern.LITERAL, "a", "Topic:a"),
        ("GROUP:a*", ResourceType.GROUP, ResourcePattern.PREFIXED, "a", "Group:a*"),
        ("Cluster:*", ResourceType.CLUSTER, ResourcePattern.ANY, "", "Cluster:*"),
        ("Namespace:a:b", ResourceType.NAMESPACE, ResourcePattern.LITERAL, "a:b", "Namespace:a:b"),
    ],
)
def test_resources(text: str, kind: ResourceType, pattern: ResourcePattern, name: str, key: str) -> None:
    found = Resource.parse(text)
    assert found == Resource(kind, pattern, name)
    assert found.key == key
    assert Resource.parse(key) == found


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        (None, "The resource is null."),
        (5, "The resource is null."),
        (" ", "The resource is null."),
        ("a", "The resource type is unknown: a; expected Cluster:, Topic:, Group:, Namespace: or * alone."),
        ("Any:a", "The resource type is unknown: Any:a; expected Cluster:, Topic:, Group:, Namespace: or * alone."),
        ("Topic:", "The resource name is empty: Topic:; Topic:* means all."),
        ("Topic", "The resource name is empty: Topic; Topic:* means all."),
        ("Topic:a*b*", "The resource name is illegal: Topic:a*b*; * is allowed at its end only."),
        ("Topic:**", "The resource name is illegal: Topic:**; * is allowed at its end only."),
        ("Topic:*a", "The resource name is illegal: Topic:*a; * is allowed at its end only."),
        ("Topic:a\nb", "The resource name has characters that cannot be printed"),
        ("Topic:" + "a" * 513, "The resource name is longer than 512 bytes"),
    ],
)
def test_resources_that_are_refused(text: Any, remark: str) -> None:
    with pytest.raises(RemotingError) as caught:
        Resource.parse(text)
    assert caught.value.remark == remark


@given(st.text())
def test_a_resource_that_is_read_has_a_key_that_is_read_as_the_same(text: str) -> None:
    try:
        found = Resource.parse("Topic:" + text)
    except RemotingError:
        return
    assert Resource.parse(found.key) == found


# -- policies

FULL = Acl(
    "User:n",
    (
        custom(entry("Topic:JT", Action.PUB, Action.SUB, ips=("10.1.2.3", "10.0.0.0/8"))),
        Policy(PolicyType.DEFAULT, (entry("*", Action.ALL, decision=DENY),)),
    ),
)


def test_the_json_of_policies_is_rocketmqs() -> None:
    assert json.loads(encode_acl(FULL)) == {
        "subject": "User:n",
        "policies": [
            {
                "policyType": "Custom",
                "entries": [
                    {
                        "resource": "Topic:JT",
                        "actions": ["Pub", "Sub"],
                        "sourceIps": ["10.1.2.3", "10.0.0.0/8"],
                        "decision": "Allow",
                    }
                ],
            },
            {"policyType": "Default", "entries": [{"resource": "*", "actions": ["All"], "decision": "Deny"}]},
        ],
    }
    assert decode_acl(encode_acl(FULL)) == FULL
    assert decode_acls(encode_acls([FULL])) == [FULL]
    assert decode_acls(b"") == []


def test_what_mqadmin_sends() -> None:
    sent = {
        "policies": [
            {
                "entries": [
                    {"actions": ["pub", "SUB", "Pub"], "decision": "allow", "resource": "topic:a", "sourceIps": None}
                ]
            }
        ]
    }
    expected = Acl("User:h", (custom(entry("Topic:a", Action.PUB, Action.SUB)),))
    assert decode_acl(body(sent), "User:h") == expected
    # A subject in the body is preferred to the header's.
    assert decode_acl(body(sent | {"subject": "User:b"}), "User:h").subject == "User:b"
    assert decode_acl(body(sent | {"subject": ""}), "User:h").subject == "User:h"


def one(**fields: Any) -> bytes:
    given_entry = {"resource": "Topic:a", "actions": ["Pub"], "decision": "Allow"} | fields
    return body({"subject": "User:n", "policies": [{"entries": [given_entry]}]})


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [
        (b"", 1, "The body of acl is null"),
        (body({"subject": "User:n"}), 1, "The body of acl is null, or it has no policies."),
        (body({"policies": []}), 29, "The subject is blank"),
        (body({"subject": "Role:n"}), 1, "The subject type is unknown: Role:n; expected User:."),
        (body({"subject": "User:n", "policies": [{"entries": []}]}), 16, "The policy entries is empty."),
        (body({"subject": "User:n", "policies": [{}]}), 16, "The policy entries is empty."),
        (body({"subject": "User:n", "policies": {}}), 29, "the body is not the JSON that this request has"),
        (body({"subject": "User:n", "policies": [5]}), 29, "the body is not the JSON that this request has"),
        (
            body({"subject": "User:n", "policies": [{"policyType": "x"}]}),
            29,
            "The policyType is illegal; expected Custom or Default",
        ),
        (one(resource=None), 16, "The resource is null."),
        (one(actions=None), 16, "The actions is empty."),
        (one(actions=["Any"]), 16, "The actions can not be Any."),
        (
            one(actions=["Pub", "Write"]),
            16,
            "The action is unknown: 'Write'; expected All, Pub, Sub, Create, Update, Delete, Get, List.",
        ),
        (one(decision=None), 16, "The decision is null or illegal."),
        (one(decision="Maybe"), 16, "The decision is null or illegal."),
        (one(sourceIps=[5]), 16, "The source ip is invalid."),
        (one(sourceIps=[""]), 16, "The source ip is empty."),
        (
            one(sourceIps=["10.0.0.300"]),
            16,
            "The source ip is invalid. Expected an address or a CIDR block instead of 10.0.0.300",
        ),
        (one(sourceIps=["10.0.0.1"] * 101), 16, "more than 100 source ips for Topic:a"),
    ],
)
def test_policies_that_are_refused(sent: bytes, code: int, text: str) -> None:
    with pytest.raises(RemotingError) as caught:
        checked_policies(decode_acl(sent).policies)
    assert (caught.value.code, caught.value.remark) == (code, text)


def test_policies_made_by_a_program_are_checked_too() -> None:
    with pytest.raises(RemotingError, match="more than 100 source ips"):
        checked_policies([custom(entry("Topic:a", ips=("10.0.0.1",) * 101))])
    with pytest.raises(RemotingError, match="more than 1000 policy entries"):
        checked_policies([custom(*[entry("Topic:a")] * 1001)])


def test_too_many_entries_are_refused() -> None:
    many = [entry(f"Topic:t{number}") for number in range(1001)]
    with pytest.raises(RemotingError, match="more than 1000 policy entries"):
        decode_acl(encode_acl(Acl("User:n", (custom(*many),))))
    full = Acl("User:n").merged([custom(*many[:1000])])
    assert full.merged([custom(many[0])]) == full
    with pytest.raises(RemotingError, match="User:n would have 1001 policy entries; 1000 are allowed"):
        full.merged([custom(many[1000])])


def test_an_entry_replaces_the_one_of_its_type_and_resource() -> None:
    old = Acl("User:n").merged([custom(entry("Topic:a", Action.PUB), entry("Topic:b"))])
    new = entry("Topic:a", Action.SUB, decision=DENY, ips=("10.0.0.1",))
    merged = old.merged([custom(entry("Topic:a", Action.GET), new), Policy(PolicyType.DEFAULT, (entry("Topic:a"),))])
    assert merged.entries(PolicyType.CUSTOM) == (new, entry("Topic:b"))
    assert merged.entries(PolicyType.DEFAULT) == (entry("Topic:a"),)
    assert merged.username == "n"
    # The literal, the prefix and all of a type are three resources.
    assert len(old.merged([custom(entry("Topic:a*"), entry("Topic:*"))]).entries(PolicyType.CUSTOM)) == 4


def test_entries_are_removed_by_type_and_resource() -> None:
    acl = Acl("User:n").merged([custom(entry("Topic:a"), entry("Topic:b"))])
    acl = acl.merged([Policy(PolicyType.DEFAULT, (entry("Topic:a"),))])
    assert acl.without(PolicyType.CUSTOM, Resource.parse("Topic:c")) == acl
    left = acl.without(PolicyType.CUSTOM, Resource.parse("Topic:a"))
    assert left == Acl("User:n", (custom(entry("Topic:b")), Policy(PolicyType.DEFAULT, (entry("Topic:a"),))))
    left = left.without(PolicyType.DEFAULT, Resource.parse("Topic:a"))
    assert left == Acl("User:n", (custom(entry("Topic:b")),))
    assert left.without(PolicyType.CUSTOM, Resource.parse("Topic:b")) is None


def test_entries_are_found_by_a_part_of_their_resource() -> None:
    assert FULL.about("JT") == Acl("User:n", FULL.policies[:1])
    assert FULL.about("*") == Acl("User:n", FULL.policies[1:])
    assert FULL.about("Group") is None


def test_addresses() -> None:
    assert model.address_of("nowhere") is None
    assert str(model.address_of("::ffff:10.0.0.1")) == "10.0.0.1"
    assert str(model.address_of("fe80::1%eth0")) == "fe80::1"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "subject",
                        "policies",
                        "policyType",
                        "entries",
                        "resource",
                        "actions",
                        "sourceIps",
                        "decision",
                        "password",
                        "userType",
                        "userStatus",
                        "username",
                    ]
                ),
                inner,
            )
        ),
    )
)
def test_any_json_is_read_or_refused(value: Any) -> None:
    sent = msgspec.json.encode(value)
    for decode in (decode_acl, decode_acls, decode_user, decode_users, decode_user_change):
        try:
            decode(sent)
        except RemotingError:
            pass


@pytest.mark.parametrize(
    ("text", "source", "inside"),
    [
        ("::ffff:10.0.0.0/104", "10.1.2.3", True),
        ("::ffff:10.0.0.0/104", "::ffff:10.1.2.3", True),
        ("::ffff:10.0.0.0/104", "11.1.2.3", False),
        ("::ffff:10.1.2.3", "10.1.2.3", True),
        ("::ffff:0:0/96", "10.1.2.3", True),
        ("::/0", "10.1.2.3", False),
        ("::/0", "fe80::1", True),
        ("10.0.0.0/8", "::ffff:10.1.2.3", True),
    ],
)
def test_ipv4_networks_in_ipv6_form_are_those_of_ipv4(text: str, source: str, inside: bool) -> None:
    # guards a Deny for such a network, which would be without effect
    address = model.address_of(source)
    assert address is not None
    assert (address in model.network_of(text)) == inside
