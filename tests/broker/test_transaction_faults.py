"""Transactions beside faults: bad halves, ends that are repeated, moves at the same time, offsets of other clients."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog.testing
import trio

from tests.broker.transactions import COMMIT, EXPIRED, HALF, OK, OP, ROLLBACK, UNKNOWN, Life, asked_for
from tests.broker.wire_client import consumer, pull_ext
from tests.store.builders import message
from trimq.broker.config import BrokerConfig
from trimq.broker.services.transaction import check as check_module
from trimq.broker.services.transaction.half_queue import State
from trimq.broker.services.transaction.messages import check_body
from trimq.broker.store.message_store import Flag
from trimq.broker.store.types import PutCallback, PutMessageResult
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import decode_message
from trimq.protocol.property_text import join_properties
from trimq.protocol.transaction import GROUP

RESUME = RequestCode.RESUME_CHECK_HALF_MESSAGE


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    async with Life(tmp_path / "store").running() as running:
        await running.join()
        yield running


def bodies(checks: list[RemotingCommand]) -> list[bytes]:
    return [decode_message(bytes(check.body)).body for check in checks]


async def settle(life: Life) -> None:
    """All ends become durable, and the group's offsets pass them."""
    await life.advance(4)
    assert await life.broker.context.store.flush()
    await life.advance(1.1)
    await life.advance(1.1)


def put_half(life: Life, properties: dict[str, str]) -> None:
    """Store a half with any properties, as it may be in a store of Apache's broker."""
    text = {"REAL_TOPIC": "T", "REAL_QID": "0", "PGROUP": "P", "UNIQ_KEY": "u", "TRAN_MSG": "true"} | properties
    life.broker.context.store.put_message(
        message(b"bad", HALF, 0, properties=join_properties(text).encode()), lambda _: None
    )


# a topic that is gone


async def test_a_half_whose_topic_was_deleted(life: Life) -> None:
    """Its commit is refused and it waits: a message in a topic that does not exist could be read by no client."""
    committed, ended, rolled_back = [await life.prepare(b"%d" % number) for number in range(3)]
    assert (await life.end(committed)).code == OK
    assert (await life.client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})).code == OK
    with structlog.testing.capture_logs() as logs:
        refused = await life.end(ended)
    assert refused.code == ResponseCode.TOPIC_NOT_EXIST
    assert "the topic T does not exist on this broker: the half message at" in (refused.remark or "")
    assert "expires after transactionCheckMax checks" in (refused.remark or "")
    assert [entry["topic"] for entry in logs if entry["event"] == "half_message_without_topic"] == ["T"]
    assert life.broker.context.store.max_offset("T", 0) == 0
    assert life.pending == 2
    assert (await life.end(committed)).code == OK, "the same end again"
    assert (await life.end(rolled_back, ROLLBACK)).code == OK
    await life.client.send("T", b"creates it")
    assert (await life.end(ended)).code == OK
    assert await life.bodies() == [b"1", b"creates it"]
    assert life.pending == 0


