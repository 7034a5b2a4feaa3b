"""The JSON bodies of the requests 3001 to 3010 and of their replies (RocketMQ's UserInfo and AclInfo)."""

from collections.abc import Iterable
from typing import Any

import msgspec

from trimq.protocol import lenient_json
from trimq.protocol.auth.model import (
    MOST_ENTRIES,
    MOST_SOURCE_IPS,
    Acl,
    Action,
    Decision,
    Policy,
    PolicyEntry,
    PolicyType,
    Resource,
    User,
    UserChange,
    UserStatus,
    UserType,
    checked_secret,
    checked_username,
    refused,
    subject_of,
    username_of,
)
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError

Body = bytes | bytearray | memoryview


# -- users


def encode_user(user: User, *, with_password: bool = False) -> bytes:
    """The body of a reply to 3004. The password is only in it if the caller says so."""
    return msgspec.json.encode(_user_info(user, with_password=with_password))


def encode_users(users: Iterable[User], *, with_password: bool = False) -> bytes:
    """The body of a reply to 3005."""
    return msgspec.json.encode([_user_info(user, with_password=with_password) for user in users])


def encode_user_change(username: str, change: UserChange) -> bytes:
    """The body of 3001 and 3002, with the password: only for the request."""
    info = {"username": username}
    if change.password is not None:
        info["password"] = change.password
    if change.user_type is not None:
        info["userType"] = change.user_type.value
    if change.user_status is not None:
        info["userStatus"] = change.user_status.value
    return msgspec.json.encode(info)


def decode_user_change(body: Body) -> UserChange:
    """The fields of the body of 3001 and 3002. Its username does not count. Raises RemotingError.

    An unknown type or status is refused; RocketMQ takes it for not given.
    """
    info = _object(body, "The body of user is null")
    password = info.get("password")
    return UserChange(
        password=None if password is None or password == "" else checked_secret(password),
        user_type=_member(UserType, info.get("userType"), "The userType is illegal; expected Super or Normal"),
        user_status=_member(
            UserStatus, info.get("userStatus"), "The userStatus is illegal; expected enable or disable"
        ),
    )


def decode_user(body: Body) -> User | None:
    """The user in a reply to 3004; None for an empty body. The password is empty if it is not in the reply."""
    return _user(_object(body, "")) if body else None


def decode_users(body: Body) -> list[User]:
    """The users in a reply to 3005."""
    return [_user(_as_object(info)) for info in _array(body)] if body else []


def _user_info(user: User, *, with_password: bool) -> dict[str, str]:
    info = {"password": user.password} if with_password else {}
    info["userStatus"] = user.user_status.value
    info["userType"] = user.user_type.value
    info["username"] = user.username
    return info


def _user(info: dict[str, Any]) -> User:
    password = info.get("password")
    return User(
        checked_username(info.get("username")),
        password if isinstance(password, str) else "",
        UserType.of(info.get("userType")) or UserType.NORMAL,
        UserStatus.of(info.get("userStatus")) or UserStatus.ENABLE,
    )


# -- policies


def encode_acl(acl: Acl) -> bytes:
    """The body of a reply to 3009, and of 3006 and 3007. What is not set is left out."""
    return msgspec.json.encode(_acl_info(acl))


def encode_acls(acls: Iterable[Acl]) -> bytes:
    """The body of a reply to 3010."""
    return msgspec.json.encode([_acl_info(acl) for acl in acls])


def decode_acl(body: Body, subject: str | None = None) -> Acl:
    """The policies in the body of 3006 and 3007 or of a reply to 3009. Raises RemotingError for what is not allowed.

    ``subject`` is the one of the request's header; a subject in the body is preferred to it, as RocketMQ does. An
    unknown action is refused; RocketMQ leaves it out. The policies are not checked: see ``checked_policies``.
    """
    return _acl(_object(body, "The body of acl is null"), subject)


def decode_acls(body: Body) -> list[Acl]:
    """The policies in a reply to 3010."""
    return [_acl(_as_object(info), None) for info in _array(body)] if body else []


def _acl_info(acl: Acl) -> dict[str, Any]:
    return {
        "policies": [
            {
                "entries": [_entry_info(entry) for entry in policy.entries],
                "policyType": policy.policy_type.value,
            }
            for policy in acl.policies
        ],
        "subject": acl.subject,
    }


def _entry_info(entry: PolicyEntry) -> dict[str, Any]:
    info: dict[str, Any] = {
        "actions": [action.value for action in entry.actions],
        "decision": entry.decision.value,
        "resource": entry.resource.key,
    }
    if entry.source_ips:
        info["sourceIps"] = list(entry.source_ips)
    return info


def _acl(info: dict[str, Any], subject: str | None) -> Acl:
    named = info.get("subject")
    username = username_of(named if isinstance(named, str) and named.strip() else subject)
    policies = _list(info, "policies")
    if sum(len(_list(_as_object(policy), "entries")) for policy in policies) > MOST_ENTRIES:
        raise refused(f"more than {MOST_ENTRIES} policy entries")
    return Acl(subject_of(username), tuple(_policy(_as_object(policy)) for policy in policies))


def _policy(info: dict[str, Any]) -> Policy:
    kind = _member(PolicyType, info.get("policyType"), "The policyType is illegal; expected Custom or Default")
    return Policy(kind or PolicyType.CUSTOM, tuple(_entry(_as_object(entry)) for entry in _list(info, "entries")))


def _entry(info: dict[str, Any]) -> PolicyEntry:
    resource = Resource.parse(info.get("resource"))
    named = _list(info, "actions")
    actions = []
    for text in named:
        action = Action.of(text)
        if action is None:
            raise refused(
                f"The action is unknown: {ascii(text)[:64]}; expected {', '.join(a.value for a in _GRANTED)}."
            )
        actions.append(action)
    source_ips = _list(info, "sourceIps")
    if len(source_ips) > MOST_SOURCE_IPS:
        raise refused(f"more than {MOST_SOURCE_IPS} source ips for {resource.key}")
    if not all(isinstance(text, str) for text in source_ips):
        raise refused("The source ip is invalid.")
    decision = Decision.of(info.get("decision"))
    if decision is None:
        raise refused("The decision is null or illegal.")
    return PolicyEntry(resource, tuple(dict.fromkeys(actions)), decision, tuple(source_ips))


_GRANTED = tuple(action for action in Action if action is not Action.ANY)


# -- JSON


def _loads(body: Body) -> Any:
    try:
        return lenient_json.loads(bytes(body))
    except (ValueError, RecursionError):
        # Without the text: a password may be in it.
        raise _illegal() from None


def _object(body: Body, if_null: str) -> dict[str, Any]:
    value = _loads(body) if body else None
    if value is None:
        raise RemotingError(ResponseCode.SYSTEM_ERROR, if_null)
    return _as_object(value)


def _array(body: Body) -> list[Any]:
    value = _loads(body)
    if not isinstance(value, list):
        raise _illegal()
    return value


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _illegal()
    return value


def _list(info: dict[str, Any], name: str) -> list[Any]:
    value = info.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _illegal()
    return value


def _illegal() -> RemotingError:
    return RemotingError(ResponseCode.INVALID_PARAMETER, "the body is not the JSON that this request has")


def _member(kind: Any, value: Any, if_unknown: str) -> Any:
    if value is None or value == "":
        return None
    member = kind.of(value)
    if member is None:
        raise RemotingError(ResponseCode.INVALID_PARAMETER, if_unknown)
    return member
