"""The fast path of a query by key returns, byte for byte, the replies of the full path."""

from pathlib import Path
from typing import Any

import trio

from tests.broker.raw_client import Raw, json_frame
from tests.broker.wire_client import WireClient, send_ext
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode
from trimq.protocol.message import decode_messages
from trimq.remoting.runtime.clock import ManualClock

FIELDS = {"topic": "Orders", "key": "k1", "maxNum": "32", "beginTimestamp": "0", "endTimestamp": "9223372036854775807"}
CASES: list[dict[str, Any]] = [
    {},
    {"key": "k2"},
    {"key": "big"},
    {"key": "none"},
    {"key": ""},
    {"maxNum": "1"},
    {"maxNum": "0"},
    {"endTimestamp": "1"},
    {"topic": "Other"},
    {"_UNIQUE_KEY_QUERY": "true"},
    {"_UNIQUE_KEY_QUERY": "true", "maxNum": "1"},
    {"maxNum": "-1"},
    {"maxNum": "100"},
    {"beginTimestamp": "5", "endTimestamp": "4"},
    {"maxNum": "x"},
    {"indexType": "T", "key": "red"},
    {"indexType": "T", "key": "k1"},
    {"indexType": "K"},
    {"indexType": "U"},
    {"indexType": "T", "_UNIQUE_KEY_QUERY": "true"},
    {"key": "T#red"},
]


async def test_both_paths_answer_the_same(broker: BrokerController, client: WireClient) -> None:
    for number in range(6):
        await client.send("Orders", b"x" * 100, properties=f"KEYS\x01k{number % 3}\x02TAGS\x01red\x02")
    for _ in range(3):
        await client.send("Orders", b"x" * 20_000, properties="KEYS\x01big\x02")
    async with await trio.open_tcp_stream(*broker.endpoint) as stream:
        raw = Raw(stream)
        await raw.ask(json_frame(12, FIELDS, fast=False))  # the index creates its first file
        for case in CASES:
            general = await raw.ask(json_frame(12, FIELDS | case, fast=False))
            assert await raw.ask(json_frame(12, FIELDS | case, fast=True)) == general, case
        assert b'"code":0' in await raw.ask(json_frame(12, FIELDS, fast=True))
    assert not any(file.is_held for file in broker.context.store.files.files)


async def by_tag(client: WireClient, topic: str, tag: str) -> list[bytes]:
    fields = FIELDS | {"topic": topic, "key": tag, "indexType": "T"}
    reply = await client.ask(RequestCode.QUERY_MESSAGE, fields)
    return [message.body for message in decode_messages(bytes(reply.body))] if reply.code == 0 else []


async def test_messages_of_all_kinds_are_found_by_their_tag(tmp_path: Path) -> None:
    """Sent alone, in a batch, delayed, delivered later, sent back; and not found if indexTagEnable is false."""
    for enabled in (True, False):
        clock = ManualClock()
        path = tmp_path / str(enabled)
        async with (
            running_broker(path, clock=clock, indexTagEnable=enabled) as broker,
            WireClient.connect(broker.endpoint) as client,
        ):
            await client.send("Orders", b"alone", {"TAGS": "red", "KEYS": "k"})
            await client.send("Orders", b"blue", {"TAGS": "blue", "KEYS": "k"})
            texts = ["TAGS\x01red\x02", "KEYS\x01red\x02", "TAGS\x01red\x02KEYS\x01a b\x02"]
            several = encode_batch([(0, b"batch %d" % at, text.encode()) for at, text in enumerate(texts)])
            assert (await client.ask(320, send_ext("Orders", batch="true"), several)).code == 0
            await client.send("Orders", b"later", {"TAGS": "red", "DELAY": "1"})
            (first, *_) = await client.pull_messages("Orders")
            back = {"offset": first.commit_log_offset, "group": "G", "delayLevel": 0, "originTopic": "Orders"}
            assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
            now = [b"alone", b"batch 0", b"batch 2"] if enabled else []
            assert await by_tag(client, "Orders", "red") == now
            assert await by_tag(client, "SCHEDULE_TOPIC_XXXX", "red") == ([b"later", b"alone"] if enabled else [])
            clock.advance(10)
            with trio.fail_after(10):
                while broker.context.schedule.delivered < 2:  # noqa: ASYNC110 - a counter has no event
                    await trio.sleep(0.01)
            assert await by_tag(client, "Orders", "red") == ([*now, b"later"] if enabled else [])
            assert await by_tag(client, "%RETRY%G", "red") == ([b"alone"] if enabled else [])
            assert await by_tag(client, "Orders", "k") == []
