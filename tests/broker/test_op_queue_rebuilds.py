"""Damaged op queues: the ends stay known whenever the rebuild is interrupted."""

from pathlib import Path

import msgspec
import pytest

from tests.broker.test_transaction_restarts import _set_offset
from tests.broker.test_unreadable_halves import BadSectors
from tests.broker.transactions import OK, OP, ROLLBACK, Life, Place
from trimq.broker.services.transaction import read_back as read_back_module
from trimq.broker.services.transaction.ops import OpQueue
from trimq.broker.start_error import StartError
from trimq.protocol.codes import ResponseCode


def _state(life: Life) -> dict[str, int]:
    found: dict[str, int] = msgspec.json.decode((life.directory / "config" / "transaction.json").read_bytes())
    return found


async def _op_record(life: Life) -> None:
    """Write the waiting ends, and note that they are durable."""
    await life.advance(4)
    assert await life.broker.context.store.flush()
    await life.advance(1)


async def _damaged(life: Life) -> tuple[Place, list[Place]]:
    """A pending half, and three ends in an op record each. The op queue had two records more."""
    async with life.running():
        first = await life.prepare(b"first")
        ended = [await life.prepare(b"%d" % number) for number in range(3)]
        for half, state in zip(ended, (8, ROLLBACK, 8), strict=True):
            assert (await life.end(half, state)).code == OK
            await _op_record(life)
        await life.advance(6)
        assert life.pending == 1
    _set_offset(life, OP, 5)
    return first, ended


async def _more_op_records(life: Life, count: int = 5) -> None:
    """The op queue grows beyond the end that it had before the damage."""
    for number in range(count):
        assert (await life.end(await life.prepare(b"more %d" % number))).code == OK
        await _op_record(life)
    assert life.broker.context.store.max_offset(OP, 0) > 5


async def _check(life: Life, ended: list[Place]) -> None:
    """Only the first half is pending, and no other can be committed (again)."""
    assert life.pending == 1
    for half in ended:
        assert (await life.end(half)).code in (OK, ResponseCode.SYSTEM_ERROR)
    bodies = await life.bodies()
    assert b"1" not in bodies, "it was rolled back"
    assert len(bodies) == len(set(bodies))


@pytest.mark.parametrize("stop", ["orderly", "kill"])
async def test_ends_stay_known_while_a_half_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """No progress is noted then: the start that can read the half still knows that the op queue was damaged."""
    monkeypatch.setattr(read_back_module, "_PAUSES", ())
    bad = BadSectors(monkeypatch)
    life = Life(tmp_path / "store")
    first, ended = await _damaged(life)
    bad.places = {first.log_offset}
    async with life.running():
        assert life.pending == 0
        await _more_op_records(life)
        await life.advance(6)
        assert _state(life) == {"settledOffset": -1, "opOffset": -1}
        assert life.offset(OP) == 3
        if stop == "kill":
            await life.kill()
    bad.places.clear()
    for _ in range(2):
        async with life.running():
            await _check(life, ended)
            await _op_record(life)
            await life.advance(6)
            assert _state(life)["opOffset"] == life.broker.context.store.max_offset(OP, 0)
            await life.kill()


async def test_a_kill_before_the_rebuilt_op_records_are_durable(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    _, ended = await _damaged(life)
    async with life.running():
        await life.advance(4)  # they are in the log
        await _more_op_records_in_the_log(life)
        assert life.offset(OP) == 3
        await life.kill()
    async with life.running():
        await _check(life, ended)


async def _more_op_records_in_the_log(life: Life) -> None:
    for number in range(3):
        assert (await life.end(await life.prepare(b"more %d" % number))).code == OK
        life.transactions.ops.write()
        await life.settled()
    assert life.broker.context.store.max_offset(OP, 0) > 5


async def test_the_file_says_that_the_op_queue_is_damaged_before_an_op_record_is_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start puts op records while it reads: when they have transactionOpMsgMaxSize bytes."""
    life = Life(tmp_path / "store", transactionOpMsgMaxSize="1")
    _, ended = await _damaged(life)
    write, states = OpQueue.write, []

    def noted(ops: OpQueue) -> None:
        states.append((_state(life), life.directory.joinpath("config/consumerOffset.json").read_text()))
        write(ops)

    monkeypatch.setattr(OpQueue, "write", noted)
    async with life.running():
        await _check(life, ended)
    state, offsets = states[0]
    assert state == {"settledOffset": -1, "opOffset": -1}
    assert msgspec.json.decode(offsets)["offsetTable"][f"{OP}@CID_RMQ_SYS_TRANS"] == {"0": 3}


async def test_a_start_that_cannot_say_so_is_refused(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    _, ended = await _damaged(life)
    blocker = life.directory / "config" / "transaction.json.tmp"
    blocker.mkdir()
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartError, match="damaged op queue.*transaction.json"), flatten_subgroups=True
    ):
        async with life.running():
            pass
    blocker.rmdir()
    async with life.running():
        assert life.broker.context.store.max_offset(OP, 0) == 3
        await _check(life, ended)


async def test_the_offset_of_the_group_from_before_the_damage_never_hides_the_rebuilt_records(tmp_path: Path) -> None:
    """A kill may come when transaction.json is written, and the offsets of the group are not."""
    life = Life(tmp_path / "store")
    _, ended = await _damaged(life)
    async with life.running():
        offsets = life.directory / "config" / "consumerOffset.json"
        before = offsets.read_bytes()
        await _op_record(life)
        await _more_op_records(life)
        await life.advance(6)
        assert _state(life)["opOffset"] > 5
        await life.kill()
    (life.directory / "config" / "consumerOffset.json").write_bytes(before)
    async with life.running():
        await _check(life, ended)


async def test_the_other_broker_may_run_before_the_rebuild_is_complete(tmp_path: Path) -> None:
    """Apache's broker does not know transaction.json; it moves the offset in the op queue behind all op records."""
    life = Life(tmp_path / "store")
    _, ended = await _damaged(life)
    async with life.running():
        await life.advance(4)
        await _more_op_records_in_the_log(life)
        await life.kill()
    _set_offset(life, OP, 7)
    async with life.running():
        await _check(life, ended)


async def test_a_rebuild_is_complete_under_load(tmp_path: Path) -> None:
    """New ends wait for their op records at every moment: they do not keep the progress from being noted."""
    life = Life(tmp_path / "store")
    _, ended = await _damaged(life)
    async with life.running():
        await life.advance(4)
        assert (await life.end(await life.prepare(b"more"))).code == OK
        assert await life.broker.context.store.flush()
        life.transactions.settle()
        assert life.transactions.ops.waiting == 1
        assert life.offset(OP) == 3
        await life.transactions.settled.file.persist()
        assert _state(life)["opOffset"] == 4
        await life.kill()
    async with life.running():
        await _check(life, ended)
