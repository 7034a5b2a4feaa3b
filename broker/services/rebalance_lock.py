"""Queue locks of orderly consumers (RocketMQ's RebalanceLockManager)."""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from trimq.protocol.body import MessageQueue
from trimq.remoting.runtime.clock import Clock

LEASE_SECONDS: Final = 60.0

_Key = tuple[str, int]


class _Lock(Struct):
    client_id: str
    renewed: float


class RebalanceLockManager:
    """Locks that permit one client to consume a queue in order.

    A lock expires 60 s after its last renewal; clients renew every 20 s. Locks are in memory only: after a restart the
    clients take them again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._groups: dict[str, dict[_Key, _Lock]] = {}

    def lock_batch(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Take or renew locks (41). Returns the queues that the client holds now."""
        now = self._clock.monotonic()
        locks = self._groups.setdefault(group, {})
        held = []
        for queue in queues:
            key = (queue.topic, queue.queue_id)
            lock = locks.get(key)
            if lock is None or lock.client_id == client_id or not _live(lock, now):
                locks[key] = _Lock(client_id, now)
                held.append(queue)
        if not locks:
            del self._groups[group]
        return held

    def unlock_batch(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release locks (42). Locks of other clients are not affected."""
        locks = self._groups.get(group, {})
        for queue in queues:
            key = (queue.topic, queue.queue_id)
            lock = locks.get(key)
            if lock is not None and lock.client_id == client_id:
                del locks[key]
        if not locks:
            self._groups.pop(group, None)

    def is_locked(self, group: str, topic: str, queue_id: int, client_id: str) -> bool:
        """Whether this client holds the lock of a queue."""
        lock = self._groups.get(group, {}).get((topic, queue_id))
        return lock is not None and lock.client_id == client_id and _live(lock, self._clock.monotonic())

    def any_live_lock(self, group: str) -> bool:
        """Whether a group consumes in order now. Its messages are then not retried by the retry topic."""
        locks = self._groups.get(group)
        if not locks:
            return False
        now = self._clock.monotonic()
        return any(_live(lock, now) for lock in locks.values())

    def remove_expired(self) -> None:
        """Remove expired locks, so that groups that are not used any more take no memory."""
        now = self._clock.monotonic()
        for group, locks in list(self._groups.items()):
            for key in [key for key, lock in locks.items() if not _live(lock, now)]:
                del locks[key]
            if not locks:
                del self._groups[group]


def _live(lock: _Lock, now: float) -> bool:
    return now - lock.renewed <= LEASE_SECONDS
