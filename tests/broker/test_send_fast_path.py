"""The fast path of a send: the same records and replies as the full path, and no side effects where it declines."""

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.broker.fast_paths import fast_paths
from tests.broker.processors import send_fast_path_of
from tests.broker.wire_client import WireClient, consumer, hashes_of, properties_text
from trimq.broker.controller import BrokerController
from trimq.broker.store.running_flags import Flag
from trimq.broker.testing import running_broker
from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import StoredMessage

UNIQUE = "7F0000010001AABBCCDD000000010001"
USUAL = {"KEYS": "k1 k2", "UNIQ_KEY": UNIQUE, "TAGS": "TagA", "WAIT": "true", "colour": "blue"}
_opaque = iter(range(100_000, 200_000))


def v2(properties: str, **more: str) -> dict[str, str]:
    fields = {
        "a": "group",
        "b": "Orders",
        "c": "TBW102",
        "d": "4",
        "e": "1",
        "f": "0",
        "g": "1700000000001",
        "h": "7",
        "i": properties,
        "j": "0",
        "k": "false",
        "m": "false",
    }
    return fields | more


async def ask(
    client: WireClient, ext: dict[str, str], *, fast: bool, code: int = 310, flag: int = 0, body: bytes = b"body"
) -> RemotingCommand | None:
    """Send a frame whose code comes first, or after a blank, which keeps it off the fast path."""
    opaque = next(_opaque)
    header = json.dumps({"code": code, "extFields": ext, "flag": flag, "opaque": opaque}, separators=(",", ":"))
    raw = header.encode() if fast else b" " + header.encode()
    await client.stream.send_all(struct.pack(">II", 4 + len(raw) + len(body), len(raw)) + raw + body)
    return None if flag & 2 else await client.reply(opaque)


async def made(client: WireClient, broker: BrokerController) -> None:
    """The topic exists, with its queue 1 empty."""
    reply = await ask(client, v2(properties_text(USUAL), e="0"), fast=False)
    assert reply is not None
    assert reply.code == 0
    assert not taken(broker)


def taken(broker: BrokerController) -> bool:
    """Whether a message has taken the fast path since the first call."""
    return bool(fast_paths(broker))


def comparable(message: StoredMessage) -> dict[str, Any]:
    own = {"queue_offset", "commit_log_offset", "store_timestamp", "offset_message_id"}
    return {name: getattr(message, name) for name in message.__struct_fields__ if name not in own}


@pytest.mark.parametrize(
    "text",
    [
        f"UNIQ_KEY\x01{UNIQUE}\x02a\x011\x02a\x012\x02",
        f"a\x011\x02a\x012\x02UNIQ_KEY\x01{UNIQUE}\x02a\x013",
        f"UNIQ_KEY\x01{UNIQUE}\x02TAGS\x01one\x02TAGS\x01two\x02KEYS\x01k\x02KEYS\x01l\x02",
    ],
)
async def test_a_name_that_is_there_twice_is_stored_as_it_came(tmp_path: Path, text: str) -> None:
    """The last one counts on both paths. No client writes such a text, since clients keep properties in maps."""
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        await made(client, broker)
        for fast in (True, False):
            reply = await ask(client, v2(text), fast=fast)
            assert reply is not None
            assert reply.code == 0
        store = broker.context.store
        units = await store.queue_units("Orders", 1, 0, 2)
        records = [bytes(await store.look_message_cold(offset)) for offset, _, _ in units]
        first, second = (record[record.index(b"Orders") :] for record in records)
        assert first == second
        assert text.encode() in first
        assert units[0][1:] == units[1][1:]


@pytest.mark.parametrize("name", ["with.dot", "a" * 128])
async def test_a_topic_that_a_state_file_has_brought_is_refused_on_both_paths(
    client: WireClient, broker: BrokerController, name: str
) -> None:
    await made(client, broker)
    broker.context.topics.put(TopicConfig(topic_name=name))
    assert (await both(client, v2(properties_text(USUAL), b=name)))[0] == ResponseCode.INVALID_PARAMETER
    assert not taken(broker)


