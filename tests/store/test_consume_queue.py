import errno
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.queue import consume_queue_store
from trimq.broker.store.queue.consume_queue import ConsumeQueue, QueueShape, first_at_or_above
from trimq.broker.store.queue.consume_queue_flush import FlushConsumeQueueService
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.queue_clean import QueueCleaner
from trimq.broker.store.queue.queue_files import erase_units, load_queue, read_units
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.protocol.queue_unit import FILLER, FILLER_SIZE, UNIT

PER_FILE = 10
FILE_SIZE = 200
LOG_FILE = 1 << 20
TOPIC = "TopicTest"


class Rig:
    def __init__(self, disk: SimDisk | None = None, *, open_files: int = 4) -> None:
        self.disk = disk or SimDisk()
        self.flags = RunningFlags()
        self.store = ConsumeQueueStore(self.disk, "/store", QueueShape(PER_FILE, LOG_FILE), max_open_files=open_files)
        self.flush = FlushConsumeQueueService(self.store, self.flags)

    def queue(self, queue_id: int = 0) -> ConsumeQueue:
        return self.store.find_or_create(TOPIC, queue_id)

    def put(self, count: int, *, first: int = 0, queue_id: int = 0) -> ConsumeQueue:
        queue = self.queue(queue_id)
        for number in range(first, first + count):
            assert queue.put(1000 * number, 100, number, number)
        return queue

    async def units(self, queue: ConsumeQueue, offset: int | None = None) -> list[tuple[int, int, int]]:
        """All units, read as consumers do: from memory where possible, else waiting for the device."""
        at = queue.min_offset if offset is None else offset
        found: list[tuple[int, int, int]] = []
        while at < queue.next_offset:
            data = self.store.read(queue, at, 7)
            if data is None:
                data = await self.store.read_cold(queue, at, 7)
            assert data
            found += UNIT.iter_unpack(data)
            at += len(data) // 20
        return found

    def reloaded(self, limit: int = 1 << 60) -> "Rig":
        rig = Rig(self.disk)
        rig.store.load(limit)
        return rig


def _unit(number: int) -> tuple[int, int, int]:
    return 1000 * number, 100, number


def _path(file_offset: int, queue_id: int = 0) -> str:
    return f"/store/consumequeue/{TOPIC}/{queue_id}/{file_offset * 20:020d}"


async def test_bytes_on_disk() -> None:
    rig = Rig()
    queue = rig.queue()
    queue.put(0x1122334455, 0x667788, -2, 0)
    assert await rig.flush.write()
    data = rig.disk.content(_path(0))
    assert data[:20].hex() == "0000001122334455" + "00667788" + "fffffffffffffffe"
    assert len(data) == FILE_SIZE
    assert not any(data[20:])


async def test_units_can_be_read_from_the_tail_and_from_files() -> None:
    rig = Rig()
    queue = rig.put(25)
    assert await rig.units(queue) == [_unit(number) for number in range(25)]
    assert await rig.flush.write()
    queue.forget_written(3)
    assert queue.tail_offset == 22
    assert await rig.units(queue) == [_unit(number) for number in range(25)]
    rig.put(2, first=25)
    assert await rig.units(queue, 4) == [_unit(number) for number in range(4, 27)]
    assert not queue.deleted


async def test_a_file_is_made_with_its_first_unit() -> None:
    rig = Rig()
    rig.store.create_queues(TOPIC, 2)
    assert rig.store.topics() == {TOPIC: [0, 1]}
    assert await rig.flush.write()
    assert rig.disk.stat(_path(0)) is None
    rig.put(10)
    assert await rig.flush.write()
    assert rig.disk.stat(_path(0)) is not None
    assert rig.disk.stat(_path(10)) is None, "RocketMQ would take its zeros for a unit"
    rig.put(1, first=10)
    assert await rig.flush.write()
    assert rig.disk.stat(_path(10)) is not None
    assert not rig.store.dirty


async def test_a_queue_waits_until_it_has_the_least_pages() -> None:
    rig = Rig()
    queue = rig.put(300)
    await rig.flush.write(least_pages=2)
    assert queue.written == 0
    rig.put(120, first=300)
    await rig.flush.write(least_pages=2)
    assert queue.written == 420


async def test_open_files_do_not_grow_with_the_queues() -> None:
    rig = Rig(open_files=4)
    for queue_id in range(20):
        rig.put(5, queue_id=queue_id)
    await rig.flush.write()
    await rig.flush.sync()
    assert rig.disk.open_files() == 0
    for queue in list(rig.store.all_queues()):
        queue.forget_written(0)
        assert await rig.units(queue) == [_unit(number) for number in range(5)]
    assert rig.disk.open_files() == 4
    rig.store.close()
    assert rig.disk.open_files() == 0


