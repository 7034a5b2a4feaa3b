"""A start checks the length of every queue file: it rebuilds files that are not full and refuses a wrong setting."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, check_all, fill, killed, opened, settings
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.queue.queue_sizes import QueueFileError, other_size
from trimq.remoting.runtime.clock import ManualClock

COUNT = 35
BASE = "/store/consumequeue"
QUEUE = f"{BASE}/{TOPIC}/0"

Write = Callable[[], Awaitable[SimDisk]]


def _cut(disk: SimDisk, start: int, length: int, queue: str = QUEUE) -> None:
    fd = disk.open(f"{queue}/{start:020d}")
    disk.truncate(fd, length)
    disk.data_sync(fd)
    disk.close(fd)


async def _fill(store: MessageStore, clock: ManualClock) -> None:
    """Store messages one second apart, ten to a queue file."""
    for number in range(COUNT):
        await fill(store, 1, first=number)
        clock.advance(1)


async def _stopped() -> SimDisk:
    disk, clock = SimDisk(), ManualClock()
    async with opened(disk, clock=clock) as store:
        await _fill(store, clock)
    return disk


async def _killed() -> SimDisk:
    """A checkpoint vouches for all units, but the exit was not orderly."""
    disk = SimDisk()
    async with killed(disk) as store:
        clock = store.clock
        assert isinstance(clock, ManualClock)
        await _fill(store, clock)
        await store._checkpoints.save()
    return disk.power_cut()


async def _of_another_broker() -> SimDisk:
    """RocketMQ has changed the checkpoint's numbers since: nothing vouches for the queues."""
    disk = await _stopped()
    data = bytearray(disk.content("/store/checkpoint"))
    data[0] ^= 1
    fd = disk.open("/store/checkpoint")
    disk.pwrite(fd, data, 0)
    disk.data_sync(fd)
    disk.close(fd)
    return disk


async def _check(store: MessageStore) -> None:
    """Check that every message can be read, none is skipped, and each is found by its time."""
    await check_all(store, {(TOPIC, 0): COUNT})
    times = [await store.message_store_time(TOPIC, 0, number) for number in range(COUNT)]
    assert times == sorted(set(times)), "each message has a different time"
    for number, time in enumerate(times):
        assert await store.offset_by_time(TOPIC, 0, time) == number


# guards: no pull or search by time reads a unit that is missing because a file of the queue was cut
@pytest.mark.parametrize("write", [_stopped, _killed])
@pytest.mark.parametrize("length", [0, 20, 100, 101, 119, 199, 220, 300])
@pytest.mark.parametrize("start", [0, 200, 400, 600])
async def test_a_file_that_is_not_full_is_made_anew(write: Write, start: int, length: int) -> None:
    disk = await write()
    _cut(disk, start, length)
    async with opened(disk) as store:
        await _check(store)
        assert store.recovered is not None
        assert store.recovered.notes or (start, write) == (600, _killed), "it is reported"
    assert set(disk.lengths(QUEUE).values()) == {200}
    async with opened(disk) as store:
        assert store.recovered is not None
        assert store.recovered.clean


# guards: a start after an orderly stop opens one file for each queue, however many the queue has
async def test_an_untouched_store_is_taken_without_opening_all_its_files() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        for queue_id in range(20):
            await fill(store, 25, queue_id=queue_id)
    disk.history.clear()
    async with opened(disk) as store:
        assert store.recovered is not None
        assert store.recovered.clean
        assert len([call for call in disk.history if call.startswith(f"open {BASE}/")]) == 20


# -- a wrong setting


def _contents(disk: SimDisk) -> dict[str, bytes]:
    names = [f"{QUEUE}/{name}" for name in disk.list(QUEUE)]
    return {path: disk.content(path) for path in (*names, "/store/checkpoint")}


# guards: a wrong setting does not cause a rebuild of queues of another size; the refusal names the right setting
@pytest.mark.parametrize("write", [_stopped, _killed, _of_another_broker])
@pytest.mark.parametrize("size", [20, 100, 400, 180, 6_000_000])
async def test_all_files_of_another_size_are_a_wrong_setting(write: Write, size: int) -> None:
    disk = await write()
    before = _contents(disk)
    with pytest.RaisesGroup(
        pytest.RaisesExc(QueueFileError, match=rf"0 has 200 bytes, .* is {size}: .*mappedFileSizeConsumeQueue=200\)"),
        flatten_subgroups=True,
        allow_unwrapped=True,
    ):
        async with opened(disk, settings(mapped_file_size_consume_queue=size)):
            pass
    assert _contents(disk) == before
    async with opened(disk) as store:
        await _check(store)


