"""Rare and wrong uses of the SDK: objects that are not open, invalid settings, bodies that cannot be decoded."""

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

from tests.client.scripted import pull_header, records, scripted_broker
from tests.client.servers import Servers
from tests.client.test_mqadmin import said
from tests.interop.harness.waiting import wait_until
from trimq.client import (
    Batch,
    ClientOptions,
    ClosedError,
    Consumer,
    CredentialsError,
    Message,
    NoPermissionError,
    NotStoredError,
    Producer,
    SendOutcome,
    UnreachableError,
    UsageError,
    sync,
)
from trimq.client.compression import compress, decompress
from trimq.client.core import Client
from trimq.client.mqadmin import main
from trimq.client.mqadmin.shell import parse_time, show_time
from trimq.client.routes import TopicRoute
from trimq.protocol import lenient_json, sysflag
from trimq.protocol.body import BrokerData, QueueData, TopicRouteData
from trimq.protocol.codes import RequestCode, ResponseCode

UNUSED = "127.0.0.1:1"


# -- blocking programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda: sync.Producer("p", namesrv=UNUSED).send(Message("T", b"")),
        lambda: sync.Producer("p", namesrv=UNUSED).group,
        lambda: sync.Consumer("g", "T", namesrv=UNUSED).portal,
        lambda: sync.TransactionProducer("p", lambda _: None, namesrv=UNUSED).transaction(Message("T", b"")),  # type: ignore[arg-type,return-value]
    ],
    ids=["method", "attribute", "portal", "transaction"],
)
def test_what_is_not_open_says_so(use: Callable[[], Any]) -> None:
    with pytest.raises(ClosedError, match="not open: use it inside its with block"):
        use()


def test_a_blocking_object_is_opened_once(servers: Servers, name: str) -> None:
    producer = sync.Producer(name, namesrv=servers.namesrv)
    with producer, pytest.raises(ClosedError, match="open already"):
        producer.__enter__()
    with pytest.raises(AttributeError):
        producer._nothing  # noqa: B018 - the test is that it does not exist


def test_what_a_blocking_class_does_not_wrap_is_the_others(servers: Servers, name: str) -> None:
    servers.create_topic(name, 2)
    with sync.Producer(name, namesrv=servers.namesrv) as producer:
        assert producer.group == name
        queues = producer.queues(name)  # a coroutine function in the asynchronous class
        assert [queue.queue_id for queue in queues] == [0, 1]
        assert producer.queues.__name__ == "queues"
        producer.send_oneway(Message(name, b"one way"), queue=queues[0])
        assert len(producer.send_batch([Message(name, b"a"), Message(name, b"b")], queue=queues[1])) == 2
        with pytest.raises(UsageError):
            producer.send_many([Message(name, b"good"), Message(name, b"")])
    with sync.Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        seen = set()
        for message in consumer:
            assert message.topic == name
            with pytest.raises(AttributeError):
                message._nothing  # noqa: B018 - as above
            message.ack()
            seen.add(message.body)
            if len(seen) == 4:
                break
    assert seen == {b"one way", b"a", b"b", b"good"}


def test_a_blocking_message_is_given_back(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    with sync.Producer(name, namesrv=servers.namesrv) as producer:
        producer.send(Message(name, b"x"))
    with sync.Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        first = next(iter(consumer))
        first.nack(delay_level=1)
        again = next(iter(consumer))
        assert (again.message_id, again.reconsume_times) == (first.message_id, 1)
        again.ack()


# -- settings and addresses --------------------------------------------------------------------------------------------


def test_headers_that_a_client_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="header='xml' is none of json, "):
        Client(UNUSED, ClientOptions(header="xml"))  # type: ignore[arg-type]
    monkeypatch.setattr("trimq.client.core.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install msgpack"):
        Client(UNUSED, ClientOptions(header="msgpack"))


def route(**addresses: dict[str, str]) -> TopicRoute:
    brokers = [BrokerData(broker_name=name, broker_addrs=addrs) for name, addrs in addresses.items()]
    queues = [
        QueueData(broker_name=name, read_queue_nums=2, write_queue_nums=2, perm=6) for name in (*addresses, "gone")
    ]
    return TopicRoute("T", TopicRouteData(broker_datas=brokers, queue_datas=queues))


def test_a_route_without_masters() -> None:
    found = route(a={}, b={"1": "b:1"})
    assert {queue.broker_name for queue in found.read_queues} == {"a", "b"}  # only brokers of the route
    assert found.write_queues == []
    assert (found.master("a"), found.master("b"), found.master("gone")) == (None, None, None)
    assert (found.member("a"), found.member("b")) == (None, "b:1")
    assert found.any_address() == "b:1"
    assert route(a={}).any_address() is None


@pytest.mark.anyio
async def test_a_broker_without_a_master_is_unreachable() -> None:
    async with scripted_broker() as broker, Client(broker.address) as client:
        found = await client.routes.get("T")
        assert await client.master(found, "a") == broker.address
        with pytest.raises(UnreachableError, match="no master of b"):
            await client.master(found, "b")


