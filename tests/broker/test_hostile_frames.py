"""Hostile frames against a broker process: it continues to serve, and its memory does not grow.

``TRIMQ_HOSTILE_FRAMES`` is their number (100,000 in CI, 10,000 elsewhere), ``TRIMQ_HOSTILE_SEED`` the random seed.
"""

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings

from tests.broker import hostile
from tests.broker.wire_client import pull_ext, send_ext
from tests.ports import free_port
from trimq.protocol import frame
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand

COUNT: Final = int(os.environ.get("TRIMQ_HOSTILE_FRAMES", "100000" if os.environ.get("CI") else "10000"))
SEED: Final = int(os.environ.get("TRIMQ_HOSTILE_SEED", "20251121"))
BURST: Final = 64
LAST: Final = 0x7ABCDEF0
"""Opaque of the request after each burst: its reply shows that the burst was served."""

CONFIG: Final = """
brokerName=broker-a
brokerIP1=127.0.0.1
bindAddress=127.0.0.1
listenPort={port}
fastListenPort=0
embeddedNamesrvEnable=false
storePathRootDir={root}
autoCreateTopicEnable=false
autoCreateSubscriptionGroup=false
mappedFileSizeCommitLog=67108864
commitLogReserveStep=4194304
maxHashSlotNum=1000
maxIndexNum=100000
logFile={root}/broker.log
"""


class Broker:
    """A broker process, with measurements of its memory and descriptors."""

    def __init__(self, root: Path) -> None:
        self.port = free_port()
        self.root = root
        (root / "broker.conf").write_text(CONFIG.format(port=self.port, root=root))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trimq.broker", "-c", str(root / "broker.conf")], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert "is up" in self.process.stdout.readline()

    def connect(self) -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    def anonymous_kib(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1])
        raise AssertionError("no RssAnon")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def log(self) -> str:
        path = self.root / "broker.log"
        return path.read_text() if path.exists() else ""

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    started = Broker(tmp_path_factory.mktemp("hostile"))
    create = {
        "topic": "Orders",
        "defaultTopic": "TBW102",
        "readQueueNums": 4,
        "writeQueueNums": 4,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
    }
    try:
        assert ask(started, RequestCode.UPDATE_AND_CREATE_TOPIC, create).code == 0
        assert ask(started, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, b'{"groupName":"G"}').code == 0
        yield started
    finally:
        started.stop()


def ask(broker: Broker, code: int, ext: dict[str, object], body: bytes = b"") -> RemotingCommand:
    """One honest request on a connection of its own."""
    with broker.connect() as connection:
        connection.sendall(request(code, ext, body))
        reply = read_until(connection, LAST)
    assert reply is not None
    return reply


def request(code: int, ext: dict[str, object], body: bytes = b"", *, opaque: int = LAST) -> bytes:
    texts = {name: str(value) for name, value in ext.items() if value is not None}
    return frame.encode(RemotingCommand(int(code), opaque, version=479, language="JAVA", ext=texts, body=body))


def read_until(connection: socket.socket, opaque: int) -> RemotingCommand | None:
    """Return the reply with this opaque, or None if the broker closes the connection first."""
    decoder = frame.FrameDecoder()
    while True:
        try:
            data = connection.recv(1 << 18)
        except ConnectionError:
            return None
        if not data:
            return None
        for command in decoder.feed(data):
            if command.opaque == opaque and command.is_reply:
                return command


PING: Final = request(RequestCode.GET_MAX_OFFSET, {"topic": "Orders", "queueId": 0})


def fire(broker: Broker, frames: list[bytes], *, killer: bytes | None = None) -> None:
    """Send frames that leave the connection open, check that they were served, then send one that closes it."""
    with broker.connect() as connection:
        connection.sendall(b"".join(frames) + PING)
        assert read_until(connection, LAST) is not None, "the broker closed a connection whose frames were complete"
        if killer is not None:
            connection.sendall(killer)
            connection.shutdown(socket.SHUT_WR)
            while True:
                try:
                    if not connection.recv(1 << 18):
                        return
                except ConnectionError:
                    return


