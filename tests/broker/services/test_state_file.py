import errno
import json
from typing import Any

import msgspec
import pytest
import trio

from tests.store.simdisk import Loss, PowerCut, SimDisk
from trimq.broker.services.state_file import (
    EntryTable,
    StateFile,
    StateFileError,
    encode_pieces,
    load_data_version,
    replace_file,
)
from trimq.protocol.body import TopicConfig
from trimq.remoting.runtime.clock import ManualClock

PATH = "/store/config/x.json"


class State:
    """A number in a file."""

    def __init__(self, disk: SimDisk, interval: float | None = None) -> None:
        self.value = 0
        self.disk = disk
        self.file = StateFile(disk, PATH, self.pieces, None if interval is None else lambda: interval)

    def pieces(self) -> Any:
        return encode_pieces({"value": self.value})

    def set(self, value: int) -> None:
        self.value = value
        self.file.changed()


def stored(disk: SimDisk) -> int:
    value: int = json.loads(disk.content(PATH))["value"]
    return value


def syncs(disk: SimDisk) -> int:
    return sum(call.startswith("data_sync") for call in disk.history)


def put(disk: SimDisk, path: str, data: bytes) -> None:
    replace_file(disk, path, data)


# reading


async def test_nothing_there_is_no_state() -> None:
    assert await State(SimDisk()).file.load() is None


async def test_bare_integer_keys_are_read() -> None:
    disk = SimDisk()
    put(disk, PATH, b'{"offsetTable":{"T@G":{0:10,1:11}}}')
    assert await State(disk).file.load() == {"offsetTable": {"T@G": {"0": 10, "1": 11}}}


@pytest.mark.parametrize("broken", [b"", b"\0\0\0", b"  \n", b'{"value":', b"[1]", b"\xff\xfe"])
async def test_a_broken_file_is_replaced_by_its_backup(broken: bytes) -> None:
    disk = SimDisk()
    put(disk, PATH, b'{"value":1}')
    put(disk, PATH, broken)
    assert await State(disk).file.load() == {"value": 1}


async def test_the_backup_alone_is_enough() -> None:
    disk = SimDisk()
    put(disk, PATH + ".bak", b'{"value":1}')
    assert await State(disk).file.load() == {"value": 1}


# guards: an empty file is damage too (a full disk, a tool that truncates): offsets would be lost silently
@pytest.mark.parametrize("broken", [b"{", b"", b"\0\0\0", b" \n"])
@pytest.mark.parametrize("names", [[PATH], [PATH + ".bak"], [PATH, PATH + ".bak"]])
async def test_broken_and_no_backup_is_an_error_and_not_an_empty_state(broken: bytes, names: list[str]) -> None:
    disk = SimDisk()
    disk.make_directory(PATH.rpartition("/")[0])
    for name in names:
        fd = disk.create(name, 0)
        disk.pwrite(fd, broken, 0)
        disk.close(fd)
    with pytest.raises(StateFileError, match=rf"{names[0]}: .*: restore {PATH} from a backup, or delete it"):
        await State(disk).file.load()


async def test_an_unreadable_disk_is_an_error() -> None:
    disk = SimDisk()
    put(disk, PATH, b"{}")
    disk.fail("open", errno.EIO)
    with pytest.raises(StateFileError, match=r"x\.json"):
        await State(disk).file.load()


# writing


async def test_persisted_means_that_it_survives_a_power_cut() -> None:
    disk = SimDisk()
    state = State(disk)
    for value in (1, 2, 3):
        state.set(value)
        await state.file.persisted()
        assert not state.file.dirty
        assert stored(disk) == value
    assert await State(disk.power_cut(Loss.ALL)).file.load() == {"value": 3}


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_power_cut_at_any_call_leaves_the_old_or_the_new_state(loss: Loss) -> None:
    seen = set()
    for cut in range(1, 40):
        disk = SimDisk(seed=cut)
        state = State(disk)
        for value in (1, 2):
            state.set(value)
            await state.file.persisted()
        disk.loss = loss
        disk.cut_at = disk.calls + cut
        state.set(3)
        try:
            await state.file.persisted()
        except PowerCut:
            pass
        else:
            break
        survivor = disk.power_cut()
        loaded = await State(survivor).file.load()
        assert loaded in ({"value": 2}, {"value": 3})
        seen.add(loaded["value"])
    else:
        pytest.fail("the write never completed")
    assert 2 in seen


