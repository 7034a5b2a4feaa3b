"""The stream reader without a JVM: offsets, limits, and queues that change while a stream runs."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
from anyio import to_thread
from msgspec import structs
from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from structlog.testing import capture_logs

from tests.interop.harness.servers import Cluster, running_cluster
from tests.spark.tables import open_sockets, options_of, read_partitions, stream
from trimq.client.errors import TopicNotFoundError, UnreachableError
from trimq.client.message import Message, MessageQueue
from trimq.client.sync import Admin, Producer
from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.schema import COLUMNS
from trimq.pipeline.topics import places, progress, session
from trimq.pipeline.topics.offsets import INITIAL, OffsetFormatError, StreamOffset
from trimq.pipeline.topics.places import Bounds, Patience
from trimq.pipeline.topics.planning import DataLossError, Range
from trimq.pipeline.topics.progress import Progress
from trimq.pipeline.topics.settings import ReadSettings
from trimq.pipeline.topics.source import TopicDataSource
from trimq.pipeline.topics.stream import HAS_ADMISSION_CONTROL, TopicStreamReader

START = StreamOffset.of(INITIAL)
ROUNDS = 5


class Clock:
    """A clock on which each reading is long after the one before it, so that every cache has expired."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


def progress_of(cluster: Cluster, **options: object) -> Progress:
    given = Options(options_of(cluster, startingOffsets="earliest", **options))
    return Progress(ReadSettings.of(given, stream=True), now=Clock())


def send(producer: Producer, topic: str, count: int, queue: int = 0, broker: str = "broker-a") -> None:
    place = MessageQueue(topic=topic, broker_name=broker, queue_id=queue)
    producer.send_batch([Message(topic, b"%d" % number) for number in range(count)], queue=place)


def total(start: StreamOffset, end: StreamOffset) -> int:
    return sum(stop - end.begin_of(queue, start) for queue, stop in end.ends.items())


def test_an_offset_has_one_text_and_is_understood_again() -> None:
    queues = [MessageQueue(topic="T", broker_name="b", queue_id=number) for number in (10, 9)]
    offset = StreamOffset({queues[0]: 1, queues[1]: 2}, {queues[1]: 0})
    assert json.dumps(offset.to_json()) == json.dumps(
        StreamOffset(dict(reversed(offset.ends.items())), offset.begins).to_json()
    )
    assert StreamOffset.of(json.loads(json.dumps(offset.to_json()))) == offset
    later = StreamOffset(offset.ends, offset.begins, 1_700_000_000_000)
    assert StreamOffset.of(json.loads(json.dumps(later.to_json()))) == later != offset
    with pytest.raises(OffsetFormatError, match="another version"):
        StreamOffset.of({"v": 2})
    with pytest.raises(OffsetFormatError, match="cannot be read"):
        StreamOffset.of({"v": 1, "q": {"T": 5}})
    with pytest.raises(OffsetFormatError, match="cannot be read: t is 'now'"):
        StreamOffset.of({"v": 1, "t": "now"})


def test_the_first_offsets_are_pinned_in_the_first_batch(cluster: Cluster, producer: Producer) -> None:
    topic = cluster.create_topic("SparkPinned", 1)
    send(producer, topic, 3)
    given = Options(options_of(cluster, topics=topic))
    first = Progress(ReadSettings.of(given, stream=True), now=Clock())
    end = first.end_after(START, None)
    assert end != START, "a batch without rows puts the position into the checkpoint first"
    assert total(START, end) == 0
    send(producer, topic, 4)
    # The driver dies before the first commit; the new one requests the initial offset again, and latest has moved.
    second = Progress(ReadSettings.of(given, stream=True), now=Clock())
    assert second.ranges(START, end) == []
    following = second.end_after(end, None)
    spans = second.ranges(end, following)
    assert sum(span.size for span in spans) == 4


def test_the_initial_offset_is_the_same_as_often_as_spark_asks(cluster: Cluster, producer: Producer) -> None:
    topic = cluster.create_topic("SparkInitial", 1)
    reader = stream(cluster, topics=topic)
    before = reader.initialOffset()
    send(producer, topic, 3)
    assert reader.initialOffset() == before == stream(cluster, topics=topic).initialOffset()