async def test_a_wrong_setting_is_seen_where_one_of_the_files_was_cut() -> None:
    disk = await _stopped()
    _cut(disk, 200, 100)
    with pytest.RaisesGroup(QueueFileError, flatten_subgroups=True, allow_unwrapped=True):
        async with opened(disk, settings(mapped_file_size_consume_queue=400)):
            pass
    async with opened(disk) as store:
        await _check(store)


# guards: the only file of a store may be cut or too long: an orderly stop has recorded the right size
@pytest.mark.parametrize("length", [0, 60, 100, 101, 220, 400])
async def test_the_only_file_of_a_store(length: int) -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 8)
    _cut(disk, 0, length)
    async with opened(disk) as store:
        await check_all(store, {(TOPIC, 0): 8})


async def test_the_remedy_of_the_refusal_works() -> None:
    disk = await _stopped()
    for name in disk.list(QUEUE):
        disk.delete(f"{QUEUE}/{name}")
    disk.remove_directory(QUEUE)
    disk.remove_directory(f"{BASE}/{TOPIC}")
    config = settings(mapped_file_size_consume_queue=400)
    async with opened(disk, config) as store:
        await _check(store)
    assert set(disk.lengths(QUEUE).values()) == {400}


def _store_of(files: dict[str, dict[int, int]]) -> SimDisk:
    disk = SimDisk()
    for queue, lengths in files.items():
        disk.make_directory(f"{BASE}/{queue}")
        for start, length in lengths.items():
            disk.close(disk.create(f"{BASE}/{queue}/{start:020d}", length))
    return disk


@pytest.mark.parametrize(
    ("files", "known", "expected"),
    [
        pytest.param({}, 400, None, id="no files"),
        pytest.param({"T/0": {0: 400}}, None, 400, id="one that is longer"),
        pytest.param({"T/0": {0: 100}}, None, None, id="one that is shorter was cut"),
        pytest.param({"T/0": {0: 100}, "T/1": {0: 100}}, None, 100, id="two that are shorter"),
        pytest.param({"T/0": {0: 100, 100: 100}}, None, 100, id="a row of shorter ones"),
        pytest.param({"T/0": {0: 100, 200: 100}}, None, None, id="two that were cut to one length"),
        pytest.param({"T/0": {0: 400, 200: 400}}, None, None, id="two that grew to one length"),
        pytest.param({"T/0": {200: 400}}, None, None, id="a name that does not fit the length"),
        pytest.param({"T/0": {0: 410}}, None, None, id="no length of units"),
        pytest.param({"T/0": {0: 0}, "T/1": {0: 0}}, None, None, id="empty ones"),
        pytest.param({"T/0": {0: 400}, "T/1": {0: 200}}, None, None, id="one of the configured size"),
        pytest.param({"T/0": {0: 400}}, 200, None, id="known to be the configured size"),
        pytest.param({"T/0": {0: 100}}, 100, 100, id="known to be another size"),
        pytest.param({"T/0": {0: 400}}, 100, 400, id="known, but no file has that size"),
        pytest.param({"T/0": {0: 300, 400: 400}}, 400, 400, id="known, and one was cut"),
    ],
)
def test_what_the_files_show_of_their_size(
    files: dict[str, dict[int, int]], known: int | None, expected: int | None
) -> None:
    found = other_size(_store_of(files), BASE, 200, known)
    assert (found and found.size) == expected


# -- while the broker runs


async def _pull(store: MessageStore, offset: int) -> None:
    if store.get_message(TOPIC, 0, offset, 4, 1 << 20, None) is None:
        await store.get_message_cold(TOPIC, 0, offset, 4, 1 << 20, None)


# guards: a pull that reads a cut file names it in its error, and skips nothing
@pytest.mark.parametrize("length", [0, 100, 101])
@pytest.mark.parametrize("is_open", [False, True])
async def test_a_file_that_is_cut_while_the_store_runs(length: int, is_open: bool) -> None:
    disk = await _stopped()
    async with opened(disk) as store:
        if is_open:
            (await store.get_message_cold(TOPIC, 0, 0, 1, 1 << 20, None)).release()
        _cut(disk, 0, length)
        with pytest.raises(QueueFileError, match="0 has lost units since the start: restart the broker"):
            await _pull(store, 5)
    async with opened(disk) as store:
        await _check(store)


def test_names_and_lengths_on_a_real_disk(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(7))
    (tmp_path / "d").mkdir()
    disk = RealDisk()
    assert disk.lengths(str(tmp_path)) == {"a": 7}
    assert disk.lengths(str(tmp_path / "none")) == disk.lengths(str(tmp_path / "a")) == {}
    assert disk.list(str(tmp_path / "a")) == []
