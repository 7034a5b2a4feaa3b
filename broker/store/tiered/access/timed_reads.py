"""Reads of the provider with a time limit: a file system over a network may not answer for hours.

The reader gets an error once the limit is over. The read itself may go on in its thread, which cannot be ended: it
*hangs* until it returns. Meanwhile its queue is not read again, and with four such reads no queue is. Six reads run at
a time, so that uploads have threads whatever hangs; others wait for their turn, within the same limit.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from errno import ETIMEDOUT
from typing import Any, Final, TypeVar

import structlog
import trio

from trimq.remoting.runtime.clock import Clock

_T = TypeVar("_T")
_log: Final = structlog.get_logger(__name__)

MOST_HANGING: Final = 4
"""With as many reads that hang no further one begins: half of the provider's threads."""
MOST_READS: Final = 6
"""Most reads that run at a time; the provider has eight threads."""
_LOOKS: Final = 4
"""Looks at the deadlines within one limit."""


class TierHangsError(OSError):
    """The provider did not answer in time, or is not asked because earlier reads hang."""


class _Call:
    __slots__ = ("deadline", "done", "error", "queue", "result", "scope")

    def __init__(self, queue: object, deadline: float) -> None:
        self.queue = queue
        self.deadline = deadline
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.error: Exception | None = OSError("the tier is being closed")
        self.result: Any = None


class TimedReads:
    """See above. Belongs to the event loop; ``run`` owns the reads. Without ``run`` there is no limit."""

    def __init__(self, clock: Clock, limit_ms: int) -> None:
        self._clock = clock
        self._seconds = limit_ms / 1000
        self._nursery: trio.Nursery | None = None
        self._calls: dict[_Call, None] = {}
        """Those within their limit, in the order of their deadlines."""
        self._turns = trio.CapacityLimiter(MOST_READS)
        self._hanging: Counter[object] = Counter()
        self.hanging = 0
        """Reads over their limit that have not returned."""
        self.timeouts = 0
        """Reads that were over their limit, in all."""
        self.refused = 0
        """Reads that did not begin because others hang."""

    async def run(self) -> None:
        """Own the reads, until it is cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    while True:
                        await self._clock.sleep(self._seconds / _LOOKS)
                        self._expire()
                finally:
                    self._nursery = None  # it takes no more tasks
        finally:
            for call in self._calls:
                call.done.set()

    async def read(self, queue: object, fn: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Return what ``fn`` returns, which reads from the provider for a queue.

        Raises TierHangsError, and what ``fn`` raises.
        """
        if self._nursery is None:
            return await fn(*arguments)
        if self.hanging >= MOST_HANGING or self._hanging[queue]:
            self.refused += 1
            await trio.lowlevel.checkpoint()
            raise TierHangsError(ETIMEDOUT, "earlier reads of the tier have not returned")
        call = _Call(queue, self._clock.monotonic() + self._seconds)
        self._calls[call] = None
        self._nursery.start_soon(self._run, call, fn, arguments)
        await call.done.wait()
        if call.error is not None:
            raise call.error
        result: _T = call.result
        return result

    async def _run(self, call: _Call, fn: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        error: Exception | None = call.error
        try:
            with call.scope:
                async with self._turns:
                    call.result = await fn(*arguments)
                error = None
        except Exception as problem:  # noqa: BLE001 - the reader gets it, and the reads of others go on
            error = problem
        finally:
            if call in self._calls:
                del self._calls[call]
                call.error = error
                call.done.set()
            else:
                self._has_returned(call)

    def _expire(self) -> None:
        now = self._clock.monotonic()
        for call in list(self._calls):
            if call.deadline > now:
                break
            del self._calls[call]
            self.timeouts += 1
            self.hanging += 1
            self._hanging[call.queue] += 1
            if self.hanging == 1:
                _log.error("tiered_reads_hang", queue=str(call.queue), limit=self._seconds)
            # What has not begun in a thread ends now.
            call.scope.cancel()
            call.error = TierHangsError(ETIMEDOUT, f"the tier has not answered within {self._seconds:g} s")
            call.done.set()

    def _has_returned(self, call: _Call) -> None:
        self.hanging -= 1
        self._hanging[call.queue] -= 1
        if not self._hanging[call.queue]:
            del self._hanging[call.queue]
        if not self.hanging:
            _log.info("tiered_reads_resumed", timeouts=self.timeouts)