@pytest.mark.anyio
async def test_routes_that_cannot_be_learned_now_stay() -> None:
    async with scripted_broker() as broker, Client(broker.address) as client:
        found = await client.routes.get("T")
        assert client.routes.address_of("a") == broker.address
        assert client.routes.address_of("b") is None
        broker.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda command: command.reply(
            ResponseCode.SYSTEM_BUSY, "no"
        )
        await client.routes.refresh_all()
        assert client.routes.known("T") is found
        with pytest.raises(NotStoredError):
            await client.routes.get("Other")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("remark", "kind"), [("check signature failed.", CredentialsError), ("no matched policies.", NoPermissionError)]
)
async def test_a_name_server_that_does_not_permit_a_route_says_so(remark: str, kind: type[Exception]) -> None:
    async with scripted_broker() as broker, Client(broker.address) as client:
        found = await client.routes.get("T")
        broker.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda command: command.reply(
            ResponseCode.NO_PERMISSION, remark
        )
        with pytest.raises(kind, match="the route of Other cannot be fetched: ") as caught:
            await client.routes.get("Other")
        assert type(caught.value) is kind
        await client.routes.refresh_all()
        assert client.routes.known("T") is found


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_message_is_due_once_and_at_a_level_that_there_is() -> None:
    with pytest.raises(UsageError, match="one of delay_level, delay and deliver_at"):
        Message("T", b"", delay_level=1, delay=1.0)
    with pytest.raises(UsageError, match="levels are 1 to 18"):
        Message("T", b"", delay_level=0)
    with pytest.raises(UsageError):
        Message("no/topic", b"")
    assert repr(Message("T", b"abc", tags="t")) == "Message('T', <3 bytes>, tags='t', id=None)"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({"delay": 1.5}, ("TIMER_DELAY_MS", "1500")),
        ({"deliver_at": datetime(2030, 1, 1, tzinfo=UTC)}, ("TIMER_DELIVER_MS", "1893456000000")),
        ({"deliver_at": 1_893_456_000.0}, ("TIMER_DELIVER_MS", "1893456000000")),
        ({"delay_level": 3}, ("DELAY", "3")),
    ],
)
async def test_when_a_message_is_due_travels_in_its_properties(when: dict[str, Any], expected: tuple[str, str]) -> None:
    async with scripted_broker() as broker:
        sent = RequestCode.SEND_MESSAGE_V2
        broker.answers[sent] = lambda command: command.reply(
            header={"msgId": "0" * 32, "queueId": "0", "queueOffset": "5"}
        )
        async with Producer("p", namesrv=broker.address) as producer:
            await producer.send(Message("T", b"x", **when))
        [command] = await broker.until(sent, 1)
        assert "\x01".join(expected) in command.ext_fields()["i"].split("\x02")


@pytest.mark.anyio
async def test_a_time_without_a_zone_is_refused() -> None:
    async with scripted_broker() as broker, Producer("p", namesrv=broker.address) as producer:
        with pytest.raises(UsageError, match="no time zone"):
            await producer.send(Message("T", b"x", deliver_at=datetime(2030, 1, 1)))  # noqa: DTZ001 - that is the test


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("code", "outcome"),
    [(ResponseCode.SYSTEM_BUSY, SendOutcome.NOT_STORED), (ResponseCode.SYSTEM_ERROR, SendOutcome.PERHAPS_STORED)],
)
async def test_each_message_of_a_batch_knows_what_became_of_it(code: int, outcome: SendOutcome) -> None:
    async with scripted_broker() as broker:
        broker.answers[RequestCode.SEND_BATCH_MESSAGE] = lambda command: command.reply(code, "no")
        messages = [Message("T", b"a"), Message("T", b"b")]
        async with Producer("p", namesrv=broker.address, retries=0) as producer:
            with pytest.raises(Exception, match="no"):
                await producer.send_batch(messages)
        assert [message.outcome for message in messages] == [outcome, outcome]


@pytest.mark.parametrize("how", ["zlib", "lz4", "zstd"])
def test_bodies_are_compressed_and_read_again(how: Any) -> None:
    body = b"a message " * 1000
    packed, flags = compress(body, how)
    assert len(packed) < 200
    assert decompress(packed, flags) == body
    assert decompress(packed, 0) is packed
    for broken in (b"no compressed body", packed[:-1]):
        with pytest.raises(ValueError, match="cannot be read"):
            decompress(broken, flags)


def test_a_compression_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'gzip' is none of"):
        compress(b"x", "gzip")  # type: ignore[arg-type]
    for module in ("lz4", "lz4.frame", "zstandard"):
        monkeypatch.setitem(sys.modules, module, None)
    for how, kind in (("lz4", sysflag.COMPRESSION_LZ4), ("zstd", sysflag.COMPRESSION_ZSTD)):
        with pytest.raises(UsageError, match=rf"{how} needs a library .* pip install 'trimq\[compression\]'"):
            compress(b"x", how)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=rf"{how} needs a library"):
            decompress(b"x", sysflag.COMPRESSED | kind)


