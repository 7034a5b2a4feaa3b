"""Half messages whose records the device does not give: they wait, and delay no others."""

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from tests.broker.transactions import COMMIT, EXPIRED, HALF, OK, OP, ROLLBACK, Life, Place, asked_for
from trimq.broker.services.transaction import check as check_module
from trimq.broker.services.transaction import read_back as read_back_module
from trimq.broker.services.transaction.half_queue import State
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageStatus
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import decode_message
from trimq.protocol.message_id import encode_offset_id
from trimq.protocol.transaction import decode_half


class BadSectors:
    """Log offsets at which the device gives no record; any other one is read as before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: set[int] = set()
        look, cold = MessageStore.look_message, MessageStore.look_message_cold

        async def look_cold(store: MessageStore, offset: int) -> Any:
            if offset in self.places:
                raise OSError(errno.EIO, "bad sector")
            return await cold(store, offset)

        monkeypatch.setattr(MessageStore, "look_message", lambda s, at: None if at in self.places else look(s, at))
        monkeypatch.setattr(MessageStore, "look_message_cold", look_cold)


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> BadSectors:
    monkeypatch.setattr(read_back_module, "_PAUSES", (0.0,) * 7)
    return BadSectors(monkeypatch)


def bodies(checks: list[RemotingCommand]) -> list[bytes]:
    return [decode_message(bytes(check.body)).body for check in checks]


def notes(life: Life) -> dict[str, str]:
    return {note.code: note.text for notes in life.broker.health.notes for note in notes()}


async def test_a_half_that_cannot_be_read_delays_no_other(tmp_path: Path, bad: BadSectors) -> None:
    async with Life(tmp_path / "store").running() as life:
        await life.join()
        half = await life.prepare(b"bad")
        await life.prepare(b"good")
        bad.places = {half.log_offset}
        await life.advance(7)
        checks = life.broker.context.transaction_checks
        assert bodies(await life.round()) == [b"good"]
        with structlog.testing.capture_logs() as logs:
            for _ in range(check_module._READ_ATTEMPTS - 2):
                await life.round()
            assert checks.unreadable == 0
            assert "half_messages_unreadable" not in notes(life)
            for _ in range(3):
                await life.round()
        assert [entry["offset"] for entry in logs if entry["event"] == "half_message_unreadable"] == [0]
        assert checks.unreadable == 1
        assert notes(life)["half_messages_unreadable"].startswith("1 half messages cannot be read")
        assert (life.pending, life.counters.lost) == (2, 0)

        bad.places.clear()
        found = await life.round()
        assert b"bad" in bodies(found)
        assert checks.unreadable == 0
        assert (await life.answer(found[bodies(found).index(b"bad")], 8)).code == OK
        assert await life.bodies() == [b"bad"]


async def test_a_round_goes_on_behind_many_that_cannot_be_read(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that gives nothing ends a round; the next one tries the halves behind, and then some of these again."""
    monkeypatch.setattr(check_module, "_MOST_ERRORS", 2)
    async with Life(tmp_path / "store").running() as life:
        await life.join()
        halves = [await life.prepare(b"bad%d" % number) for number in range(5)]
        await life.prepare(b"good")
        bad.places = {half.log_offset for half in halves}
        await life.advance(7)
        checks = life.broker.context.transaction_checks
        for _ in range(2):
            with pytest.raises(OSError, match="2 half messages could not be read"):
                await checks.check()
        assert bodies(await life.round()) == [b"good"]
        bad.places.clear()
        found: set[bytes] = set()
        for _ in range(3):
            found |= set(bodies(await life.round()))
        assert found >= {b"bad%d" % number for number in range(5)}


