import errno
import json
from typing import Any

import pytest
import trio

from broker.services.state_file import (
    EntryTable,
    StateFile,
    StateFileError,
    encode_pieces,
    load_data_version,
    replace_file,
)
from protocol.body import TopicConfig
from remoting.clock import ManualClock
from tests.store.simdisk import Loss, PowerCut, SimDisk

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


# guards: an empty file is damage too (a full disk, a tool that truncates): offsets would be lost without a word
@pytest.mark.parametrize("broken", [b"{", b"", b"\0\0\0", b" \n"])
@pytest.mark.parametrize("names", [[PATH], [PATH + ".bak"], [PATH, PATH + ".bak"]])
async def test_broken_and_no_backup_is_an_error_and_not_an_empty_state(broken: bytes, names: list[str]) -> None:
    disk = SimDisk()
    disk.make_directory(PATH.rpartition("/")[0])
    for name in names:
        fd = disk.create(name, 0)
        disk.pwrite(fd, broken, 0)
        disk.close(fd)
    with pytest.raises(StateFileError, match=rf"{names[0]}: .*: put a backup of {PATH} in its place, or delete it"):
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
        pytest.fail("the write never came through")
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


async def test_with_an_interval_changes_wait_for_it_unless_somebody_waits_for_them() -> None:
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


async def test_a_failed_write_is_told_to_who_waits_and_tried_again() -> None:
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


def test_entries_keep_fields_that_nobody_knows() -> None:
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
