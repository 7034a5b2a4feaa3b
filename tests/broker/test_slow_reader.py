"""A client that does not read the replies it requested, while the file they come from expires."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from tests.broker.wire_client import WireClient, pull_ext
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol import frame
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand

FILE = 1 << 20
BODY = b"x" * 60_000
PULLS = 40


async def _fill_files(client: WireClient, broker: BrokerController, topic: str, files: int) -> None:
    while len(broker.context.store.files.files) < files:
        assert (await client.send(topic, BODY)).code == 0


async def _slow_reader(address: tuple[str, int], topic: str) -> trio.SocketStream:
    """Requests more than a socket buffer holds, and reads nothing of it."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await sock.connect(address)
    stream = trio.SocketStream(sock)
    for opaque in range(PULLS):
        ext = {name: str(value) for name, value in pull_ext(topic, 0).items()}
        await stream.send_all(frame.encode(RemotingCommand(int(RequestCode.PULL_MESSAGE), opaque, ext=ext)))
    return stream


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition is internal to the broker and has no event
        await trio.sleep(0.01)


async def _until_closed(stream: trio.SocketStream) -> int:
    """The number of bytes sent before the end."""
    total = 0
    try:
        while data := await stream.receive_some(1 << 20):
            total += len(data)
    except trio.BrokenResourceError:
        pass
    return total


async def test_it_is_closed_after_its_time_and_the_memory_is_free(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "mappedFileSizeCommitLog": FILE,
        "commitLogReserveStep": 256 << 10,
        "maxMessageSize": 256 << 10,
        "destroyMapedFileIntervalForcibly": 700,
        "cleanResourceInterval": 100,
        "diskMaxUsedSpaceRatio": 95,
    }
    async with running_broker(tmp_path, **settings) as broker, WireClient.connect(broker.endpoint) as client:
        await _fill_files(client, broker, "Slow", 3)
        first = broker.context.store.files.files[0]
        slow = await _slow_reader(broker.endpoint, "Slow")
        healthy = await client.pull("Slow", 0)
        assert healthy.code == 0
        connections = broker.reactor.connections
        await _until(lambda: any(connection.out.releases() for connection in connections.values()))
        os.utime(first.path, (1, 1))
        with trio.fail_after(20):
            await client.ask(RequestCode.DELETE_EXPIRED_COMMITLOG)
            await _until(lambda: not Path(first.path).exists())
            deleted_at = trio.current_time()
            assert first.is_held
            assert not first.destroyed
            await _until(lambda: not first.is_held)
            assert trio.current_time() - deleted_at > 0.5
            await _until(lambda: first.destroyed)
            assert 0 < await _until_closed(slow) < PULLS * 240_000
        # other clients continue
        assert not client.closed
        assert (await client.send("Slow", b"more")).code == 0
        assert (await client.pull("Slow", broker.context.store.min_offset("Slow", 0))).code == 0
        await slow.aclose()
