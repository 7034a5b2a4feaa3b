"""Kv: the five operations of etcd that the controllers need: grant, keep, range, txn, watch.

Every decision is one transaction: it compares the revisions of all keys that it was made from. An answer is never
computed from memory.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol


class KvError(Exception):
    """The store does not answer. ``sent``: the operation may have been done."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


class Entry(NamedTuple):
    """A key's value, the revision of its last change, and the lease that it goes with; 0: it stays."""

    value: str
    revision: int
    lease: int


class Snapshot(NamedTuple):
    """All keys below a prefix at one revision."""

    revision: int
    entries: dict[str, Entry]


class Compare(NamedTuple):
    """A condition of a transaction: the revision of a key's last change; 0: there is no such key."""

    key: str
    revision: int


class Put(NamedTuple):
    """Set a key. With ``lease`` it goes when the lease ends."""

    key: str
    value: str
    lease: int = 0


class Delete(NamedTuple):
    """Delete a key, if it is there."""

    key: str


class Lease(NamedTuple):
    """A lease, and how many milliseconds it lasts after each ``keep``."""

    number: int
    ttl_ms: int


class Kv(Protocol):
    """A store that all controllers share. All methods but ``close`` raise KvError."""

    async def grant(self, ttl_ms: int) -> Lease:
        """A new lease of at least ``ttl_ms``."""
        ...

    async def keep(self, lease: int) -> int:
        """Renew a lease. Returns its milliseconds from now on, 0 if it has ended."""
        ...

    async def range(self, prefix: str) -> Snapshot:
        """What is below a prefix: never less than what was done before the call."""
        ...

    async def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """Make all changes if all conditions hold, and all leases that are named last. Returns whether it did."""
        ...

    async def watch(self, prefix: str, revision: int, deleted: Callable[[str], None]) -> None:
        """Call ``deleted`` with each key below ``prefix`` that is deleted after ``revision``.

        Returns when the store has no more of it: the caller reads all again, and watches on from there.
        """
        ...

    async def run(self) -> None:
        """Its tasks, until cancelled."""
        ...

    async def close(self) -> None:
        """Free what it holds."""
        ...


Save = Callable[[int, Sequence[Put | Delete], Sequence[Lease], Sequence[int]], Awaitable[None]]
"""Makes a change durable: the revision, changed keys, new leases, ended leases."""