def test_a_restarted_query_of_the_old_signature_starts_at_its_checkpoint(
    cluster: Cluster, producer: Producer, admin: Admin
) -> None:
    """Spark's calls after a restart, as observed with PySpark 4.0: first ``partitions`` with the last offset, twice."""
    topic = "SparkRestarted"
    cluster.create_topic(topic, 1)
    send(producer, topic, 3)
    given = Options(options_of(cluster, topics=topic))
    first = TopicStreamReader(given, dict.fromkeys(COLUMNS, False))
    end = first.latestOffset()
    assert first.partitions(dict(INITIAL), end) == []
    address = cluster.brokers[0].address
    config = admin.topic_config(address, topic)
    config = structs.replace(config, read_queue_nums=2, write_queue_nums=2)
    admin.update_topic(address, config)
    send(producer, topic, 2)
    send(producer, topic, 50, queue=1)
    second = TopicStreamReader(given, dict.fromkeys(COLUMNS, False))
    assert second.partitions(end, end) == []
    partitions: Any = second.partitions(end, second.latestOffset())
    assert {(part.span.queue.queue_id, part.span.begin, part.span.end) for part in partitions} == {
        (0, 3, 5),
        (1, 0, 50),
    }


def test_an_end_that_was_asked_for_before_the_checkpoint_was_known_is_refused(cluster: Cluster) -> None:
    """Spark's wrapper for Trigger.AvailableNow does this; it is refused before the end is in the checkpoint."""
    topic = cluster.create_topic("SparkBlind", 1)
    given = Options(options_of(cluster, topics=topic))
    end = TopicStreamReader(given, dict.fromkeys(COLUMNS, False)).latestOffset()
    reader = TopicStreamReader(given, dict.fromkeys(COLUMNS, False))
    following = reader.latestOffset()
    with pytest.raises(
        OptionError, match=r"option spark\.sql\.streaming\.triggerAvailableNowWrapper\.enabled = 'true'"
    ):
        reader.partitions(end, end)
    new = TopicStreamReader(given, dict.fromkeys(COLUMNS, False))
    assert new.partitions(dict(INITIAL), new.latestOffset()) == []
    assert new.partitions(following, following) == [], "a batch without new data"


def test_nothing_new_is_the_same_offset(cluster: Cluster, producer: Producer) -> None:
    topic = cluster.create_topic("SparkIdle", 2)
    send(producer, topic, 3)
    reader = progress_of(cluster, topics=topic)
    end = reader.end_after(START, None)
    assert reader.end_after(end, None) is end
    send(producer, topic, 1, queue=1)
    assert total(end, reader.end_after(end, None)) == 1


def test_batches_are_limited_and_an_available_now_run_ends(cluster: Cluster, producer: Producer) -> None:
    topic = cluster.create_topic("SparkLimited", 2)
    send(producer, topic, 12)
    send(producer, topic, 5, queue=1, broker="broker-b")
    reader = progress_of(cluster, topics=topic)
    reader.pin_target()
    position = START
    sizes: list[int] = []
    while (following := reader.end_after(position, 5)) != position:
        if not sizes:
            send(producer, topic, 30, queue=1)
        sizes.append(total(position, following))
        position = following
    assert sizes == [5, 5, 5, 2], "messages sent after the start of the run are left to the next one"


def test_ends_never_move_backwards(cluster: Cluster, producer: Producer) -> None:
    topic = cluster.create_topic("SparkForward", 1)
    send(producer, topic, 5)
    reader = progress_of(cluster, topics=topic)
    end = reader.end_after(START, None)
    reader.remember(end)
    queue = next(iter(reader.bounds()))
    reader._bounds[queue] = reader._bounds[queue]._replace(end=2)
    reader._queried_at = float("inf")
    assert reader.end_after(end, None) == end
    assert reader.end_after(StreamOffset({queue: 3}), None).ends[queue] == 5


