"""The requests that end a transaction, and the answers to the broker's checks, as sent over the connection.

Guards: a check of another group's transaction is not answered (the wrong program would decide), and only the answer to
a check is marked as one (``fromTransactionCheck``).
"""

import anyio
import pytest

from tests.client.scripted import ScriptedBroker, scripted_broker
from tests.client.test_scripted import SEND, stored
from trimq.client import Message, ReceivedMessage, TransactionProducer, TransactionState, UsageError
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.property_text import decode_properties, encode_properties
from trimq.protocol.record import encode_record, pack_host

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

END = RequestCode.END_TRANSACTION
GREETING = RequestCode.HEART_BEAT


def half(broker: ScriptedBroker, group: str, body: bytes, **properties: str) -> bytes:
    """A prepared message as the broker stores it."""
    host, _, port = broker.address.rpartition(":")
    text = encode_properties({"PGROUP": group, "TRAN_MSG": "true", **properties})
    return encode_record(
        topic=b"T", body=body, properties=text.encode(),
        queue_id=0, queue_offset=7, physical_offset=70, born_timestamp=0, born_host=pack_host("127.0.0.1", 1),
        store_timestamp=0, store_host=pack_host(host, int(port)),
    )  # fmt: skip


async def ask(broker: ScriptedBroker, group: str, body: bytes, **properties: str) -> None:
    """Send the broker's check of a transaction, over the connection of the producer's heartbeat."""
    header = {"tranStateTableOffset": "7", "commitLogOffset": "70", "msgId": "m", "transactionId": "t"}
    header["topic"] = "RMQ_SYS_TRANS_HALF_TOPIC"
    question = RemotingCommand.request(
        RequestCode.CHECK_TRANSACTION_STATE, header, half(broker, group, body, **properties), oneway=True
    )
    [stream] = [stream for stream, command in broker.seen if command.code == GREETING][:1]
    await stream.send(encode(question))


def stored_with_id(command: RemotingCommand) -> RemotingCommand:
    reply = stored(command)
    reply.ext_fields()["transactionId"] = "t"
    return reply


async def test_only_the_groups_own_transactions_are_answered_for() -> None:
    asked: list[bytes] = []

    def check(message: ReceivedMessage) -> TransactionState:
        asked.append(message.body)
        return TransactionState.ROLLBACK

    async with scripted_broker() as broker, TransactionProducer("ours", check, namesrv=broker.address) as producer:
        await producer.queues("T")
        await producer.client.heartbeat()
        await ask(broker, "theirs", b"another program's")
        await ask(broker, "our", b"nor one whose name ours begins with")
        await ask(broker, "ours", b"ours")  # in the order of their arrival
        [end] = await broker.until(END, 1)
        await anyio.wait_all_tasks_blocked()
        assert broker.counts[END] == 1
    assert asked == [b"ours"]
    fields = end.ext_fields()
    assert end.is_oneway
    assert {name: fields[name] for name in ("producerGroup", "tranStateTableOffset", "commitLogOffset", "msgId")} == {
        "producerGroup": "ours", "tranStateTableOffset": "7", "commitLogOffset": "70", "msgId": "m",
    }  # fmt: skip
    assert (fields["commitOrRollback"], fields["fromTransactionCheck"]) == (
        str(TransactionState.ROLLBACK.value),
        "true",
    )
    assert fields["topic"] == "T", "a policy of the topic has to suffice"


@pytest.mark.parametrize("state", TransactionState)
async def test_the_answer_is_what_check_says(state: TransactionState) -> None:
    async def check(_message: ReceivedMessage) -> TransactionState:
        await anyio.lowlevel.checkpoint()
        return state

    async with scripted_broker() as broker, TransactionProducer("g", check, namesrv=broker.address) as producer:
        await producer.queues("T")
        await producer.client.heartbeat()
        await ask(broker, "g", b"x")
        [end] = await broker.until(END, 1)
    assert (end.ext_fields()["commitOrRollback"], end.ext_fields()["fromTransactionCheck"]) == (
        str(state.value),
        "true",
    )


async def test_a_check_that_fails_leaves_the_transaction_open() -> None:
    def check(_message: ReceivedMessage) -> TransactionState:
        raise ZeroDivisionError

    async with scripted_broker() as broker, TransactionProducer("g", check, namesrv=broker.address) as producer:
        await producer.queues("T")
        await producer.client.heartbeat()
        await ask(broker, "g", b"x")
        [end] = await broker.until(END, 1)
    assert end.ext_fields()["commitOrRollback"] == str(TransactionState.UNKNOWN.value)


@pytest.mark.parametrize("state", TransactionState)
async def test_the_end_of_a_block_is_reported_unasked(state: TransactionState) -> None:
    def never(_message: ReceivedMessage) -> TransactionState:
        pytest.fail("the check was called although the broker had not asked")

    async with scripted_broker() as broker, TransactionProducer("g", never, namesrv=broker.address) as producer:
        broker.answers[SEND] = stored_with_id
        async with producer.transaction(Message("T", b"x")) as transaction:
            transaction.state = state
        [end] = await broker.until(END, 1)
        [send] = await broker.until(SEND, 1)
    fields = end.ext_fields()
    assert (fields["commitOrRollback"], fields["fromTransactionCheck"]) == (str(state.value), "false")
    assert (fields["tranStateTableOffset"], fields["producerGroup"]) == ("5", "g")
    assert "PGROUP\x01g\x02" in send.ext_fields()["i"]
    assert int(send.ext_fields()["f"]) & 4  # prepared: not visible to consumers yet


@pytest.mark.parametrize(("seconds", "expected"), [(None, None), (0, "0"), (300, "300")])
async def test_the_immunity_is_sent_with_the_message(seconds: int | None, expected: str | None) -> None:
    # guards long blocks: without the property the broker asks after its transactionTimeOut
    async with scripted_broker() as broker, TransactionProducer("g", unknown, namesrv=broker.address) as producer:
        broker.answers[SEND] = stored_with_id
        async with producer.transaction(Message("T", b"x"), check_immunity_time_in_seconds=seconds):
            pass
        [send] = await broker.until(SEND, 1)
    properties = decode_properties(send.ext_fields()["i"])
    assert properties.get("CHECK_IMMUNITY_TIME_IN_SECONDS") == expected


async def test_a_negative_immunity_is_a_usage_error() -> None:
    async with scripted_broker() as broker, TransactionProducer("g", unknown, namesrv=broker.address) as producer:
        with pytest.raises(UsageError, match="at least 0"):
            async with producer.transaction(Message("T", b"x"), check_immunity_time_in_seconds=-1):
                pytest.fail("not prepared, and yet begun")
        assert SEND not in broker.counts


def unknown(_message: ReceivedMessage) -> TransactionState:
    return TransactionState.UNKNOWN
