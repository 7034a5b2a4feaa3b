"""The quick way to brokers: what is not acknowledged is given back, whatever a broker answers, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from client.message import MessageQueue
from pipeline.topics import delivery, send_lane
from pipeline.topics.plain_rows import Request
from pipeline.topics.send_lane import LaneEndedError, SendLane
from protocol.codes import ResponseCode
from protocol.command import RemotingCommand
from protocol.frame import FrameDecoder, encode
from protocol.headers.send import SendMessageResponseHeader
from tests.interop.harness.servers import Cluster
from tests.spark.tables import bodies, read, write

pytestmark = pytest.mark.one_pyspark

REQUESTS = 12
Answer = Callable[[RemotingCommand, int], RemotingCommand | None]
"""What a broker says to its n-th request; None for nothing."""


def stored(request: RemotingCommand, number: int) -> RemotingCommand:
    header = SendMessageResponseHeader(msg_id="A", queue_id=0, queue_offset=number)
    return request.reply(ResponseCode.SUCCESS, header=header)


class FakeBroker:
    """Serves one connection after the other; ``kept`` are the numbers of the requests that it said it has stored."""

    def __init__(self, answer: Answer) -> None:
        self.kept: list[int] = []
        self._answer = answer
        self._asked = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with closing(connection), suppress(OSError):
            decoder = FrameDecoder()
            while data := connection.recv(65536):
                for request in decoder.feed(data):
                    reply = self._answer(request, self._asked)
                    self._asked += 1
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


def given(lane: SendLane, count: int = REQUESTS) -> list[int]:
    """Sends so many; the numbers of those that the lane gave back or never took."""
    number = 0
    try:
        for number in range(count):
            lane.send(request(number))
        lane.finish()
    except LaneEndedError:
        return [int(bytes(one.body)[:4]) for one in lane.take_back()] + list(range(number + 1, count))
    lane.close()
    return []


def refused(request: RemotingCommand, number: int) -> RemotingCommand:
    return request.reply(ResponseCode.SYSTEM_BUSY, "busy")


def of_another_request(request: RemotingCommand, number: int) -> RemotingCommand:
    reply = stored(request, number)
    reply.opaque += 1000
    return reply


def gone(request: RemotingCommand, number: int) -> RemotingCommand:
    raise ConnectionError


@pytest.mark.parametrize("room", [1, 200_000, 1 << 22])
def test_everything_is_sent_and_acknowledged(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_lane, "_UNDER_WAY", room)
    with FakeBroker(stored).running() as broker:
        lane = SendLane("g", [(queue(0), broker.address), (queue(1), broker.address)], 20)
        assert given(lane) == []
        assert lane.stored == 10 * REQUESTS
    assert broker.kept == list(range(REQUESTS))


@pytest.mark.parametrize("room", [1, 1 << 22])
@pytest.mark.parametrize("after", [0, 1, 7, REQUESTS - 1])
@pytest.mark.parametrize("fault", [refused, of_another_request, gone])
def test_what_is_not_acknowledged_is_given_back(
    fault: Answer, after: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_lane, "_UNDER_WAY", room)
    with FakeBroker(lambda one, number: (fault if number == after else stored)(one, number)).running() as broker:
        lane = SendLane("g", [(queue(0), broker.address)], 20)
        left = given(lane)
    assert after in left
    assert set(left) >= set(range(REQUESTS)) - set(broker.kept), "nothing is lost"
    assert lane.stored == 10 * (REQUESTS - len(left))
    if fault is refused:
        assert sorted([*left, *broker.kept]) == list(range(REQUESTS)), "what was stored behind it is not sent again"


def test_a_broker_that_says_nothing() -> None:
    with FakeBroker(lambda one, number: stored(one, number) if number < 3 else None).running() as broker:
        lane = SendLane("g", [(queue(0), broker.address)], 0.5)
        left = given(lane)
    assert set(left) >= set(range(3, REQUESTS))
    assert lane.stored == 10 * (REQUESTS - len(left))


def test_nobody_listens() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert given(SendLane("g", [(queue(0), address)], 20)) == list(range(REQUESTS))


def test_rows_are_all_there_once_with_the_lane_and_where_it_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"body": b"%05d" % number} for number in range(3000)]
    everything = [row["body"] for row in rows]

    def no_start(*_: object) -> None:
        raise AssertionError("the lane ended")

    topic = cluster.create_topic("SparkSendLane", 2)
    with monkeypatch.context() as patch:
        patch.setattr(delivery._Delivery, "_start", no_start)
        assert write(cluster, rows, topic=topic, batchBytes=2000) == (3000, 0)
    assert bodies(read(cluster, topics=topic)) == everything

    topic = cluster.create_topic("SparkSendLaneEnds", 2)
    real, sent = SendLane.send, 0

    def breaks(self: SendLane, request: Request) -> None:
        nonlocal sent
        sent += 1
        real(self, request)
        if sent == 20:
            raise LaneEndedError

    monkeypatch.setattr(SendLane, "send", breaks)
    assert write(cluster, rows, topic=topic, batchBytes=2000) == (3000, 0)
    assert sent == 20
    assert bodies(read(cluster, topics=topic)) == everything
