"""A stream whose topic was deleted and created again, or whose broker lost messages: every run reports it.

The readers detect it from the checkpoint alone: each run is a new reader (Trigger.AvailableNow) without other state.
These tests need no PySpark.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
from anyio import to_thread
from structlog.testing import capture_logs

from trimq.broker.testing_threads import BrokerUnderTest, broker_in_thread
from trimq.client.errors import UnreachableError
from trimq.client.message import Message, MessageQueue
from trimq.client.sync import Admin, Producer
from trimq.pipeline.options import Options
from trimq.pipeline.topics import places, session
from trimq.pipeline.topics.offsets import INITIAL, OffsetFormatError, Seen, StreamOffset
from trimq.pipeline.topics.places import Bounds, Patience
from trimq.pipeline.topics.planning import DataLossError, Range
from trimq.pipeline.topics.progress import Progress
from trimq.pipeline.topics.settings import ReadSettings

START: Final = StreamOffset.of(INITIAL)
TOPIC: Final = "Orders"
QUEUE: Final = MessageQueue(topic=TOPIC, broker_name="broker-a", queue_id=0)
HOUR_MS: Final = 3_600_000


class Scene:
    """A broker with a topic, which the test fills, deletes, creates again and reads."""

    def __init__(self, broker: BrokerUnderTest, admin: Admin, producer: Producer) -> None:
        self.broker = broker
        self.admin = admin
        self.producer = producer

    def send(self, count: int) -> None:
        self.producer.send_batch([Message(TOPIC, b"%d" % number) for number in range(count)], queue=QUEUE)

    def make_topic(self, count: int) -> None:
        self.admin.create_topic(TOPIC, queues=1)
        self.send(count)

    def make_anew(self, count: int) -> None:
        self.admin.delete_topic(TOPIC)
        self.make_topic(count)

    def reader(self, **options: object) -> Progress:
        """The reader of a new run; each of its requests comes long after the one before, so that no cache is used."""
        given = {"namesrv": self.broker.namesrv, "topics": TOPIC, "startingOffsets": "earliest", "pollTimeoutMs": 1}
        if "startingTimestamp" in options:
            del given["startingOffsets"]
        texts = {name: str(value) for name, value in (given | options).items()}
        moments = iter(range(1_000_000))
        return Progress(ReadSettings.of(Options(texts), stream=True), now=lambda: float(next(moments)))

    def run(self, start: StreamOffset, *, pins: bool, **options: object) -> StreamOffset:
        """The end of the first batch of a run, as read back from Spark's checkpoint."""
        reader = self.reader(**options)
        if pins:
            reader.pin_target()
        else:
            reader.remember(start)
        return StreamOffset.of(json.loads(json.dumps(reader.end_after(start, None).to_json())))

    def spans(self, start: StreamOffset, **options: object) -> list[Range]:
        """The ranges that a run starting at ``start`` reads."""
        reader = self.reader(**options)
        reader.pin_target()
        reader.remember(start)
        return reader.ranges(start, reader.end_after(start, None))


@pytest.fixture
def scene() -> Iterator[Scene]:
    with (
        broker_in_thread() as broker,
        Admin(broker.namesrv) as admin,
        Producer("lost-queues", namesrv=broker.namesrv) as producer,
    ):
        yield Scene(broker, admin, producer)


def without_sightings(offset: StreamOffset) -> StreamOffset:
    """The offset as an older version wrote it."""
    return StreamOffset(offset.ends, offset.begins, offset.since_ms)


@pytest.mark.parametrize("pins", [True, False], ids=["AvailableNow", "other triggers"])
def test_a_topic_made_anew_ends_every_run_until_the_user_decides(scene: Scene, pins: bool) -> None:
    """Issue 19.3: one run saw ten new messages and ended without a row, the next started in the middle of forty."""
    scene.make_topic(30)
    end = scene.run(START, pins=pins)
    scene.make_anew(10)
    # No wait is needed to be certain: a newer message precedes one that was read.
    with pytest.raises(DataLossError) as raised:
        scene.run(end, pins=pins, pollTimeoutMs=600_000)
    for word in (
        "Orders/broker-a/0 (topic/broker/queue) ends at 10, the stream has read it up to 30",
        "deleted and created again",
        "failOnDataLoss=false",
        "a new checkpoint",
    ):
        assert word in str(raised.value)
    scene.send(30)
    with pytest.raises(
        DataLossError, match=r"Orders/broker-a/0 \(topic/broker/queue\) has another message at 29 .*0 to 40"
    ):
        scene.run(end, pins=pins)
    with capture_logs() as logs:
        assert scene.spans(end, failOnDataLoss=False) == [Range(QUEUE, 0, 40)]
    warnings = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert warnings == ["a queue was replaced", "a queue is read from a new begin"]


