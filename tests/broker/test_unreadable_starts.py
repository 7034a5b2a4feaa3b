"""Starts with a half queue or an op queue whose files the device does not give completely."""

import errno
from pathlib import Path

import pytest
import structlog.testing

from tests.broker.test_transaction_restarts import _set_offset
from tests.broker.test_unreadable_halves import BadSectors
from tests.broker.transactions import HALF, OK, OP, ROLLBACK, Life, Place
from trimq.broker.services.transaction import read_back as read_back_module
from trimq.broker.start_error import StartError
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.codes import ResponseCode


class BadUnits:
    """Units of a queue that the device does not give, nor any read that includes one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, topic: str) -> None:
        self.offsets: set[int] = set()
        self.reads: list[tuple[int, int]] = []
        read = MessageStore.queue_units

        async def units(
            store: MessageStore, name: str, queue_id: int, offset: int, count: int
        ) -> list[tuple[int, int, int]]:
            if name == topic:
                self.reads.append((offset, count))
                if self.offsets.intersection(range(offset, offset + count)):
                    raise OSError(errno.EIO, "bad sector")
            return await read(store, name, queue_id, offset, count)

        monkeypatch.setattr(MessageStore, "queue_units", units)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_back_module, "_PAUSES", (0.0,) * 7)


async def test_a_bad_page_of_the_half_queue_hides_only_its_own_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half queue is read in steps, each of which is more than a page."""
    monkeypatch.setattr(read_back_module, "_UNITS", 16)
    bad = BadUnits(monkeypatch, HALF)
    life = Life(tmp_path / "store")
    async with life.running():
        halves = [await life.prepare(b"%d" % number) for number in range(50)]
    bad.offsets = {25, 26}
    async with life.running():
        steps = [read for read in bad.reads if read[1] > 1]
        assert (life.pending, life.transactions.halves.unreadable) == (48, {25, 26})
        assert len(steps) == 4, "a step that the device refuses is not tried again for each of its halves"
        for number in (24, 27):
            assert (await life.end(halves[number])).code == OK
        assert (await life.end(halves[25])).code != OK
        bad.offsets.clear()
    async with life.running():
        assert life.pending == 48


async def test_many_halves_that_cannot_be_read_make_few_log_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = BadUnits(monkeypatch, HALF)
    life = Life(tmp_path / "store")
    async with life.running():
        for number in range(60):
            await life.prepare(b"%d" % number)
    bad.offsets = set(range(60))
    with structlog.testing.capture_logs() as logs:
        async with life.running():
            assert len(life.transactions.halves.unreadable) == 60
    events = [entry["event"] for entry in logs]
    assert events.count("half_message_unreadable") == 20
    assert [entry["count"] for entry in logs if entry["event"] == "events_left_out"] == [40]


async def test_a_damaged_op_queue_is_rebuilt_while_the_first_half_has_no_readable_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = BadUnits(monkeypatch, HALF)
    life = Life(tmp_path / "store")
    async with life.running():
        await life.prepare(b"pending")
        ended = await life.prepare(b"ended")
        assert (await life.end(ended)).code == OK
    _set_offset(life, OP, 77)
    bad.offsets = {0}
    async with life.running():
        assert (life.pending, life.transactions.halves.unreadable) == (0, {0})
        await life.end(ended)
        assert await life.bodies() == [b"ended"]


async def _ended_behind_a_pending_one(life: Life) -> list[Place]:
    async with life.running():
        await life.prepare(b"pending")
        ended = [await life.prepare(b"%d" % number) for number in range(2)]
        assert (await life.end(ended[0])).code == OK
        assert (await life.end(ended[1], ROLLBACK)).code == OK
    return ended


async def test_an_op_queue_that_cannot_be_read_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = BadUnits(monkeypatch, OP)
    life = Life(tmp_path / "store")
    ended = await _ended_behind_a_pending_one(life)
    bad.offsets = {0}
    found: list[str] = []
    for _ in range(2):
        with structlog.testing.capture_logs() as logs:
            async with life.running():
                assert life.pending == 1
                for half in ended:
                    assert (await life.end(half)).code == ResponseCode.SYSTEM_ERROR
                assert await life.bodies() == [b"0"]
        found = [entry["op_queue"] for entry in logs if entry["event"] == "transactions_read_back"]
    assert not found, "the second start reads the records that the first one has written"
    assert life.broker.context.offsets.own_offset("CID_RMQ_SYS_TRANS", OP, 0) == 1


async def test_an_error_of_the_op_queue_that_passes_costs_no_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = BadUnits(monkeypatch, OP)
    life = Life(tmp_path / "store")
    await _ended_behind_a_pending_one(life)
    bad.offsets = {0}

    async def pause(_seconds: float) -> None:
        bad.offsets.clear()

    monkeypatch.setattr(read_back_module, "_pause", pause)
    with structlog.testing.capture_logs() as logs:
        async with life.running():
            assert life.pending == 1
    events = [entry["event"] for entry in logs]
    assert events.count("op_record_not_read") == 1
    assert "transactions_read_back" not in events


async def test_an_op_record_that_cannot_be_read_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other place says which halves were rolled back. A start that can read it has lost nothing."""
    life = Life(tmp_path / "store")
    ended = await _ended_behind_a_pending_one(life)
    async with life.running():
        (record,) = await life.stored(OP, [0])
    bad = BadSectors(monkeypatch)
    bad.places = {record.commit_log_offset}
    text = f"op record at {record.commit_log_offset} of the log.*bad sector"
    with pytest.RaisesGroup(pytest.RaisesExc(StartError, match=text), flatten_subgroups=True):
        async with life.running():
            pass
    bad.places.clear()
    async with life.running():
        assert life.pending == 1
        for half in ended:
            assert (await life.end(half)).code == ResponseCode.SYSTEM_ERROR
        assert await life.bodies() == [b"0"]


async def test_an_op_record_of_zeros_hides_no_commit(tmp_path: Path) -> None:
    """What docs/fault-model.md says to do if its page stays unreadable."""
    life = Life(tmp_path / "store")
    ended = await _ended_behind_a_pending_one(life)
    async with life.running():
        (record,) = await life.stored(OP, [0])
        await life.client.send("T", b"plain")
        ((_, size, _),) = await life.broker.context.store.queue_units(OP, 0, 0, 1)
    (file,) = (life.directory / "commitlog").iterdir()
    with file.open("r+b") as log:
        log.seek(record.commit_log_offset)
        log.write(bytes(size))
    async with life.running():
        assert life.pending == 2
        assert (await life.end(ended[0], ROLLBACK)).code == ResponseCode.SYSTEM_ERROR
        assert (await life.end(ended[1], ROLLBACK)).code == OK
        assert await life.bodies() == [b"0", b"plain"]