@pytest.mark.parametrize(
    "properties",
    [USUAL, {"UNIQ_KEY": UNIQUE}, {"UNIQ_KEY": UNIQUE, "KEYS": "one"}, {"UNIQ_KEY": UNIQUE, "TAGS": "ä" * 200}],
    ids=["all", "least", "one key", "long tag"],
)
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_both_paths_store_and_answer_the_same(tmp_path: Path, flush: str, properties: dict[str, str]) -> None:
    async with running_broker(tmp_path, flushDiskType=flush) as broker, WireClient.connect(broker.endpoint) as client:
        await made(client, broker)
        fields = v2(properties_text(properties), j="3", f="1")
        fast = await ask(client, fields, fast=True)
        assert taken(broker)
        full = await ask(client, fields, fast=False)
        assert fast is not None
        assert full is not None
        assert fast.code == full.code == 0
        first, second = fast.ext_fields(), full.ext_fields()
        assert (first.pop("queueOffset"), second.pop("queueOffset")) == ("0", "1")
        assert first.pop("msgId") != second.pop("msgId")
        assert first == second
        one, two = await client.pull_messages("Orders", queueId=1)
        assert comparable(one) == comparable(two)
        assert one.properties == two.properties
        ours, theirs = await hashes_of(broker, [one, two])
        assert ours == theirs
        assert len(ours) == 1 + len(properties.get("KEYS", "").split()) + ("TAGS" in properties)
        for key in [UNIQUE, *properties.get("KEYS", "").split()]:
            await broker.context.store.index.flush_pending()  # type: ignore[union-attr]
            found = broker.context.store.query_message("Orders", key, 32, 0, 1 << 62)
            assert found is not None
            assert found.count >= 2
            found.release()


async def test_the_first_form_takes_the_fast_path_too(client: WireClient, broker: BrokerController) -> None:
    await made(client, broker)
    fields = {
        "producerGroup": "group",
        "topic": "Orders",
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4",
        "queueId": "1",
        "sysFlag": "0",
        "bornTimestamp": "1700000000001",
        "flag": "0",
        "properties": properties_text(USUAL),
    }
    reply = await ask(client, fields, fast=True, code=10)
    assert reply is not None
    assert reply.code == 0
    assert taken(broker)


@pytest.mark.parametrize(
    "change",
    [
        {"e": "-1"},
        {"e": "99"},
        {"f": "4"},
        {"m": "true"},
        {"b": "New"},
        {"g": "x"},
        {"i": properties_text(USUAL | {"DELAY": "1"})},
        {"i": properties_text(USUAL | {"WAIT": "false"})},
        {"i": properties_text(USUAL | {"CLUSTER": "other"})},
        {"i": properties_text(USUAL | {"UNIQ_KEY": "with-dash"})},
        {"i": properties_text({"TAGS": "TagA"})},
        {"i": properties_text(USUAL)[:-1]},
        {"i": "x" * 40_000},
    ],
)
async def test_what_is_not_ordinary_is_left_to_the_full_path(
    client: WireClient, broker: BrokerController, change: dict[str, str]
) -> None:
    await made(client, broker)
    fast = await ask(client, v2(properties_text(USUAL)) | change, fast=True)
    full = await ask(client, v2(properties_text(USUAL)) | change, fast=False)
    assert not taken(broker)
    assert fast is not None
    assert full is not None
    assert (fast.code, fast.remark) == (full.code, full.remark)
    assert set(broker.context.store.topics()["Orders"]) <= {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("topic", "reconsumed", "code"),
    [
        ("SELF_TEST_TOPIC", "0", 16),
        ("SCHEDULE_TOPIC_XXXX", "0", 16),
        ("RMQ_SYS_TRANS_HALF_TOPIC", "0", 16),
        ("%RETRY%group", "1", 0),
        ("%RETRY%group", "17", 0),
        ("Nowhere", "0", 17),
    ],
)
async def test_special_topics_are_left_to_the_full_path(
    client: WireClient, broker: BrokerController, topic: str, reconsumed: str, code: int
) -> None:
    await made(client, broker)
    await client.heartbeat("c1", consumers=[consumer("group", "Orders")])
    fields = v2(properties_text(USUAL), b=topic, j=reconsumed, e="0") | ({"c": "none"} if code == 17 else {})
    assert (await both(client, fields))[0] == code
    assert not taken(broker)
    assert broker.context.store.max_offset("%DLQ%group", 0) == (2 if reconsumed == "17" else 0)


async def test_empty_bodies_and_oneways(client: WireClient, broker: BrokerController) -> None:
    await made(client, broker)
    fields = v2(properties_text(USUAL))
    refused = await ask(client, fields, fast=True, body=b"")
    assert refused is not None
    assert refused.code == 13
    await ask(client, fields, fast=True, flag=2)
    assert (await ask(client, fields, fast=False)) is not None
    assert not taken(broker)
    assert len(await client.pull_messages("Orders", queueId=1)) == 2