async def test_one_that_waits_for_its_topic_too_long_can_be_resumed(life: Life) -> None:
    life.broker.configuration.change({"transactionCheckMax": "1"})
    await life.prepare()
    assert (await life.client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"})).code == OK
    await life.advance(7)
    (check,) = await life.round()
    assert (await life.answer(check, COMMIT)).code == ResponseCode.TOPIC_NOT_EXIST
    await life.round()
    (expired,) = await life.stored(EXPIRED, [0])
    assert (await life.client.ask(RESUME, {"msgId": expired.offset_message_id})).code == OK
    await life.client.send("T", b"creates it")
    await life.advance(7)
    (check,) = await life.round()
    assert (await life.answer(check, COMMIT)).code == OK
    assert await life.bodies() == [b"creates it", b"half"]


# bad halves

BAD = pytest.mark.parametrize(
    "properties",
    [
        {"REAL_TOPIC": OP},
        {"REAL_TOPIC": "rmq_sys_wheel_timer"},
        {"REAL_TOPIC": "../../evil"},
        {"REAL_TOPIC": "nul\0"},
        {"REAL_QID": "99999999999"},
        {"REAL_QID": "x"},
    ],
    ids=str,
)


@BAD
async def test_a_half_that_cannot_be_committed_is_moved_away(life: Life, properties: dict[str, str]) -> None:
    # guards the broker, which such a half ended at each round, and the halves behind it
    put_half(life, properties)
    good = await life.prepare(b"good")
    bad, _ = await life.stored(HALF, [0])
    place = good._replace(queue_offset=0, log_offset=bad.commit_log_offset)
    for state in (ROLLBACK, COMMIT):
        reply = await life.end(place, state)
        assert (reply.code, "cannot be committed" in str(reply.remark)) == (ResponseCode.SYSTEM_ERROR, True)
    await life.advance(30)
    assert bodies(await life.client_checks()) == [b"good"]
    (moved,) = await life.stored(EXPIRED, [0])
    assert moved.body == b"bad"
    assert moved.properties.items() >= properties.items()
    assert (life.pending, life.counters.expired, life.counters.lost) == (1, 1, 0)
    assert (await life.end(good)).code == OK
    assert await life.bodies() == [b"good"]
    await settle(life)
    assert life.offset(HALF) == 3


async def test_a_half_that_was_moved_away_before_a_kill_is_not_moved_again(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    async with life.running():
        put_half(life, {"REAL_TOPIC": OP})
        await life.round()
        await life.kill()
    async with life.running():
        assert life.pending == 0
        await life.round()
        assert len(await life.stored(EXPIRED, [0])) == 1


async def test_a_half_that_cannot_be_moved_away_now_is_moved_later(life: Life) -> None:
    put_half(life, {"REAL_TOPIC": OP})
    flags = life.broker.context.store.flags
    flags.set(Flag.DISK_FULL, "the disk is full")
    await life.round()
    assert (life.pending, life.counters.expired) == (1, 0)
    flags.clear(Flag.DISK_FULL)
    await life.round()
    assert (life.pending, life.counters.expired) == (0, 1)


async def test_a_fault_in_one_half_does_not_keep_the_others_from_their_check(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    # guards the broker and all other halves against what no one has thought of
    for number in range(100):
        await life.prepare(b"bad%d" % number)
    await life.prepare(b"good")

    def fails(half: Any, body: bytes, *more: Any) -> bytes:
        if body.startswith(b"bad"):
            raise ValueError("unforeseen")
        return check_body(half, body, *more)

    monkeypatch.setattr(check_module, "check_body", fails)
    with structlog.testing.capture_logs() as logged:
        await life.advance(30)
    assert bodies(await life.client_checks()) == [b"good"]
    assert life.counters.failed == 100
    events = [entry["event"] for entry in logged]
    assert events.count("half_message_not_checked") == 20
    assert {"event": "events_left_out", "count": 80, "log_level": "warning"} in logged
    monkeypatch.undo()
    await life.advance(30)
    assert len(await life.client_checks()) == 101


# ends that are repeated


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK], ids=["commit", "rollback"])
async def test_the_same_end_is_acknowledged_long_after_it_was_done(life: Life, state: int) -> None:
    # guards a producer that has lost the reply: an error would say that its message was not delivered
    half = await life.prepare()
    assert (await life.end(half, state)).code == OK
    for number in range(5):
        await life.end(await life.prepare(b"%d" % number), ROLLBACK)
    await settle(life)
    assert life.transactions.halves.first == 6
    assert (await life.end(half, state)).code == OK
    other = await life.end(half, ROLLBACK if state == COMMIT else COMMIT)
    word = "has been committed" if state == COMMIT else "has been rolled back"
    assert (other.code, word in str(other.remark)) == (ResponseCode.SYSTEM_ERROR, True)
    assert await life.bodies() == ([b"half"] if state == COMMIT else [])


@pytest.mark.parametrize("named", [0, 1, 2], ids=["first record", "between", "last record"])
async def test_the_same_end_of_a_half_that_was_stored_again(life: Life, named: int) -> None:
    records = [await life.prepare()]
    await life.advance(7)
    for _ in range(2):
        (check,) = await life.round()
        records.append(asked_for(check))
    assert (await life.end(records[1], check=True)).code == OK
    await settle(life)
    assert life.transactions.halves.first == 3
    assert (await life.end(records[named], check=True)).code == OK
    assert (await life.end(records[named], ROLLBACK, check=True)).code == ResponseCode.SYSTEM_ERROR
    assert await life.bodies() == [b"half"]


async def test_the_same_end_after_a_restart(tmp_path: Path) -> None:
    # what is allowed: the op record says that the half is ended, not how
    life = Life(tmp_path / "store")
    async with life.running():
        half = await life.prepare()
        assert (await life.end(half)).code == OK
        await settle(life)
    async with life.running():
        reply = await life.end(half)
        assert (reply.code, "it was ended" in str(reply.remark)) == (ResponseCode.SYSTEM_ERROR, True)
        assert await life.bodies() == [b"half"]


@pytest.mark.parametrize("state", [5, 99, -1, 4, 2**31 - 1])
async def test_an_end_with_another_state_is_refused(life: Life, state: int) -> None:
    # guards a producer with a fault: RocketMQ does not answer, so that it waits for the timeout
    half = await life.prepare()
    reply = await life.end(half, state)
    assert (reply.code, f"commitOrRollback is {state}" in str(reply.remark)) == (ResponseCode.INVALID_PARAMETER, True)
    assert (await life.end(half, UNKNOWN)).code == OK
    assert life.pending == 1


# at the same time


async def test_a_half_does_not_expire_while_it_is_stored_again(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the table: the copy would be pending for ever, or committed beside the expired record
    life.broker.configuration.change({"transactionCheckMax": "1"})
    await life.prepare()
    await life.advance(7)
    await life.round()
    *_, copy = await life.stored(HALF, [0])
    store = life.broker.context.store
    put, held = store.put_message, trio.Event()
    release: list[Callable[[], None]] = []

    def slow(inner: Any, on_done: PutCallback) -> PutMessageResult | None:
        result = put(inner, on_done)
        if inner.topic != HALF or result is None:
            return result
        release.append(lambda: on_done(result))
        held.set()
        return None

    monkeypatch.setattr(store, "put_message", slow)
    replies: list[int] = []

    async def resume() -> None:
        replies.append((await life.client.ask(RESUME, {"topic": HALF, "msgId": copy.offset_message_id})).code)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(resume)
        await held.wait()
        await life.broker.context.transaction_checks.check()
        release[0]()
    monkeypatch.undo()
    assert replies == [OK]
    assert not await life.stored(EXPIRED, [0])
    halves = life.transactions.halves
    assert [halves.state(offset) for offset in range(halves.end)] == [State.MOVED, State.MOVED, State.PENDING]
    await life.client_checks()
    (check,) = await life.round()
    assert (await life.answer(check, COMMIT)).code == OK
    await settle(life)
    assert (life.pending, len(halves), halves.moved) == (0, 0, 0)
    assert await life.bodies() == [b"half"]


async def test_all_that_wait_for_a_half_are_woken(life: Life) -> None:
    # guards ends that come before their halves can be read, more than one of which may wait
    took: list[float] = []

    async def wait() -> None:
        began = trio.current_time()
        await life.transactions.until_readable(1)
        took.append(trio.current_time() - began)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await life.prepare(b"0")
        await trio.testing.wait_all_tasks_blocked()
        assert not took
        await life.prepare(b"1")
    assert len(took) == 3
    assert max(took) < 0.9, "one of them has waited for the timeout"


# op records


async def test_op_records_of_a_store_that_takes_only_small_messages(tmp_path: Path) -> None:
    # guards ends: an op record that is larger than maxMessageSize is never stored, nor is any after it
    async with Life(tmp_path / "store", maxMessageSize="100").running() as life:
        for number in range(300):
            await life.end(await life.prepare(b"%d" % number), ROLLBACK)
        await settle(life)
        ops = await life.ops()
        assert b"".join(ops) == b"".join(b"%d," % number for number in range(300))
        assert 90 < max(map(len, ops)) <= 100
        assert (life.transactions.ops.waiting, life.offset(HALF)) == (0, 300)


async def test_op_records_that_cannot_be_stored_are_logged_within_a_budget(life: Life) -> None:
    # guards the log: with a full disk each end tries it again
    life.broker.configuration.change({"transactionOpMsgMaxSize": "1"})
    halves = [await life.prepare(b"%d" % number) for number in range(100)]
    flags = life.broker.context.store.flags
    flags.set(Flag.DISK_FULL, "the disk is full")
    with structlog.testing.capture_logs() as logged:
        for half in halves:
            assert (await life.end(half, ROLLBACK)).code == OK
    assert [entry["event"] for entry in logged].count("op_record_not_stored") == 20
    flags.clear(Flag.DISK_FULL)
    await settle(life)
    assert (life.transactions.ops.waiting, life.offset(HALF)) == (0, 100)


# the group's offsets


RESET = {"topic": HALF, "group": GROUP, "timestamp": -1, "isForce": "true"}
FORGED: list[tuple[int, dict[str, Any]]] = [
    (15, {"consumerGroup": GROUP, "topic": HALF, "queueId": 0, "commitOffset": 2}),
    (11, pull_ext(HALF, 0, group=GROUP, sysFlag=5, commitOffset=2)),
    (361, pull_ext(HALF, 0, group=GROUP, sysFlag=5, commitOffset=2)),
    (11, pull_ext(HALF, 3, group=GROUP, sysFlag=7, commitOffset=2)),  # one that would be held
    (314, {"srcGroup": "G", "destGroup": GROUP, "topic": HALF, "offline": "true"}),
    (314, {"srcGroup": "G", "destGroup": GROUP, "topic": "", "offline": "true"}),
    (222, RESET),
    (222, RESET | {"queueId": 0, "offset": 2}),
]
"""All requests that set offsets."""


async def _forge(life: Life) -> None:
    """Set the offset of the transactions' group by each of them: all are refused."""
    client, offsets = life.client, life.broker.context.offsets
    life.broker.context.store.create_queues(HALF, 1)
    assert (await client.heartbeat("x", consumers=[consumer(GROUP, HALF), consumer("G", HALF)])).code == OK
    assert (await client.ask(15, FORGED[0][1] | {"consumerGroup": "G"})).code == OK
    before, refused = dict(offsets.offset_table.get(f"{HALF}@{GROUP}", {})), offsets.refused
    for code, ext in FORGED:
        reply = await client.ask(code, ext)
        assert (reply.code, GROUP in str(reply.remark)) == (ResponseCode.NO_PERMISSION, True), (code, ext)
    assert offsets.offset_table.get(f"{HALF}@{GROUP}", {}) == before
    assert offsets.reset_offset_table == {}
    assert offsets.refused == refused + 4, "commits"
    assert (await client.pull(HALF, group=GROUP)).code == OK, "without a commit it is a pull like others"


@pytest.mark.parametrize("full", [False, True], ids=["fast paths", "full paths"])
async def test_no_request_sets_offsets_of_the_group(tmp_path: Path, full: bool) -> None:
    # guards the log of a slave, which is kept from the group's offset on
    life = Life(tmp_path / "store", useServerSideResetOffset="true")
    async with life.running():
        if full:
            life.take_full_paths()
        halves = [await life.prepare(b"%d" % number) for number in range(3)]
        await _forge(life)  # the group has no offset yet, so the fast path would not commit a first one anyway
        await life.end(halves[0], ROLLBACK)
        await settle(life)
        assert life.offset(HALF) == 1
        await _forge(life)
        assert life.offset(HALF) == 1


@pytest.mark.parametrize("wait", [0, 3], ids=["at once", "later"])
async def test_a_client_cannot_end_halves_by_an_offset_of_the_group(tmp_path: Path, wait: int) -> None:
    # guards halves: what is below the group's offset counts as ended at the next start
    life = Life(tmp_path / "store", useServerSideResetOffset="true")
    async with life.running():
        for number in range(3):
            await life.prepare(b"%d" % number)
        await _forge(life)
        offsets = life.broker.context.offsets
        offsets.assign_reset(HALF, GROUP, 0, 2)  # as from a state file of an earlier version
        await life.advance(wait)
        await offsets.persisted()
        await life.kill()
        state = msgspec.json.decode((life.directory / "config" / "consumerOffset.json").read_bytes())
        assert state["offsetTable"].get(f"{HALF}@{GROUP}", {}) == {}
        assert state["offsetTable"][f"{HALF}@G"] == {"0": 2}
    async with life.running():
        assert life.pending == 3
        await life.join()
        await life.advance(7)
        assert bodies(await life.round()) == [b"0", b"1", b"2"]


async def test_an_offset_beyond_an_empty_half_queue_is_set_to_0(tmp_path: Path) -> None:
    # guards the first halves of a new half queue
    life = Life(tmp_path / "store")
    async with life.running():
        await life.client.send("T", b"plain")
    path = life.directory / "config" / "consumerOffset.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode({"offsetTable": {f"{HALF}@{GROUP}": {"0": 2}}}))
    async with life.running():
        await life.advance(1.1)
        assert life.offset(HALF) == 0
        for number in range(3):
            await life.prepare(b"%d" % number)
        await life.advance(6)
        await life.kill()
    async with life.running():
        assert life.pending == 3


# settings


def test_defaults() -> None:
    # guards the values of Apache's BrokerConfig: operators know them
    config = BrokerConfig()
    assert config.reject_transaction_message is False
    assert config.transaction_time_out == 6000
    assert config.transaction_check_max == 15
    assert config.transaction_check_interval == 30000
    assert config.transaction_op_msg_max_size == 4096
    assert config.transaction_op_batch_interval == 3000
