"""Call: a request and who waits for its reply, in the words of the loop that runs.

The general events of anyio ask at each use which loop runs, and keep a line of tasks; a request has one task, that
waits once, and a socket one that reads. What is left here is what trio and asyncio need for that.
"""

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio

from trimq.protocol.command import RemotingCommand

if TYPE_CHECKING:
    import asyncio
    import socket


class Call:
    """A request and, later, its reply. ``finish`` is called when there is one, and when none can come any more."""

    __slots__ = ("deadline", "frame", "opaque", "reply", "written")

    def __init__(self) -> None:
        self.opaque: int = 0
        self.deadline: float = 0.0
        self.frame: bytes = b""
        self.written: bool = False
        self.reply: RemotingCommand | None = None

    def finish(self) -> None:
        """Tells who waits; again is nothing new."""
        raise NotImplementedError


class WaitingCall(Call):
    """A call that one task waits for."""

    __slots__ = ()

    def wait(self) -> Awaitable[object]:
        """To be awaited at once: returns when the call is finished."""
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


class Crowd:
    """Tasks that wait for the same moment."""

    __slots__ = ()

    def wait(self) -> Awaitable[object]:
        """To be awaited at once: returns at that moment. Who is cancelled before it is out of the crowd."""
        raise NotImplementedError

    def wake(self) -> None:
        """The moment has come for all that wait; who waits from here on waits for the next."""
        raise NotImplementedError


class Readable:
    """Waits for a socket to have something to read; one task at a time."""

    async def wait(self) -> None:
        """Returns when there may be something, or the other side has closed."""
        raise NotImplementedError

    def close(self) -> None:
        """To be called before the socket is closed."""
        raise NotImplementedError


class Loop(NamedTuple):
    """What a connection, and who uses it, needs of the loop that it runs on."""

    call: Callable[[], WaitingCall]
    crowd: Callable[[], Crowd]
    now: Callable[[], float]
    readable: "Callable[[socket.socket], Readable]"


def running_loop() -> Loop:
    """That of the task that runs now."""
    if "trio" in sys.modules:
        from trimq.remoting.client import call_trio as client_call_trio  # noqa: PLC0415 - an asyncio program does without trio

        if client_call_trio.is_running():
            return client_call_trio.LOOP
    import asyncio  # noqa: PLC0415 - as above, the other way round

    loop = asyncio.get_running_loop()
    return Loop(partial(_AsyncioCall, loop), partial(_AsyncioCrowd, loop), loop.time, partial(_asyncio_readable, loop))


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

    def wait(self) -> Awaitable[object]:
        future = self._future = self._loop.create_future()
        if self._done:
            future.set_result(None)
        return future


class _AsyncioCrowd(Crowd):
    __slots__ = ("_futures", "_loop")

    def __init__(self, loop: "asyncio.AbstractEventLoop") -> None:
        self._loop = loop
        self._futures: list[asyncio.Future[None]] = []

    def wait(self) -> Awaitable[object]:
        future = self._loop.create_future()
        self._futures.append(future)
        return future

    def wake(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)


def _asyncio_readable(loop: "asyncio.AbstractEventLoop", sock: "socket.socket") -> Readable:
    try:
        return _AsyncioReadable(loop, sock)
    except NotImplementedError:  # Windows' proactor
        return _AnyioReadable(sock)


class _AsyncioReadable(Readable):
    """Registered once: to register for each wait would be two system calls more."""

    def __init__(self, loop: "asyncio.AbstractEventLoop", sock: "socket.socket") -> None:
        self._loop = loop
        self._socket = sock
        self._future: asyncio.Future[None] | None = None
        loop.add_reader(sock, self._there_is_something)

    def _there_is_something(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    async def wait(self) -> None:
        self._future = self._loop.create_future()
        await self._future

    def close(self) -> None:
        self._loop.remove_reader(self._socket)


class _AnyioReadable(Readable):
    def __init__(self, sock: "socket.socket") -> None:
        self._socket = sock

    async def wait(self) -> None:
        await anyio.wait_readable(self._socket)

    def close(self) -> None:
        """Nothing is registered while nobody waits."""
