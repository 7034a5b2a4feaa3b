"""Read-ahead in cold parts of the log: more for sequential readers, little for others, bounded, and no new fault."""

import errno
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar, TypeVarTuple

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.builders import LOG
from tests.store.simdisk import SimDisk
from tests.store.slowdisk import SlowDisk
from tests.store.stores import TOPIC, opened, put, settings
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.disk.page_cache import CHUNK
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.read.read_ahead import (
    CONCURRENT_READS,
    FIRST_WINDOW,
    LARGEST_WINDOW,
    MOST_STREAMS,
    STEP,
    ReadAhead,
)
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.protocol.message import decode_messages

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

SIZE = 32 << 20
MEMORY = 64 << 30
BIG = settings(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000, max_message_size=70_000)


class Log:
    """Consecutive full files, all cold except for what the test reads."""

    def __init__(self, disk: SimDisk, count: int = 2) -> None:
        self.disk = disk
        disk.make_directory(LOG)
        self.files = MappedFileQueue(disk, LOG, SIZE)
        for number in range(count):
            path = self.files.path_of(number * SIZE)
            file = MappedFile(disk, path, number * SIZE, SIZE, disk.create(path, SIZE))
            file.wrote = file.flushed = SIZE
            self.files.files.append(file)
        disk.cold = True
        self.ahead = ReadAhead(self.files, MEMORY)

    def reads(self) -> list[tuple[int, int]]:
        """Positions and lengths of the reads ahead since the last call."""
        found = [entry.split()[1].split("+") for entry in self.disk.history if entry.startswith("read_ahead")]
        self.disk.history.clear()
        return [(int(at), int(length)) for at, length in found]

    def look(self, position: int) -> bool:
        """Check one byte as a pull served from memory does."""
        file = self.files.find(position)
        assert file is not None
        return self.files.page_cache.covers(file, position - file.start, position - file.start + 1)


@asynccontextmanager
async def running(log: Log) -> AsyncIterator[Log]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.ahead.run)
        await trio.testing.wait_all_tasks_blocked()
        yield log
        log.ahead.stop()
    assert not any(file.is_held for file in log.files.files)
    log.files.close()
    assert log.disk.open_files() == 0


class CountingDisk(SlowDisk):
    """Records the largest number of concurrent reads."""

    def __init__(self) -> None:
        super().__init__("read_ahead")
        self.now = self.most = 0

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        self.now += fn.__name__ == self.slow
        self.most = max(self.most, self.now)
        try:
            return await super().run(fn, *args)
        finally:
            self.now -= fn.__name__ == self.slow


async def test_who_reads_on_gets_twice_as_much_each_time() -> None:
    async with running(Log(SimDisk())) as log:
        await log.ahead.bring_in(10, 5000)
        assert log.reads() == [(0, CHUNK)], "not yet known to be sequential"
        window, at = FIRST_WINDOW, CHUNK
        while window <= LARGEST_WINDOW:
            await log.ahead.bring_in(at, at + 100)
            await trio.testing.wait_all_tasks_blocked()
            steps = [(at + done, min(STEP, window - done)) for done in range(0, window, STEP)]
            assert log.reads() == steps
            at += window
            window *= 2


async def test_a_reader_in_the_middle_of_a_window_lets_the_next_one_begin() -> None:
    async with running(Log(SimDisk())) as log:
        await log.ahead.bring_in(0, CHUNK)
        await log.ahead.bring_in(CHUNK, CHUNK + 1)
        log.reads()
        half = CHUNK + FIRST_WINDOW // 2
        assert all(log.look(at) for at in range(CHUNK, half, CHUNK))
        await trio.testing.wait_all_tasks_blocked()
        assert log.reads() == [], "a reader that stops gets no more"
        assert log.look(half + 2 * CHUNK), "the part between was read for others"
        await trio.testing.wait_all_tasks_blocked()
        assert log.reads() == [(CHUNK + FIRST_WINDOW, 2 * FIRST_WINDOW)]
        assert log.look(half + CHUNK)
        await trio.testing.wait_all_tasks_blocked()
        assert log.reads() == []


async def test_a_whole_log_without_waiting_twice() -> None:
    """From one file into the next, up to the part in memory."""
    log = Log(SimDisk())
    log.files.files[-1].in_memory_from = SIZE - 3 * CHUNK
    async with running(log):
        waited = 0
        for at in range(0, 2 * SIZE, CHUNK):
            if not log.look(at):
                waited += 1
                await log.ahead.bring_in(at, at + CHUNK)
                assert log.look(at)
            await trio.testing.wait_all_tasks_blocked()
        assert waited == 2
        assert sum(length for _, length in log.reads()) == 2 * SIZE - 3 * CHUNK
        assert not log.files.page_cache.marks