@pytest.fixture
def reads(bad: BadSectors, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Log offsets of the bad sectors that were tried."""
    tried: list[int] = []
    cold = MessageStore.look_message_cold

    async def look_cold(store: MessageStore, offset: int) -> Any:
        if offset in bad.places:
            tried.append(offset)
        return await cold(store, offset)

    monkeypatch.setattr(MessageStore, "look_message_cold", look_cold)
    return tried


async def test_a_round_tries_only_some_again_and_each_once(
    tmp_path: Path, bad: BadSectors, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they keep a large table alive: a bad device takes seconds for each attempt."""
    monkeypatch.setattr(check_module, "_SPARSE_AT", 8)
    monkeypatch.setattr(check_module, "_SPARSE", 1)
    async with Life(tmp_path / "store").running() as life:
        await life.join()
        halves = [await life.prepare(b"bad%d" % number) for number in range(3)]
        for number in range(10):
            await life.end(await life.prepare(b"%d" % number), ROLLBACK)
        bad.places = {half.log_offset for half in halves}
        await life.advance(7)
        for _ in range(check_module._READ_ATTEMPTS - 1):
            await life.round()
            assert sorted(reads) == [half.log_offset for half in halves]
            reads.clear()
        checks = life.broker.context.transaction_checks
        assert checks.unreadable == 0
        monkeypatch.setattr(check_module, "_MOST_ERRORS", 2)
        await life.round()
        assert sorted(reads) == [half.log_offset for half in halves[:2]]
        assert checks.unreadable == 2


async def test_a_table_is_made_dense_until_too_many_cannot_be_read(
    tmp_path: Path, bad: BadSectors, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # guards the round's end: halves that were readable at their check may not be so just afterwards
    monkeypatch.setattr(check_module, "_SPARSE_AT", 8)
    monkeypatch.setattr(check_module, "_SPARSE", 1)
    monkeypatch.setattr(check_module, "_MOST_ERRORS", 2)
    async with Life(tmp_path / "store").running() as life:
        halves = [await life.prepare(b"bad%d" % number) for number in range(5)]
        for number in range(10):
            await life.end(await life.prepare(b"%d" % number), ROLLBACK)
        await life.advance(7)
        bad.places = {half.log_offset for half in halves}
        await life.broker.context.transaction_checks._make_dense()
        assert reads == [half.log_offset for half in halves[:2]]
        assert life.counters.moved == 0


async def test_all_that_can_be_read_again_are_checked_in_one_round(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only failures are limited."""
    async with Life(tmp_path / "store").running() as life:
        await life.join()
        halves = [await life.prepare(b"bad%d" % number) for number in range(5)]
        bad.places = {half.log_offset for half in halves}
        await life.advance(7)
        await life.round()
        monkeypatch.setattr(check_module, "_MOST_ERRORS", 2)
        bad.places = {halves[0].log_offset}
        assert bodies(await life.round()) == [b"bad%d" % number for number in range(1, 5)]


async def test_what_is_known_of_checks_that_were_not_sent_ends_with_their_records(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    # guards the memory: a half that cannot be read keeps the front of the table for as long as the device is bad
    async with Life(tmp_path / "store").running() as life:
        await life.join()
        half = await life.prepare(b"bad")
        await life.prepare(b"good")
        bad.places = {half.log_offset}
        checks = life.broker.context.transaction_checks
        monkeypatch.setattr(checks, "_ask", lambda *_: False)
        for _ in range(4):
            await life.advance(7)
            await life.round()
        assert life.counters.moved == 8
        assert sorted(checks._unsent.values()) == [0, 1]
        last = Place(max(checks._unsent), 0, "")
        units = await life.broker.context.store.queue_units(HALF, 0, last.queue_offset, 1)
        assert (await life.end(last._replace(log_offset=units[0][0]))).code == OK
        await life.round()
        assert checks._unsent == {}


# what becomes of a half between a failed attempt and the next one


async def resume(life: Life, half: Place) -> RemotingCommand:
    message_id = encode_offset_id(b"\x7f\0\0\1\0\0\x2a\x9f", half.log_offset)
    return await life.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, {"msgId": message_id})


async def _round_with(
    life: Life, bad: BadSectors, monkeypatch: pytest.MonkeyPatch, act: Callable[[Place], Awaitable[None]]
) -> list[RemotingCommand]:
    """A round that tries a half again which was checked once, and ``act`` just before that.

    The device gives the half again then.
    """
    await life.join()
    await life.prepare(b"bad")
    await life.advance(7)
    half = asked_for((await life.round())[0])
    await life.prepare(b"other")
    bad.places = {half.log_offset}
    await life.advance(7)
    assert bodies(await life.round()) == [b"other"]
    bad.places.clear()
    await life.advance(7)
    checks = life.broker.context.transaction_checks
    check_one = checks._check_one
    acted: list[int] = []

    async def look(offset: int) -> int:
        since = await check_one(offset)
        if not acted:
            acted.append(offset)
            await act(half)
        return since

    monkeypatch.setattr(checks, "_check_one", look)
    with structlog.testing.capture_logs() as logs:
        found = await life.round()
    assert acted, "the other half comes first"
    assert half.queue_offset not in [entry.get("offset") for entry in logs], "the round leaves it alone"
    return found


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
async def test_one_that_was_ended_meanwhile_is_not_moved_away(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch, state: int
) -> None:
    """A record in TRANS_CHECK_MAX_TIME_TOPIC could be resumed, and then committed a second time."""
    async with Life(tmp_path / "store", transactionCheckMax="1").running() as life:

        async def end(half: Place) -> None:
            assert (await life.end(half, state)).code == OK

        await _round_with(life, bad, monkeypatch, end)
        assert b"bad" not in [message.body for message in await life.stored(EXPIRED, [0])]
        assert (b"bad" in await life.bodies()) == (state == COMMIT)


async def test_one_that_is_being_committed_is_not_moved_away(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Life(tmp_path / "store", transactionCheckMax="1").running() as life:
        halves = life.transactions.halves

        async def commit(half: Place) -> None:
            halves.set(half.queue_offset, State.COMMITTING)

        await _round_with(life, bad, monkeypatch, commit)
        assert b"bad" not in [message.body for message in await life.stored(EXPIRED, [0])]


async def test_one_that_was_stored_again_meanwhile_stays_one_half(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path / "store")
    async with life.running():

        async def again(half: Place) -> None:
            assert (await resume(life, half)).code == OK

        assert b"bad" not in bodies(await _round_with(life, bad, monkeypatch, again))
        states = [life.transactions.halves.state(offset) for offset in range(life.transactions.halves.end)]
        assert states.count(State.PENDING) == life.pending
        await life.advance(7)
        assert bodies(await life.round()).count(b"bad") == 1
        await life.advance(4)
        assert await life.broker.context.store.flush()
        assert await life.ops() == [], "nothing has ended"
        await life.kill()
    async with life.running():
        await life.join()
        await life.advance(7)
        assert bodies(await life.round()).count(b"bad") == 1


async def test_one_that_was_ended_during_a_failed_attempt_is_not_tried_again(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Life(tmp_path / "store").running() as life:
        await life.join()
        half = await life.prepare(b"bad")
        await life.advance(7)
        checks = life.broker.context.transaction_checks
        cold = MessageStore.look_message_cold

        async def ended_meanwhile(store: MessageStore, offset: int) -> Any:
            if offset in bad.places:
                bad.places.clear()
                assert (await life.end(half)).code == OK
                raise OSError(errno.EIO, "bad sector")
            return await cold(store, offset)

        bad.places = {half.log_offset}
        monkeypatch.setattr(MessageStore, "look_message_cold", ended_meanwhile)
        await life.round()
        assert not bad.places
        assert checks._failed == {}


async def test_no_half_that_is_not_pending_is_stored_elsewhere(tmp_path: Path) -> None:
    """It would be pending once more, or could be resumed."""
    async with Life(tmp_path / "store").running() as life:
        place = await life.prepare()
        store = life.broker.context.store
        half = decode_half(bytes(store.look_message(place.log_offset) or b""))
        assert (await life.end(place)).code == OK
        _, again = await life.transactions.store_again(half, 1)
        expired = await life.transactions.expire(half)
        assert again.status is expired.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert again.remark == expired.remark == "the half message is not pending"
        assert life.transactions.halves.state(place.queue_offset) is State.COMMITTED
        assert (store.max_offset(HALF, 0), store.max_offset(EXPIRED, 0)) == (1, 0)


async def test_one_whose_log_file_is_deleted_is_lost(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path / "store")
    async with life.running():
        half = await life.prepare(b"bad")
    bad.places = {half.log_offset}
    async with life.running():
        checks = life.broker.context.transaction_checks
        assert checks.unreadable == 1
        monkeypatch.setattr(life.broker.context.store, "min_offset", lambda _topic, _queue: 1)
        await life.round()
        assert (checks.unreadable, life.counters.lost) == (0, 1)
        assert notes(life)["half_messages_lost"].startswith("1 half messages were lost")
        await life.prepare(b"next")
        assert life.pending == 1


async def test_a_start_with_a_half_that_cannot_be_read(tmp_path: Path, bad: BadSectors) -> None:
    """It is left alone until a start can read it: it may be pending or ended."""
    life = Life(tmp_path / "store")
    async with life.running():
        half = await life.prepare(b"bad")
        await life.prepare(b"good")
    bad.places = {half.log_offset}
    with structlog.testing.capture_logs() as logs:
        async with life.running():
            await life.join()
            assert (life.pending, life.broker.context.transaction_checks.unreadable) == (1, 1)
            assert "half_messages_unreadable" in notes(life)
            assert await life.broker.context.store.log_holds.lowest() == half.log_offset
            await life.advance(7)
            (check,) = await life.round()
            assert bodies([check]) == [b"good"]
            assert (await life.answer(check, 8)).code == OK
            bad.places.clear()
            refused = await life.end(half)
            assert refused.code == ResponseCode.SYSTEM_ERROR
            assert "could not be read when the broker started" in (refused.remark or "")
    assert len([entry for entry in logs if entry["event"] == "half_message_not_read"]) == 7
    assert len([entry for entry in logs if entry["event"] == "half_message_unreadable"]) == 1
    async with life.running():
        assert life.pending == 1
        assert (await life.end(half)).code == OK
        assert await life.bodies() == [b"bad", b"good"]


async def test_an_error_that_passes_costs_a_start_nothing(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path / "store")
    async with life.running():
        half = await life.prepare(b"bad")
    bad.places = {half.log_offset}
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            bad.places.clear()

    monkeypatch.setattr(read_back_module, "_pause", sleep)
    async with life.running():
        assert (life.pending, life.broker.context.transaction_checks.unreadable) == (1, 0)
    assert slept == [0.0, 0.0]


async def test_a_half_ended_by_its_first_record_while_the_last_one_could_not_be_read(
    tmp_path: Path, bad: BadSectors
) -> None:
    """The start that can read the last record knows the end of the first one: the half is not committed twice."""
    life = Life(tmp_path / "store")
    async with life.running():
        await life.join()
        half = await life.prepare()
        await life.advance(7)
        again = asked_for((await life.round())[0])
        await life.kill()
    bad.places = {again.log_offset}
    async with life.running():
        assert life.pending == 1
        assert (await life.end(half)).code == OK
        for _ in range(3):
            await life.advance(4)
            assert await life.broker.context.store.flush()
        assert life.offset(HALF) == 1, "the first record is done"
    bad.places.clear()
    async with life.running():
        assert life.pending == 0
        assert (await life.end(again)).code != OK
        assert await life.bodies() == [b"half"]


async def test_a_half_ended_by_its_last_record_while_the_first_one_could_not_be_read(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not unreadable any more, is not lost with its log file, and the progress is noted again."""
    life = Life(tmp_path / "store")
    async with life.running():
        await life.join()
        half = await life.prepare()
        await life.advance(7)
        again = asked_for((await life.round())[0])
        await life.kill()
    bad.places = {half.log_offset}
    async with life.running():
        checks = life.broker.context.transaction_checks
        assert (life.pending, checks.unreadable) == (1, 1)
        assert (await life.end(again)).code == OK
        for _ in range(3):
            await life.advance(4)
            assert await life.broker.context.store.flush()
        assert checks.unreadable == 0
        assert "half_messages_unreadable" not in notes(life)
        assert (life.offset(HALF), life.offset(OP)) == (2, 1)
        monkeypatch.setattr(life.broker.context.store, "min_offset", lambda topic, _queue: int(topic == HALF))
        await life.round()
        assert life.counters.lost == 0
        bad.places.clear()
        assert (await life.end(half)).code == OK, "the same end again"
    async with life.running():
        assert life.pending == 0
        assert (await life.end(half)).code != OK
        assert await life.bodies() == [b"half"]


async def test_a_first_record_that_is_deleted_is_no_lost_half(
    tmp_path: Path, bad: BadSectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path / "store")
    async with life.running():
        await life.join()
        half = await life.prepare()
        await life.advance(7)
        await life.round()
        await life.kill()
    bad.places = {half.log_offset}
    async with life.running():
        checks = life.broker.context.transaction_checks
        assert (life.pending, checks.unreadable) == (1, 1)
        monkeypatch.setattr(life.broker.context.store, "min_offset", lambda topic, _queue: int(topic == HALF))
        with structlog.testing.capture_logs() as logs:
            await life.round()
        assert (life.pending, checks.unreadable, life.counters.lost) == (1, 0, 0)
        assert "half_message_lost" not in [entry["event"] for entry in logs]
        bad.places.clear()
        assert (await life.end(half)).code == OK
        assert await life.bodies() == [b"half"]


# requests


async def test_requests_for_a_half_that_could_not_be_read_at_the_start(tmp_path: Path, bad: BadSectors) -> None:
    life = Life(tmp_path / "store")
    async with life.running():
        half = await life.prepare()
    bad.places = {half.log_offset}
    async with life.running():
        with structlog.testing.capture_logs() as logs:
            replies = [await life.end(half), await resume(life, half)]
        for reply in replies:
            assert reply.code == ResponseCode.SYSTEM_ERROR
            assert str(reply.remark).startswith(f"the message at {half.log_offset} cannot be read: [Errno 5] bad")
        assert logs == [], "no defect"
        bad.places.clear()
        reply = await resume(life, half)
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "could not be read when the broker started" in str(reply.remark)


async def test_a_half_of_another_state_is_not_resumed(tmp_path: Path) -> None:
    async with Life(tmp_path / "store").running() as life:
        half = await life.prepare()
        assert (await life.end(half)).code == OK
        reply = await resume(life, half)
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert str(reply.remark) == f"the half message at {half.log_offset} has been committed"


async def test_no_half_is_resumed_while_a_later_one_cannot_be_read(tmp_path: Path, bad: BadSectors) -> None:
    """It may be the half that was made of the expired one: a second one would be committed a second time."""
    life = Life(tmp_path / "store", transactionCheckMax="1")
    async with life.running():
        await life.join()
        await life.prepare()
        await life.advance(7)
        await life.round()
        await life.advance(7)
        await life.round()
        (expired,) = await life.stored(EXPIRED, [0])
        later = await life.prepare(b"later")
    bad.places = {later.log_offset}
    place = Place(0, expired.commit_log_offset, "")
    async with life.running():
        with structlog.testing.capture_logs() as logs:
            reply = await resume(life, place)
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert str(reply.remark).startswith(
            f"whether the message at {place.log_offset} has been resumed is not known, because a half message behind it"
            " cannot be read: [Errno 5] bad sector"
        )
        assert logs == []
        bad.places.clear()
        assert (await resume(life, place)).code == OK
        assert "has been resumed already" in str((await resume(life, place)).remark)