@pytest.mark.parametrize("pins", [True, False], ids=["AvailableNow", "other triggers"])
def test_a_shorter_queue_fails_with_an_old_checkpoint_too(scene: Scene, pins: bool) -> None:
    scene.make_topic(30)
    end = without_sightings(scene.run(START, pins=pins))
    scene.make_anew(10)
    for _ in range(2):
        with pytest.raises(DataLossError, match="ends at 10, the stream has read it up to 30"):
            scene.run(end, pins=pins)
    assert scene.spans(end, failOnDataLoss=False) == [Range(QUEUE, 0, 10)]


def test_a_queue_that_begins_again_is_read_on_as_any_other(scene: Scene) -> None:
    """The new start is in the checkpoint: a repeated batch reads the same rows, later batches continue behind them."""
    scene.make_topic(30)
    end = scene.run(START, pins=True)
    scene.make_anew(0)
    empty = scene.run(end, pins=True, failOnDataLoss=False)
    assert (empty.ends[QUEUE], empty.begins) == (0, {QUEUE: 0})
    scene.send(10)
    reader = scene.reader(failOnDataLoss=False, maxOffsetsPerTrigger=4)
    reader.pin_target()
    position, spans = end, []
    while (following := reader.end_after(position, 4)) != position:
        assert scene.reader(failOnDataLoss=False).ranges(position, following) == reader.ranges(position, following)
        spans += reader.ranges(position, following)
        assert reader.ranges(following, following) == []
        reader.remember(following)
        position = following
    assert spans == [Range(QUEUE, 0, 4), Range(QUEUE, 4, 8), Range(QUEUE, 8, 10)]
    assert scene.run(position, pins=True) == position, "and without failOnDataLoss=false again"


def test_a_broker_that_is_behind_for_a_moment_is_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.make_topic(30)
    end = scene.run(START, pins=True)
    behind = StreamOffset({QUEUE: 35}, None, None, {QUEUE: Seen(34, end.seen[QUEUE].time_ms + 1)})
    waited = []

    async def catch_up(patience: Patience) -> None:
        waited.append(patience.seconds)
        scene.send(5)

    monkeypatch.setattr(Patience, "wait", catch_up)
    asked: list[object] = []
    monkeypatch.setattr(places, "store_times", lambda *given: asked.append(given))
    assert scene.run(behind, pins=True, pollTimeoutMs=60_000) == behind
    assert waited == [60.0], "the same call waits, for at most pollTimeoutMs"
    assert asked == [], "an idle queue needs no request"


