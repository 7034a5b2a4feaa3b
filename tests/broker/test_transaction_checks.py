"""Checks of half messages that were not ended, through a real broker with a clock that the test moves."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.transactions import (
    CHECK,
    COMMIT,
    EXPIRED,
    HALF,
    OK,
    ROLLBACK,
    UNKNOWN,
    Life,
    asked_for,
    end_ext,
    place_of,
)
from tests.broker.wire_client import WireClient
from trimq.broker.services.transaction import check as check_module
from trimq.broker.store.message_store import Flag
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import decode_message

SYNC = {"flushDiskType": "SYNC_FLUSH"}
POOL = {"transientStorePoolEnable": "true"}


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    async with Life(tmp_path / "store").running() as running:
        await running.join()
        yield running


def times(check: RemotingCommand) -> str:
    return decode_message(bytes(check.body)).properties["TRANSACTION_CHECK_TIMES"]


def bodies(checks: list[RemotingCommand]) -> list[bytes]:
    return [decode_message(bytes(check.body)).body for check in checks]


async def test_a_check_names_the_half_that_was_stored_again(life: Life) -> None:
    # guards the bytes that producers of all languages read; the values are those of Apache's 5.5.0
    half = await life.prepare(b"body", properties={"TAGS": "A"}, queue_id=3)
    await life.advance(6.001)
    (check,) = await life.round()
    ext = check.ext_fields()
    message = decode_message(bytes(check.body))
    first, again = await life.stored(HALF, [0])
    assert ext == {
        "topic": HALF,
        "bname": "broker-a",
        "tranStateTableOffset": "1",
        "commitLogOffset": str(again.commit_log_offset),
        "msgId": half.message_id,
        "transactionId": half.message_id,
        "offsetMsgId": again.offset_message_id,
    }
    assert check.is_oneway
    assert (message.topic, message.queue_id, message.queue_offset) == ("T", 3, 1)
    assert (message.commit_log_offset, message.body) == (again.commit_log_offset, b"body")
    assert message.properties == again.properties
    assert again.properties == first.properties | {"TRANSACTION_CHECK_TIMES": "1", "TRAN_PREPARED_QUEUE_OFFSET": "0"}
    assert (again.born_timestamp, again.born_host) == (first.born_timestamp, first.born_host)


@pytest.mark.parametrize("changes", [{}, SYNC, POOL], ids=["async", "sync", "pool"])
async def test_the_answer_ends_the_half(tmp_path: Path, changes: dict[str, str]) -> None:
    async with Life(tmp_path / "store", **changes).running() as life:
        await life.join()
        for body in (b"commit", b"rollback", b"unknown"):
            await life.prepare(body)
        await life.stored(HALF, [0])
        await life.advance(7)
        states = {b"commit": COMMIT, b"rollback": ROLLBACK, b"unknown": UNKNOWN}
        with trio.fail_after(50):
            checks = await life.round()
        while len(checks) < 3:  # with the pool, a check goes out once the half stored again can be read
            checks.append(await life.client.asked_for(CHECK))
        for check, body in zip(checks, bodies(checks), strict=True):
            await life.stored(HALF, [0])
            assert (await life.answer(check, states[body])).code == OK
        await life.advance(4)
        assert await life.bodies() == [b"commit"]
        assert life.pending == 1
        # 0 to 2 were stored again as 3 to 5; the op record names the first record too
        assert await life.ops() == [b"0,3,1,4,"]


async def test_when_halves_are_checked(life: Life) -> None:
    # guards transactionTimeOut, CHECK_IMMUNITY_TIME_IN_SECONDS, and that these are counted by the broker's clock
    await life.prepare(b"usual")
    await life.prepare(b"short", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "2"})
    await life.prepare(b"long", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"})
    await life.prepare(b"-1", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "-1"})
    await life.prepare(b"ahead", born_timestamp=life.clock.wall_ms() + 3_600_000)
    await life.prepare(b"behind", born_timestamp=life.clock.wall_ms() - 3_600_000)
    seen: list[list[bytes]] = []
    for seconds in (2, 0.001, 3.999, 0.001, 53.999, 0.001):
        await life.advance(seconds)
        checks = await life.round()
        seen.append(sorted(bodies(checks)))
        for check in checks:
            await life.answer(check, ROLLBACK)
    # The automatic rounds, every 30 s, find nothing: the immune half is due only afterwards.
    assert seen == [[], [b"short"], [], [b"-1", b"ahead", b"behind", b"usual"], [], [b"long"]]


async def test_a_round_comes_at_every_interval(life: Life) -> None:
    await life.prepare()
    sent = []
    for seconds in (29.999, 0.001, 30):
        await life.advance(seconds)
        sent.append(life.counters.checks)
    life.broker.configuration.change({"transactionCheckInterval": "1000"})
    for seconds in (30, 1):
        await life.advance(seconds)
        sent.append(life.counters.checks)
    assert sent == [0, 1, 2, 3, 4]


async def test_a_clock_that_was_set_back_delays_no_check(life: Life) -> None:
    # guards against halves that wait for the hour by which the clock was set back
    await life.prepare()
    life.clock.set_wall_ms(life.clock.wall_ms() - 3_600_000)
    assert len(await life.round()) == 1


async def test_each_check_goes_to_one_producer_and_the_next_one_to_the_next(life: Life) -> None:
    # guards a half whose producer is there and never answers: another one of the group must get its turn
    await life.prepare(b"half")
    async with WireClient.connect(life.broker.endpoint) as other:
        await life.join(client=other, name="other")
        turns = []
        await life.advance(7)
        for _ in range(4):
            mine = len(await life.round())
            theirs = len([other.asked.pop() for _ in range(len(other.asked))])
            turns.append((mine, theirs))
        assert sorted(turns[:2]) == [(0, 1), (1, 0)]
        assert turns[2:] == turns[:2]


async def test_a_producer_that_does_not_read_is_passed_over(life: Life) -> None:
    # guards the others: a check must not wait for a client that is stuck, nor be queued for it without a limit
    await life.prepare(b"half")
    await life.advance(7)
    async with WireClient.connect(life.broker.endpoint) as other:
        await life.join(client=other, name="other")
        stuck = life.broker.context.producers.channels("P")[0].connection
        stuck.paused = True
        for number in range(2):
            assert len(await life.round()) == 0
            assert len(other.asked) == number + 1
        for channel in life.broker.context.producers.channels("P"):
            channel.connection.paused = True
        await life.round()
        assert len(other.asked) == 2
        assert (life.counters.checks, life.counters.unanswered) == (2, 1)
        for channel in life.broker.context.producers.channels("P"):
            channel.connection.paused = False


async def test_only_checks_that_were_sent_count(life: Life) -> None:
    # guards halves of a producer that is offline for long: RocketMQ ends them after 15 rounds
    life.broker.configuration.change({"transactionCheckMax": "2"})
    await life.prepare()
    await life.client.ask(RequestCode.UNREGISTER_CLIENT, {"clientID": "c", "producerGroup": "P"})
    await life.advance(7)
    for _ in range(20):
        assert not await life.round()
    assert (life.counters.checks, life.counters.moved, life.counters.unanswered) == (0, 0, 20)
    await life.join()
    seen = [times(check) for _ in range(3) for check in await life.round()]
    assert seen == ["1", "2"]
    assert life.counters.expired == 1


async def test_a_half_that_was_checked_too_often_is_moved(life: Life) -> None:
    life.broker.configuration.change({"transactionCheckMax": "3"})
    half = await life.prepare(b"never", properties={"TAGS": "A"})
    await life.advance(7)
    checks = [check for _ in range(3) for check in await life.round()]
    assert [times(check) for check in checks] == ["1", "2", "3"]
    assert not await life.round()
    (moved,) = await life.stored(EXPIRED, [0])
    *_, last = await life.stored(HALF, [0])
    assert (moved.body, moved.properties) == (b"never", last.properties)
    assert life.broker.context.topics.get(EXPIRED) is not None
    assert life.pending == 0
    # no end counts any more, whichever of its records it names
    for place in (half, *map(asked_for, checks)):
        reply = await life.end(place, check=True)
        assert (reply.code, "checked too often" in str(reply.remark)) == (ResponseCode.SYSTEM_ERROR, True)
    assert not await life.bodies()
    await life.advance(4)
    assert await life.ops() == [b"0,3,"]


async def test_the_first_record_can_be_ended_after_the_half_was_stored_again(life: Life) -> None:
    # guards long transactions: their commit names the first record, and must end all of them, once
    half = await life.prepare()
    await life.advance(7)
    (one,) = await life.round()
    (two,) = await life.round()
    assert (await life.end(half)).code == OK
    assert (await life.answer(one, COMMIT)).code == OK
    assert (await life.answer(two, COMMIT)).code == OK
    assert (await life.answer(two, ROLLBACK)).code == ResponseCode.SYSTEM_ERROR
    assert not await life.round()
    (message,) = await life.stored()
    assert message.prepared_transaction_offset == half.log_offset
    await life.advance(4)
    assert await life.ops() == [b"0,2,"]


async def test_a_slow_answer_to_an_older_check_counts(life: Life) -> None:
    await life.prepare()
    await life.advance(7)
    (one,) = await life.round()
    await life.round()
    assert (await life.answer(one, COMMIT)).code == OK
    assert not await life.round()
    (message,) = await life.stored()
    assert message.prepared_transaction_offset == asked_for(one).log_offset


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
async def test_an_end_while_the_half_is_stored_again(life: Life, monkeypatch: pytest.MonkeyPatch, state: int) -> None:
    # guards the time between the put of a copy and its result, as under SYNC_FLUSH: the copy shares the end
    half = await life.prepare()
    store = life.broker.context.store
    put, held = store.put_message, trio.Event()
    release: list[Callable[[], None]] = []

    def slow(message: Any, on_done: PutCallback) -> PutMessageResult | None:
        result = put(message, on_done)
        if message.topic != HALF or result is None:
            return result
        release.append(lambda: on_done(result))
        held.set()
        return None

    monkeypatch.setattr(store, "put_message", slow)
    await life.advance(7)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.broker.context.transaction_checks.check)
        await held.wait()
        assert (await life.end(half, state)).code == OK
        release[0]()
    monkeypatch.undo()
    assert life.pending == 0
    assert not await life.round()
    assert not life.counters.checks
    assert await life.bodies() == ([b"half"] if state == COMMIT else [])
    await life.advance(3)
    assert await life.ops() == [b"0,0,1,"]


async def test_a_commit_that_takes_longer_than_a_round(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    # guards a commit that is under way when the half is stored again; if it fails, the copy is what is pending
    store = life.broker.context.store
    put = store.put_message
    release: list[Callable[[], None]] = []

    def slow(message: Any, on_done: PutCallback) -> PutMessageResult | None:
        if message.topic not in ("T", HALF):
            return put(message, on_done)
        refused = PutMessageResult(PutMessageStatus.OS_PAGE_CACHE_BUSY, remark="busy")
        result = refused if message.topic == "T" else put(message, on_done)
        assert result is not None
        release.append(lambda: on_done(result))
        return None

    life.take_full_paths()
    half = await life.prepare()
    monkeypatch.setattr(store, "put_message", slow)
    await life.advance(7)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.broker.context.transaction_checks.check)
        await life.settled()
        commit = await life.client.post(RequestCode.END_TRANSACTION, end_ext(half, COMMIT))
        await life.settled()
        again = await life.end(half)
        assert (again.code, "is being committed" in str(again.remark)) == (ResponseCode.SYSTEM_ERROR, True)
        copy, committed = release
        copy()
        committed()
    assert (await life.client.reply(commit)).code == ResponseCode.SYSTEM_BUSY
    monkeypatch.undo()
    assert life.pending == 1
    assert len(await life.round()) == 2  # that of the copy, and that of this round
    assert (await life.end(half)).code == OK
    assert await life.bodies() == [b"half"]


async def test_an_expired_half_can_be_resumed(life: Life) -> None:
    life.broker.configuration.change({"transactionCheckMax": "1"})
    await life.prepare(b"half")
    await life.advance(7)
    await life.round()
    await life.round()
    (expired,) = await life.stored(EXPIRED, [0])
    request = {"topic": EXPIRED, "msgId": expired.offset_message_id}
    assert (await life.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, request)).code == OK
    again = await life.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, request)
    assert (again.code, "resumed already" in str(again.remark)) == (ResponseCode.SYSTEM_ERROR, True)
    *_, half = await life.stored(HALF, [0])
    assert half.properties["TRANSACTION_CHECK_TIMES"] == "0"
    assert "TRAN_PREPARED_QUEUE_OFFSET" not in half.properties
    await life.advance(7)
    (check,) = await life.round()
    assert (await life.answer(check, COMMIT)).code == OK
    assert await life.bodies() == [b"half"]


async def test_a_pending_half_can_be_resumed(life: Life) -> None:
    half = await life.prepare()
    await life.advance(7)
    await life.round()
    (check,) = await life.round()
    assert times(check) == "2"
    last = check.ext_fields()["offsetMsgId"]
    request = {"topic": HALF, "msgId": last}
    assert (await life.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, request)).code == OK
    (check,) = await life.round()
    assert times(check) == "1"
    refused = await life.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, request)
    assert (refused.code, "stored again at a later offset" in str(refused.remark)) == (ResponseCode.SYSTEM_ERROR, True)
    assert (await life.end(half)).code == OK
    assert await life.bodies() == [b"half"]


async def test_a_half_is_stored_again_by_one_at_a_time(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    # guards against two copies of a half, which could be committed one after the other
    await life.prepare()
    store = life.broker.context.store
    (stored,) = await life.stored(HALF, [0])
    put, held = store.put_message, trio.Event()
    release: list[Callable[[], None]] = []

    def slow(message: Any, on_done: PutCallback) -> PutMessageResult | None:
        result = put(message, on_done)
        assert result is not None
        release.append(lambda: on_done(result))
        held.set()
        return None

    monkeypatch.setattr(store, "put_message", slow)
    await life.advance(7)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.broker.context.transaction_checks.check)
        await held.wait()
        request = {"topic": HALF, "msgId": stored.offset_message_id}
        refused = await life.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, request)
        assert (refused.code, "being stored again" in str(refused.remark)) == (ResponseCode.SYSTEM_ERROR, True)
        release[0]()
    monkeypatch.undo()
    one, two = await life.round()  # that of the round before, and that of this one
    assert (times(one), times(two)) == ("1", "2")
    assert (await life.answer(two, COMMIT)).code == OK
    assert not await life.round()
    assert life.pending == 0


async def test_other_messages_cannot_be_resumed(life: Life) -> None:
    # guards other topics: RocketMQ would copy any message into the queue of half messages
    reply = await life.client.send("T", b"plain")
    nowhere = reply.ext_fields()["msgId"][:16] + f"{1 << 40:016X}"
    assert place_of(reply).log_offset == 0
    for message_id in (reply.ext_fields()["msgId"], nowhere, "u1", "zz" * 16):
        refused = await life.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, {"msgId": message_id})
        assert refused.code == ResponseCode.SYSTEM_ERROR
    assert not await life.stored(HALF, [0])


async def test_a_half_that_is_too_large_to_be_stored_again_is_checked_where_it_is(life: Life) -> None:
    # guards a half stored before maxMessageSize was lowered: it must still be checked
    half = await life.prepare(b"x" * 100)
    life.broker.configuration.change({"maxMessageSize": "50"})
    await life.advance(7)
    (check,) = await life.round()
    assert asked_for(check) == half
    assert life.counters.moved == 0
    assert (await life.answer(check, ROLLBACK)).code == OK
    assert life.pending == 0


async def test_a_store_that_takes_no_messages_loses_no_half(life: Life) -> None:
    half = await life.prepare()
    await life.advance(7)
    store = life.broker.context.store
    store.flags.set(Flag.DISK_FULL, "the disk is full")
    assert not await life.round()
    assert (await life.end(half)).code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert life.pending == 1
    other = await life.end(half, ROLLBACK)
    assert other.code == OK
    await life.advance(3)
    assert not await life.ops()
    store.flags.clear(Flag.DISK_FULL)
    await life.advance(3)
    assert await life.ops() == [b"0,"]


async def test_a_half_whose_log_file_was_deleted_is_lost_and_counted(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    # guards the table: such a half would be looked for in every round, and hold the group's offset forever
    await life.prepare()
    store = life.broker.context.store

    async def none(*_: object) -> list[tuple[int, int, int]]:
        await trio.lowlevel.checkpoint()
        return []

    monkeypatch.setattr(store, "min_offset", lambda *_: 1)
    monkeypatch.setattr(store, "look_units", lambda *_: [])
    monkeypatch.setattr(store, "queue_units", none)
    await life.advance(7)
    assert not await life.round()
    assert (life.pending, life.counters.lost) == (0, 1)


async def test_a_half_whose_record_is_damaged_is_lost_and_counted(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    await life.prepare(b"damaged")
    await life.prepare(b"sound")
    store = life.broker.context.store
    cold = store.look_message_cold

    async def damaged(offset: int) -> Any:
        data = bytearray(await cold(offset))
        if b"damaged" in data:
            data[0:4] = b"\0\0\0\1"
        return bytes(data)

    monkeypatch.setattr(store, "look_message", lambda _: None)
    monkeypatch.setattr(store, "look_message_cold", damaged)
    await life.advance(7)
    assert bodies(await life.round()) == [b"sound"]
    assert (life.pending, life.counters.lost) == (1, 1)


@pytest.mark.parametrize(("restarts", "refused"), [(0, False), (0, True), (3, False)])
async def test_a_check_that_reached_no_producer_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, refused: bool
) -> None:
    # guards the number of checks where the producer leaves while its half is stored again
    life = Life(tmp_path / "store")
    async with life.running():
        await life.prepare()
    for _ in range(max(1, restarts)):
        async with life.running():
            await life.join()
            await life.advance(7)
            await _unsent_round(life, monkeypatch, refused=refused)
            assert (life.counters.moved, life.counters.checks) == (2 - refused, 0)
            if not restarts:
                await _two_checks(life)
            await life.kill()
    if restarts:
        async with life.running():
            await _two_checks(life)


async def test_a_half_does_not_expire_when_its_check_after_a_start_reached_no_producer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path / "store", transactionCheckMax="1")
    async with life.running():
        await life.join()
        await life.prepare()
        await life.advance(7)
        assert len(await life.round()) == 1
    async with life.running():
        await life.join()
        await _unsent_round(life, monkeypatch, refused=False)
        await life.join()
        (check,) = await life.round()
        assert times(check) == "2"
        assert not await life.round()
        assert life.counters.expired == 1


async def _unsent_round(life: Life, monkeypatch: pytest.MonkeyPatch, *, refused: bool) -> None:
    """A round in which the producer leaves. ``refused``: the store does not take the half with the right number."""
    store = life.broker.context.store
    put, held = store.put_message, trio.Event()
    release: list[Callable[[], None]] = []

    def slow(message: Any, on_done: PutCallback) -> PutMessageResult | None:
        if release:
            return PutMessageResult(PutMessageStatus.OS_PAGE_CACHE_BUSY) if refused else put(message, on_done)
        result = put(message, on_done)
        assert result is not None
        release.append(lambda: on_done(result))
        held.set()
        return None

    monkeypatch.setattr(store, "put_message", slow)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.broker.context.transaction_checks.check)
        await held.wait()
        await life.client.ask(RequestCode.UNREGISTER_CLIENT, {"clientID": "c", "producerGroup": "P"})
        release[0]()
    monkeypatch.setattr(store, "put_message", put)


async def _two_checks(life: Life) -> None:
    await life.join()
    for number in ("1", "2"):
        (check,) = await life.round()
        assert times(check) == number


async def test_an_error_of_the_device_ends_only_the_round(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    await life.prepare()

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(life.broker.context.store, "look_units", fails)
    await life.advance(30)
    assert not await life.client_checks()
    monkeypatch.undo()
    await life.advance(30)
    assert len(await life.client_checks()) == 1


async def test_an_expired_half_that_cannot_be_moved_stays(life: Life) -> None:
    life.broker.configuration.change({"transactionCheckMax": "1"})
    half = await life.prepare()
    await life.advance(7)
    await life.round()
    flags = life.broker.context.store.flags
    flags.set(Flag.DISK_FULL, "the disk is full")
    await life.round()
    assert (life.pending, life.counters.expired) == (1, 0)
    flags.clear(Flag.DISK_FULL)
    assert (await life.end(half)).code == OK


async def test_old_pending_halves_do_not_keep_a_large_table(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the memory: one producer that never comes back would keep an entry for each later half
    monkeypatch.setattr(check_module, "_SPARSE_AT", 8)
    old = await life.prepare(b"old", properties={"PGROUP": "away"})
    for number in range(20):
        await life.end(await life.prepare(b"%d" % number), ROLLBACK)
    await life.advance(7)
    await life.broker.context.store.flush()
    await life.advance(1)
    assert len(life.transactions.halves) == 21
    assert not await life.round()
    await life.broker.context.store.flush()
    await life.advance(1)
    assert (len(life.transactions.halves), life.pending, life.counters.checks) == (1, 1, 0)
    await life.join("away")
    (check,) = await life.round()
    assert (times(check), bodies([check])) == ("1", [b"old"])
    assert (await life.end(old, producerGroup="away")).code == OK
    assert await life.bodies() == [b"old"]


async def _sparse(life: Life, monkeypatch: pytest.MonkeyPatch, **properties: str) -> None:
    """A table of halves of which only the first one is pending; its group has no producer."""
    monkeypatch.setattr(check_module, "_SPARSE_AT", 8)
    await life.prepare(b"old", properties={"PGROUP": "away"} | properties)
    for number in range(20):
        await life.end(await life.prepare(b"%d" % number), ROLLBACK)
    await life.advance(7)
    await life.broker.context.store.flush()
    await life.advance(1)


async def test_a_half_within_its_immunity_is_not_stored_again_for_room(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _sparse(life, monkeypatch, CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    await life.round()
    assert (len(life.transactions.halves), life.counters.moved) == (21, 0)


async def test_a_table_that_cannot_be_made_dense_now_is_made_dense_later(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _sparse(life, monkeypatch)
    flags = life.broker.context.store.flags
    flags.set(Flag.DISK_FULL, "the disk is full")
    await life.round()
    assert (len(life.transactions.halves), life.counters.moved) == (21, 0)
    flags.clear(Flag.DISK_FULL)
    await life.round()
    assert life.counters.moved == 1