async def test_a_reader_that_finds_in_memory_what_follows_is_one_that_goes_on() -> None:
    """The part in memory is skipped in the same turn, so the mark is set before the reader comes; cold data is read."""
    async with running(Log(SimDisk())) as log:
        log.disk.read_ahead(log.files.files[0].fd, CHUNK, 1 << 20)
        await log.ahead.bring_in(0, 1)
        log.reads()
        for at in range(CHUNK, 17 * CHUNK, CHUNK):
            assert log.look(at)
        assert log.reads() == []
        assert log.look(17 * CHUNK)
        await trio.testing.wait_all_tasks_blocked()
        assert log.reads() == [(1 << 20, 25 * CHUNK)]


async def test_what_is_in_memory_is_not_read() -> None:
    async with running(Log(SimDisk())) as log:
        log.disk.cold = False
        for at in range(0, 1 << 20, 3 * CHUNK):
            await log.ahead.bring_in(at, at + 3 * CHUNK)
        assert log.reads() == []


async def test_only_the_missing_end_of_a_piece_is_read() -> None:
    async with running(Log(SimDisk())) as log:
        log.disk.read_ahead(log.files.files[0].fd, 0, 5 * CHUNK)
        log.reads()
        await log.ahead.bring_in(CHUNK, 8 * CHUNK)
        assert log.reads() == [(5 * CHUNK, 3 * CHUNK)]


