"""The fast path of sending: exactly the requests without an acknowledgement are returned, whatever a broker answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pyarrow as pa
import pytest

from tests.client.verifying import SECRET, USER, problem
from tests.interop.harness.servers import Cluster
from tests.spark.tables import bodies, options_of, read, write
from trimq.client.message import MessageQueue
from trimq.pipeline.options import Options
from trimq.pipeline.topics import delivery, direct_sender
from trimq.pipeline.topics.delivery import Chunk, Identity, WriteSettings, deliver
from trimq.pipeline.topics.direct_sender import ConnectionEndedError, DirectSender
from trimq.pipeline.topics.rows_fast_path import Request
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, decode, encode
from trimq.protocol.headers.send import SendMessageResponseHeader
from trimq.remoting.client.credentials import Credentials, Signer

pytestmark = pytest.mark.one_pyspark

REQUESTS = 12
Answer = Callable[[RemotingCommand, int], RemotingCommand | None]
"""A broker's answer to its n-th request; None for no answer."""


def stored(request: RemotingCommand, number: int) -> RemotingCommand:
    header = SendMessageResponseHeader(msg_id="A", queue_id=0, queue_offset=number)
    return request.reply(ResponseCode.SUCCESS, header=header)


def stored_at_length(request: RemotingCommand, number: int) -> RemotingCommand:
    """An answer as for many short rows, too long for any buffer."""
    reply = stored(request, number)
    reply.body = bytes(1 << 20)
    return reply


def shrink(connection: socket.socket, size: int) -> None:
    for which in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, which, size)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of the buffers that a sender's connections have."""
    real, size = socket.create_connection, 16_384

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        connection = real(address, timeout)
        shrink(connection, size)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect)
    return size


class FakeBroker:
    """Serves one connection after the other; ``kept`` lists the numbers of the requests that it has acknowledged."""

    def __init__(self, answer: Answer, buffers: int | None = None) -> None:
        self.kept: list[int] = []
        self._answer = answer
        self.asked = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        if buffers is not None:
            shrink(self._server, buffers)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with closing(connection), suppress(OSError):
            decoder = FrameDecoder()
            while data := connection.recv(65536):
                for request in decoder.feed(data):
                    reply = self._answer(request, self.asked)
                    self.asked += 1
                    if reply is not None:
                        connection.sendall(encode(reply))
                        if reply.code == ResponseCode.SUCCESS and reply.opaque == request.opaque:
                            self.kept.append(int(bytes(request.body)[:4]))

    @contextmanager
    def running(self) -> Iterator[FakeBroker]:
        self._thread.start()
        with closing(self._server):
            yield self
            self._thread.join(30)
            assert not self._thread.is_alive()


def queue(number: int) -> MessageQueue:
    return MessageQueue(topic="T", broker_name="b", queue_id=number)


def request(number: int, size: int = 50_000) -> Request:
    return Request("T", memoryview(b"%04d" % number + bytes(size)), 10, "A" * 32, 1)


def given(sender: DirectSender, count: int = REQUESTS) -> list[int]:
    """Send ``count`` requests; return the numbers of those that the sender gave back or did not accept."""
    number = 0
    try:
        for number in range(count):
            sender.send(request(number))
        sender.finish()
    except ConnectionEndedError:
        return [int(bytes(one.body)[:4]) for one in sender.take_back()] + list(range(number + 1, count))
    sender.close()
    return []


def refused(request: RemotingCommand, number: int) -> RemotingCommand:
    return request.reply(ResponseCode.SYSTEM_BUSY, "busy")


def of_another_request(request: RemotingCommand, number: int) -> RemotingCommand:
    reply = stored(request, number)
    reply.opaque += 1000
    return reply


def gone(request: RemotingCommand, number: int) -> RemotingCommand:
    raise ConnectionError


@pytest.mark.parametrize("limit", [1, 200_000, 1 << 22])
def test_everything_is_sent_and_acknowledged(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_sender, "_UNDER_WAY", limit)
    with FakeBroker(stored).running() as broker:
        sender = DirectSender("g", [(queue(0), broker.address), (queue(1), broker.address)], 20)
        assert given(sender) == []
        assert sender.stored == 10 * REQUESTS
    assert broker.kept == list(range(REQUESTS))


@pytest.mark.parametrize("limit", [1, 1 << 22])
@pytest.mark.parametrize("after", [0, 1, 7, REQUESTS - 1])
@pytest.mark.parametrize("fault", [refused, of_another_request, gone])
def test_what_is_not_acknowledged_is_given_back(
    fault: Answer, after: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_sender, "_UNDER_WAY", limit)
    with FakeBroker(lambda one, number: (fault if number == after else stored)(one, number)).running() as broker:
        sender = DirectSender("g", [(queue(0), broker.address)], 20)
        left = given(sender)
    assert after in left
    assert set(left) >= set(range(REQUESTS)) - set(broker.kept), "nothing is lost"
    assert sender.stored == 10 * (REQUESTS - len(left))
    if fault is refused:
        assert sorted([*left, *broker.kept]) == list(range(REQUESTS)), "requests stored after it are not sent again"


def test_a_broker_that_says_nothing() -> None:
    with FakeBroker(lambda one, number: stored(one, number) if number < 3 else None).running() as broker:
        sender = DirectSender("g", [(queue(0), broker.address)], 0.5)
        left = given(sender)
    assert set(left) >= set(range(3, REQUESTS))
    assert sender.stored == 10 * (REQUESTS - len(left))


