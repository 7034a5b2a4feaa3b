"""Half messages and their ends, through a real broker; the expected bytes are those that Apache's 5.5.0 has stored."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker.transactions import COMMIT, HALF, OK, OP, ROLLBACK, UNKNOWN, Life, Place, end_ext
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.sysflag import TRANSACTION_COMMIT

SYNC = {"flushDiskType": "SYNC_FLUSH"}
POOL = {"transientStorePoolEnable": "true"}
MODES = pytest.mark.parametrize("changes", [{}, SYNC, POOL], ids=["async", "sync", "pool"])


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    async with Life(tmp_path / "store").running() as running:
        yield running


# half messages


async def test_a_half_is_stored_and_answered_as_apaches_broker_does(life: Life) -> None:
    # guards what the producer sends with its commit, and the properties by which Apache's broker would check it
    reply = await life.client.send(
        "T",
        b"commit",
        {"UNIQ_KEY": "U1", "PGROUP": "P", "TAGS": "A", "TRAN_MSG": "true", "KEYS": "k1 k2", "WAIT": "true", "a": "b"},
        queue_id=2,
        sys_flag=4,
        flag=0,
    )
    ext = reply.ext_fields()
    assert (reply.code, ext["queueId"], ext["queueOffset"], ext["transactionId"]) == (0, "2", "0", "U1")
    (half,) = await life.stored(HALF, [0])
    assert ext["msgId"] == half.offset_message_id
    assert (half.sys_flag, half.queue_id, half.prepared_transaction_offset) == (0, 0, 0)
    assert half.properties == {
        "MSG_REGION": "DefaultRegion",
        "UNIQ_KEY": "U1",
        "CLUSTER": "DefaultCluster",
        "PGROUP": "P",
        "__transactionId__": "U1",
        "TAGS": "A",
        "TRAN_MSG": "true",
        "KEYS": "k1 k2",
        "WAIT": "true",
        "a": "b",
        "TRACE_ON": "true",
        "REAL_TOPIC": "T",
        "REAL_QID": "2",
    }
    assert not await life.bodies()


@pytest.mark.parametrize(
    ("sys_flag", "properties", "v1"),
    [(4, {"TRAN_MSG": "true"}, False), (0, {"TRAN_MSG": "TRUE"}, True), (5, {}, False)],
    ids=["both", "property", "flag"],
)
async def test_a_half_is_marked_by_its_flag_or_its_property(
    life: Life, sys_flag: int, properties: dict[str, str], v1: bool
) -> None:
    # guards old clients, which send only the property, and the group for the check, which others may not send
    code = RequestCode.SEND_MESSAGE if v1 else RequestCode.SEND_MESSAGE_V2
    reply = await life.client.send("T", b"x", properties, sys_flag=sys_flag, v1=v1, code=code)
    assert reply.code == OK
    (half,) = await life.stored(HALF, [0])
    assert half.sys_flag == sys_flag & 1
    assert half.properties["PGROUP"] == "P"
    assert half.properties["TRAN_MSG"] == "true"
    assert half.properties["__transactionId__"] == half.properties["UNIQ_KEY"]


@pytest.mark.parametrize(
    ("topic", "properties", "more"),
    [
        ("T", {"TRAN_MSG": "false"}, {}),
        ("T", {"TRAN_MSG": "true", "DELAY": "5"}, {"reconsume_times": 1}),
        ("%RETRY%G", {"TRAN_MSG": "true"}, {"reconsume_times": 1}),
        ("T", {"PGROUP": "P"}, {"sys_flag": 8}),
    ],
)
async def test_these_are_no_halves(life: Life, topic: str, properties: dict[str, str], more: dict[str, Any]) -> None:
    # guards messages of transactions that consumers send to their retry topic: as a half they would be lost
    life.broker.context.groups.find("G") or await life.client.heartbeat(
        "c", consumers=[{"groupName": "G", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
                         "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": []}],
    )  # fmt: skip
    assert (await life.client.send(topic, b"x", properties, **more)).code == OK
    assert not await life.stored(HALF, [0])
    assert not life.pending


async def test_a_client_cannot_claim_to_be_a_half_that_was_stored_again(life: Life) -> None:
    # guards another producer's half: with its offset as origin, this one would end it
    forged = {"TRAN_PREPARED_QUEUE_OFFSET": "0", "TRANSACTION_CHECK_TIMES": "15", "REAL_TOPIC": "SCHEDULE_TOPIC_XXXX"}
    await life.prepare(properties=forged)
    (half,) = await life.stored(HALF, [0])
    assert half.properties["REAL_TOPIC"] == "T"
    assert not half.properties.keys() & {"TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES"}


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
async def test_a_delayed_half_is_refused(life: Life, name: str) -> None:
    # guards against the loss of such messages, which RocketMQ stores where they can never be committed
    reply = await life.client.send("T", b"x", {"TRAN_MSG": "true", name: "3"}, sys_flag=4)
    assert (reply.code, name in str(reply.remark)) == (ResponseCode.MESSAGE_ILLEGAL, True)
    assert (await life.client.send("T", b"x", {"TRAN_MSG": "true", "DELAY": "0"}, sys_flag=4)).code == OK


async def test_the_limits_of_halves(life: Life) -> None:
    # guards the room for the properties that a half gets when it is stored again, and the memory of the table
    long = {"TRAN_MSG": "true", "UNIQ_KEY": "u", "a": "x" * 32_500}
    assert (await life.client.send("T", b"x", long, sys_flag=4)).code == ResponseCode.MESSAGE_ILLEGAL
    assert (await life.client.send("T", b"x", long | {"TRAN_MSG": "none"})).code == OK
    reply = await life.client.send("T", b"x", {"PGROUP": "P"}, sys_flag=12)
    assert (reply.code, reply.remark) == (
        ResponseCode.MESSAGE_ILLEGAL,
        "the sysFlag says that the message is rolled back",
    )
    life.broker.configuration.change({"maxPendingHalfMessages": "1"})
    half = await life.prepare(b"1")
    reply = await life.client.send("T", b"2", {"TRAN_MSG": "true"}, sys_flag=4)
    assert (reply.code, "maxPendingHalfMessages" in str(reply.remark)) == (ResponseCode.SYSTEM_BUSY, True)
    await life.end(half)
    await life.prepare(b"3")


async def test_transactions_can_be_refused(life: Life) -> None:
    life.broker.configuration.change({"rejectTransactionMessage": "true"})
    reply = await life.client.send("T", b"x", {"TRAN_MSG": "true"}, sys_flag=4)
    assert (reply.code, "rejectTransactionMessage" in str(reply.remark)) == (ResponseCode.NO_PERMISSION, True)


async def test_a_batch_is_not_part_of_a_transaction(life: Life) -> None:
    body = encode_batch([(0, b"one", b"")])
    for more in ({"sys_flag": 4}, {"properties": {"TRAN_MSG": "true"}}):
        reply = await life.client.send("T", body, code=RequestCode.SEND_BATCH_MESSAGE, batch="true", **more)
        assert reply.code == ResponseCode.MESSAGE_ILLEGAL
    assert not await life.bodies()


# ends


@MODES
async def test_a_commit_stores_the_message_and_a_rollback_does_not(tmp_path: Path, changes: dict[str, str]) -> None:
    async with Life(tmp_path / "store", **changes).running() as life:
        properties = {"TAGS": "A", "KEYS": "k", "a": "b"}
        first = await life.prepare(b"first", properties={"PGROUP": "P"})
        half = await life.prepare(b"commit", properties=properties, queue_id=2)
        assert (await life.end(first, ROLLBACK)).code == OK
        assert (await life.end(half, COMMIT)).code == OK
        await life.advance(4)
        (message,) = await life.stored()
        assert (message.queue_id, message.sys_flag, message.body) == (2, TRANSACTION_COMMIT, b"commit")
        assert message.prepared_transaction_offset == half.log_offset
        assert message.properties == {
            "MSG_REGION": "DefaultRegion",
            "UNIQ_KEY": half.message_id,
            "CLUSTER": "DefaultCluster",
            "PGROUP": "P",
            "__transactionId__": half.message_id,
            "TAGS": "A",
            "TRAN_MSG": "true",
            "KEYS": "k",
            "WAIT": "true",
            "a": "b",
            "TRACE_ON": "true",
        }
        assert [each.body for each in await life.client.pull_messages("T", queueId=2)] == [b"commit"]
        assert life.pending == 0
        assert (life.counters.commits, life.counters.rollbacks) == (1, 1)


async def test_ends_are_written_in_op_records_like_apaches(life: Life) -> None:
    # guards that Apache's broker finds the ends: topic, queue, tag and body; and that they come after the interval
    halves = [await life.prepare(b"%d" % number) for number in range(4)]
    for half, state in zip(halves, (COMMIT, ROLLBACK, COMMIT, UNKNOWN), strict=True):
        assert (await life.end(half, state)).code == OK
    assert not await life.ops()
    await life.advance(3)
    (op,) = await life.stored(OP, [0])
    assert (op.body, op.properties, op.sys_flag) == (b"0,1,2,", {"WAIT": "true", "TAGS": "d"}, 0)
    units = await life.broker.context.store.queue_units(OP, 0, 0, 1)
    assert units[0][2] == ord("d")
    assert life.pending == 1


async def test_an_op_record_is_written_when_it_is_full(life: Life) -> None:
    life.broker.configuration.change({"transactionOpMsgMaxSize": "4"})
    for number in range(5):
        await life.end(await life.prepare(b"%d" % number), ROLLBACK)
    assert await life.ops() == [b"0,1,", b"2,3,"]
    await life.advance(3)
    assert await life.ops() == [b"0,1,", b"2,3,", b"4,"]


async def test_the_groups_offsets_follow_what_is_durable(life: Life) -> None:
    # guards that a restart, here or of Apache's broker, begins behind the halves that are ended, and not further
    halves = [await life.prepare(b"%d" % number) for number in range(3)]
    for half in (halves[0], halves[2]):
        await life.end(half)
    await life.advance(2)
    assert (life.offset(HALF), life.offset(OP)) == (-1, -1)
    await life.advance(1)  # the op record
    assert await life.broker.context.store.flush()
    await life.advance(1)
    assert (life.offset(HALF), life.offset(OP)) == (1, -1)  # the op record names half 2, which is behind half 1
    await life.end(halves[1])
    await life.advance(4)
    assert await life.broker.context.store.flush()
    await life.advance(1)
    assert (life.offset(HALF), life.offset(OP)) == (3, 2)


@MODES
async def test_a_half_is_ended_once(tmp_path: Path, changes: dict[str, str]) -> None:
    # guards against a second delivery: a client repeats a commit whose reply was lost
    async with Life(tmp_path / "store", **changes).running() as life:
        half, other = await life.prepare(b"a"), await life.prepare(b"b")
        for wait in (0, 0, 4, 0):
            assert (await life.end(half, COMMIT)).code == OK
            assert (await life.end(other, ROLLBACK)).code == OK
            await life.advance(wait)
        assert await life.bodies() == [b"a"]
        refused = [await life.end(half, ROLLBACK), await life.end(other, COMMIT)]
        assert [reply.code for reply in refused] == [ResponseCode.SYSTEM_ERROR] * 2
        assert await life.bodies() == [b"a"]
        assert life.counters.refused == 2


async def test_two_commits_at_the_same_time(tmp_path: Path) -> None:
    # guards the time between a commit and its sync: the second one must not be stored too
    async with Life(tmp_path / "store", **SYNC).running() as life:
        half = await life.prepare()
        one = await life.client.post(RequestCode.END_TRANSACTION, end_ext(half, COMMIT))
        two = await life.client.post(RequestCode.END_TRANSACTION, end_ext(half, COMMIT))
        codes = [(await life.client.reply(one)).code, (await life.client.reply(two)).code]
        assert codes[0] == OK
        assert codes[1] in (OK, ResponseCode.SYSTEM_ERROR)
        assert await life.bodies() == [b"half"]


async def test_ends_without_a_reply(life: Life) -> None:
    # guards Java clients, which end transactions by one-way requests: a reply would not match any request of theirs
    half, other, third = [await life.prepare(b"%d" % number) for number in range(3)]
    for each, state in ((half, COMMIT), (other, UNKNOWN), (third, ROLLBACK), (Place(9, 9, ""), COMMIT)):
        await life.client.post(RequestCode.END_TRANSACTION, end_ext(each, state), flag=2)
    assert (await life.end(half, COMMIT)).code == OK
    assert not life.client.replies
    assert await life.bodies() == [b"0"]
    assert life.pending == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"producerGroup": "Q"}, "another producer group"),
        ({"tranStateTableOffset": 1}, "the queue offset 0, the request 1"),
        ({"tranStateTableOffset": 2**63 - 1}, "the queue offset 0"),
        ({"commitLogOffset": 1}, "no message starts"),
        ({"commitLogOffset": -1}, "no message starts"),
        ({"commitLogOffset": 2**63 - 1}, "no message starts"),
        ({"commitLogOffset": -(2**63)}, "no message starts"),
    ],
)
@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
async def test_an_end_that_does_not_match_is_refused(
    life: Life, changes: dict[str, Any], words: str, state: int
) -> None:
    half = await life.prepare()
    reply = await life.end(half, state, **changes)
    assert (reply.code, words in str(reply.remark)) == (ResponseCode.SYSTEM_ERROR, True), reply.remark
    assert life.pending == 1
    assert not await life.bodies()
    assert (await life.end(half)).code == OK


async def test_only_halves_can_be_ended(life: Life) -> None:
    # guards other topics: an end with a message's place must not publish that message again
    reply = await life.client.send("T", b"plain", {"PGROUP": "P"})
    ext = reply.ext_fields()
    place = Place(int(ext["queueOffset"]), int(ext["msgId"][16:], 16), "u")
    refused = await life.end(place)
    assert (refused.code, "no half message" in str(refused.remark)) == (ResponseCode.SYSTEM_ERROR, True)
    assert await life.bodies() == [b"plain"]


async def test_an_end_with_missing_or_impossible_fields(life: Life) -> None:
    half = await life.prepare()
    for changes in ({"commitLogOffset": None}, {"tranStateTableOffset": "x"}, {"commitOrRollback": 2**40}):
        assert (await life.end(half, COMMIT, **changes)).code not in (OK, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
    assert life.pending == 1


async def test_an_end_that_comes_too_late(life: Life) -> None:
    # guards CHECK_IMMUNITY_TIME_IN_SECONDS: after it only the answer to a check counts, as in RocketMQ
    own = await life.prepare(b"own", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "20"})
    short = await life.prepare(b"short", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "1"})
    usual = await life.prepare(b"usual")
    await life.advance(6)
    assert (await life.end(short)).code == OK  # at least transactionTimeOut
    await life.advance(14.001)
    for state in (COMMIT, ROLLBACK):
        reply = await life.end(own, state)
        assert (reply.code, "20000 ms" in str(reply.remark)) == (ResponseCode.ILLEGAL_OPERATION, True)
    assert (await life.end(usual)).code == OK
    assert (await life.end(own, check=True)).code == OK
    assert await life.bodies() == [b"own", b"short", b"usual"]


async def test_a_commit_that_cannot_be_stored_can_be_repeated(life: Life) -> None:
    # guards the half: a refused commit has not ended it
    half = await life.prepare(b"x" * 100)
    life.broker.configuration.change({"maxMessageSize": "50"})
    reply = await life.end(half)
    assert reply.code == ResponseCode.MESSAGE_ILLEGAL
    assert life.pending == 1
    life.broker.configuration.change({"maxMessageSize": "4000000"})
    assert (await life.end(half)).code == OK
    assert await life.bodies() == [b"x" * 100]


async def test_a_commit_right_after_a_half_that_cannot_be_read_yet(tmp_path: Path) -> None:
    # guards the transient store pool: a half is acknowledged up to 200 ms before it can be read
    async with Life(tmp_path / "store", **POOL, commitIntervalCommitLog="600").running() as life:
        half = await life.prepare()
        assert life.transactions.halves.end == 0, "the half can be read already: the test shows nothing"
        assert (await life.end(half)).code == OK
        assert await life.bodies() == [b"half"]


async def test_the_text_of_a_refusal_says_what_happened(life: Life) -> None:
    half = await life.prepare(b"a")
    await life.end(half, COMMIT)
    assert "has been committed" in str((await life.end(half, ROLLBACK)).remark)
    half = await life.prepare(b"b")
    await life.end(half, ROLLBACK)
    assert "has been rolled back" in str((await life.end(half, COMMIT)).remark)


async def test_a_flood_of_ends(life: Life) -> None:
    # guards other clients and the memory: ends of halves that are there, ended, not there, and of other groups
    halves = [await life.prepare(b"%d" % number) for number in range(50)]
    numbers = []
    for turn in range(60):
        for number, half in enumerate(halves):
            kinds: list[dict[str, Any]] = [
                {},
                {"producerGroup": "Q"},
                {"tranStateTableOffset": turn},
                {"commitLogOffset": half.log_offset + turn + 1},
                {"commitLogOffset": (1 << 62) + turn},
            ]
            changes = kinds[(turn + number) % len(kinds)]
            state = COMMIT if number % 2 else ROLLBACK
            numbers.append(await life.client.post(RequestCode.END_TRANSACTION, end_ext(half, state) | changes))
    codes = {(await life.client.reply(number)).code for number in numbers}
    assert codes == {OK, ResponseCode.SYSTEM_ERROR}
    assert await life.bodies() == sorted(b"%d" % number for number in range(1, 50, 2))
    await life.advance(4)
    assert await life.broker.context.store.flush()
    await life.advance(1)
    assert (life.pending, len(life.transactions.halves), len(life.transactions.settled)) == (0, 0, 0)
