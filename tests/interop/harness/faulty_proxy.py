"""A proxy between a client and a server of this machine that delays, cuts, answers by itself, or swallows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import trio

UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_CHUNK = 65536


@dataclass
class Fault:
    """What happens to each request. None, 0 and False: nothing.

    ``delay`` seconds before a part of a reply is passed on. ``request_bytes``, ``reply_bytes``: the connection is cut
    when so many bytes were passed on. ``answer``: sent instead of the server's reply, to a request that it does not
    get. ``swallows``: requests are read, and that is all.
    """

    delay: float = 0
    request_bytes: int | None = None
    reply_bytes: int | None = None
    answer: bytes | None = None
    swallows: bool = False


class FaultyProxy:
    """See above. ``endpoint``: its URL. It passes on what comes, as long as there is no fault."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._fault = Fault()
        self.endpoint = ""

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """Requests of this block meet the fault, also on connections that exist already."""
        self._fault = fault
        try:
            yield
        finally:
            self._fault = Fault()

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
        while data := await client.receive_some(_CHUNK):
            fault = self._fault
            if fault.swallows:
                continue
            if fault.answer is not None:
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
