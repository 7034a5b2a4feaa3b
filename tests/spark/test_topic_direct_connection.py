"""The fast path of reading a range: whatever a broker answers, the messages before ``at`` were returned, each once."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from tests.interop.harness.servers import Cluster
from tests.spark.tables import bodies, read
from trimq.client.message import Message, MessageQueue
from trimq.client.sync import Producer
from trimq.pipeline.topics import direct_connection, rows
from trimq.pipeline.topics.direct_connection import DirectConnection
from trimq.pipeline.topics.planning import Range
from trimq.pipeline.topics.servers import Servers
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode
from trimq.protocol.headers.pull import PullMessageRequestHeader, PullMessageResponseHeader

pytestmark = pytest.mark.one_pyspark

END = 1000
SPAN = Range(MessageQueue(topic="T", broker_name="b", queue_id=0), 20, END)
Answer = Callable[[RemotingCommand, int, int], RemotingCommand]
"""A broker's answer to a request for some number of messages from an offset on."""


def found(request: RemotingCommand, at: int, count: int, *, first: int = 0) -> RemotingCommand:
    header = PullMessageResponseHeader(
        suggest_which_broker_id=0, next_begin_offset=at + count, min_offset=first, max_offset=5000
    )
    return request.reply(ResponseCode.SUCCESS, header=header, body=b",".join(b"%d" % n for n in range(at, at + count)))


@contextmanager
def broker(answer: Answer, *, reorder: random.Random | None = None) -> Iterator[str]:
    """Serve one connection; with ``reorder`` replies are held back and leave in random order."""

    def serve() -> None:
        connection, _ = server.accept()
        decoder = FrameDecoder()
        with closing(connection), suppress(OSError):
            while data := connection.recv(65536):
                requests = decoder.feed(data)
                if reorder is not None:
                    reorder.shuffle(requests)
                for request in requests:
                    header = request.header(PullMessageRequestHeader)
                    connection.sendall(encode(answer(request, header.queue_offset, header.max_msg_nums)))

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(30)
        assert not thread.is_alive()


