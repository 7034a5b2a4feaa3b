"""A name server on its own port, and a client that exchanges frames with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from tests.namesrv.builders import registration_body, registration_header, topic
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode
from trimq.protocol.register_broker_body import encode_register_broker_body
from trimq.remoting.runtime.clock import ManualClock


class Wire:
    """One connection to the name server."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder = FrameDecoder()
        self._opaque = 0

    async def ask(
        self,
        code: int,
        header: msgspec.Struct | dict[str, str] | None = None,
        body: bytes = b"",
        *,
        encoding: Encoding = Encoding.JSON,
        version: int = 479,
    ) -> RemotingCommand:
        command = RemotingCommand.request(code, header, body, encoding=encoding)
        self._opaque += 1
        command.opaque = self._opaque
        command.version = version
        await self.stream.send_all(encode(command))
        (reply,) = await self.receive()
        assert reply.is_reply
        assert reply.opaque == command.opaque
        return reply

    async def receive(self) -> list[RemotingCommand]:
        while True:
            data = await self.stream.receive_some()
            assert data, "the name server closed the connection"
            commands = self._decoder.feed(data)
            if commands:
                return commands

    async def register(self, name: str = "broker-a", addr: str = "127.0.0.1:10911") -> None:
        body = registration_body(topic("A"), topic("TBW102", read=8, write=8, perm=7))
        reply = await self.ask(103, registration_header(name, 0, addr), encode_register_broker_body(body))
        assert reply.code == 0


class Server:
    """A running name server; the test advances its ``clock``."""

    def __init__(self, controller: NamesrvController, clock: ManualClock, address: tuple[str, int]) -> None:
        self.controller = controller
        self.clock = clock
        self.address = address

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Wire]:
        async with await trio.open_tcp_stream(*self.address) as stream:
            yield Wire(stream)


@asynccontextmanager
async def running(folder: Path, **config: str) -> AsyncIterator[Server]:
    """Run a name server with its files in ``folder``; ``config`` has RocketMQ's keys."""
    keys = {
        "bindAddress": "127.0.0.1",
        "listenPort": "0",
        "kvConfigPath": str(folder / "kvConfig.json"),
        "configStorePath": str(folder / "namesrv.properties"),
        **config,
    }
    configuration = load_namesrv(flags={key: (value, "test") for key, value in keys.items()})
    clock = ManualClock()
    controller = NamesrvController(configuration, clock)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(controller.run)
        yield Server(controller, clock, address)
        controller.shutdown()


async def until(condition: object, text: str) -> None:
    """Let the loop run until ``condition()`` holds; the test's own time limit ends a wait that never succeeds."""
    assert callable(condition), text
    while not condition():
        await trio.lowlevel.checkpoint()
