"""A proxy between a client and a server of this machine that delays, cuts, answers by itself, swallows, or holds."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

from tests.interop.harness.waiting import wait_until

UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_CHUNK = 65536
_LINE = re.compile(rb"([A-Z]{3,6}) (\S+) HTTP/1\.1\r\n")


@dataclass
class Fault:
    """What happens to each request. None, 0 and False: nothing.

    ``delay`` seconds before a part of a reply is passed on. ``request_bytes``, ``reply_bytes``: the connection is cut
    when so many bytes were passed on. ``answer``: sent instead of the server's reply, to a request that it does not
    get; with ``answers``, to requests only whose first line this pattern finds. ``swallows``: requests are read, and
    that is all. ``holds``: a request whose first line this pattern finds waits until the block of the fault ends, and
    ``held`` is set.
    """

    delay: float = 0
    request_bytes: int | None = None
    reply_bytes: int | None = None
    answer: bytes | None = None
    answers: re.Pattern[bytes] = re.compile(b"")
    swallows: bool = False
    holds: re.Pattern[bytes] | None = None
    held: threading.Event = field(default_factory=threading.Event)


class FaultyProxy:
    """See above. ``endpoint``: its URL. It passes on what comes, as long as there is no fault.

    ``requests``: method and target of each request that came, on connections that are kept.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._fault = Fault()
        self._token = trio.lowlevel.current_trio_token()
        self._released = trio.Event()
        self.endpoint = ""
        self.requests: list[tuple[str, str]] = []

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """Requests of this block meet the fault, also on connections that exist already. Any thread may use it."""
        self._fault = fault
        try:
            yield
        finally:
            self._fault = Fault()
            self.run_soon(self._release)

    def run_soon(self, fn: Callable[[], object]) -> None:
        """Call a function in the proxy's thread."""
        self._token.run_sync_soon(fn)

    def _release(self) -> None:
        self._released.set()
        self._released = trio.Event()

    def count(self, *methods: str) -> int:
        """The number of requests so far that have one of these methods."""
        return sum(method in methods for method, _ in list(self.requests))

    async def serve(self, client: trio.SocketStream) -> None:
        """One connection."""
        try:
            async with (
                client,
                await trio.open_tcp_stream("127.0.0.1", self._port) as server,
                trio.open_nursery() as both,
            ):

                async def pass_requests() -> None:
                    await self._requests(client, server)
                    both.cancel_scope.cancel()

                both.start_soon(pass_requests)
                if await self._replies(server, client):
                    await client.send_eof()  # and read on: a client that cannot send does not look for a reply
                else:
                    both.cancel_scope.cancel()
        except* (OSError, trio.BrokenResourceError):
            pass

    async def _requests(self, client: trio.SocketStream, server: trio.SocketStream) -> None:
        passed = 0
        first_line = b""
        while data := await client.receive_some(_CHUNK):
            fault = self._fault
            if (line := _LINE.match(data)) is not None:
                first_line = line[0]
                self.requests.append((line[1].decode(), line[2].decode()))
                if fault.holds is not None and fault.holds.search(line[0]):
                    released = self._released
                    fault.held.set()
                    await released.wait()
                    fault = self._fault
            if fault.swallows:
                continue
            if fault.answer is not None and fault.answers.search(first_line):
                await client.send_all(fault.answer)
                return
            if fault.request_bytes is None:
                passed = 0
            else:
                data = data[: fault.request_bytes - passed]
                passed += len(data)
            try:
                await server.send_all(data)
            except trio.BrokenResourceError:
                pass  # it has answered before it has read everything
            if fault.request_bytes is not None and passed >= fault.request_bytes:
                return

    async def _replies(self, server: trio.SocketStream, client: trio.SocketStream) -> bool:
        """Pass on what the server says; false if the connection is to be cut before the server ends."""
        passed = 0
        while data := await server.receive_some(_CHUNK):
            fault = self._fault
            await trio.sleep(fault.delay)
            if fault.reply_bytes is None:
                passed = 0
            else:
                data = data[: fault.reply_bytes - passed]
                passed += len(data)
            await client.send_all(data)
            if fault.reply_bytes is not None and passed >= fault.reply_bytes:
                return False
        return True


@asynccontextmanager
async def faulty_proxy(port: int) -> AsyncIterator[FaultyProxy]:
    """Run a proxy in front of a port of this machine."""
    proxy = FaultyProxy(port)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, proxy.serve, 0, host="127.0.0.1"))
        proxy.endpoint = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        yield proxy
        nursery.cancel_scope.cancel()


@contextmanager
def running_proxy(port: int) -> Iterator[FaultyProxy]:
    """Run a proxy in a thread, for tests that wait without an event loop."""
    started: list[FaultyProxy] = []
    stops: list[trio.Event] = []

    async def serve() -> None:
        async with faulty_proxy(port) as proxy:
            stops.append(trio.Event())
            started.append(proxy)
            await stops[0].wait()

    thread = threading.Thread(target=trio.run, args=(serve,), name="proxy", daemon=True)
    thread.start()
    proxy = wait_until(lambda: started[0] if started else None, "start of the proxy")
    try:
        yield proxy
    finally:
        proxy.run_soon(stops[0].set)
        thread.join(10)
