"""Users and policies of RocketMQ 4's access control (plain_acl.yml), as those of ACL 2.0.

As in RocketMQ: an admin becomes a Super, the permissions of topics and groups a policy of the type Custom, the default
permissions one of the type Default, and the lists of addresses that need no check are left out. Each thing that is left
out, or is something else afterwards, is reported. Source: RocketMQ's AuthMigrator and PlainPermissionManager.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from trimq.protocol.auth.model import (
    Acl,
    Action,
    Decision,
    Policy,
    PolicyEntry,
    PolicyType,
    Resource,
    ResourceType,
    User,
    UserType,
    checked_policies,
    checked_secret,
    checked_username,
    subject_of,
)
from trimq.protocol.errors import RemotingError
from trimq.protocol.topic_rules import RETRY_PREFIX

_PERMISSIONS: Final[dict[str, tuple[tuple[Action, ...], Decision]]] = {
    "DENY": ((Action.ALL,), Decision.DENY),
    "PUB": ((Action.PUB,), Decision.ALLOW),
    "SUB": ((Action.SUB,), Decision.ALLOW),
    "PUB|SUB": ((Action.PUB, Action.SUB), Decision.ALLOW),
    "SUB|PUB": ((Action.PUB, Action.SUB), Decision.ALLOW),
}
_RESOURCES: Final = (
    ("topicPerms", "defaultTopicPerm", ResourceType.TOPIC),
    ("groupPerms", "defaultGroupPerm", ResourceType.GROUP),
)
_GLOBAL_LIST: Final = "globalWhiteRemoteAddresses"
_OWN_LIST: Final = "whiteRemoteAddress"


@dataclass(frozen=True, slots=True)
class Migrated:
    """A user, and the policies; None: it has none."""

    user: User
    acl: Acl | None


@dataclass(slots=True)
class Migration:
    """What files of RocketMQ 4 become. ``dropped``: a line for people for what is not taken over as it is."""

    users: dict[str, Migrated] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def migrate(documents: Iterable[tuple[str, Any]]) -> Migration:
    """Convert files: their names, and their content as dicts, lists and texts (each scalar is a text).

    Of several accounts with one access key the first counts. Nothing is raised: what cannot be read is reported. No
    line of the report has a secret.
    """
    result = Migration()
    for name, document in documents:
        if document is None:
            continue
        if not isinstance(document, dict):
            result.dropped.append(f"{name}: not a file of accounts")
            continue
        if addresses := _texts(document.get(_GLOBAL_LIST)):
            text = f"{_GLOBAL_LIST} is dropped: requests from {', '.join(addresses)} have to be signed now"
            result.dropped.append(f"{name}: {text}")
        accounts = document.get("accounts")
        if accounts is not None and not isinstance(accounts, list):
            result.dropped.append(f"{name}: accounts is not a list")
            continue
        for number, account in enumerate(accounts or (), 1):
            _Account(result, f"{name}: account {number}").take(account)
    return result


class _Account:
    """Converts one account. ``where`` begins the lines of the report."""

    def __init__(self, result: Migration, where: str) -> None:
        self._result = result
        self._where = where

    def _drop(self, text: str) -> None:
        self._result.dropped.append(f"{self._where}: {text}")

    def take(self, account: Any) -> None:
        """Add the user, or say why not."""
        if not isinstance(account, dict):
            self._drop("not an account: dropped")
            return
        try:
            username = checked_username(account.get("accessKey"))
            self._where += f" ({username})"
            is_super = str(account.get("admin", "")).strip().lower() in ("true", "yes", "on")
            user = User(
                username, checked_secret(account.get("secretKey")), UserType.SUPER if is_super else UserType.NORMAL
            )
        except RemotingError as error:
            self._drop(f"dropped: {error.remark}")
            return
        if username in self._result.users:
            self._drop("dropped: an account above has the same accessKey")
            return
        if addresses := _texts(account.get(_OWN_LIST)):
            self._drop(f"{_OWN_LIST} is dropped: requests from {', '.join(addresses)} have to be signed now")
        acl = self._acl(username, account)
        if is_super and acl is not None:
            self._drop("becomes a Super: its permissions do not limit it")
        self._result.users[username] = Migrated(user, acl)

    def _acl(self, username: str, account: dict[str, Any]) -> Acl | None:
        custom = [
            entry for perms, _, kind in _RESOURCES for entry in self._entries(perms, _texts(account.get(perms)), kind)
        ]
        default = [
            self._entry(key, Resource.every(kind), permission)
            for _, key, kind in _RESOURCES
            for permission in _texts(account.get(key))
        ]
        policies = [
            Policy(policy_type, tuple(entries))
            for policy_type, entries in ((PolicyType.CUSTOM, custom), (PolicyType.DEFAULT, default))
            if entries
        ]
        if not policies:
            return None
        try:
            return Acl(subject_of(username)).merged(checked_policies(policies))
        except RemotingError as error:
            self._drop(f"its permissions are dropped: {error.remark}")
            return None

    def _entries(self, key: str, texts: list[str], kind: ResourceType) -> Iterator[PolicyEntry]:
        for text in texts:
            name, equals, permission = text.rpartition("=")
            name = name.strip()
            if kind is ResourceType.GROUP:
                name = name.removeprefix(RETRY_PREFIX)
            # A star means all names with this beginning now, and meant itself: no topic or group has one.
            if not equals or not name or "*" in name:
                self._drop(f"{key} {text!r} is dropped: expected NAME=PERMISSION")
                continue
            try:
                resource = Resource.parse(f"{kind.value}:{name}")
            except RemotingError as error:
                self._drop(f"{key} {text!r} is dropped: {error.remark}")
                continue
            yield self._entry(f"{key} {name}", resource, permission)

    def _entry(self, key: str, resource: Resource, permission: str) -> PolicyEntry:
        known = _PERMISSIONS.get(permission.strip())
        if known is None:
            self._drop(f"{key} {permission.strip()!r} is no permission: it denies, as it did")
            known = _PERMISSIONS["DENY"]
        return PolicyEntry(resource, *known)


def _texts(value: Any) -> list[str]:
    """The texts of a list, or a single one. Empty ones do not count."""
    values = value if isinstance(value, list) else [value]
    return [each.strip() for each in values if isinstance(each, str) and each.strip()]
