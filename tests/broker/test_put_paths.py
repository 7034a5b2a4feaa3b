"""Sends of each size and kind, with and without an index: pulls return what was sent, and held pulls are woken."""

from pathlib import Path

import pytest

from tests.broker.wire_client import WireClient, properties_text, pull_ext, send_ext
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.message import StoredMessage, decode_messages


async def send_batch(client: WireClient, *bodies: bytes) -> int:
    body = encode_batch([(0, one, properties_text({"TAGS": "t", "KEYS": "k"}).encode()) for one in bodies])
    return (await client.ask(RequestCode.SEND_BATCH_MESSAGE, send_ext("Orders", batch="true"), body)).code


@pytest.mark.parametrize("index", [True, False])
async def test_large_and_small_bodies_and_batches(tmp_path: Path, index: bool) -> None:
    sent = [b"", b"small", b"x" * 4096, b"y" * 4097, bytes(range(256)) * 1000]
    async with (
        running_broker(tmp_path, messageIndexEnable=index) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        for body in sent[1:]:
            assert (await client.send("Orders", body, {"KEYS": "k", "TAGS": "t"})).code == ResponseCode.SUCCESS
        assert await send_batch(client, b"one", b"three", b"z" * 5000) == ResponseCode.SUCCESS
        found: list[StoredMessage] = []
        while len(found) < 7:
            found += await client.pull_messages("Orders", len(found))
        assert [message.body for message in found] == [*sent[1:], b"one", b"three", b"z" * 5000]
        assert [message.queue_offset for message in found] == list(range(7))
        query = {"topic": "Orders", "key": "k", "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 2**62}
        reply = await client.ask(RequestCode.QUERY_MESSAGE, query)
        assert (reply.code == ResponseCode.SUCCESS) is index


async def test_a_batch_wakes_who_waits(broker: BrokerController, client: WireClient) -> None:
    await client.send("Orders", b"first")
    held = [
        await client.post(RequestCode.PULL_MESSAGE, pull_ext("Orders", 1, sysFlag=6, subscription=tag))
        for tag in ("*", "t", "other")
    ]
    await client.pull("Orders")  # answered after them: they are held now
    async with WireClient.connect(broker.endpoint) as producer:
        assert await send_batch(producer, b"a", b"b") == ResponseCode.SUCCESS
    for opaque in held[:2]:
        reply = await client.reply(opaque)
        assert [message.body for message in decode_messages(bytes(reply.body))] == [b"a", b"b"]
    assert held[2] not in client.replies


async def test_a_thousand_keys_between_two_writes_of_the_index(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        await client.send("Orders")  # creates the topic
        for number in range(1100):
            await client.post(
                RequestCode.SEND_MESSAGE_V2, send_ext("Orders", {"KEYS": f"k{number}", "UNIQ_KEY": f"U{number}"}), b"x"
            )
        await client.pull("Orders")  # answered after them
        for number in (0, 1023, 1024, 1099):
            query = {"topic": "Orders", "key": f"k{number}", "maxNum": 2, "beginTimestamp": 0, "endTimestamp": 2**62}
            reply = await client.ask(RequestCode.QUERY_MESSAGE, query)
            [message] = decode_messages(bytes(reply.body))
            assert message.queue_offset == number + 1