def test_idle_polling_asks_the_brokers_rarely(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = cluster.create_topic("SparkPolled", 1)
    asked = []
    ask = session.ask

    def counted(*arguments: Any) -> Any:
        asked.append(arguments)
        return ask(*arguments)

    monkeypatch.setattr(session, "ask", counted)
    moments = iter([number / 65 for number in range(1000)])
    given = Options(options_of(cluster, topics=topic, startingOffsets="earliest"))
    reader = Progress(ReadSettings.of(given, stream=True), now=lambda: next(moments))
    end = reader.end_after(START, None)
    for _ in range(65):
        end = reader.end_after(end, None)
    assert len(asked) <= 12, "65 requests of Spark in a second cause about five requests to brokers"


def test_new_queues_and_brokers_are_noticed_and_read_from_their_begin(
    cluster: Cluster, producer: Producer, admin: Admin
) -> None:
    topic = "SparkGrowing"
    first = cluster.brokers[0]
    cluster.create_topic(topic, 1)
    config = admin.topic_config(first.address, topic)
    send(producer, topic, 2)
    reader = progress_of(cluster, topicsPattern="SparkGrowing|SparkGrownLater")
    end = reader.end_after(START, None)
    assert len(end.ends) == 2
    config = structs.replace(config, read_queue_nums=3, write_queue_nums=3)
    admin.update_topic(first.address, config)
    send(producer, topic, 4, queue=2)
    later = cluster.create_topic("SparkGrownLater", 1)
    send(producer, later, 5, broker="broker-b")
    following = reader.end_after(end, None)
    new = set(following.ends) - set(end.ends)
    assert {(queue.topic, queue.broker_name, queue.queue_id) for queue in new} == {
        (topic, "broker-a", 1),
        (topic, "broker-a", 2),
        (later, "broker-a", 0),
        (later, "broker-b", 0),
    }
    assert {queue: following.begins[queue] for queue in new} == dict.fromkeys(new, 0)
    assert sum(span.size for span in reader.ranges(end, following)) == 9


def test_a_deleted_topic_is_an_error_or_passed_over(cluster: Cluster, producer: Producer, admin: Admin) -> None:
    topic = cluster.create_topic("SparkDeleted", 1)
    send(producer, topic, 2)
    strict, lenient = progress_of(cluster, topics=topic), progress_of(cluster, topics=topic, failOnDataLoss=False)
    end = strict.end_after(START, None)
    assert lenient.end_after(START, None) == end
    admin.delete_topic(topic)
    with pytest.raises(DataLossError, match=rf"the queue {topic}/broker-a/0 was deleted while a stream reads it"):
        strict.end_after(end, None)
    assert lenient.end_after(end, None) == end
    with pytest.raises(OptionError, match=f"no broker has {topic}"):
        progress_of(cluster, topics=topic).end_after(START, None)


def test_a_run_that_ends_goes_on_without_a_topic_that_was_deleted(
    cluster: Cluster, producer: Producer, admin: Admin
) -> None:
    kept, deleted = cluster.create_topic("SparkKept", 1), cluster.create_topic("SparkUnkept", 1)
    send(producer, deleted, 2)
    topics = f"{kept},{deleted}"
    end = progress_of(cluster, topics=topics).end_after(START, None)
    admin.delete_topic(deleted)
    send(producer, kept, 3)
    strict, lenient = progress_of(cluster, topics=topics), progress_of(cluster, topics=topics, failOnDataLoss=False)
    strict.pin_target()
    with pytest.raises(DataLossError, match=rf"the queue {deleted}/broker-a/0 was deleted while a stream reads it"):
        strict.end_after(end, None)
    lenient.pin_target()
    assert total(end, lenient.end_after(end, None)) == 3


def test_trimmed_messages_are_skipped_immediately_and_reported_once(cluster: Cluster) -> None:
    topic = cluster.create_topic("SparkTrimmed", 1)
    queue = MessageQueue(topic=topic, broker_name="broker-a", queue_id=0)
    start = StreamOffset({queue: 0, MessageQueue(topic=topic, broker_name="broker-b", queue_id=0): 0})
    reader = progress_of(cluster, topics=topic, failOnDataLoss=False)
    reader.bounds(start)
    reader._bounds[queue] = Bounds(1_000_000, 1_000_500)
    reader._queried_at = float("inf")
    with capture_logs() as logs:
        ends = [reader.end_after(start, 100).ends[queue] for _ in range(50)]
    assert set(ends) == {1_000_100}
    assert [entry["event"] for entry in logs] == ["messages were deleted"]


def test_a_queue_that_was_trimmed_or_is_shorter_is_noticed(cluster: Cluster, producer: Producer) -> None:
    """Queues that were deleted and created again: see tests/pipeline/test_lost_queues.py."""
    topic = cluster.create_topic("SparkShorter", 1)
    send(producer, topic, 9)
    queue = MessageQueue(topic=topic, broker_name="broker-a", queue_id=0)
    reader = progress_of(cluster, topics=topic, pollTimeoutMs=1)
    position = StreamOffset({queue: 12, MessageQueue(topic=topic, broker_name="broker-b", queue_id=0): 0})
    with pytest.raises(DataLossError, match=rf"{topic}/broker-a/0 .* ends at 9, the stream has read it up to 12"):
        reader.end_after(position, None)
    reader._bounds[queue] = reader._bounds[queue]._replace(first=4)
    reader._queried_at = float("inf")
    with pytest.raises(DataLossError, match=rf"{topic}/broker-a/0 begins at 4, the stream has read it up to 2"):
        reader.end_after(StreamOffset({**position.ends, queue: 2}), None)
    with pytest.raises(DataLossError, match=rf"{topic}/broker-a/0 ends at 3, the stream has read it up to 7"):
        reader.ranges(StreamOffset({queue: 7}), StreamOffset({queue: 3}))


@pytest.fixture
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("lonely")) as running:
        yield running