async def test_what_has_left_memory_again_is_read_again_and_less_of_it() -> None:
    async with running(Log(SimDisk())) as log:
        for at in range(0, 4 * FIRST_WINDOW, CHUNK):
            await log.ahead.bring_in(at, at + CHUNK)
        await trio.testing.wait_all_tasks_blocked()
        log.disk.forget_read_ahead()
        log.files.page_cache.forget(log.files.files[0], 0, SIZE)
        log.reads()
        await log.ahead.bring_in(2 * FIRST_WINDOW, 2 * FIRST_WINDOW + 1)
        await trio.testing.wait_all_tasks_blocked()
        assert log.reads() == [(2 * FIRST_WINDOW, FIRST_WINDOW)]
        half = 5 * FIRST_WINDOW // 2
        assert {number * CHUNK for _, number in log.files.page_cache.marks} == set(
            range(half, half + FIRST_WINDOW // 2, CHUNK)
        )


async def test_readers_here_and_there_get_what_they_ask_for() -> None:
    async with running(Log(SimDisk())) as log:
        places = [(number * 11 << 20) % SIZE + (number % 2) * SIZE for number in range(6)]
        for at in places:
            await log.ahead.bring_in(at + 7, at + CHUNK)
        await trio.testing.wait_all_tasks_blocked()
        assert [length for _, length in log.reads()] == [CHUNK] * 6


async def test_many_readers_in_one_place_share_what_is_read() -> None:
    disk = CountingDisk()
    async with running(Log(disk)) as log:
        disk.held = True
        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(log.ahead.bring_in, number * 10, number * 10 + 10)
            await trio.testing.wait_all_tasks_blocked()
            disk.held = False
            disk.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        reads = log.reads()
        assert reads[0][0] == 0
        assert sum(length for _, length in reads) <= CHUNK + FIRST_WINDOW, "however many they are"
        assert disk.most == 1


async def test_few_reads_at_the_same_time_whatever_comes() -> None:
    disk = CountingDisk()
    async with running(Log(disk, 20)) as log:
        disk.held = True
        async with trio.open_nursery() as nursery:
            for number in range(2 * MOST_STREAMS):
                at = number * 2 * (STEP + CHUNK)
                nursery.start_soon(log.ahead.bring_in, at, at + 10)
                await trio.testing.wait_all_tasks_blocked()
            assert disk.now == CONCURRENT_READS
            assert len(nursery.child_tasks) == MOST_STREAMS, "other readers read their records themselves"
            disk.held = False
            disk.gate.set()
        assert disk.most == CONCURRENT_READS
        assert len(log.reads()) == MOST_STREAMS
        await log.ahead.bring_in(CHUNK, CHUNK + 1)
        assert log.reads() == [(CHUNK, FIRST_WINDOW)]
        await log.ahead.bring_in(19 * SIZE, 19 * SIZE + 1)
        assert log.reads() == [(0, CHUNK)], "the least recently used stream was evicted"
        second = 2 * (STEP + CHUNK) + CHUNK
        await log.ahead.bring_in(second, second + 1)
        assert log.reads() == [(second, CHUNK)], "that was the second one"
        await log.ahead.bring_in(CHUNK + FIRST_WINDOW, CHUNK + FIRST_WINDOW + 1)
        assert log.reads() == [(CHUNK + FIRST_WINDOW, 2 * FIRST_WINDOW)]


async def test_small_machines_read_less_ahead() -> None:
    log = Log(SimDisk())
    log.ahead = ReadAhead(log.files, 1 << 30)
    async with running(log):
        for at in range(0, 8 << 20, CHUNK):
            await log.ahead.bring_in(at, at + CHUNK)
        assert max(length for _, length in log.reads()) == 512 << 10


async def test_nothing_is_read_before_run_and_after_stop() -> None:
    log = Log(SimDisk())
    await log.ahead.bring_in(0, 1)
    async with running(log):
        await log.ahead.bring_in(0, CHUNK)
        await log.ahead.bring_in(CHUNK, CHUNK + 1)
        log.reads()
        log.ahead.stop()
        await log.ahead.bring_in(10 << 20, (10 << 20) + 1)
        assert log.look(CHUNK + FIRST_WINDOW // 2)
        await trio.testing.wait_all_tasks_blocked()
        assert log.reads() == []
        assert not log.files.page_cache.marks


# -- faults


@pytest.mark.parametrize("places", [(0, 1), (0, CHUNK, CHUNK + 1)])
async def test_an_error_is_reported_once_and_no_reader_waits(places: tuple[int, ...]) -> None:
    async with running(Log(SimDisk())) as log:
        *before, last = places
        for at in before[:-1]:
            await log.ahead.bring_in(at, at + 1)
        with capture_logs() as logs:
            for _ in range(3):
                log.disk.fail("read_ahead", errno.EIO)
                await log.ahead.bring_in(last, last + 1)
        assert [entry["event"] for entry in logs] == ["read_ahead_failed"]
        assert not log.look(last)
        await log.ahead.bring_in(last, last + 1)
        assert log.look(last), "the next read may succeed"


async def test_a_file_that_is_shorter_than_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Log(SimDisk())) as log:
        monkeypatch.setattr(log.disk, "read_ahead", lambda _fd, begin, _end: begin + CHUNK + 100)
        await log.ahead.bring_in(0, 3 * CHUNK)
        assert log.files.page_cache.is_read(log.files.files[0], 0, CHUNK)
        assert not log.files.page_cache.is_read(log.files.files[0], CHUNK, SIZE)
        monkeypatch.setattr(log.disk, "read_ahead", lambda _fd, begin, _end: begin)
        await log.ahead.bring_in(2 * CHUNK, 3 * CHUNK)
        await log.ahead.bring_in(5 << 20, (5 << 20) + 1)
        assert not log.files.page_cache.is_read(log.files.files[0], CHUNK, SIZE)


async def test_a_file_that_is_deleted_meanwhile_stays_open_until_it_has_been_read() -> None:
    disk = CountingDisk()
    async with running(Log(disk)) as log:
        disk.held = True
        first = log.files.files[0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.ahead.bring_in, 0, 1)
            await trio.testing.wait_all_tasks_blocked()
            log.files.remove_first().destroy()
            assert disk.open_files() == 2
            assert first.is_held
            disk.gate.set()
        assert disk.open_files() == 1
        assert not log.files.page_cache.is_read(first, 0, CHUNK)
        await log.ahead.bring_in(0, 1)
        assert len(log.reads()) == 1, "a deleted file is not read again"


async def test_a_reader_that_goes_away_leaves_the_others_theirs() -> None:
    disk = CountingDisk()
    async with running(Log(disk)) as log:
        disk.held = True
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(log.ahead.bring_in, 0, CHUNK)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.ahead.bring_in, 0, CHUNK)
            await trio.testing.wait_all_tasks_blocked()
            disk.gate.set()
        assert log.look(0)
        assert log.reads()[0] == (0, CHUNK)


async def test_a_stop_waits_for_the_reads_under_way_and_begins_no_other() -> None:
    disk = CountingDisk()
    log = Log(disk, 20)
    disk.held = True
    async with trio.open_nursery() as readers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log.ahead.run)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(2 * CONCURRENT_READS):
                readers.start_soon(log.ahead.bring_in, number * SIZE, number * SIZE + 3 * STEP)
            await trio.testing.wait_all_tasks_blocked()
            log.ahead.stop()
            await trio.testing.wait_all_tasks_blocked()
            assert not readers.child_tasks, "no reader waits any longer"
            assert disk.now == CONCURRENT_READS
            assert nursery.child_tasks
            disk.gate.set()
        assert len(log.reads()) == CONCURRENT_READS
    log.files.close()
    assert disk.open_files() == 0


