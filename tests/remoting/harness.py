"""A reactor on a loopback port, and clients that send and receive bare frames, so a test controls every byte."""

import itertools
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from tests.canary import look_at_reply
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.reactor import (
    Connection,
    HandlerTable,
    Origins,
    Outcome,
    Reactor,
    ReactorLimits,
    ServerTls,
    listen,
)

ECHO = 1
_opaque = itertools.count(1)


def echo(connection: Connection, command: RemotingCommand) -> Outcome:
    return encode(command.reply(body=command.body))


def echo_table() -> HandlerTable:
    table = HandlerTable()
    table.register(ECHO, echo)
    return table


def request(
    code: int = ECHO,
    body: bytes = b"",
    *,
    oneway: bool = False,
    ext: dict[str, str] | None = None,
    encoding: Encoding = Encoding.JSON,
    opaque: int | None = None,
) -> RemotingCommand:
    command = RemotingCommand.request(code, ext, body, oneway=oneway, encoding=encoding)
    command.opaque = next(_opaque) if opaque is None else opaque
    return command


class Peer:
    """One connection to a server."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.arrived: list[RemotingCommand] = []
        self._decoder = FrameDecoder()

    async def send(self, *commands: RemotingCommand) -> None:
        await self.stream.send_all(b"".join(encode(command) for command in commands))

    async def send_bytes(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive(self) -> RemotingCommand:
        while not self.arrived:
            data = await self.stream.receive_some(1 << 20)
            if not data:
                raise EOFError
            look_at_reply(data)
            self.arrived += self._decoder.feed(data)
        return self.arrived.pop(0)

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        await self.send(command)
        return await self.receive()

    async def is_closed_by_server(self) -> bool:
        """Wait until the server has closed the connection; return False if it sends something."""
        try:
            return not await self.stream.receive_some(1)
        except trio.BrokenResourceError:
            return True


@dataclass
class Server:
    reactor: Reactor
    address: tuple[str, int]
    nursery: trio.Nursery

    @property
    def text(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    @asynccontextmanager
    async def peer(
        self, *, receive_buffer: int = 0, tls: ssl.SSLContext | None = None, source: str = ""
    ) -> AsyncIterator[Peer]:
        sock = trio.socket.socket()
        if source:  # any address of 127.0.0.0/8 is this machine's
            await sock.bind((source, 0))
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await sock.connect(self.address)
        async with trio.SocketStream(sock) as stream:
            if tls is None:
                yield Peer(stream)
                return
            secure = trio.SSLStream(stream, tls, server_hostname="localhost", https_compatible=True)
            await secure.do_handshake()
            yield Peer(secure)

    def connection(self) -> Connection:
        """The only connection there is."""
        (connection,) = self.reactor.connections.values()
        return connection


@asynccontextmanager
async def serving(
    table: HandlerTable | None = None,
    limits: ReactorLimits | None = None,
    clock: Clock | None = None,
    port: int = 0,
    tls: ServerTls | None = None,
    origins: Origins | None = None,
) -> AsyncIterator[Server]:
    reactor = Reactor(limits, clock, tls=tls, origins=origins)
    sock = listen("127.0.0.1", port)
    reactor.add_listener(sock, table or echo_table())
    async with trio.open_nursery() as nursery:
        await nursery.start(reactor.run)
        yield Server(reactor, sock.getsockname(), nursery)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def within_seconds(
    table: HandlerTable | None = None,
    limits: ReactorLimits | None = None,
    clock: Clock | None = None,
    tls: ServerTls | None = None,
    origins: Origins | None = None,
) -> AsyncIterator[Server]:
    """Like ``serving``, for 15 s at most: if something waits forever, the test fails."""
    with trio.fail_after(15):
        async with serving(table, limits, clock, tls=tls, origins=origins) as server:
            yield server


async def until(server: Server, condition: str) -> None:
    """Wait until an expression over ``stats`` (``s``) is true; the reactor runs between two checks."""
    while not eval(condition, {"s": server.reactor.stats}):
        await trio.lowlevel.checkpoint()
