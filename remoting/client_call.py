"""Call: a request and who waits for its reply, in the words of the loop that runs.

The general events of anyio ask at each use which loop runs, and keep a line of tasks; a request has one task, that
waits once. What is left here is what trio and asyncio need for that.
"""

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from protocol.command import RemotingCommand

if TYPE_CHECKING:
    import asyncio
    import socket


class Call:
    """A request and, later, its reply. ``finish`` is called when there is one, and when none can come any more."""

    __slots__ = ("frame", "opaque", "reply", "written")

    def __init__(self) -> None:
        self.opaque = 0
        self.frame = b""
        self.written = False
        self.reply: RemotingCommand | None = None

    def finish(self) -> None:
        """Tells who waits; again is nothing new."""
        raise NotImplementedError


class WaitingCall(Call):
    """A call that one task waits for."""

    __slots__ = ()

    async def wait(self) -> None:
        """Returns when the call is finished."""
        raise NotImplementedError


class CallbackCall(Call):
    """A call that no task waits for: ``then`` is called, with it, in the task that reads. It must not raise."""

    __slots__ = ("then",)

    def __init__(self, then: "Callable[[CallbackCall], None]") -> None:
        super().__init__()
        self.then = then

    def finish(self) -> None:
        """Calls ``then``."""
        self.then(self)


class Loop(NamedTuple):
    """What a connection needs of the loop that it runs on."""

    call: Callable[[], WaitingCall]
    now: Callable[[], float]
    wait_readable: "Callable[[socket.socket], Awaitable[None]] | None"
    """None where sockets belong to the loop's own streams."""


def running_loop() -> Loop:
    """That of the task that runs now."""
    if "trio" in sys.modules:
        from remoting import client_call_trio  # noqa: PLC0415 - an asyncio program does without trio

        if client_call_trio.is_running():
            return client_call_trio.LOOP
    import asyncio  # noqa: PLC0415 - as above, the other way round

    loop = asyncio.get_running_loop()
    return Loop(partial(_AsyncioCall, loop), loop.time, None)


class _AsyncioCall(WaitingCall):
    __slots__ = ("_done", "_future", "_loop")

    def __init__(self, loop: "asyncio.AbstractEventLoop") -> None:
        super().__init__()
        self._loop = loop
        self._done = False
        self._future: asyncio.Future[None] | None = None

    def finish(self) -> None:
        self._done = True
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self) -> None:
        if not self._done:
            self._future = self._loop.create_future()
            await self._future