# -- whole stores


def _age(store: MessageStore) -> None:
    """Make nothing count as in memory."""
    disk = store.disk
    assert isinstance(disk, SimDisk)
    disk.cold = True
    for file in store.files.files:
        file.in_memory_from = file.size
        store.files.page_cache.forget(file, 0, file.size)


async def _drain(store: MessageStore, queue_id: int = 0) -> tuple[list[bytes], int]:
    """Bodies of a queue's messages, and how often the reader had to wait for the device."""
    offset, waited = 0, 0
    bodies: list[bytes] = []
    while offset < store.max_offset(TOPIC, queue_id):
        result = store.get_message(TOPIC, queue_id, offset, 32, 1 << 20, None)
        if result is None:
            waited += 1
            result = await store.get_message_cold(TOPIC, queue_id, offset, 32, 1 << 20, None)
        assert result.status is GetMessageStatus.FOUND
        bodies += [one.body for data in result.buffers for one in decode_messages(bytes(data))]
        offset = result.next_begin_offset
        result.release()
        await trio.testing.wait_all_tasks_blocked()
    return bodies, waited


@contextmanager
def _calls(disk: SimDisk) -> Iterator[dict[str, int]]:
    """How many records were read one by one, and how many reads ahead were made."""
    counts: dict[str, int] = {}
    disk.history.clear()
    yield counts
    for entry in disk.history:
        name = entry.split()[0]
        if name in ("pread", "read_ahead"):
            counts[name] = counts.get(name, 0) + 1


async def _fill(store: MessageStore, count: int = 600) -> list[list[bytes]]:
    bodies: list[list[bytes]] = [[], []]
    for number in range(count):
        body = f"{number}-".encode().ljust(4000, b".")
        bodies[number % 2].append(body)
        await put(store, body, queue_id=number % 2)
    _age(store)
    return bodies


async def test_a_consumer_of_the_log_begin_waits_a_few_times_only() -> None:
    disk = SimDisk()
    async with opened(disk, BIG) as store:
        bodies = await _fill(store)
        assert len(store.files.files) == 3
        with _calls(disk) as calls:
            assert await _drain(store) == (bodies[0], 2)
        assert "pread" not in calls
        assert calls["read_ahead"] <= 8
        with _calls(disk) as calls:
            assert await _drain(store, 1) == (bodies[1], 0)
        assert not calls


async def test_an_error_of_the_read_ahead_costs_nothing_but_it() -> None:
    disk = SimDisk()
    async with opened(disk, BIG) as store:
        bodies = await _fill(store, 100)
        for _ in range(1000):
            disk.fail("read_ahead", errno.EIO)
        with _calls(disk) as calls:
            assert (await _drain(store))[0] == bodies[0]
        assert calls["pread"] == 50
        disk.clear_failures()
        disk.fail("read_ahead", errno.EIO)
        disk.fail("pread", errno.EIO)
        with pytest.raises(OSError, match="error"):
            await store.get_message_cold(TOPIC, 0, 0, 32, 1 << 20, None)
        assert not any(file.is_held for file in store.files.files)


async def test_messages_far_apart_are_read_one_by_one() -> None:
    disk = SimDisk()
    async with opened(disk, BIG) as store:
        await put(store, b"first")
        for _ in range(14):
            await put(store, bytes(64_000), queue_id=1)
        await put(store, b"last")
        _age(store)
        with _calls(disk) as calls:
            assert (await _drain(store))[0] == [b"first", b"last"]
        assert calls == {"pread": 2}


async def test_a_store_that_stops_while_it_is_read_ahead() -> None:
    disk = SlowDisk("read_ahead")
    found: list[GetMessageResult] = []
    async with trio.open_nursery() as nursery:
        closed = trio.Event()

        async def live(*, task_status: trio.TaskStatus[MessageStore]) -> None:
            async with opened(disk, BIG) as store:
                await _fill(store, 100)
                disk.held = True
                task_status.started(store)
                await stop.wait()
            closed.set()

        async def read(store: MessageStore) -> None:
            found.append(await store.get_message_cold(TOPIC, 0, 0, 32, 1 << 20, None))
            found[0].release()

        stop = trio.Event()
        store = await nursery.start(live)
        nursery.start_soon(read, store)
        await trio.testing.wait_all_tasks_blocked()
        assert not found
        stop.set()
        await trio.testing.wait_all_tasks_blocked()
        assert [result.count for result in found] == [32], "the waiting reader has read its records itself"
        assert not closed.is_set()
        disk.gate.set()
        with trio.fail_after(5):
            await closed.wait()
    assert disk.open_files() == 0