def test_spark_asking_how_far_there_is_does_not_end_the_wait(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that were read a moment ago without a start are no reason to report a shorter queue."""
    scene.make_topic(3)
    reader = scene.reader(pollTimeoutMs=60_000)
    reader._now = lambda: 0.0
    assert reader.bounds()[QUEUE].end == 3

    async def catch_up(_: Patience) -> None:
        scene.send(2)

    monkeypatch.setattr(Patience, "wait", catch_up)
    start = StreamOffset({QUEUE: 5})
    assert reader.end_after(start, None) is start


def test_a_broker_that_lost_its_last_messages_only_gives_no_row_twice(scene: Scene) -> None:
    scene.make_topic(9)
    now = scene.run(START, pins=True).seen[QUEUE].time_ms
    long_ago = StreamOffset({QUEUE: 12}, None, None, {QUEUE: Seen(11, now + HOUR_MS)})
    with pytest.raises(DataLossError, match="ends at 9, the stream has read it up to 12"):
        scene.run(long_ago, pins=True)
    end = scene.run(long_ago, pins=True, failOnDataLoss=False)
    assert (end.ends[QUEUE], end.begins[QUEUE]) == (9, 9)
    # Within the minute that a clock may go back, a duplicate is better than a skipped message.
    lately = StreamOffset({QUEUE: 12}, None, None, {QUEUE: Seen(11, now)})
    assert scene.spans(lately, failOnDataLoss=False) == [Range(QUEUE, 0, 9)]


def test_a_batch_that_was_planned_before_is_not_read_from_another_queue(scene: Scene) -> None:
    """A driver is killed between planning a batch and reading it, and the topic is created again before the restart."""
    scene.make_topic(30)
    end = scene.run(START, pins=True)
    assert scene.reader().ranges(START, end) == [Range(QUEUE, 0, 30)]
    scene.make_anew(40)
    with pytest.raises(DataLossError, match="has another message at 29"):
        scene.reader().ranges(START, end)
    assert scene.reader().ranges(end, end) == [], "an empty batch compares nothing"
    assert scene.reader(failOnDataLoss=False).ranges(START, end) == [Range(QUEUE, 0, 30)]
    with pytest.raises(DataLossError, match="ends at 40, the stream has read it up to 50"):
        scene.reader().ranges(START, StreamOffset({QUEUE: 50}))


def test_limited_batches_know_their_queues_too(scene: Scene) -> None:
    """Their ends are not the ends of queues, for which brokers report a store time without a further request."""
    scene.make_topic(30)
    reader = scene.reader(maxOffsetsPerTrigger=10)
    first = reader.end_after(START, 10)
    assert first.ends[QUEUE] == 10
    assert first.seen[QUEUE].offset == 9
    second = reader.end_after(first, 10)
    assert (second.ends[QUEUE], second.seen) == (20, first.seen)
    scene.make_anew(50)
    with pytest.raises(DataLossError, match="has another message at 9 than"):
        scene.run(second, pins=True)


def test_a_known_message_that_was_trimmed_says_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.make_topic(30)
    end = scene.run(START, pins=True)
    scene.send(3)
    old = StreamOffset({QUEUE: 30}, None, None, {QUEUE: Seen(9, 1)})
    begins = 9

    async def trimmed(*_: object) -> dict[MessageQueue, Bounds]:
        return {QUEUE: Bounds(begins, 33, end.seen[QUEUE].time_ms)}

    monkeypatch.setattr(places, "bounds", trimmed)
    with pytest.raises(DataLossError, match="another message at 9"):
        scene.run(old, pins=True)
    begins = 10
    assert scene.run(old, pins=True).seen[QUEUE].offset == 32


def test_a_broker_that_does_not_answer_leaves_the_queue_to_a_later_batch(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.make_topic(30)
    end = scene.run(START, pins=True)
    scene.send(10)

    async def silent(*_: object) -> Any:
        raise UnreachableError("no broker answers")

    with monkeypatch.context() as patched:
        patched.setattr(places, "store_times", silent)
        assert scene.run(end, pins=False) == end, "a queue that cannot be compared is not read"
    assert scene.spans(end) == [Range(QUEUE, 30, 40)]


def test_one_request_more_for_a_queue_with_new_messages(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.make_topic(3)
    reader = scene.reader()
    end = reader.end_after(START, None)
    asked = []
    ask = session.ask

    def counted(*given: Any) -> Any:
        asked.append(given)
        return ask(*given)

    monkeypatch.setattr(session, "ask", counted)
    assert reader.end_after(end, None) is end
    assert len(asked) == 1
    scene.send(1)
    reader.end_after(end, None)
    assert len(asked) == 3


def test_named_offsets_that_are_behind_the_end_are_an_error(scene: Scene) -> None:
    scene.make_topic(3)
    table = json.dumps({TOPIC: {"broker-a": {"0": 7}}})
    with pytest.raises(DataLossError, match="ends at 3, the stream has read it up to 7"):
        scene.run(START, pins=False, startingOffsets=table)
    assert scene.run(START, pins=False, startingOffsets=table, failOnDataLoss=False).ends == {QUEUE: 3}


def test_checkpoints_of_older_versions_are_read(scene: Scene) -> None:
    """In addition the text of an offset is always the same, because Spark compares texts."""
    old = {"v": 1, "q": {TOPIC: {"broker-a": {"0": 23}}}, "from": {TOPIC: {"broker-a": {"0": 7}}}}
    offset = StreamOffset.of(old)
    assert (offset.seen, offset.to_json()) == ({}, old)
    new = {**old, "seen": {TOPIC: {"broker-a": {"0": [22, 1_700_000_000_123]}}}}
    offset = StreamOffset.of(new)
    assert offset.seen == {QUEUE: Seen(22, 1_700_000_000_123)}
    assert json.dumps(offset.to_json()) == json.dumps(new)
    assert offset != StreamOffset.of(old)
    for wrong in ("x", [1], [1, "now"], {"a": 1}, None):
        with pytest.raises(OffsetFormatError, match="cannot be read"):
            StreamOffset.of({"v": 1, "seen": {TOPIC: {"broker-a": {"0": wrong}}}})


def test_messages_that_come_while_a_begin_is_asked_for_are_no_loss(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time ahead of the broker's clock gives the queue's current end, which may be later than the known bounds."""
    scene.make_topic(3)
    at_time = places.at_time

    async def late(*arguments: Any) -> dict[MessageQueue, int]:
        await to_thread.run_sync(scene.send, 2)
        return await at_time(*arguments)

    monkeypatch.setattr(places, "at_time", late)
    ahead = int(time.time() * 1000) + HOUR_MS
    end = scene.run(START, pins=False, startingTimestamp=ahead)
    assert end.begins == {QUEUE: 5}
    assert end.ends == {QUEUE: 5}
