"""StoreFollower: what a slave's HAClient needs of its store."""

from collections.abc import Awaitable, Callable
from typing import Any

from trimq.broker.store.dispatch.dispatcher import StoreDispatcher
from trimq.broker.store.durability.write_path import WritePath


class StoreFollower:
    """Implements ha_client.Follower, and EpochFollower of auto_switch_client."""

    def __init__(
        self,
        path: WritePath,
        dispatcher: StoreDispatcher,
        wake_reput: Callable[[], None],
        look: Callable[[int], Awaitable[Any]],
        *,
        syncs: bool,
        confirmed_offset: int | None,
    ) -> None:
        """``look`` returns the record at a log offset. ``syncs``: acknowledge only what is on disk (SYNC_FLUSH).

        ``confirmed_offset``: what is known to be acknowledged; None if it is not known.
        """
        self._path = path
        self._dispatcher = dispatcher
        self._wake_reput = wake_reput
        self._look = look
        self._syncs = syncs
        self.confirmed_offset = confirmed_offset or 0
        """See EpochFollower."""
        self._knows = confirmed_offset is not None

    @property
    def nothing_confirmed(self) -> bool:
        """See EpochFollower."""
        return self._knows and not self.confirmed_offset

    def confirm(self, offset: int) -> None:
        """See EpochFollower."""
        if offset > self.confirmed_offset:
            self.confirmed_offset = offset
            self._wake_reput()

    @property
    def acknowledged_offset(self) -> int:
        """See Follower."""
        return self._path.sync.flushed_offset if self._syncs else self._path.log.max_offset

    async def make_acknowledgeable(self) -> bool:
        """See Follower."""
        return await self._path.sync.flush() if self._syncs else not self._path.sync.failed

    def dispatch_soon(self) -> None:
        """See Follower."""
        self._wake_reput()

    async def last_record(self, *, dispatched: bool = False) -> tuple[int, bytes] | None:
        """See Follower. It is known once all of the log is dispatched. Raises OSError before that."""
        dispatcher = self._dispatcher
        if not dispatched and dispatcher.position < self._path.log.max_offset:
            raise OSError("the log of this slave is not dispatched yet")
        if dispatcher.last_record < 0:
            return None
        offset = dispatcher.last_record
        record = bytes(await self._look(offset) or b"")
        return (offset, record) if record else None

    async def begin_at(self, offset: int) -> None:
        """See Follower."""
        await self._path.allocator.begin_at(offset)
        self._path.sync.restart()
        self._dispatcher.start_at(offset, -1, 0)
