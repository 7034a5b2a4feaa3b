"""ClientCalls: requests that the broker sends to a client while the sender of another request waits for the answer.

Each runs as a task of this service, not of the connection whose request caused it: a client that does not answer must
not delay the other requests on that connection. The number of calls and their memory are bounded, for each client that
is asked, for each connection that causes them, and for the broker.

Source: RocketMQ's Broker2Client.callClient.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog
import trio

from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.errors import RemotingTimeoutError
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection

_log = structlog.get_logger("broker.client_calls")

CLIENT_TIMEOUT: Final = 10.0
"""Seconds that a client has to answer."""
MAX_CALLS: Final = 4096
"""Most calls at a time."""
MAX_BYTES: Final = 64 * 1024 * 1024
"""Most bytes that they hold."""
SHARE: Final = 8
"""One connection, as the one that is asked or as the one that asks, may take this part of either limit."""
OVERHEAD: Final = 4096
"""Bytes that a call counts besides its texts and body."""

_MOST: Final = 100
"""Characters of a client's id that are logged: a replier may name any client."""


class _Usage:
    """Calls and bytes in use."""

    __slots__ = ("bytes", "calls")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0

    def has_space(self, size: int, share: int = 1) -> bool:
        """Whether there is space for one more call. The first always fits, whatever its size."""
        return not self.calls or (self.calls < MAX_CALLS // share and self.bytes + size <= MAX_BYTES // share)

    def add(self, calls: int, size: int) -> None:
        self.calls += calls
        self.bytes += size


class ClientCalls:
    """Calls of clients, at most MAX_CALLS and MAX_BYTES at a time.

    ``refused`` counts those that were over a limit, ``done`` those that the client took, ``failed`` all others.
    """

    def __init__(self, clock: Clock) -> None:
        self._all = _Usage()
        self._of: dict[tuple[Connection, bool], _Usage] = {}
        self._nursery: trio.Nursery | None = None
        self._log_budget = LogBudget(clock)
        self.refused = 0
        self.done = 0
        self.failed = 0

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return self._all.calls

    @property
    def held_bytes(self) -> int:
        """Bytes that they hold."""
        return self._all.bytes

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the tasks of the calls, forever."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def start(
        self, asking: Connection, client: Connection, size: int, call: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run ``call``, which asks ``client`` because of a request of ``asking``; it must not raise. Returns at once.

        ``size`` is the number of bytes that it holds. Raises SYSTEM_BUSY, and does not run it, over a limit.
        """
        size += OVERHEAD
        mine = self._of.get((asking, False)) or _Usage()
        theirs = self._of.get((client, True)) or _Usage()
        if not theirs.has_space(size, SHARE):
            raise self._busy(f"{theirs.calls} replies ({theirs.bytes} bytes) wait for the same client already")
        if not mine.has_space(size, SHARE):
            raise self._busy(f"{mine.calls} replies ({mine.bytes} bytes) of this connection wait for clients already")
        if not self._all.has_space(size):
            raise self._busy(f"{self._all.calls} replies ({self._all.bytes} bytes) wait for clients already")
        assert self._nursery is not None
        self._of[asking, False], self._of[client, True] = mine, theirs
        for usage in (mine, theirs, self._all):
            usage.add(1, size)
        self._nursery.start_soon(self._run, asking, client, size, call)

    def _busy(self, text: str) -> RemotingError:
        self.refused += 1
        return RemotingError(ResponseCode.SYSTEM_BUSY, f"{text}: try again later")

    async def _run(
        self, asking: Connection, client: Connection, size: int, call: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            await call()
        finally:
            self._all.add(-1, -size)
            for key in ((asking, False), (client, True)):
                usage = self._of[key]
                usage.add(-1, -size)
                if not usage.calls:
                    del self._of[key]

    async def ask(self, client: Connection, request: RemotingCommand) -> RemotingCommand:
        """Send ``request`` and wait for the answer, CLIENT_TIMEOUT seconds in all.

        A client that is behind with reading what it was sent gets the request when it has caught up. Raises
        RemotingTimeoutError, RemotingSendError if the connection ends, FrameError if the request is too long.
        """
        until = trio.current_time() + CLIENT_TIMEOUT
        with trio.move_on_at(until) as scope:
            await client.drained()
        if scope.cancelled_caught:
            raise RemotingTimeoutError(client.peer_text, request.code, CLIENT_TIMEOUT, written=False)
        return await client.request(request, until - trio.current_time())

    def note(self, client_id: str, problem: str | None) -> None:
        """Count a call, or one that could not be made. A ``problem`` is logged, within a budget."""
        if problem is None:
            self.done += 1
            return
        self.failed += 1
        if self._log_budget.allows():
            _log.warning("reply_not_delivered", client=client_id[:_MOST], reason=problem[: 2 * _MOST])