def taken(address: str, span: Range = SPAN, buffers: list[int] | None = None) -> tuple[list[int], int]:
    """``buffers`` takes the size of each batch's buffer."""
    direct = DirectConnection(address, "g", span, 20, Servers(address))
    given: list[int] = []
    for view, pieces in direct.reply_batches():
        assert direct.at == (given[-1] + 1 if given else span.begin), "the messages before it have been returned"
        if buffers is not None:
            buffers.append(len(view))
        given += [int(number) for begin, end in pieces for number in bytes(view[begin:end]).split(b",")]
    return given, direct.at


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("batch_bytes", "spare_bytes"), [(1, 0), (700, 300), (700, 40_000), (1 << 20, 1 << 20)])
def test_replies_in_any_order_and_of_any_length(
    seed: int, batch_bytes: int, spare_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any size of the buffer: bytes not yet returned move to its front, or to a larger buffer."""
    monkeypatch.setattr(direct_connection, "REPLY_BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(direct_connection, "_SPARE_BYTES", spare_bytes)
    chance = random.Random(seed)
    with broker(
        lambda request, at, most: found(request, at, chance.randint(1, min(most, 32))), reorder=chance
    ) as place:
        assert taken(place) == (list(range(20, END)), END)


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_connection, "REPLY_BATCH_BYTES", 64 << 10)
    monkeypatch.setattr(direct_connection, "_SPARE_BYTES", 16 << 10)
    monkeypatch.setattr(direct_connection, "_MAX_BUFFERED", 256 << 10)


def padded(request: RemotingCommand, at: int, sizes: list[int]) -> RemotingCommand:
    """``found`` with a message of each size; a number may have spaces behind it."""
    reply = found(request, at, len(sizes))
    reply.body = b",".join((b"%d" % number).ljust(size) for number, size in enumerate(sizes, at))
    return reply


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("stops_at", [None, 1500])
@pytest.mark.usefixtures("small_buffer")
def test_messages_that_become_larger_do_not_pile_up(stops_at: int | None, seed: int | None) -> None:
    """From the first reply 64 messages fit into one request, but later replies contain only one each.

    So every part has to be requested repeatedly, and only the messages of the first part can be returned.
    """
    size, count = 2 << 10, 64
    span = SPAN._replace(begin=0, end=count * 40)
    asked: list[int] = []

    def answer(request: RemotingCommand, at: int, most: int) -> RemotingCommand:
        asked.append(most)
        if not at:
            return padded(request, at, [6] * count)
        return refused(request, at, most) if at == stops_at else padded(request, at, [size])

    buffers: list[int] = []
    with broker(answer, reorder=None if seed is None else random.Random(seed)) as place:
        given, at = taken(place, span, buffers)
    assert given == list(range(at))
    # Replies in flight when the messages became larger are added; a buffer is at most twice as large as its content.
    assert max(buffers) <= 2 * (
        direct_connection._MAX_BUFFERED
        + direct_connection.REPLY_BATCH_BYTES
        + (direct_connection._DEPTH + 1) * (size + 500)
    )
    if stops_at is None:
        assert at == span.end
        assert max(asked[-100:]) <= 2, "requests adapt to the size of the replies"
    else:
        assert count < at <= stops_at
        with broker(lambda request, at, most: padded(request, at, [size] * min(most, 8))) as place:
            assert taken(place, span._replace(begin=at)) == (list(range(at, span.end)), span.end)


@pytest.mark.usefixtures("small_buffer")
def test_messages_that_become_smaller_are_asked_for_many_at_a_time() -> None:
    span = SPAN._replace(begin=0, end=8000)
    asked = 0

    def answer(request: RemotingCommand, at: int, most: int) -> RemotingCommand:
        nonlocal asked
        asked += 1
        return padded(request, at, [40_000] if not at else [6] * min(most, 32))

    with broker(answer) as place:
        assert taken(place, span) == (list(range(span.end)), span.end)
    assert asked < 1500


@pytest.mark.usefixtures("small_buffer")
def test_a_large_message_does_not_leave_a_large_buffer() -> None:
    buffers: list[int] = []
    with broker(lambda request, at, most: padded(request, at, [2 << 20 if at == 300 else 2 << 10])) as place:
        assert taken(place, SPAN, buffers) == (list(range(20, END)), END)
    assert max(buffers) > 2 << 20
    assert buffers[-1] <= 4 * (direct_connection.REPLY_BATCH_BYTES + direct_connection._SPARE_BYTES)


def refused(request: RemotingCommand, at: int, count: int) -> RemotingCommand:
    return request.reply(ResponseCode.SYSTEM_BUSY, "busy")


def nothing(request: RemotingCommand, at: int, count: int) -> RemotingCommand:
    return found(request, at, 0)


def too_much(request: RemotingCommand, at: int, count: int) -> RemotingCommand:
    return found(request, at, count + 1)


def deleted(request: RemotingCommand, at: int, count: int) -> RemotingCommand:
    return found(request, at, count, first=at + 1)


def of_another_request(request: RemotingCommand, at: int, count: int) -> RemotingCommand:
    reply = found(request, at, count)
    reply.opaque += 1_000_000
    return reply


def malformed(request: RemotingCommand, at: int, count: int) -> RemotingCommand:
    return request.reply(ResponseCode.SUCCESS, header={"nextBeginOffset": "x"})


def gone(request: RemotingCommand, at: int, count: int) -> RemotingCommand:
    raise ConnectionError


@pytest.mark.parametrize("fault", [refused, nothing, too_much, deleted, of_another_request, malformed, gone])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_what_is_not_expected_ends_the_connection_and_nothing_is_given_out_twice(fault: Answer, after: int) -> None:
    asked = 0

    def answer(request: RemotingCommand, at: int, count: int) -> RemotingCommand:
        nonlocal asked
        asked += 1
        return found(request, at, min(count, 32)) if asked <= after else fault(request, at, count)

    with broker(answer) as place:
        given, at = taken(place)
    assert given == list(range(20, at))
    # A peer that closes its connection may discard replies in flight.
    assert at == 20 + 32 * after or (fault is gone and at < 20 + 32 * after)


def test_bytes_that_are_no_frame_end_the_connection() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with closing(connection):
                connection.recv(65536)
                connection.sendall(struct.pack(">I", 1 << 30) + b"GET / HTTP")

        thread = threading.Thread(target=serve)
        thread.start()
        assert taken(f"127.0.0.1:{server.getsockname()[1]}") == ([], 20)
        thread.join(30)


def test_no_broker_listens() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    assert taken(f"127.0.0.1:{port}") == ([], 20)


def test_a_range_is_read_to_its_end_where_the_connection_ends_and_where_not(
    cluster: Cluster, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bodies differ greatly in size; brokers return as many as fit into 256 KiB."""
    topic = cluster.create_topic("SparkDirectConnection", 1)
    chance = random.Random(1)
    sent: list[bytes] = []
    for queue in producer.queues(topic):
        sent += [b"%06d" % (len(sent) + n) + chance.randbytes(chance.choice((1, 100, 40_000))) for n in range(300)]
        for body in sent[-300:]:
            producer.send(Message(topic, body), queue=queue)

    def no_reader(*_: object) -> None:
        raise AssertionError("the connection ended")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "RangeReader", no_reader)
        assert bodies(read(cluster, topics=topic)) == sorted(sent)
    real = DirectConnection._receive_reply

    def breaks(self: DirectConnection, connection: socket.socket) -> None:
        if self.at > 150:
            raise ConnectionResetError
        real(self, connection)

    monkeypatch.setattr(direct_connection, "REPLY_BATCH_BYTES", 256 * 1024)
    monkeypatch.setattr(DirectConnection, "_receive_reply", breaks)
    assert bodies(read(cluster, topics=topic)) == sorted(sent)
    monkeypatch.setattr(DirectConnection, "reply_batches", lambda _: iter(()))
    assert bodies(read(cluster, topics=topic)) == sorted(sent)
