"""What the reply to a put guarantees, and which records may be read: one object, chosen at start by the configuration.

ASYNC_FLUSH: a record is dispatched in the turn of its append, and its result is ready immediately (AsyncFlush).
SYNC_FLUSH: both happen once the record is durable (flush.GroupCommitService). With the transient store pool the result
is ready immediately, and the record is dispatched after the commit to its file (commit.CommitRealTimeService).
"""

from collections.abc import Callable
from typing import Protocol

from trimq.broker.store.durability.flush import FlushRealTimeService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.puts import Dispatcher, Put
from trimq.broker.store.types import PutCallback, PutMessageResult


class Durability(Protocol):
    """The steps after the append. It gets all records, in the order of the log."""

    @property
    def waits(self) -> bool:
        """True if the result of an ordinary put comes later."""
        ...

    @property
    def readable_offset(self) -> int:
        """Records below this offset may be read and dispatched."""
        ...

    @property
    def end_offset(self) -> int:
        """The end of the log that is reported to clients."""
        ...

    @property
    def dispatch_only(self) -> Callable[[Put, PutMessageResult], None] | None:
        """The dispatch, if ``submit`` does nothing else; the hot path then calls it without ``submit`` in between."""
        ...

    def submit(self, put: Put, result: PutMessageResult, on_done: PutCallback | None) -> PutMessageResult | None:
        """Records are in the log. Returns the result if it is ready, else None, and ``on_done`` gets it later."""
        ...

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """The log continues in another file. The dispatcher is notified between the records before and after."""
        ...

    def join_rounds(self, rounds: list[Callable[[], None]], in_round: Callable[[], bool]) -> None:
        """Register a call for the end of each reactor round, if work for all puts of a round can be done together."""
        ...

    def commit_soon(self) -> None:
        """Nothing can be appended until the write buffers are committed to their files."""
        ...

    async def commit_buffers(self) -> bool:
        """Write the present content of the write buffers into the files. Returns False if the device refused."""
        ...

    async def run(self) -> None:
        """Run the services until ``stop``."""
        ...

    async def stop(self) -> bool:
        """End the services after the last put. Returns False if the device refused. The last flush is the store's."""
        ...


class AsyncFlush:
    """ASYNC_FLUSH: every record in the log may be read; FlushRealTimeService flushes it to the device."""

    waits = False

    def __init__(self, log: CommitLog, dispatcher: Dispatcher, real_time: FlushRealTimeService) -> None:
        self._log = log
        self._dispatch = dispatcher.dispatch
        self._real_time = real_time
        self._wakes_flush = not real_time.timed
        self.dispatch_only = None if self._wakes_flush else self._dispatch
        """See Durability."""
        self.rolled = dispatcher.rolled

    @property
    def readable_offset(self) -> int:
        """The end of the log: every record may be read."""
        return self._log.max_offset

    @property
    def end_offset(self) -> int:
        """See Durability."""
        return self._log.max_offset

    def submit(self, put: Put, result: PutMessageResult, _on_done: PutCallback | None) -> PutMessageResult | None:
        """Dispatch; the result is ready immediately."""
        if self._wakes_flush:
            self._real_time.wake()
        self._dispatch(put, result)
        return result

    def join_rounds(self, _rounds: list[Callable[[], None]], _in_round: Callable[[], bool]) -> None:
        """No put waits for a round."""

    def commit_soon(self) -> None:
        """There are no write buffers."""

    async def commit_buffers(self) -> bool:
        """There are no write buffers."""
        return True

    async def run(self) -> None:
        """Flush at intervals."""
        await self._real_time.run()

    async def stop(self) -> bool:
        """End the service."""
        self._real_time.stop()
        return True