def works(broker: Broker) -> None:
    """Check that the broker stores a message and delivers it."""
    sent = ask(broker, RequestCode.SEND_MESSAGE_V2, send_ext("Orders", queue_id=3), b"honest")
    assert sent.code == 0, sent.remark
    offset = int(sent.ext_fields()["queueOffset"])
    pulled = ask(broker, RequestCode.PULL_MESSAGE, pull_ext("Orders", offset, queueId=3))
    if pulled.remark == "OFFSET_RESET":
        pulled = ask(broker, RequestCode.PULL_MESSAGE, pull_ext("Orders", offset, queueId=3))
    assert pulled.code == 0, (pulled.code, pulled.remark)
    assert b"honest" in bytes(pulled.body)


def mutations(broker: Broker, rng: random.Random, count: int) -> None:
    golden = hostile.golden_frames()
    harmless: list[bytes] = []
    for _ in range(count):
        data = hostile.mutated(rng, golden)
        if hostile.is_killer(data):
            fire(broker, harmless, killer=data)
            harmless = []
        else:
            harmless.append(data)
            if len(harmless) >= BURST:
                fire(broker, harmless)
                harmless = []
    fire(broker, harmless)


@pytest.mark.timeout(900)
def test_mutations_of_golden_frames(broker: Broker) -> None:
    rng = random.Random(SEED)
    mutations(broker, rng, max(2000, COUNT // 10))
    settle(broker, 200)
    memory, descriptors = broker.anonymous_kib(), broker.descriptors()
    mutations(broker, rng, COUNT)
    works(broker)
    settle(broker, descriptors + 4)
    grown = broker.anonymous_kib() - memory
    assert grown < 8 * 1024, f"{grown} KiB more than before {COUNT} hostile frames (seed {SEED})"
    assert broker.descriptors() <= descriptors + 4
    assert "request_failed" not in broker.log()


def settle(broker: Broker, most: int) -> None:
    """Wait until the broker has closed its end of connections that were closed here: ``most`` descriptors are left."""
    end = time.monotonic() + 20
    while time.monotonic() < end and broker.descriptors() > most:
        works(broker)


@pytest.mark.timeout(300)
@settings(max_examples=max(200, COUNT // 100), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(data=hostile.hostile_frames())
def test_strange_headers(broker: Broker, data: bytes) -> None:
    if hostile.is_killer(data):
        fire(broker, [], killer=data)
    else:
        fire(broker, [data])


def test_serves_afterwards(broker: Broker) -> None:
    works(broker)
    assert "request_failed" not in broker.log()


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        struct.pack(">I", 16_777_213),
        struct.pack(">I", 0x7FFFFFFF),
        struct.pack(">I", 3) + b"abc",
        struct.pack(">II", 4, 5),
    ],
)
def test_what_is_no_frame(broker: Broker, start: bytes) -> None:
    with broker.connect() as connection:
        connection.sendall(start)
        try:
            assert connection.recv(100) == b""
        except ConnectionError:
            pass
    works(broker)


def test_held_pulls_keep_no_receive_buffer(broker: Broker) -> None:
    end = int(ask(broker, RequestCode.GET_MAX_OFFSET, {"topic": "Orders", "queueId": 2}).ext_fields()["offset"])
    if not end:
        ask(broker, RequestCode.SEND_MESSAGE_V2, send_ext("Orders", queue_id=2), b"first")
        end = 1
    fire(broker, [])
    memory = broker.anonymous_kib()
    ext = pull_ext("Orders", end, queueId=2, sysFlag=6)
    held = request(RequestCode.PULL_MESSAGE, ext, bytes(1 << 20), opaque=1)
    with broker.connect() as connection:
        for _ in range(100):
            connection.sendall(held)
        connection.sendall(PING)
        assert read_until(connection, LAST) is not None
        assert broker.anonymous_kib() - memory < 32 * 1024


def test_largest_frame_is_read_and_refused(broker: Broker) -> None:
    reply = ask(broker, RequestCode.SEND_MESSAGE_V2, send_ext("Orders"), bytes(16_777_216 - 600))
    assert reply.code == 13
    works(broker)