async def test_many_changes_become_one_write() -> None:
    disk = SimDisk()
    state = State(disk)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(state.file.run, ManualClock().sleep)
        await trio.testing.wait_all_tasks_blocked()
        for value in range(100):
            state.set(value)
        await trio.testing.wait_all_tasks_blocked()
        assert stored(disk) == 99
        assert syncs(disk) == 1
        nursery.cancel_scope.cancel()


async def test_with_an_interval_changes_wait_for_it_unless_a_caller_waits_for_them() -> None:
    disk, clock = SimDisk(), ManualClock()
    state = State(disk, interval=5.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(state.file.run, clock.sleep)
        await trio.testing.wait_all_tasks_blocked()
        state.set(1)
        await trio.testing.wait_all_tasks_blocked()
        assert disk.stat(PATH) is None
        clock.advance(5)
        await trio.testing.wait_all_tasks_blocked()
        assert stored(disk) == 1
        state.set(2)
        await state.file.persisted()
        assert stored(disk) == 2
        before = syncs(disk)
        clock.advance(5)
        await trio.testing.wait_all_tasks_blocked()
        assert syncs(disk) == before
        nursery.cancel_scope.cancel()


async def test_a_failed_write_is_reported_to_the_waiting_caller_and_retried() -> None:
    disk, clock = SimDisk(), ManualClock()
    state = State(disk)
    disk.fail("data_sync", errno.ENOSPC)
    state.set(1)
    with pytest.raises(StateFileError, match="cannot be written"):
        await state.file.persisted()
    assert state.file.dirty
    disk.fail("pwrite", errno.EIO)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(state.file.run, clock.sleep)
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked()
            assert disk.stat(PATH) is None
            clock.advance(1)
        await trio.testing.wait_all_tasks_blocked()
        assert stored(disk) == 1
        nursery.cancel_scope.cancel()


async def test_a_change_during_a_write_is_written_too() -> None:
    class SlowDisk(SimDisk):
        gate = trio.Event()

        async def run(self, fn: Any, *args: Any) -> Any:  # type: ignore[override]
            await self.gate.wait()
            return fn(*args)

    disk = SlowDisk()
    state = State(disk)
    state.set(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(state.file.persist)
        await trio.testing.wait_all_tasks_blocked()
        state.set(2)
        nursery.start_soon(state.file.persisted)
        await trio.testing.wait_all_tasks_blocked()
        disk.gate.set()
    assert stored(disk) == 2
    assert not state.file.dirty


class GatedDisk(SimDisk):
    """Each write waits until the test releases it, and fails where ``errors`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[trio.Event] = []
        self.errors: list[OSError | None] = []

    async def run(self, fn: Any, *args: Any) -> Any:  # type: ignore[override]
        gate = trio.Event()
        self.gates.append(gate)
        await gate.wait()
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return fn(*args)


async def test_changes_during_a_write_share_the_next_one_and_no_caller_is_answered_before_it() -> None:
    # guards the group commit: 50 changes during one write cost one more write, not 50, and each waits for that write
    disk = GatedDisk()
    state = State(disk)
    answered: list[int] = []

    async def change(value: int) -> None:
        state.set(value)
        await state.file.persisted()
        answered.append(value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(state.file.run, ManualClock().sleep)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(change, 1)
        await trio.testing.wait_all_tasks_blocked()
        for value in range(2, 52):
            nursery.start_soon(change, value)
            await trio.testing.wait_all_tasks_blocked()
        assert len(disk.gates) == 1
        disk.gates[0].set()
        await trio.testing.wait_all_tasks_blocked()
        assert answered == [1]
        assert len(disk.gates) == 2
        disk.gates[1].set()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(answered) == list(range(1, 52))
        assert len(disk.gates) == 2
        assert stored(disk) == 51
        nursery.cancel_scope.cancel()


async def test_a_failed_write_fails_the_callers_waiting_for_it_and_no_others() -> None:
    # guards that callers whose change was in the failed write get the error, and later callers get a write of their own
    disk = GatedDisk()
    disk.errors = [OSError(errno.ENOSPC, "full")]
    state = State(disk)
    saved: dict[int, bool] = {}

    async def change(value: int) -> None:
        state.set(value)
        await trio.lowlevel.checkpoint()
        try:
            await state.file.persisted()
        except StateFileError:
            saved[value] = False
        else:
            saved[value] = True

    async with trio.open_nursery() as nursery:
        for value in (1, 2, 3):
            nursery.start_soon(change, value)
        await trio.testing.wait_all_tasks_blocked()
        assert len(disk.gates) == 1
        nursery.start_soon(change, 4)
        await trio.testing.wait_all_tasks_blocked()
        disk.gates[0].set()
        await trio.testing.wait_all_tasks_blocked()
        assert saved == {1: False, 2: False, 3: False}
        assert len(disk.gates) == 2
        disk.gates[1].set()
        await trio.testing.wait_all_tasks_blocked()
        assert saved[4]
        assert stored(disk) == 4


async def test_one_who_gives_up_while_the_text_is_made_leaves_the_others_their_write() -> None:
    # guards the callers waiting for a write whose own task is cancelled before the write has reached the disk
    disk = SimDisk()
    table = {f"k{n}": "x" * 100 for n in range(20_000)}
    file = StateFile(disk, PATH, lambda: encode_pieces({"table": table}))
    file.changed()
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def first() -> None:
                with scope:
                    await file.persisted()

            nursery.start_soon(first)
            while not file._writing.locked():
                await trio.lowlevel.checkpoint()
            nursery.start_soon(file.persisted)
            await trio.lowlevel.checkpoint()
            scope.cancel()
    assert not file.dirty


def test_no_piece_of_a_large_table_is_a_long_piece_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the loop: unknown fields are merged into their entries batch by batch, not for the whole table at the start
    table = EntryTable(TopicConfig)
    table.load({f"T{n}": {"perm": 6, "later": n} for n in range(5000)}, "f", "topicName")
    merged = 0
    original = msgspec.to_builtins

    def counted(entry: Any) -> Any:
        nonlocal merged
        merged += 1
        return original(entry)

    monkeypatch.setattr(msgspec, "to_builtins", counted)
    steps, text = [], []
    for piece in encode_pieces({"table": table.encodable()}):
        text.append(piece)
        steps.append(merged)
        merged = 0
    assert 0 < max(steps) <= 200
    assert json.loads(b"".join(text))["table"]["T4999"]["later"] == 4999


async def test_a_large_file_is_written_in_pieces_that_make_one_text() -> None:
    disk = SimDisk()
    table = {f"k{n}": "x" * 100 for n in range(5000)}
    file = StateFile(disk, PATH, lambda: encode_pieces({"table": table}))
    file.changed()
    pieces = await file._text()
    assert len(pieces) > 3
    assert max(map(len, pieces)) < 256 * 1024
    await file.persisted()
    assert await StateFile(disk, PATH, lambda: ()).load() == {"table": table}


# encoding


@pytest.mark.parametrize("count", [0, 1, 200, 201, 450])
def test_pieces_are_one_json_text(count: int) -> None:
    numbers = {n: n for n in range(count)}
    table = {"first": 1} | {f"k{n}": {n: n} for n in range(count)} | {"long": numbers, "last": 2}
    state = {"v": {"counter": 1}, "table": table, "x": [1]}
    text = b"".join(encode_pieces(state))
    assert text == json.dumps(state, separators=(",", ":")).encode()


def test_no_fields_are_an_empty_object() -> None:
    assert b"".join(encode_pieces({})) == b"{}"


def test_entries_keep_unknown_fields() -> None:
    table = EntryTable(TopicConfig)
    table.load({"T": {"perm": 6, "later": [1], "attributes": "", "order": None}}, "f", "topicName")
    assert table.entries["T"] == TopicConfig(topic_name="T")
    encoded = json.loads(b"".join(encode_pieces(table.encodable())))
    assert encoded["T"]["later"] == [1]
    table.forget("T")
    assert "later" not in json.loads(b"".join(encode_pieces(table.encodable())))["T"]


@pytest.mark.parametrize("raw", [[], {"T": 1}, {"T": {"perm": "x"}}])
def test_an_entry_that_does_not_fit_is_an_error(raw: Any) -> None:
    with pytest.raises(StateFileError, match="f: "):
        EntryTable(TopicConfig).load(raw, "f", "topicName")


def test_data_versions() -> None:
    assert load_data_version(None, "f").counter == 0
    assert load_data_version({"counter": "3", "timestamp": 1}, "f").counter == 3
    with pytest.raises(StateFileError):
        load_data_version({"counter": "x"}, "f")
