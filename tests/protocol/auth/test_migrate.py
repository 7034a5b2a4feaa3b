"""Accounts of RocketMQ 4 as users and policies."""

from typing import Any

import pytest

from trimq.protocol.auth.body import encode_acl
from trimq.protocol.auth.decision import decide
from trimq.protocol.auth.migrate import Migration, migrate
from trimq.protocol.auth.model import Action, Resource, UserStatus, UserType

SECRET = "canary-7f3a91"


def account(name: str = "someone", **fields: Any) -> dict[str, Any]:
    return {"accessKey": name, "secretKey": SECRET, **fields}


def one(**fields: Any) -> Migration:
    found = migrate([("f", {"accounts": [account(**fields)]})])
    assert SECRET not in str(found.dropped)
    return found


def may(found: Migration, resource: Resource, action: Action) -> bool:
    return decide(found.users["someone"].acl, resource, (action,), "127.0.0.1").allowed


def test_an_account_becomes_a_user_with_policies() -> None:
    found = one(
        topicPerms=["A=PUB", "B=SUB", "C=PUB|SUB", "D=SUB|PUB", "E=DENY"],
        groupPerms=["G=SUB", "%RETRY%H=PUB|SUB"],
        defaultTopicPerm="SUB",
        defaultGroupPerm="DENY",
        admin="false",
    )
    assert found.dropped == []
    user, acl = found.users["someone"].user, found.users["someone"].acl
    assert (user.username, user.password, user.user_type) == ("someone", SECRET, UserType.NORMAL)
    assert user.user_status is UserStatus.ENABLE
    assert acl is not None
    text = encode_acl(acl).decode()
    assert '"policyType":"Custom"' in text
    assert '"policyType":"Default"' in text
    topic, group = Resource.topic, Resource.group
    assert may(found, topic("A"), Action.PUB)
    assert not may(found, topic("A"), Action.GET)
    assert may(found, topic("A"), Action.SUB)  # by the default
    assert may(found, topic("C"), Action.PUB)
    assert may(found, topic("D"), Action.SUB)
    assert not may(found, topic("E"), Action.SUB)
    assert may(found, topic("other"), Action.SUB)
    assert not may(found, topic("other"), Action.PUB)
    assert may(found, group("G"), Action.SUB)
    assert may(found, group("H"), Action.SUB)
    assert not may(found, group("other"), Action.SUB)


def test_without_permissions_there_is_no_policy() -> None:
    assert one().users["someone"].acl is None
    assert one(topicPerms=[], groupPerms=None, defaultTopicPerm="").users["someone"].acl is None


@pytest.mark.parametrize("admin", ["true", "True", "yes", "on", True])
def test_an_admin_becomes_a_super(admin: object) -> None:
    found = one(admin=admin)
    assert found.users["someone"].user.user_type is UserType.SUPER
    assert found.dropped == []
    found = one(admin=admin, topicPerms=["A=PUB"])
    assert found.dropped == ["f: account 1 (someone): becomes a Super: its permissions do not limit it"]


def test_white_lists_are_dropped_and_named() -> None:
    found = migrate(
        [
            ("a.yml", {"globalWhiteRemoteAddresses": ["10.0.0.*", "::1"], "accounts": [account()]}),
            ("b.yml", {"accounts": [account("other", whiteRemoteAddress="192.168.1.*")]}),
            ("c.yml", {"globalWhiteRemoteAddresses": [], "accounts": None}),
            ("d.yml", None),
        ]
    )
    assert list(found.users) == ["someone", "other"]
    assert found.dropped == [
        "a.yml: globalWhiteRemoteAddresses is dropped: requests from 10.0.0.*, ::1 have to be signed now",
        "b.yml: account 1 (other): whiteRemoteAddress is dropped: requests from 192.168.1.* have to be signed now",
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"topicPerms": ["A=ALL"]}, "topicPerms A 'ALL' is no permission: it denies, as it did"),
        ({"topicPerms": ["A=pub"]}, "topicPerms A 'pub' is no permission: it denies, as it did"),
        ({"defaultGroupPerm": "ANY"}, "defaultGroupPerm 'ANY' is no permission: it denies, as it did"),
        ({"topicPerms": ["A"]}, "topicPerms 'A' is dropped: expected NAME=PERMISSION"),
        ({"topicPerms": ["=PUB"]}, "topicPerms '=PUB' is dropped: expected NAME=PERMISSION"),
        ({"topicPerms": ["A*=PUB"]}, "topicPerms 'A*=PUB' is dropped: expected NAME=PERMISSION"),
        ({"groupPerms": ["*=SUB"]}, "groupPerms '*=SUB' is dropped: expected NAME=PERMISSION"),
        ({"topicPerms": ["A\x07=PUB"]}, "is dropped: The resource name has characters that cannot be printed"),
        ({"topicPerms": [f"A{number}=PUB" for number in range(1001)]}, "its permissions are dropped: more than 1000"),
    ],
)
def test_permissions_that_mean_something_else_are_named(fields: dict[str, Any], expected: str) -> None:
    found = one(**fields)
    (line,) = found.dropped
    assert line.startswith("f: account 1 (someone): ")
    assert expected in line
    assert not may(found, Resource.topic("A"), Action.PUB)
    assert not may(found, Resource.topic("Another"), Action.PUB)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            {"accounts": [account(), account()]},
            "f: account 2 (someone): dropped: an account above has the same accessKey",
        ),
        ({"accounts": [account(), {"secretKey": SECRET}]}, "f: account 2: dropped: The username is blank"),
        ({"accounts": [account(), {"accessKey": "x"}]}, "f: account 2 (x): dropped: password can not be blank"),
        ({"accounts": [account(), "text"]}, "f: account 2: not an account: dropped"),
        ({"accounts": "text"}, "f: accounts is not a list"),
        (["text"], "f: not a file of accounts"),
        (SECRET, "f: not a file of accounts"),
    ],
)
def test_accounts_that_cannot_be_taken_over_are_named(document: Any, expected: str) -> None:
    found = migrate([("f", document)])
    assert found.dropped == [expected]
    assert set(found.users) <= {"someone"}