async def test_a_topic_that_is_changed_or_made_anew_is_looked_at_again(
    client: WireClient, broker: BrokerController
) -> None:
    await made(client, broker)
    fields = v2(properties_text(USUAL))
    assert (await ask(client, fields, fast=True)) is not None
    topics = broker.context.topics
    assert topics.delete("Orders")
    await broker.context.store.delete_topic("Orders")
    reply = await ask(client, fields, fast=True)
    assert reply is not None
    assert (reply.code, reply.ext_fields()["queueOffset"]) == (0, "0")
    assert topics.get("Orders") is not None
    reply = await ask(client, fields, fast=True)
    assert reply is not None
    assert reply.ext_fields()["queueOffset"] == "1"
    assert taken(broker)


async def both(client: WireClient, fields: dict[str, str], body: bytes = b"body") -> tuple[int, dict[str, str]]:
    """The reply to a send, the same on both paths except for its place."""
    replies = []
    for fast in (True, False):
        reply = await ask(client, fields, fast=fast, body=body)
        assert reply is not None
        ext = reply.ext_fields()
        replies.append((reply.code, reply.remark, {name: ext[name] for name in ext if name not in PLACE}))
    assert replies[0] == replies[1]
    return replies[0][0], replies[0][2]


PLACE = {"msgId", "queueOffset"}
CHANGES = [
    ("startAcceptSendRequestTimeStamp=32503680000000", 1),
    ("maxMessageSize=3", 13),
    ("regionId=elsewhere", 0),
    ('regionId=a"b%d', 0),
    ("traceOn=false", 0),
    ("brokerPermission=4", 0),
    ("autoCreateTopicEnable=false", 0),
]


@pytest.mark.parametrize(("change", "code"), CHANGES)
async def test_what_the_configuration_says_counts_at_once(
    client: WireClient, broker: BrokerController, change: str, code: int
) -> None:
    await made(client, broker)
    fields = v2(properties_text(USUAL))
    before = broker.configuration.properties_text()
    assert (await both(client, fields))[0] == 0
    assert (await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=change.encode())).code == 0
    assert broker.configuration.properties_text() != before
    answered, ext = await both(client, fields)
    assert answered == code
    key, _, value = change.partition("=")
    if key == "regionId":
        assert ext["MSG_REGION"] == value
    one, two = (await client.pull_messages("Orders", queueId=1))[-2:]
    assert one.properties == two.properties


async def test_what_becomes_of_the_topic_counts_at_once(client: WireClient, broker: BrokerController) -> None:
    await made(client, broker)
    fields = v2(properties_text(USUAL))
    assert (await both(client, fields))[0] == 0
    topics = broker.context.topics
    config = topics.table["Orders"]
    topics.put(msgspec.structs.replace(config, write_queue_nums=1, read_queue_nums=1))
    assert (await both(client, fields))[0] == 29
    topics.put(msgspec.structs.replace(config, perm=4))  # only clients check the permission to write
    assert (await both(client, fields))[0] == 0
    broker.context.store.flags.set(Flag.DISK_FULL, "the disk is full")
    assert (await both(client, fields))[0] == 14
    broker.context.store.flags.clear(Flag.DISK_FULL)
    assert (await both(client, fields))[0] == 0
    assert taken(broker)


async def test_nothing_is_kept_of_a_deleted_topic(broker: BrokerController) -> None:
    fast_path = send_fast_path_of(broker.context)
    broker.context.topics.put(TopicConfig(topic_name="Short-lived"))
    assert fast_path._find("Short-lived") is not None
    assert broker.context.topics.delete("Short-lived")
    assert fast_path._topics == {}


async def test_it_is_counted_as_any_other(client: WireClient, broker: BrokerController) -> None:
    await made(client, broker)
    before = broker.context.stats.put_total
    size = broker.context.stats.items("TOPIC_PUT_SIZE")["Orders"].value
    end = broker.context.store.max_phy_offset
    assert (await ask(client, v2(properties_text(USUAL)), fast=True)) is not None
    assert broker.context.stats.put_total == before + 1
    stored = broker.context.store.max_phy_offset - end
    assert broker.context.stats.items("TOPIC_PUT_SIZE")["Orders"].value == size + stored
