"""Requests that name a record by its offset get no record of a topic that their user may not use."""

import hashlib
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio.testing

from tests.broker.auth.signed import User, closed_broker
from tests.broker.wire_client import WireClient, consumer, send_ext
from trimq.broker.controller import BrokerController
from trimq.protocol.codes import ResponseCode
from trimq.protocol.message_id import encode_offset_id
from trimq.remoting.auth.permit import topic_of

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


async def test_the_hash_of_a_record_needs_what_the_record_needs(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root):
        app = await root.make("app", *ALL_OF_MINE)
        mine, theirs = [(await sent(root, topic))[0] for topic in ("Mine", "Theirs")]
        end = broker.context.store.max_phy_offset

        async def compare(user: User, offset: int) -> tuple[int, str | None]:
            record = broker.context.store.look_message(offset)
            digest = hashlib.sha256(bytes(record or b"")).hexdigest()
            reply = await user.ask(33, {"topic": "Mine", "offset": offset, "trimqSha256": digest})
            return reply.code, reply.ext_fields().get("trimqSame")

        assert await compare(app, mine) == (0, "true")
        assert await compare(app, theirs) == (ResponseCode.NO_PERMISSION, None)
        for offset in (theirs + 1, end):  # no record: no answer about its bytes
            assert await compare(app, offset) == (ResponseCode.SYSTEM_ERROR, None)
        assert await compare(root, theirs) == (0, "true")
        assert await compare(root, theirs + 1) == (0, "false")


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


@pytest.mark.parametrize("topic", ["RMQ_SYS_TRANS_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC", "SCHEDULE_TOPIC_XXXX"])
def test_a_record_that_waits_or_has_expired(topic: str) -> None:
    record = made_up(0, topic, properties=b"REAL_TOPIC\x01Theirs\x02REAL_QID\x010\x02", more=0)
    assert topic_of(record) == "Theirs"


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


def made_up(
    physical: int, topic: str, *, queue_id: int = 0, offset: int = 0, properties: bytes = b"", more: int
) -> bytes:
    """The bytes of a record as a client may send them in a body.

    Its properties reach ``more`` bytes over its own end: over what is stored behind it. Without a body it has no CRC.
    """
    name = topic.encode()
    length = len(properties) + more
    front = struct.pack(">4xIIII2Q", 0xDAA320A7, 0, queue_id, 0, offset, physical) + bytes(4 + 4 * 8 + 4 + 8 + 4)
    head = front + bytes([len(name)]) + name + length.to_bytes(2, "big") + properties
    return (len(head) + more).to_bytes(4, "big") + head[4:]


async def planted(app: User, broker: BrokerController, **fields: Any) -> int:
    """Send such bytes to Mine; returns the log offset at which they are."""
    physical = broker.context.store.appended_offset + 88
    reply = await app.ask(310, send_ext("Mine"), made_up(physical, **fields))
    assert reply.code == 0, reply.remark
    assert int(reply.ext_fields()["msgId"][-16:], 16) + 88 == physical
    return physical


@pytest.mark.parametrize("code", [33, 36, 309])
async def test_a_body_with_the_bytes_of_a_record(tmp_path: Path, code: int) -> None:
    """It names the user's own topic, and would bring what others have sent after it."""
    async with closed_broker(tmp_path) as (broker, root):
        app = await root.make("app", *ALL_OF_MINE)
        await sent(root, "Mine")
        physical = await planted(app, broker, topic="Mine", more=400)
        for _ in range(4):
            await sent(root, "Theirs")
        message_id = encode_offset_id(broker.context.store_host, physical)
        requests: dict[int, dict[str, Any]] = {
            33: {"topic": "Mine", "offset": physical},
            36: {"originTopic": "Mine", "group": "G", "offset": physical, "delayLevel": -1},
            309: {"topic": "Mine", "consumerGroup": "G", "clientId": "c", "msgId": message_id},
        }
        for user in (app, root):  # the bytes are those of a whole record: who may read everything gets them
            reply = await user.ask(code, requests[code])
            if user is app:
                assert reply.code == ResponseCode.SYSTEM_ERROR
                assert "no message starts at the commit log offset" in (reply.remark or "")
            elif code == 33:
                assert b"secret of Theirs" in bytes(reply.body)


async def test_a_record_that_is_not_in_its_queue_yet(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root):
        app = await root.make("app", *ALL_OF_MINE)
        offset, _ = await sent(root, "Mine")
        store = broker.context.store
        queue = store.queues.find("Mine", 0)
        assert queue is not None
        end, store.dispatcher.position = store.dispatcher.position, offset
        queue.next_offset = 0
        opaque = await app.post(33, {"topic": "Mine", "offset": offset})
        await trio.testing.wait_all_tasks_blocked(0.001)
        queue.next_offset, store.dispatcher.position = 1, end
        assert (await root.client.reply(opaque)).code == 0


async def test_the_end_of_a_half_that_names_another_users(tmp_path: Path) -> None:
    """Bytes of a half at an offset that the queue does not have, which was first stored as the half of another user."""
    async with closed_broker(tmp_path) as (broker, root):
        app = await root.make("app", "Topic:Mine Pub")
        for topic in ("Mine", "Theirs"):
            await sent(root, topic)
        theirs = await half(root, "Theirs")
        transactions = broker.context.transactions
        number = int(theirs["tranStateTableOffset"])
        transactions.halves.stands_for(number, number)  # as after its first check
        properties = f"REAL_TOPIC\x01Mine\x02REAL_QID\x010\x02PGROUP\x01P\x02TRAN_PREPARED_QUEUE_OFFSET\x01{number}\x02"
        far = 1_000_000
        where = {"topic": "RMQ_SYS_TRANS_HALF_TOPIC", "offset": far, "properties": properties.encode(), "more": 0}
        physical = await planted(app, broker, **where)
        reply = await app.ask(
            37,
            theirs
            | {"topic": "Mine", "commitOrRollback": 12, "tranStateTableOffset": far, "commitLogOffset": physical},
        )
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "is not in its queue" in (reply.remark or "")
        assert (await root.ask(37, theirs)).code == 0
