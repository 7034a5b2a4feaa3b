"""What a put's reply promises, and what may be read: one object, chosen at the start by the configuration.

ASYNC_FLUSH: a record is dispatched in the turn that brought it, and its result is ready at once (AsyncFlush).
SYNC_FLUSH: both happen once it is durable (flush.GroupCommitService). With the transient store pool the result is ready
at once, and the record is dispatched when it has been committed to its file (commit.CommitRealTimeService).
"""

from collections.abc import Callable
from typing import Protocol

from trimq.broker.store.durability.flush import FlushRealTimeService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.puts import Dispatcher, Put
from trimq.broker.store.types import PutCallback, PutMessageResult


class Durability(Protocol):
    """What happens to records behind the append. It is told of all of them, in their order."""

    @property
    def waits(self) -> bool:
        """Whether the result of an ordinary put comes later."""
        ...

    @property
    def readable_offset(self) -> int:
        """Records below may be read and dispatched."""
        ...

    @property
    def end_offset(self) -> int:
        """Where the log ends for those who ask."""
        ...

    @property
    def at_once(self) -> Callable[[Put, PutMessageResult], None] | None:
        """All that ``submit`` does, where that is a dispatch and nothing else; the hot path saves itself the call."""
        ...

    def submit(self, put: Put, result: PutMessageResult, on_done: PutCallback | None) -> PutMessageResult | None:
        """Records are in the log: the result if it is ready, else None, and ``on_done`` gets it."""
        ...

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        """The log goes on in another file: told to the dispatcher between the records before and after."""
        ...

    def join_rounds(self, rounds: list[Callable[[], None]], in_round: Callable[[], bool]) -> None:
        """What can be done for all puts of a reactor's round shall be done at its end: see Reactor."""
        ...

    def commit_soon(self) -> None:
        """Nothing can be appended before what is in write buffers is in its files."""
        ...

    async def run(self) -> None:
        """The services, until ``stop``."""
        ...

    async def stop(self) -> bool:
        """No more puts: end the services; False where the device refused. The last flush is the store's."""
        ...


class AsyncFlush:
    """ASYNC_FLUSH: what is in the log may be read; FlushRealTimeService brings it to the device."""

    waits = False

    def __init__(self, log: CommitLog, dispatcher: Dispatcher, real_time: FlushRealTimeService) -> None:
        self._log = log
        self._dispatch = dispatcher.dispatch
        self._real_time = real_time
        self._pokes = not real_time.timed
        self.at_once = None if self._pokes else self._dispatch
        """See Durability."""
        self.rolled = dispatcher.rolled

    @property
    def readable_offset(self) -> int:
        """All of it."""
        return self._log.max_offset

    @property
    def end_offset(self) -> int:
        """See Durability."""
        return self._log.max_offset

    def submit(self, put: Put, result: PutMessageResult, _on_done: PutCallback | None) -> PutMessageResult | None:
        """Dispatch; the result is ready."""
        if self._pokes:
            self._real_time.wake()
        self._dispatch(put, result)
        return result

    def join_rounds(self, _rounds: list[Callable[[], None]], _in_round: Callable[[], bool]) -> None:
        """Nothing waits for a round."""

    def commit_soon(self) -> None:
        """There are no write buffers."""

    async def run(self) -> None:
        """Flush by time."""
        await self._real_time.run()

    async def stop(self) -> bool:
        """End the service."""
        self._real_time.stop()
        return True
