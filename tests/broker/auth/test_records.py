"""Requests that name a record by its offset get no record of a topic that their user may not use."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.broker.auth.signed import User, closed_broker
from tests.broker.wire_client import WireClient, consumer, send_ext
from trimq.protocol.codes import ResponseCode
from trimq.protocol.message_id import encode_offset_id

ALL_OF_MINE = ("Topic:Mine All", "Group:G All", "Topic:%RETRY%G All")


async def sent(root: User, topic: str, **properties: str) -> tuple[int, str]:
    """Send a message; returns where its record is, and its offset message id."""
    reply = await root.ask(310, send_ext(topic, properties), b"secret of " + topic.encode())
    assert reply.code == 0, reply.remark
    message_id = reply.ext_fields()["msgId"]
    return int(message_id[-16:], 16), message_id


async def request(root: User, code: int, topic: str) -> dict[str, Any]:
    """A request that names the user's own topic, and a record of ``topic``."""
    offset, message_id = await sent(root, topic)
    requests: dict[int, dict[str, Any]] = {
        33: {"topic": "Mine", "offset": offset},
        36: {"originTopic": "Mine", "group": "G", "offset": offset, "delayLevel": 0},
        309: {"topic": "Mine", "consumerGroup": "G", "clientId": "c", "msgId": message_id},
    }
    return requests[code]


@pytest.mark.parametrize("code", [33, 36, 309])
async def test_a_record_of_another_topic(tmp_path: Path, code: int) -> None:
    async with closed_broker(tmp_path) as (_, root):
        app = await root.make("app", *ALL_OF_MINE)
        for name in ("Mine", "Theirs"):
            await sent(root, name)
        wrong = await app.ask(code, await request(root, code, "Theirs"))
        assert (wrong.code, len(wrong.body)) == (ResponseCode.NO_PERMISSION, 0)
        assert wrong.remark == "User:app has no permission to access Topic:Theirs from 127.0.0.1, no matched policies."
        right = await app.ask(code, await request(root, code, "Mine"))
        assert right.code != ResponseCode.NO_PERMISSION
        assert (await root.ask(code, await request(root, code, "Theirs"))).code != ResponseCode.NO_PERMISSION
        if code == 36:
            assert right.code == 0


FORWARDED: list[tuple[int, dict[str, Any]]] = [
    (307, {"consumerGroup": "G", "clientId": "c", "jstackEnable": "false"}),
    (309, {"consumerGroup": "G", "clientId": "c", "topic": "Mine", "brokerName": "b"}),
]


@pytest.mark.parametrize(("code", "ext"), FORWARDED)
async def test_a_client_does_not_get_the_signature_of_who_asks_about_it(
    tmp_path: Path, code: int, ext: dict[str, Any]
) -> None:
    """It chooses its own id: with the signature over it, it could delete a user of that name."""
    async with closed_broker(tmp_path) as (broker, root), WireClient.connect(broker.endpoint) as client:
        app = User(client, (await root.make("app", *ALL_OF_MINE)).name)
        body = {"clientID": "c", "consumerDataSet": [consumer("G", "Mine")]}
        _, message_id = await sent(root, "Mine")
        assert (await app.ask(34, body=msgspec.json.encode(body))).code == 0
        opaque = await root.post(code, ext | ({"msgId": message_id} if code == 309 else {}))
        forwarded = await client.asked_for(code)
        fields = forwarded.ext_fields()
        assert fields.items() >= {"consumerGroup": "G", "clientId": "c"}.items()
        assert not fields.keys() & {"AccessKey", "Signature", "SecurityToken"}
        await client.answer(forwarded)
        assert (await root.client.reply(opaque)).code == 0


async def half(root: User, topic: str) -> dict[str, Any]:
    """A half message for ``topic``, and the request that ends it without naming the topic, as RocketMQ 4's do."""
    properties = {"TRAN_MSG": "true", "PGROUP": "P", "UNIQ_KEY": "A" * 32}
    ext = send_ext(topic, properties) | {"f": 4}
    reply = await root.ask(310, ext, b"half")
    assert reply.code == 0, reply.remark
    fields = reply.ext_fields()
    offset = int(fields["msgId"][-16:], 16)
    return {
        "producerGroup": "P",
        "tranStateTableOffset": fields["queueOffset"],
        "commitLogOffset": offset,
        "commitOrRollback": 8,
        "msgId": "A" * 32,
    }


async def test_the_end_of_a_transaction_of_another_topic(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        app = await root.make("app", "Topic:Mine Pub|Update")
        for topic in ("Mine", "Theirs"):
            await sent(root, topic)
        theirs, mine = await half(root, "Theirs"), await half(root, "Mine")
        for extra in ({}, {"topic": "Mine"}):
            reply = await app.ask(37, theirs | extra)
            assert reply.code == ResponseCode.NO_PERMISSION
            assert "Topic:Theirs" in (reply.remark or "")
        assert (await app.ask(37, mine)).code == 0
        assert (await root.ask(37, theirs)).code == 0


async def test_the_answer_to_a_check_names_the_topic_of_all_halves(tmp_path: Path) -> None:
    """RocketMQ 5's producers name the topic that the check has; that of the half decides."""
    async with closed_broker(tmp_path) as (_, root):
        app = await root.make("app", "Topic:Mine Pub")
        for topic, code in (("Theirs", 16), ("Mine", 0)):
            await sent(root, topic)
            where = await half(root, topic) | {"fromTransactionCheck": "true"}
            reply = await app.ask(37, where | {"topic": "RMQ_SYS_TRANS_HALF_TOPIC"})
            assert reply.code == code, reply.remark
            assert code == 0 or f"Topic:{topic}" in (reply.remark or "")


async def test_the_checks_of_a_half_of_another_topic(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root):
        app = await root.make("app", "Topic:Mine Pub|Update")
        for topic, code in (("Theirs", 16), ("Mine", 0)):
            await sent(root, topic)
            where = await half(root, topic)
            message_id = encode_offset_id(broker.context.store_host, int(where["commitLogOffset"]))
            reply = await app.ask(323, {"topic": "Mine", "msgId": message_id})
            assert reply.code == code, reply.remark