# -- deliveries --------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_batch_is_a_sequence_and_goes_back_as_a_whole(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    async with Producer(name, namesrv=servers.namesrv) as producer:
        await producer.send_batch(Message(name, b"%d" % number) for number in range(3))
    async with Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        with anyio.fail_after(30):
            batch = await anext(consumer.batches(8))
            assert [message.body for message in batch] == [b"0", b"1", b"2"]
            assert [message.body for message in batch[1:]] == [b"1", b"2"]
            assert batch[-1].body == b"2"
            assert batch.consumer is batch[0].consumer is consumer
            assert batch.messages == list(batch)
            assert batch[0].messages == [batch[0]]
            assert repr(batch).startswith("Batch(<3 messages from ")
            batch.release()
            again = await anext(consumer)
            assert (again.body, again.reconsume_times) == (b"0", 0)
            again.release()
            batch = await anext(consumer.batches(8))
            assert len(batch) == 3
            await batch.nack(delay_level=1)
            later = {(await anext(consumer)).reconsume_times for _ in range(3)}
            assert later == {1}
    with pytest.raises(UsageError, match="at least one message"):
        Batch([], batch.source)


@pytest.mark.anyio
async def test_a_broadcasting_consumer_passes_over_what_fails(tmp_path: Path) -> None:
    async with scripted_broker() as broker:
        broker.answers[RequestCode.PULL_MESSAGE] = lambda command: (
            command.reply(header=pull_header(2), body=records(0, 2))
            if command.ext_fields()["queueOffset"] == "0"
            else None
        )
        broker.answers[RequestCode.GET_MIN_OFFSET] = lambda command: command.reply(header={"offset": "0"})
        file = tmp_path / "offsets.json"
        async with Consumer(
            "g", "T", namesrv=broker.address, start="first", model="broadcasting", offsets_file=file
        ) as one:
            with anyio.fail_after(50):
                await (await anext(one)).nack()
                assert (await anext(one)).queue_offset == 1
        assert broker.counts[RequestCode.CONSUMER_SEND_MSG_BACK] == 0
        [offsets] = lenient_json.loads(file.read_bytes()).values()
        assert offsets == {"T@a@0": 1}  # the second message is not acknowledged


# -- mqadmin -----------------------------------------------------------------------------------------------------------


def test_times_of_the_command_line() -> None:
    assert parse_time("1500") == 1.5
    assert parse_time("2030-01-01T00:00:00+00:00") == 1_893_456_000
    assert parse_time("2030-01-01#00:00") == parse_time("2030-01-01T00:00:00")
    with pytest.raises(Exception, match="'yesterday' is no time"):
        parse_time("yesterday")
    assert show_time(0) == ""
    assert show_time(1_893_456_000_123).endswith(",123")


def test_topics_with_their_clusters_and_groups(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    with sync.Producer(name, namesrv=servers.namesrv) as producer:
        producer.send(Message(name, b"x"))
    with sync.Consumer(name, name, namesrv=servers.namesrv, start="first") as consumer:
        next(iter(consumer)).ack()
    wait_until(  # a consumer commits its offsets without an answer
        lambda: (
            ["DefaultCluster", name, name] in [line.split() for line in said(servers, "topicList", "-c").splitlines()]
        ),
        "the topic's group",
    )
    assert name in said(servers, "topicList")
    rows = [line.split() for line in said(servers, "statsAll", "-t", name).splitlines()]
    assert any(row[:2] == [name, name] for row in rows)
    quiet = servers.create_topic(f"{name}_quiet", 1)  # of the other one, Apache's broker takes samples at its own times
    assert quiet in said(servers, "statsAll", "-t", quiet)
    assert quiet not in said(servers, "statsAll", "-t", quiet, "-a")
    assert f'"topic":"{name}"' in said(servers, "deleteTopic", "-t", name, "-c", "DefaultCluster", "--json").replace(
        " ", ""
    )
    assert name not in said(servers, "topicList").split()


def test_progress_of_all_groups(servers: Servers, name: str) -> None:
    servers.create_topic(name, 1)
    with sync.Consumer(name, name, namesrv=servers.namesrv, start="first"):
        rows = [line.split() for line in said(servers, "consumerProgress").splitlines()]
        assert [row[1] for row in rows if row[:1] == [name]] == ["1"]
    rows = [line.split() for line in said(servers, "consumerProgress").splitlines()]
    assert [row[1:3] for row in rows if row[:1] == [name]] == [["0", "OFFLINE"]]


def test_one_queue_is_named_by_its_broker_and_number(servers: Servers, name: str) -> None:
    words = ["resetOffsetByTime", "-g", name, "-t", name, "-s", "now", "-n", servers.namesrv]
    for more in (["-b", "broker-a"], ["-q", "0"], ["-o", "1"]):
        result = CliRunner().invoke(main, [*words, *more])
        assert result.exit_code == 2
        assert "name one queue together" in result.output
