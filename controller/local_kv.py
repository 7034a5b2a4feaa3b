"""LocalKv: the operations of etcd in one process. SQLite makes them durable; a simulation uses them as they are."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import trio

from trimq.controller.kv import Compare, Delete, Entry, KvError, Lease, Put, Save, Snapshot
from trimq.remoting.runtime.clock import Clock

_LOOK = 0.05
"""Seconds between two looks at the leases, so the precision of their ends."""
_LONGEST = 0.5
"""Seconds without a look: a lease that was granted meanwhile may end before those that were known."""
_REMEMBERED = 1000
"""Deletions that a watch can begin with."""


class LocalKv:
    """Keys and leases in memory. Belongs to the event loop."""

    def __init__(
        self,
        clock: Clock,
        save: Save | None = None,
        *,
        revision: int = 1,
        entries: Mapping[str, Entry] | None = None,
        leases: Sequence[Lease] = (),
    ) -> None:
        """``save`` is called before each change. ``revision``, ``entries`` and ``leases`` are those of an earlier run.

        Each lease then lasts its whole time again: for how long this process was away is not known.
        """
        self._clock = clock
        self._save = save
        self._revision = revision
        self._entries = dict(entries or {})
        self._ttl = {lease.number: lease.ttl_ms for lease in leases}
        self._ends: dict[int, float] = {}
        self._next_lease = max([0, *self._ttl]) + 1
        self._deleted: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._remembered_from = revision
        """``_deleted`` has all deletions after this revision."""
        self._watchers: list[tuple[str, Callable[[str], None]]] = []
        self._lock = trio.Lock()
        for number in self._ttl:
            self._renew(number)

    def _renew(self, lease: int) -> int:
        ttl = self._ttl[lease]
        self._ends[lease] = self._clock.boot_seconds() + ttl / 1000
        return ttl

    async def grant(self, ttl_ms: int) -> Lease:
        """See Kv."""
        async with self._lock:
            lease = Lease(self._next_lease, ttl_ms)
            self._next_lease += 1
            if self._save is not None:
                await self._save(self._revision, (), (lease,), ())
            self._ttl[lease.number] = ttl_ms
            self._renew(lease.number)
            return lease

    async def keep(self, lease: int) -> int:
        """See Kv."""
        async with self._lock:
            await self._expire()
            return self._renew(lease) if lease in self._ttl else 0

    async def range(self, prefix: str) -> Snapshot:
        """See Kv."""
        async with self._lock:
            await self._expire()
            return Snapshot(
                self._revision, {key: entry for key, entry in self._entries.items() if key.startswith(prefix)}
            )

    async def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """See Kv."""
        async with self._lock:
            await self._expire()
            for key, revision in compares:
                found = self._entries.get(key)
                if (found.revision if found is not None else 0) != revision:
                    return False
            # A lease that has ended takes no key: as in etcd, where the transaction fails.
            if any(isinstance(change, Put) and change.lease and change.lease not in self._ttl for change in changes):
                return False
            await self._apply(changes, ())
            return True

    async def _apply(self, changes: Sequence[Put | Delete], ended: Sequence[int]) -> None:
        revision = self._revision + 1
        if self._save is not None:
            await self._save(revision, changes, (), ended)
        self._revision = revision
        for lease in ended:
            del self._ttl[lease], self._ends[lease]
        for change in changes:
            if isinstance(change, Put):
                self._entries[change.key] = Entry(change.value, revision, change.lease)
            elif self._entries.pop(change.key, None) is not None:
                if len(self._deleted) == _REMEMBERED:
                    self._remembered_from = self._deleted[0][0]
                self._deleted.append((revision, change.key))
                for prefix, deleted in list(self._watchers):
                    if change.key.startswith(prefix):
                        deleted(change.key)

    async def _expire(self) -> None:
        """End the leases whose time is over, with their keys. Called with the lock."""
        now = self._clock.boot_seconds()
        ended = sorted(lease for lease, end in self._ends.items() if end <= now)
        if ended:
            gone = [Delete(key) for key, entry in self._entries.items() if entry.lease in ended]
            await self._apply(gone, ended)

    async def watch(self, prefix: str, revision: int, deleted: Callable[[str], None]) -> None:
        """See Kv. Returns if ``revision`` is too old: the caller reads all again, and watches on."""
        if revision < self._remembered_from:
            return
        for at, key in list(self._deleted):
            if at > revision and key.startswith(prefix):
                deleted(key)
        watcher = (prefix, deleted)
        self._watchers.append(watcher)
        try:
            await trio.sleep_forever()
        finally:
            self._watchers.remove(watcher)

    async def run(self) -> None:
        """End leases in time."""
        while True:
            wait = min(self._ends.values(), default=math.inf) - self._clock.boot_seconds()
            await self._clock.sleep(min(max(_LOOK, wait), _LONGEST))
            with suppress(KvError):  # each operation ends leases first, so its caller gets the error
                async with self._lock:
                    await self._expire()

    async def close(self) -> None:
        """There is nothing to free."""