async def test_the_tails_of_all_queues_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimq.broker.store.queue.consume_queue_flush._KEEP_UNITS", 8)
    monkeypatch.setattr("trimq.broker.store.queue.consume_queue_flush._KEEP_UNITS_ALL", 20)
    rig = Rig()
    for queue_id in range(10):
        rig.put(30, queue_id=queue_id)
    await rig.flush.write()
    held = [len(queue.tail) // 20 for queue in rig.store.all_queues()]
    assert held == [0] * 8 + [8] * 2


async def test_a_full_disk_is_no_loss_and_heals() -> None:
    rig = Rig(SimDisk(capacity=4096))
    rig.put(5, queue_id=0)
    assert await rig.flush.write()
    queue = rig.put(5, queue_id=1)
    assert not await rig.flush.write()
    assert rig.flags.has(Flag.LOGIC_DISK_FULL)
    assert "no space" in rig.flags.reason
    assert await rig.units(queue) == [_unit(number) for number in range(5)]
    rig.disk.capacity = 1 << 20
    assert await rig.flush.write()
    assert rig.flags.writable
    assert await rig.units(rig.reloaded().queue(1)) == [_unit(number) for number in range(5)]


@pytest.mark.parametrize("method", ["pwrite", "data_sync", "sync_directory", "create"])
async def test_an_error_of_the_device_stops_the_store(method: str) -> None:
    rig = Rig()
    rig.put(5)
    rig.disk.fail(method, errno.EIO)
    written = await rig.flush.write()
    assert not (written and await rig.flush.sync())
    assert rig.flags.is_broken
    assert "restart" in rig.flags.reason


async def test_a_sync_that_finds_no_space_does_not_heal() -> None:
    rig = Rig()
    rig.put(5)
    assert await rig.flush.write()
    rig.disk.fail("data_sync", errno.ENOSPC)  # the kernel drops the pages it had no space for
    assert not await rig.flush.sync()
    assert rig.flags.is_broken


def test_a_unit_that_is_there_is_not_put_twice() -> None:
    queue = Rig().put(5)
    assert not queue.put(*_unit(3), 3)
    assert queue.next_offset == 5


def test_offsets_that_were_left_out_are_filled_so_that_nothing_shifts() -> None:
    queue = Rig().put(3)
    queue.put(LOG_FILE + 500, 100, 9, 6)
    units = list(UNIT.iter_unpack(queue.tail_units(3, 10)))
    assert units == [(LOG_FILE, FILLER_SIZE, 0)] * 3 + [(LOG_FILE + 500, 100, 9)]
    assert queue.next_offset == 7


def test_an_absurd_offset_makes_no_fillers() -> None:
    queue = Rig().put(3)
    queue.put(5000, 100, 9, 1 << 40)
    assert queue.next_offset == 4


def test_an_old_offset_of_a_new_record_goes_to_the_end() -> None:
    queue = Rig().put(3)
    assert queue.put(9000, 100, 9, 1)
    assert queue.next_offset == 4


async def test_a_queue_that_begins_late_begins_with_fillers() -> None:
    rig = Rig()
    queue = rig.queue()
    queue.put(5000, 100, 9, 23)
    assert (queue.first_offset, queue.min_offset, queue.next_offset) == (20, 23, 24)
    await rig.flush.write()
    assert rig.disk.list(f"/store/consumequeue/{TOPIC}/0") == [f"{400:020d}"]
    assert rig.disk.content(_path(20))[:80] == FILLER * 3 + UNIT.pack(5000, 100, 9)
    again = rig.reloaded()
    loaded = again.queue()
    again.store.correct_min_offset(loaded, 0)
    assert (loaded.first_offset, loaded.min_offset, loaded.next_offset, loaded.max_phy) == (20, 23, 24, 5100)


@given(st.lists(st.tuples(st.sampled_from("pwfcg"), st.integers(1, 13)), max_size=30))
def test_a_queue_is_a_list(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        rig = Rig()
        model: list[tuple[int, int, int]] = []
        queue = rig.queue()
        phy = 0
        for what, number in steps:
            if what == "p":
                for _ in range(number):
                    queue.put(phy, 100, number, len(model))
                    model.append((phy, 100, number))
                    phy += 1000
            elif what == "w":
                assert await rig.flush.write()
            elif what == "f":
                queue.forget_written(number)
            elif what == "c" and model:
                keep = max(queue.min_offset, len(model) - number)
                del model[keep:]
                written = queue.written
                queue.cut(keep, model[-1][0] + 100 if model else 0)
                rig.store.descriptors.drop_in(queue.directory)
                erase_units(rig.disk, queue, written, FILE_SIZE)
                rig.store.recount()
            elif what == "g":
                queue.put(phy + 1000 * number, 100, 0, len(model) + number)
                begins = not model
                filler = FILLER if begins else UNIT.pack(0, FILLER_SIZE, 0)
                model += [UNIT.unpack(filler)] * number
                model.append((phy + 1000 * number, 100, 0))
                phy += 1000 * (number + 1)
            assert queue.next_offset == len(model)
            assert await rig.units(queue, queue.first_offset) == model[queue.first_offset :]
            assert rig.store.settle() == len(model)
        assert await rig.flush.write()
        assert await rig.flush.sync()
        loaded = rig.reloaded(phy + 1).queue()
        while model and model[-1][1] == FILLER_SIZE:
            model.pop()
        assert loaded.next_offset == max(len(model), loaded.first_offset)
        assert await rig.units(loaded, loaded.first_offset) == model[loaded.first_offset :]

    trio.run(run)


# -- loading


async def test_loading_takes_the_units_below_a_log_offset_and_erases_the_others() -> None:
    rig = Rig()
    rig.put(27)
    await rig.flush.write()
    again = rig.reloaded(17_000)
    queue = again.queue()
    assert (queue.next_offset, queue.max_phy) == (17, 16_100)
    assert await again.units(queue) == [_unit(number) for number in range(17)]
    assert not any(rig.disk.content(_path(10))[140:])
    assert rig.disk.stat(_path(20)) is None


async def test_garbage_far_behind_the_end_is_erased() -> None:
    disk = SimDisk()
    disk.make_directory(f"/store/consumequeue/{TOPIC}/0")
    fd = disk.create(_path(0), 20_000)
    disk.pwrite(fd, UNIT.pack(1, 100, 0), 0)
    disk.pwrite(fd, UNIT.pack(5, 100, 0) * 3, 16_000)
    disk.close(fd)
    loaded = load_queue(disk, f"/store/consumequeue/{TOPIC}/0", 20_000, 1 << 60)
    assert loaded.next_offset == 1
    assert not any(disk.content(_path(0))[20:])


async def test_a_file_that_was_cut_short_gets_its_size_back() -> None:
    rig = Rig()
    rig.put(5)
    await rig.flush.write()
    fd = rig.disk.open(_path(0))
    rig.disk.truncate(fd, 70)
    rig.disk.close(fd)
    assert rig.reloaded().queue().next_offset == 3
    assert len(rig.disk.content(_path(0))) == FILE_SIZE


async def test_a_file_that_was_cut_within_a_unit_keeps_no_part_of_it() -> None:
    # the part holds the record's place and size: padded with zeros it would be a unit with the wrong tags code
    rig = Rig()
    rig.put(5)
    await rig.flush.write()
    fd = rig.disk.open(_path(0))
    rig.disk.truncate(fd, 75)
    rig.disk.close(fd)
    assert rig.reloaded().queue().next_offset == 3
    assert not any(rig.disk.content(_path(0))[60:])


@pytest.mark.parametrize(("start", "length"), [(0, 300), (0, 100), (10, 0), (10, 70), (20, 220)])
async def test_a_file_that_is_not_full_is_reported_and_left_alone(start: int, length: int) -> None:
    rig = Rig()
    rig.put(25)
    await rig.flush.write()
    fd = rig.disk.open(_path(start))
    rig.disk.truncate(fd, length)
    rig.disk.close(fd)
    loaded = load_queue(rig.disk, f"/store/consumequeue/{TOPIC}/0", FILE_SIZE, 1 << 60)
    assert loaded.why == f"{_path(start)} has {length} bytes, {FILE_SIZE} are expected"
    assert rig.disk.lengths(f"/store/consumequeue/{TOPIC}/0")[_path(start)[-20:]] == length


async def test_a_file_that_begins_within_another_is_reported() -> None:
    rig = Rig()
    rig.put(5)
    await rig.flush.write()
    rig.disk.rename(_path(0), _path(5))
    assert "multiple" in load_queue(rig.disk, f"/store/consumequeue/{TOPIC}/0", FILE_SIZE, 1 << 60).why


async def test_files_with_holes_between_them_are_reported() -> None:
    rig = Rig()
    rig.put(35)
    await rig.flush.write()
    rig.disk.delete(_path(10))
    assert "missing" in load_queue(rig.disk, f"/store/consumequeue/{TOPIC}/0", FILE_SIZE, 1 << 60).why
    other = Rig()
    other.put(35)
    await other.flush.write()
    fd = other.disk.open(_path(20))
    other.disk.pwrite(fd, bytes(40), 160)
    other.disk.close(fd)
    assert "missing" in load_queue(other.disk, f"/store/consumequeue/{TOPIC}/0", FILE_SIZE, 1 << 60).why


async def test_names_that_are_no_queues_are_passed_over() -> None:
    rig = Rig()
    rig.put(3)
    await rig.flush.write()
    rig.disk.make_directory(f"/store/consumequeue/{TOPIC}/x1")
    rig.disk.make_directory(f"/store/consumequeue/{TOPIC}/0/sub")
    assert rig.reloaded().store.topics() == {TOPIC: [0]}


# -- following the log


@given(st.integers(0, 60), st.integers(0, 60_000), st.integers(0, 60))
def test_a_queue_follows_the_log(count: int, log_min: int, keep: int) -> None:
    async def run() -> None:
        rig = Rig()
        queue = rig.put(count)
        await rig.flush.write()
        queue.forget_written(keep)
        deleted = await QueueCleaner(rig.store, rig.flush).follow(log_min)
        expected = min(count, -(-log_min // 1000))
        assert queue.min_offset == expected
        assert await rig.units(queue) == [_unit(number) for number in range(expected, count)]
        names = [name for name in rig.disk.list(queue.directory) if int(name) // 20 < max(count, 1)]
        first = min(expected, max(count - 1, 0)) // PER_FILE
        assert deleted == first
        assert [int(name) // FILE_SIZE for name in names] == list(range(first, (max(count, 1) - 1) // PER_FILE + 1))[
            : len(names)
        ]
        again = rig.reloaded()
        assert again.queue().next_offset == count
        again.store.correct_min_offset(again.queue(), log_min)
        assert again.queue().min_offset == max(expected, again.queue().first_offset)

    trio.run(run)


async def test_a_topic_goes_with_its_files_and_can_be_made_again_at_once() -> None:
    rig = Rig()
    rig.put(15)
    rig.put(3, queue_id=1)
    await rig.flush.write()
    rig.put(1, first=15)
    cleaner = QueueCleaner(rig.store, rig.flush)
    async with trio.open_nursery() as nursery:
        async with rig.flush.lock:
            nursery.start_soon(cleaner.drop_topics, [TOPIC], lambda: 0, lambda: 0)
            await trio.testing.wait_all_tasks_blocked()
            rig.put(2)
        nursery.start_soon(rig.flush.write)
    assert await rig.units(rig.queue()) == [_unit(0), _unit(1)]
    await rig.flush.write()
    assert rig.disk.list(f"/store/consumequeue/{TOPIC}") == ["0"]
    assert await rig.units(rig.reloaded().queue()) == [_unit(0), _unit(1)]
    assert rig.store.settle() == 2


async def test_queues_without_messages_in_the_log_can_be_dropped() -> None:
    rig = Rig()
    rig.put(15)
    rig.put(30, queue_id=1)
    await rig.flush.write()
    cleaner = QueueCleaner(rig.store, rig.flush)
    await cleaner.follow(20_000)
    assert await cleaner.drop_expired() == 1
    assert rig.store.topics() == {TOPIC: [1]}
    assert rig.disk.list(f"/store/consumequeue/{TOPIC}") == ["1"]


async def test_many_queues_follow_the_log_in_batches() -> None:
    rig = Rig()
    for queue_id in range(40):
        rig.put(15, queue_id=queue_id)
    await rig.flush.write()
    cleaner = QueueCleaner(rig.store, rig.flush)
    await cleaner.follow(20_000)
    assert await cleaner.drop_expired() == 40
    assert rig.store.topics() == {}
    await cleaner.drop_old(TOPIC, 3)  # it is not there any more
    assert rig.disk.list("/store/consumequeue") == []


def test_first_at_or_above_is_a_binary_search() -> None:
    values = [1, 3, 3, 7]
    for wanted in range(9):
        expected = sum(value < wanted for value in values)
        assert first_at_or_above(values.__getitem__, 0, 4, wanted) == expected


async def test_on_a_real_disk(tmp_path: Any) -> None:
    disk = RealDisk()
    store = ConsumeQueueStore(disk, str(tmp_path), QueueShape(PER_FILE, LOG_FILE))
    flush = FlushConsumeQueueService(store, RunningFlags())
    queue = store.find_or_create(TOPIC, 0)
    for number in range(25):
        queue.put(*_unit(number), number)
    assert await flush.write()
    assert await flush.sync()
    queue.forget_written(0)
    assert store.read(queue, 0, 5) is None
    assert await store.read_cold(queue, 0, 5) == b"".join(UNIT.pack(*_unit(number)) for number in range(5))
    assert store.read(queue, 0, 5) is not None
    store.close()
    fd = disk.open(queue.path_of(20))
    disk.pwrite(fd, UNIT.pack(7, 7, 7), 180)
    disk.close(fd)
    again = ConsumeQueueStore(disk, str(tmp_path), QueueShape(PER_FILE, LOG_FILE))
    again.load(1 << 60)
    loaded = again.find(TOPIC, 0)
    assert loaded is not None
    assert loaded.next_offset == 25
    assert not any(read_units(disk, queue.path_of(20), 5, 5))


@pytest.mark.parametrize("dirty", [False, True])
@pytest.mark.parametrize("start", [0, 5, 9])
def test_units_of_a_batch_are_put_as_one_by_one(dirty: bool, start: int) -> None:
    queues = []
    for _ in range(2):
        queue = ConsumeQueue("T", 0, "/q/T/0", QueueShape(10, 1 << 20), lambda _: None)
        queue.put(100, 50, 1, 4)
        queue.dirty = dirty
        queues.append(queue)
    one, many = queues
    places, sizes, tags = [150, 250, 350], [100, 100, 60], [1, -2, 3]
    for number, unit in enumerate(zip(places, sizes, tags, strict=True)):
        one.put(*unit, start + number)
    many.put_all(places, sizes, tags, start)
    for name in ("tail", "next_offset", "max_phy", "min_offset", "tail_offset", "dirty"):
        assert getattr(one, name) == getattr(many, name), name


def units(first: int, stop: int) -> bytes:
    return b"".join(UNIT.pack(1000 * number, 100, number) for number in range(first, stop))


async def test_units_behind_the_tail_are_read_in_blocks_for_all_who_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files hold 10 units, which are cached in blocks of four."""
    monkeypatch.setattr(consume_queue_store, "_BLOCK", 4)
    monkeypatch.setattr(consume_queue_store, "_BLOCK_FROM", 3)
    monkeypatch.setattr(consume_queue_store, "_MOST_BLOCKS", 3)
    rig = Rig()
    queue = rig.put(25)
    other = rig.put(25, queue_id=1)
    assert await rig.flush.write()
    for one in (queue, other):
        one.forget_written(0)
        assert await rig.store.read_cold(one, 0, 1)
    assert await rig.store.read_cold(queue, 10, 1)
    read = rig.store.read
    assert read(queue, 5, 2) == units(5, 7)
    rig.disk.cold = True
    assert read(queue, 5, 3) is None, "a read of a single unit caches no others"
    rig.disk.cold = False
    assert read(queue, 1, 3) == units(1, 4)
    rig.disk.cold = True
    assert read(queue, 0, 4) == units(0, 4), "later readers get the cached units"
    assert read(queue, 3, 1) == units(3, 4)
    assert read(queue, 2, 5) == units(2, 4), "as much as is there"
    rig.disk.cold = False
    assert read(queue, 2, 5) == units(2, 7)
    assert read(queue, 7, 4) == units(7, 10), "the file ends before"
    assert read(queue, 12, 3) == units(12, 15)
    rig.disk.cold = True
    assert read(queue, 8, 3) == units(8, 10)
    assert read(queue, 0, 3) is None, "no more than the limit is cached"
    rig.disk.cold = False
    first = read(other, 0, 3)
    rig.disk.cold = True
    assert read(other, 0, 3) == first == units(0, 3)
    rig.store.drop_queue(other)
    assert read(other, 0, 3) is None
    assert read(queue, 8, 3) == units(8, 10)
    rig.store.forget_all()
    assert read(queue, 8, 3) is None


async def test_blocks_end_where_the_tail_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The units of the tail are only partly in a file, and the tail grows."""
    monkeypatch.setattr(consume_queue_store, "_BLOCK", 4)
    monkeypatch.setattr(consume_queue_store, "_BLOCK_FROM", 1)
    rig = Rig()
    queue = rig.put(6)
    assert await rig.flush.write()
    queue.forget_written(0)
    assert queue.tail_offset == 6
    assert await rig.store.read_cold(queue, 0, 1)
    for first in range(6):
        for count in range(1, 7):
            found = rig.store.read(queue, first, count)
            assert found
            assert found == units(first, min(first + count, 6))[: len(found)]
    queue.put(6000, 100, 6, 6)
    assert rig.store.read(queue, 5, 1) == units(5, 6)
    assert rig.store.read(queue, 6, 1) == units(6, 7)