def test_a_broker_that_is_away_is_waited_for(lonely: Cluster) -> None:
    topic = lonely.create_topic("SparkAway", 1)
    with Producer("away", namesrv=lonely.namesrv) as producer:
        send(producer, topic, 4)
        reader = progress_of(lonely, topics=topic)
        end = reader.end_after(START, None)
        lonely.broker.kill()
        assert reader.end_after(end, None) == end
        assert progress_of(lonely, topics=topic).end_after(end, None) == end, "a restarted query waits too"
        lonely.broker.start()
        send(producer, topic, 3)
        assert total(end, reader.end_after(end, None)) == 3


def test_a_run_that_ends_waits_for_a_broker_that_is_away(lonely: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = lonely.create_topic("SparkAwayNow", 1)
    with Producer("away-now", namesrv=lonely.namesrv) as producer:
        send(producer, topic, 4)
    end = progress_of(lonely, topics=topic).end_after(START, None)
    lonely.broker.kill()
    impatient = progress_of(lonely, topics=topic, pollTimeoutMs=1)
    impatient.pin_target()
    assert impatient.end_after(end, None) == end
    waited = []

    def send_more() -> None:
        with Producer("away-now", namesrv=lonely.namesrv) as producer:
            send(producer, topic, 3)

    async def wait(patience: Patience) -> None:
        waited.append(patience.seconds)
        lonely.broker.start()  # in this thread: the process is killed when the thread that started it ends
        await to_thread.run_sync(send_more)

    monkeypatch.setattr(Patience, "wait", wait)
    reader = progress_of(lonely, topics=topic)
    reader.pin_target()
    assert total(end, reader.end_after(end, None)) == 3
    assert waited == [120.0]


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("pair"), brokers=2) as running:
        yield running


@pytest.mark.parametrize("start", ["latest", "time"])
def test_a_broker_that_was_away_when_a_stream_began_brings_no_history(pair: Cluster, start: str) -> None:
    topic = pair.create_topic("SparkLateBroker", 1)
    with Producer("late", namesrv=pair.namesrv) as producer:
        send(producer, topic, 5, broker="broker-b")
        pair.brokers[1].kill()
        began = int(time.time() * 1000)
        options = {"startingOffsets": "latest"} if start == "latest" else {"startingTimestamp": str(began)}
        given = ReadSettings.of(Options(options_of(pair, topics=topic, **options)), stream=True)
        # The tolerance for a broker's slow clock must not reach back to the messages that this test has sent.
        end = Progress(given, now=Clock(), wall=lambda: began / 1000 + progress.CLOCKS).end_after(START, None)
        assert [queue.broker_name for queue in end.ends] == ["broker-a"]
        pair.brokers[1].start()
        send(producer, topic, 2, broker="broker-b")
        # A query restarted later takes the position from the checkpoint.
        restarted = Progress(given, now=Clock())
        following = restarted.end_after(StreamOffset.of(end.to_json()), None)
        late = MessageQueue(topic=topic, broker_name="broker-b", queue_id=0)
        assert restarted.ranges(end, following) == [Range(late, 5, 7)]
        assert restarted.end_after(following, None) is following


