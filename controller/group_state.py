"""GroupState: what the store has of the brokers of one name, and under which keys.

Below the prefix and the broker name, percent-encoded: ``group`` (cluster name, next id), ``ids/N`` (address, check
code), ``master`` (an id), ``epoch`` (of the masters), ``set`` (the SyncStateSet and its epoch), ``alive/N`` (with the
broker's lease), and ``next`` (the next id, while there is no ``group``). The epochs are values of their own: etcd's
revisions are shared by all keys, and have 64 bits.
"""

from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from trimq.controller.kv import Compare, Delete, Entry, Put, Snapshot


class GroupRecord(Struct, frozen=True):
    """``group``: the cluster, and the id for the next broker.

    ``least_id``: all brokers with lower ids were removed at once, and another group has begun under their name.
    """

    cluster: str
    next_id: int
    least_id: int = 1


class IdRecord(Struct, frozen=True):
    """``ids/N``: where the broker is, and the check code of the request that has got the id."""

    address: str
    check_code: str


class SetRecord(Struct, frozen=True):
    """``set``: the number of its last change, and the ids."""

    epoch: int
    ids: list[int]


class AliveRecord(Struct, frozen=True):
    """``alive/N``: the milliseconds without a heartbeat after which it goes, as the broker has asked for."""

    timeout_ms: int


def group_prefix(root: str, name: str) -> str:
    """Where the keys of a broker name begin."""
    return f"{root}{quote(name, safe='')}/"


def place_of(root: str, key: str) -> tuple[str, str]:
    """Broker name and rest of a key."""
    name, _, rest = key[len(root) :].partition("/")
    return unquote(name), rest


_R = TypeVar("_R", bound=Struct)


class UnreadableError(Exception):
    """What the store has below the prefix was not written by a controller."""


class GroupState:
    """One name's part of a snapshot."""

    def __init__(self, root: str, name: str, snapshot: Snapshot) -> None:
        """Raises UnreadableError."""
        self.name = name
        self._root = root
        self._snapshot = snapshot
        self._prefix = group_prefix(root, name)
        self._entries = snapshot.entries
        try:
            self._read()
        except (ValueError, msgspec.MsgspecError) as error:
            raise UnreadableError(f"what the store has of {name} is not a controller's: {error}") from error

    def _read(self) -> None:
        self.ids = {int(key): self._decode(f"ids/{key}", IdRecord) for key in self._below("ids/")}
        self._timeouts = {
            int(key): self._decode(f"alive/{key}", AliveRecord).timeout_ms for key in self._below("alive/")
        }
        self.alive = set(self._timeouts)
        group = self._value("group")
        self.group = msgspec.json.decode(group, type=GroupRecord) if group else None
        found = self._value("set")
        self.set = msgspec.json.decode(found, type=SetRecord) if found else None
        master = self._value("master")
        self.master = int(master) if master else None
        """The id of the elected broker, alive or not."""
        self.epoch = int(self._value("epoch") or 0)
        self.next_id = self.group.next_id if self.group is not None else int(self._value("next") or 1)
        """The id for another broker: no broker has had it before."""
        self.least_id = self.group.least_id if self.group is not None else self.next_id
        """The lowest id that a broker may have."""

    def _below(self, part: str) -> list[str]:
        start = self._prefix + part
        return [key[len(start) :] for key in self._entries if key.startswith(start)]

    def _value(self, key: str) -> str:
        found = self._entries.get(self._prefix + key)
        return found.value if found is not None else ""

    def _decode(self, key: str, kind: type[_R]) -> _R:
        return msgspec.json.decode(self._value(key), type=kind)

    def timeout_ms(self, broker_id: int) -> int:
        """What a living broker has asked for."""
        return self._timeouts[broker_id]

    def lease(self, broker_id: int) -> int:
        """The lease of a broker; 0 if it is not alive."""
        found = self._entries.get(f"{self._prefix}alive/{broker_id}")
        return found.lease if found is not None else 0

    @property
    def living_master(self) -> int | None:
        """The id of the master, if it is alive."""
        return self.master if self.master in self.alive else None

    @property
    def members(self) -> list[int]:
        """The ids of the SyncStateSet."""
        return self.set.ids if self.set is not None else []

    @property
    def set_epoch(self) -> int:
        """The number of the set's last change."""
        return self.set.epoch if self.set is not None else 0

    def address(self, broker_id: int | None) -> str:
        """Where a broker is; empty if that is not known."""
        found = self.ids.get(broker_id) if broker_id is not None else None
        return found.address if found is not None else ""

    def key(self, key: str) -> str:
        """The whole key."""
        return self._prefix + key

    def unchanged(self, *keys: str) -> list[Compare]:
        """Conditions: these keys are as they were read."""
        found = []
        for key in keys:
            entry = self._entries.get(self._prefix + key)
            found.append(Compare(self._prefix + key, entry.revision if entry is not None else 0))
        return found

    def after(self, changes: Sequence[Put | Delete]) -> "GroupState":
        """What is known once these changes were made. It is for answers, not for decisions: it has no revisions."""
        entries = dict(self._entries)
        for change in changes:
            if isinstance(change, Put):
                entries[change.key] = Entry(change.value, 0, change.lease)
            else:
                entries.pop(change.key, None)
        return GroupState(self._root, self.name, Snapshot(self._snapshot.revision, entries))

    def put(self, key: str, value: Struct | int, lease: int = 0) -> Put:
        """A change."""
        return Put(self._prefix + key, msgspec.json.encode(value).decode(), lease)