def test_a_broker_that_reads_on_when_its_reply_is_taken(small_buffers: int) -> None:
    with FakeBroker(stored_at_length, small_buffers).running() as broker:
        sender = DirectSender("g", [(queue(0), broker.address)], 20)
        assert given(sender) == []
    assert broker.kept == list(range(REQUESTS))
    assert sender.stored == 10 * REQUESTS


def test_a_request_that_is_refused_while_another_gets_out(small_buffers: int) -> None:
    def answer(one: RemotingCommand, number: int) -> RemotingCommand:
        reply = stored_at_length(one, number)
        reply.code = ResponseCode.SYSTEM_BUSY if number == 3 else reply.code
        return reply

    with FakeBroker(answer, small_buffers).running() as broker:
        sender = DirectSender("g", [(queue(0), broker.address)], 20)
        left = given(sender)
    assert 3 in left
    assert broker.kept[:3] == [0, 1, 2]
    assert sorted([*left, *broker.kept]) == list(range(REQUESTS)), "each once"
    assert sender.stored == 10 * len(broker.kept)
    assert sender._connections[broker.address]._works, "the sender did not wait for a reply that cannot come"


def test_no_more_than_so_many_requests_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_sender, "_REQUESTS", 5)
    with FakeBroker(lambda one, number: None).running() as broker:
        sender = DirectSender("g", [(queue(0), broker.address)], 0.1)
        for number in range(5):
            sender.send(request(number, size=10))
        with pytest.raises(ConnectionEndedError):
            sender.send(request(5, size=10))
        assert [int(bytes(one.body)[:4]) for one in sender.take_back()] == list(range(6))
    assert broker.asked == 5


@pytest.mark.usefixtures("small_buffers")
def test_a_broker_that_does_not_read() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert given(DirectSender("g", [(queue(0), address)], 0.5)) == list(range(REQUESTS))


def test_no_broker_listens() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert given(DirectSender("g", [(queue(0), address)], 20)) == list(range(REQUESTS))


def test_rows_are_all_there_once_with_the_direct_sender_and_where_it_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"body": b"%05d" % number} for number in range(3000)]
    everything = [row["body"] for row in rows]

    def no_start(*_: object) -> None:
        raise AssertionError("the direct sender ended")

    topic = cluster.create_topic("SparkDirectSender", 2)
    with monkeypatch.context() as patch:
        patch.setattr(delivery._Delivery, "_start", no_start)
        assert write(cluster, rows, topic=topic, batchBytes=2000) == (3000, 0)
    assert bodies(read(cluster, topics=topic)) == everything

    topic = cluster.create_topic("SparkDirectSenderEnds", 2)
    real, sent = DirectSender.send, 0

    def breaks(self: DirectSender, request: Request) -> None:
        nonlocal sent
        sent += 1
        real(self, request)
        if sent == 20:
            raise ConnectionEndedError

    monkeypatch.setattr(DirectSender, "send", breaks)
    assert write(cluster, rows, topic=topic, batchBytes=2000) == (3000, 0)
    assert sent == 20
    assert bodies(read(cluster, topics=topic)) == everything


def test_nothing_is_in_flight_in_the_background_while_the_direct_sender_works(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does not run during that time: a reply would be read too late, and its rows would be sent twice."""
    in_flight = started = sent = 0
    real_start, real_send = delivery._Delivery._send, DirectSender.send

    async def start(self: delivery._Delivery, chunk: Chunk) -> None:
        nonlocal in_flight, started
        started += 1
        in_flight += 1
        await real_start(self, chunk)
        in_flight -= 1

    def send(self: DirectSender, request: Request) -> None:
        nonlocal sent
        sent += 1
        assert not in_flight
        real_send(self, request)

    monkeypatch.setattr(delivery._Delivery, "_send", start)
    monkeypatch.setattr(DirectSender, "send", send)
    topic = cluster.create_topic("SparkDirectSenderAlone", 2)
    everything = [b"%05d" % number for number in range(780)]
    # The direct sender is not used for fewer than a hundred rows.
    parts = [everything[:90], everything[90:390], everything[390:480], everything[480:]]
    batches = [pa.RecordBatch.from_pylist([{"body": body} for body in part]) for part in parts]
    settings = WriteSettings.of(Options(options_of(cluster, topic=topic, batchBytes=2000)))
    assert deliver(batches, settings, Identity("query/0/0")) == (780, 0)
    assert started > 2
    assert sent > 2
    assert bodies(read(cluster, topics=topic)) == everything


def test_requests_are_signed() -> None:
    # guards the fast path of writing, which makes its frames itself: header and body leave separately
    frames: list[bytes] = []

    def serve() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as stream:
            size = int.from_bytes(stream.read(4), "big")
            frames.append(stream.read(size))
            reply = decode(memoryview(frames[0])).reply(header={"msgId": "0" * 32, "queueId": "0", "queueOffset": "0"})
            connection.sendall(encode(reply))

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        sender = DirectSender("g", [(queue(0), address)], 20, Signer(Credentials(USER, SECRET)))
        sender.send(request(0))
        sender.finish()
        sender.close()
        thread.join(30)
    assert [problem(frame, {USER: SECRET}) for frame in frames] == [None]