def test_a_queue_whose_progress_cannot_be_shown_holds_up_no_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = [MessageQueue(topic="T", broker_name=f"broker-{name}", queue_id=0) for name in "abc"]
    queues.append(MessageQueue(topic="Deleted", broker_name="broker-b", queue_id=0))
    tried: Counter[MessageQueue] = Counter()

    async def commit(_client: object, _group: str, positions: list[tuple[MessageQueue, int]]) -> None:
        for queue, _ in positions:
            tried[queue] += 1
            if queue.broker_name == "broker-a":
                raise UnreachableError("no broker answers")
            if queue.topic == "Deleted":
                raise TopicNotFoundError("no broker has it")

    monkeypatch.setattr(places, "commit", commit)
    reader = progress_of(cluster, topics="T", group="spark-unshown")
    with capture_logs():
        for _ in range(int(progress.SHOWN_AGAIN)):
            reader.show(dict.fromkeys(queues, 7))
        assert tried == Counter(queues), "neither successful nor failed commits are repeated soon"
        reader.show(dict.fromkeys(queues, 7))
    assert tried == Counter(queues) + Counter([queues[0], queues[3]])


def test_progress_is_shown_at_a_commit_and_at_the_start_of_the_next_batch(
    cluster: Cluster, producer: Producer, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = cluster.create_topic("SparkShown", 1)
    send(producer, topic, 6)
    reader = stream(cluster, topics=topic, group="spark-stream", startingOffsets="earliest")

    def lag() -> int:
        return int(admin.consume_stats("spark-stream", topic).lag)

    def latest(start: dict[str, Any]) -> Any:
        return (
            reader.latestOffset(start, reader.getDefaultReadLimit()) if HAS_ADMISSION_CONTROL else reader.latestOffset()
        )

    end = latest(dict(INITIAL))
    assert len(read_partitions(reader, reader.partitions(dict(INITIAL), end))) == 6
    reader.commit(end)
    assert lag() == 0
    send(producer, topic, 2)
    monkeypatch.setattr(progress, "FRESH", 0.0)
    following = latest(end)
    # The last batch of a run is never committed: the start of the next batch shows the same progress.
    reader.partitions(following, following)
    assert lag() == 0


def test_a_wrong_option_is_reported_by_the_first_call_and_not_by_the_constructor(cluster: Cluster) -> None:
    reader = stream(cluster, topics="T", endingOffsets="latest")
    for call in (reader.initialOffset, lambda: reader.commit(dict(INITIAL))):
        with pytest.raises(OptionError, match=r"option endingOffsets = 'latest': .*a stream has no end"):
            call()


def test_nothing_is_open_between_sparks_calls(cluster: Cluster, producer: Producer) -> None:
    """Spark ends the process of a stream reader without calling ``stop``."""
    topic = cluster.create_topic("SparkUnstopped", 1)
    send(producer, topic, 5)
    threads, connections = threading.active_count(), open_sockets()
    readers = []
    for _ in range(ROUNDS):
        reader = stream(cluster, topics=topic, group="spark-unstopped", startingOffsets="earliest")
        readers.append(reader)
        start = reader.initialOffset()
        limit = (start, reader.getDefaultReadLimit()) if HAS_ADMISSION_CONTROL else ()
        end = reader.latestOffset(*limit)
        assert len(read_partitions(reader, reader.partitions(start, end))) == 5
        reader.commit(end)
    # The tests' own producer may open or close a thread during the test; a leak would add one for each reader.
    assert threading.active_count() < threads + ROUNDS
    assert open_sockets() < connections + ROUNDS
    assert type(readers[0]).stop is DataSourceStreamReader.stop, "Spark would not call an override"


def test_reading_is_the_tasks_business(cluster: Cluster) -> None:
    """PySpark's simple stream reader would read on the driver and keep all rows in memory."""
    assert isinstance(stream(cluster, topics="T"), DataSourceStreamReader)
    assert TopicDataSource.simpleStreamReader is DataSource.simpleStreamReader
    assert len(signature(TopicDataSource.streamReader).parameters) == 2
    assert "schema" in signature(TopicDataSource.streamReader).parameters, "Spark passes it by this name"


def test_a_limit_needs_a_pyspark_that_can_keep_it(cluster: Cluster) -> None:
    reader = stream(cluster, topics="T", maxOffsetsPerTrigger=10)
    if HAS_ADMISSION_CONTROL:
        assert reader.getDefaultReadLimit().max_rows == 10
    else:
        with pytest.raises(OptionError, match=r"option maxOffsetsPerTrigger = '10': expected PySpark 4\.2 or later"):
            reader.initialOffset()
