"""Reading topics without a JVM, as Spark's workers do: options, ranges and missing offsets."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from tests.interop.harness.servers import Cluster, running_cluster
from tests.interop.harness.waiting import wait_until
from tests.spark.tables import batch_reader, bodies, open_sockets, options_of, read, read_partitions
from trimq.client.message import Message, MessageQueue
from trimq.client.sync import Admin, Producer
from trimq.pipeline.options import OptionError
from trimq.pipeline.topics.planning import DataLossError
from trimq.pipeline.topics.source import TopicDataSource

ROUNDS = 5


@pytest.fixture(scope="module")
def numbers(cluster: Cluster, producer: Producer) -> str:
    """A topic with 100 messages in each of two queues of each of two brokers."""
    topic = cluster.create_topic("SparkNumbers", 2)
    for queue in producer.queues(topic):
        messages = [
            Message(topic, b"%s-%d-%03d" % (queue.broker_name.encode(), queue.queue_id, number), tags=f"t{number % 3}")
            for number in range(100)
        ]
        producer.send_batch(messages, queue=queue)
    return topic


def queue_of(topic: str, broker: str = "broker-a", number: int = 0) -> MessageQueue:
    return MessageQueue(topic=topic, broker_name=broker, queue_id=number)


def test_every_message_is_read_once(cluster: Cluster, numbers: str) -> None:
    rows = read(cluster, topics=numbers)
    assert len(rows) == 400
    assert len(set(bodies(rows))) == 400
    for broker in ("broker-a", "broker-b"):
        offsets = [row["queueOffset"] for row in rows if (row["brokerName"], row["queueId"]) == (broker, 1)]
        assert offsets == list(range(100)), "the rows of a queue are in its order"


def test_partitions_are_at_least_as_many_as_asked_for(cluster: Cluster, numbers: str) -> None:
    assert len(batch_reader(cluster, topics=numbers).partitions()) == 4
    reader = batch_reader(cluster, topics=numbers, minPartitions=10)
    partitions = reader.partitions()
    assert len(partitions) >= 10
    assert bodies(read_partitions(reader, partitions)) == bodies(read(cluster, topics=numbers))


def test_chosen_queues_and_tags(cluster: Cluster, numbers: str) -> None:
    chosen = json.dumps({numbers: {"broker-b": [1]}})
    assert {(row["brokerName"], row["queueId"]) for row in read(cluster, topics=numbers, queues=chosen)} == {
        ("broker-b", 1)
    }
    tagged = read(cluster, topics=numbers, tags="t0 || t2")
    assert len(tagged) == 4 * 67
    assert {row["tags"] for row in tagged} == {"t0", "t2"}


def test_an_expression(cluster: Cluster, numbers: str) -> None:
    """The broker evaluates it; of a wrong one it is not asked."""
    found = read(cluster, topics=numbers, sql="TAGS = 't1'")
    assert len(found) == 4 * 33
    assert {row["tags"] for row in found} == {"t1"}
    with pytest.raises(OptionError, match=r"option sql = 'TAGS ==': expected an SQL92 expression \(at position 6: "):
        read(cluster, topics=numbers, sql="TAGS ==")
    with pytest.raises(OptionError, match="option sql = 'a = 1': expected not to be given together with tags"):
        read(cluster, topics=numbers, sql="a = 1", tags="a")


def test_a_filter_does_not_bring_messages_from_behind_the_end(cluster: Cluster, numbers: str) -> None:
    end = json.dumps({numbers: {name: {"0": 10, "1": 10} for name in ("broker-a", "broker-b")}})
    assert len(read(cluster, topics=numbers, tags="t0", endingOffsets=end)) == 4 * 4


def test_offsets_by_queue_and_the_words_for_the_ends(cluster: Cluster, numbers: str) -> None:
    start = {numbers: {"broker-a": {"0": 90, "1": -1}, "broker-b": {"0": -2, "1": 100}}}
    end = {numbers: {"broker-a": {"0": -1, "1": -1}, "broker-b": {"0": 5, "1": -1}}}
    rows = read(cluster, topics=numbers, startingOffsets=json.dumps(start), endingOffsets=json.dumps(end))
    places = sorted((row["brokerName"], row["queueId"], row["queueOffset"]) for row in rows)
    assert places == [("broker-a", 0, n) for n in range(90, 100)] + [("broker-b", 0, n) for n in range(5)]


def test_timestamps_are_those_of_storing(cluster: Cluster, producer: Producer) -> None:
    topic = cluster.create_topic("SparkTimes", 1)
    queue = producer.queues(topic)[0]
    producer.send_batch([Message(topic, b"before %d" % number) for number in range(3)], queue=queue)
    first = max(row["storeTimestamp"].timestamp() for row in read(cluster, topics=topic))
    while int(time.time() * 1000) <= int(first * 1000) + 2:
        pass
    producer.send_batch([Message(topic, b"after %d" % number) for number in range(2)], queue=queue)
    between = round(first * 1000) + 1
    assert bodies(read(cluster, topics=topic, startingTimestamp=between)) == [b"after 0", b"after 1"]
    assert bodies(read(cluster, topics=topic, endingTimestamp=between)) == [b"before 0", b"before 1", b"before 2"]


def test_a_pattern_finds_topics_but_none_of_the_brokers_own(cluster: Cluster, producer: Producer) -> None:
    for name in ("SparkPatternA", "SparkPatternB", "XSparkPatternC"):
        producer.send(Message(cluster.create_topic(name, 1), name.encode()))
    assert bodies(read(cluster, topicsPattern="SparkPattern.*")) == [b"SparkPatternA", b"SparkPatternB"]
    assert read(cluster, topicsPattern="(TBW102|%RETRY%.*|broker-a|nothing)") == []


def test_properties_can_be_left_out(cluster: Cluster, numbers: str) -> None:
    row = read(cluster, topics=numbers, includeProperties=False)[0]
    assert "properties" not in row
    assert row["tags"] == "t0"


def test_batches_have_the_schema_that_was_asked_for_to_the_letter(cluster: Cluster, numbers: str) -> None:
    """Spark compares the schemas from 4.2 on; in a schema written by a user every column is nullable."""
    source = TopicDataSource(options_of(cluster, topics=numbers))
    reader = source.reader(StructType([StructField("queueOffset", LongType()), StructField("body", BinaryType())]))
    batches: list[Any] = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    (schema,) = {batch.schema for batch in batches}
    assert schema == pa.schema([("queueOffset", pa.int64()), ("body", pa.binary())])
    with pytest.raises(OptionError, match=r"option schema = 'price': expected columns of rocketmq: topic, brokerName"):
        source.reader(StructType([StructField("price", LongType())]))


def test_a_read_shows_its_progress_to_the_group(cluster: Cluster, numbers: str, admin: Admin) -> None:
    read(cluster, topics=numbers, group="spark-shown")
    stats = admin.consume_stats("spark-shown", numbers)
    assert {queue.queue_id for queue in stats.offsets} == {0, 1}
    assert [wrapper.lag for wrapper in stats.offsets.values()] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topics": "NoSuchTopic"}, r"option topics = 'NoSuchTopic': expected topics that exist; no broker has NoSuch"),
        ({}, r"option topics is not given: expected names of topics, separated by commas, or topicsPattern"),
        ({"topics": "a b"}, r"option topics = 'a b': expected names of topics"),
        ({"topics": "T", "topicsPattern": "T"}, r"option topicsPattern = 'T': expected not to be given together"),
        ({"topicsPattern": "("}, r"option topicsPattern = '\(': expected a regular expression"),
        ({"topics": "T", "namesrv": ""}, r"option namesrv is not given: expected addresses of name servers"),
        ({"topics": "T", "namesrv": "a:b"}, r"option namesrv = 'a:b': expected addresses of name servers"),
        ({"topics": "T", "startingOffsets": "first"}, r"option startingOffsets = 'first': expected earliest, latest"),
        (
            {"topics": "T", "startingOffsets": '{"T": {"b": {"0": -3}}}'},
            r"option startingOffsets = .*expected earliest",
        ),
        ({"topics": "T", "startingOffsets": "latest"}, r"option startingOffsets = 'latest': .*latest reads nothing"),
        ({"topics": "T", "endingOffsets": "earliest"}, r"option endingOffsets = 'earliest': .*earliest reads nothing"),
        ({"topics": "T", "maxOffsetsPerTrigger": "5"}, r"option maxOffsetsPerTrigger = '5': .*for a stream only"),
        ({"topics": "T", "tags": "a ||"}, r"option tags = 'a \|\|': expected tags as"),
        ({"topics": "T", "tags": "a", "sql": "b = 1"}, r"option sql = 'b = 1': expected not to be given together"),
        ({"topics": "T", "queues": "[1]"}, r"option queues = '\[1\]': expected JSON"),
        ({"topics": "T", "group": "a b"}, r"option group = 'a b': expected a name that brokers accept"),
        ({"topics": "T", "minPartitions": "0"}, r"option minPartitions = '0': expected a whole number, at least 1"),
        (
            {"topics": "T", "startingTimestamp": "now"},
            r"option startingTimestamp = 'now': expected a whole number of mi",
        ),
        (
            {"topics": "T", "startingTimestamp": "200", "endingTimestamp": "100"},
            r"option startingTimestamp = 200: expected a time not after endingTimestamp = 100",
        ),
        ({"topics": "T", "queues": '{"T": {"b": "12"}}'}, r"option queues = .*expected JSON"),
        ({"topics": "T", "queues": '{"T": {"b": ["1"]}}'}, r"option queues = .*expected JSON"),
        ({"topics": "T", "queues": '{"T": {"b": [true, -1]}}'}, r"option queues = .*expected JSON"),
        ({"topics": "T", "queues": '{"T": [1]}'}, r"option queues = .*expected JSON"),
        ({"topics": "T", "path": "Orders"}, r"option path = 'Orders': expected none: call load\(\) without a path"),
        ({"topics": "T", "discoveryIntervalMs": "5"}, r"option discoveryIntervalMs = '5': expected an option of"),
        ({"topics": "T", "topic": "T"}, r"option topic = 'T': expected an option of the rocketmq source"),
    ],
)
def test_a_wrong_option_is_refused_when_the_read_is_planned(
    cluster: Cluster, options: dict[str, str], text: str
) -> None:
    with pytest.raises(OptionError, match=text):
        batch_reader(cluster, **options).partitions()


def test_a_table_of_offsets_has_to_fit_the_queues(cluster: Cluster, numbers: str) -> None:
    with pytest.raises(OptionError, match=rf"there is none for {numbers}/broker-a/1"):
        read(cluster, topics=numbers, startingOffsets=json.dumps({numbers: {"broker-a": {"0": 0}}}))
    table = {numbers: {name: {"0": 0, "1": 0, "7": 0} for name in ("broker-a", "broker-b")}}
    with pytest.raises(OptionError, match=rf"{numbers}/broker-a/7 is none of"):
        read(cluster, topics=numbers, startingOffsets=json.dumps(table))
    start = {numbers: {name: {"0": 9, "1": 9} for name in ("broker-a", "broker-b")}}
    end = {numbers: {name: {"0": 9, "1": 8} for name in ("broker-a", "broker-b")}}
    with pytest.raises(OptionError, match=rf"'9 for {numbers}/broker-a/1': .*not after the end 8"):
        read(cluster, topics=numbers, startingOffsets=json.dumps(start), endingOffsets=json.dumps(end))
    with pytest.raises(OptionError, match=rf"option queues = '{numbers}/broker-a/9': expected queues that can be read"):
        read(cluster, topics=numbers, queues=json.dumps({numbers: {"broker-a": [9]}}))


def test_messages_that_are_not_there_are_an_error_or_passed_over(cluster: Cluster, numbers: str) -> None:
    end = json.dumps({numbers: {name: {"0": 150, "1": -1} for name in ("broker-a", "broker-b")}})
    with pytest.raises(DataLossError, match=rf"{numbers}/broker-a/0 ends at 100, offsets up to 150 were to be read"):
        read(cluster, topics=numbers, endingOffsets=end)
    assert len(read(cluster, topics=numbers, endingOffsets=end, failOnDataLoss=False)) == 400


def test_nothing_stays_behind_when_a_task_ends(cluster: Cluster, numbers: str) -> None:
    reader = batch_reader(cluster, topics=numbers)
    partitions = reader.partitions()
    read_partitions(reader, partitions)
    threads, connections = threading.active_count(), open_sockets()
    for _ in range(ROUNDS):
        read_partitions(reader, partitions)
        rows = reader.read(partitions[0])
        next(rows)
        rows.close()
    # The tests' own producer may open or close a thread during the test; a leak would add one in every round.
    assert threading.active_count() < threads + ROUNDS
    assert open_sockets() < connections + ROUNDS


def test_a_trimmed_queue_is_noticed(tmp_path: Path) -> None:
    properties = {"mappedFileSizeCommitLog": str(1 << 20), "fileReservedTime": "1"}
    with (
        running_cluster(tmp_path, properties=properties) as small,
        Producer("trim", namesrv=small.namesrv, compression=None) as producer,
    ):
        topic = small.create_topic("SparkTrimmed", 1)
        for number in range(60):
            producer.send(Message(topic, b"%02d" % number * 20_000), queue=queue_of(topic))
        reader = batch_reader(small, topics=topic)
        patient = batch_reader(small, topics=topic, failOnDataLoss=False)
        planned = reader.partitions()
        long_ago = time.time() - 7200
        for file in sorted((small.broker.store / "commitlog").iterdir())[:-1]:
            os.utime(file, (long_ago, long_ago))
        with Admin(small.namesrv) as admin:
            admin.delete_expired_commit_log(small.broker.address)

            def begin() -> int:
                admin.clean_expired_queues(small.broker.address)
                return int(admin.topic_stats(topic)[queue_of(topic)].min_offset)

            wait_until(lambda: begin() > 0, "the first messages of the queue are deleted", 60)
            first = begin()
        assert first < 60
        start = json.dumps({topic: {"broker-a": {"0": 0}}})
        with pytest.raises(DataLossError, match=rf"{topic}/broker-a/0 begins at {first}, offsets from 0 were to be"):
            batch_reader(small, topics=topic, startingOffsets=start).partitions()
        with pytest.raises(DataLossError, match=rf"{topic}/broker-a/0 begins at {first}, 0 was to be read"):
            read_partitions(reader, planned)
        rows = read_partitions(patient, planned)
        assert [row["queueOffset"] for row in rows] == list(range(first, 60))
