"""Call: a request and the task that waits for its reply, with the primitives of the running loop.

The general events of anyio look up the running loop at each use, and maintain a queue of tasks. But a request has one
task that waits once, and a socket has one task that reads. This module has the little that trio and asyncio need for
that.
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
    """A request and, later, its reply. ``finish`` is called when the reply arrives, or can no longer arrive."""

    __slots__ = ("deadline", "frame", "opaque", "reply", "written")

    def __init__(self) -> None:
        self.opaque: int = 0
        self.deadline: float = 0.0
        self.frame: bytes = b""
        self.written: bool = False
        self.reply: RemotingCommand | None = None

    def finish(self) -> None:
        """Notify the waiting side. Further calls have no effect."""
        raise NotImplementedError


class WaitingCall(Call):
    """A call that one task waits for."""

    __slots__ = ()

    def wait(self) -> Awaitable[object]:
        """To be awaited immediately: returns when the call is finished."""
        raise NotImplementedError


class CallbackCall(Call):
    """A call that no task waits for: ``then`` is called with it, in the task that reads. ``then`` must not raise."""

    __slots__ = ("then",)

    def __init__(self, then: "Callable[[CallbackCall], None]") -> None:
        super().__init__()
        self.then = then

    def finish(self) -> None:
        """Calls ``then``."""
        self.then(self)


class Crowd:
    """Tasks that wait for the same event."""

    __slots__ = ()

    def wait(self) -> Awaitable[object]:
        """To be awaited immediately: returns at the next ``wake``. A cancelled task no longer waits."""
        raise NotImplementedError

    def wake(self) -> None:
        """Wake all tasks that wait now; a task that waits later is woken by the next call."""
        raise NotImplementedError


class Readable:
    """Waits until a socket is readable; one task at a time."""

    async def wait(self) -> None:
        """Returns when there may be data, or the peer has closed."""
        raise NotImplementedError

    def close(self) -> None:
        """To be called before the socket is closed."""
        raise NotImplementedError


class Loop(NamedTuple):
    """The functions of a loop that a connection and its users need."""

    call: Callable[[], WaitingCall]
    crowd: Callable[[], Crowd]
    now: Callable[[], float]
    readable: "Callable[[socket.socket], Readable]"


def running_loop() -> Loop:
    """The functions of the loop that runs the current task."""
    if "trio" in sys.modules:
        from trimq.remoting.client import call_trio as client_call_trio  # noqa: PLC0415 - an asyncio program need not have trio installed

        if client_call_trio.is_running():
            return client_call_trio.LOOP
    import asyncio  # noqa: PLC0415 - a trio program need not import asyncio

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
    """Registers the socket once: registering for each wait would cost two more system calls."""

    def __init__(self, loop: "asyncio.AbstractEventLoop", sock: "socket.socket") -> None:
        self._loop = loop
        self._socket = sock
        self._future: asyncio.Future[None] | None = None
        loop.add_reader(sock, self._notify)

    def _notify(self) -> None:
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
        """Nothing is registered while no task waits."""
