"""Old pages of the log are evicted for new ones: at a high pace only, where memory is expensive, and unread pages."""

import errno
import sys
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.store.builders import LOG
from tests.store.simdisk import SimDisk
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.disk.memory import log_memory
from trimq.broker.store.disk.page_cache import CHUNK
from trimq.broker.store.log import page_recycling
from trimq.broker.store.log.page_recycling import PageRecycling

STEP = 4 * CHUNK
SIZE = 8 * STEP
QUICK = 50 << 20
"""Bytes a second."""
EXPENSIVE = page_recycling._EXPENSIVE * STEP / (1 << 20)


class Log:
    """Two consecutive files, full and durable. All but the last two steps are before the range read through the map."""

    def __init__(self) -> None:
        self.disk = SimDisk()
        self.disk.make_directory(LOG)
        self.files = MappedFileQueue(self.disk, LOG, SIZE)
        for start in (0, SIZE):
            file = MappedFile.create(self.disk, self.files.path_of(start), start, SIZE, SIZE)
            file.wrote = file.flushed = SIZE
            self.files.files.append(file)
        self.first, self.last = self.files.files
        self.first.in_memory_from = SIZE
        self.last.in_memory_from = 6 * STEP
        self.recycling = PageRecycling(self.files, QUICK, 6 * STEP)

    async def step(self, file: MappedFile, number: int, *, cost: float = EXPENSIVE, pace: float = QUICK) -> list[int]:
        """Report one step as made; return the steps evicted for it."""
        before = len(self.disk.history)
        self.recycling.made(file, number * STEP, (number + 1) * STEP, cost=cost, pace=pace)
        await self.recycling.settle()
        gone = [entry.split()[1] for entry in self.disk.history[before:] if entry.startswith("evict")]
        return [int(place.split("+")[0]) // STEP for place in gone]


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.files.close()


async def test_as_much_is_let_go_as_is_made(log: Log) -> None:
    with capture_logs() as logs:
        assert [await log.step(log.first, number) for number in range(3)] == [[0], [1], [2]]
    assert [entry["event"] for entry in logs] == ["log_memory_recycled"]
    log.recycling.made(log.first, 3 * STEP, 7 * STEP, cost=4 * EXPENSIVE, pace=QUICK)
    await log.recycling.settle()
    await log.recycling.settle()
    assert sum(entry.startswith("evict") for entry in log.disk.history) == 4


async def test_cheap_memory_is_not_given_back(log: Log) -> None:
    assert [await log.step(log.first, number, cost=EXPENSIVE / 2) for number in range(3)] == [[], [], []]


async def test_what_came_in_slowly_stays_and_so_it_does_while_little_comes(log: Log) -> None:
    assert await log.step(log.first, 0, pace=QUICK / 8) == []
    assert await log.step(log.first, 1) == [1]
    assert await log.step(log.first, 2, pace=QUICK / 2) == []


async def test_after_a_while_the_kernel_is_asked_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_recycling, "_PROBE_AFTER", 2)
    gone = [await log.step(log.first, number, cost=EXPENSIVE if not number else 0) for number in range(4)]
    assert gone == [[0], [1], [], []]
    assert await log.step(log.first, 4) == [2]


async def test_what_is_hot_or_not_on_the_device_or_held_waits(log: Log) -> None:
    assert await log.step(log.last, 5) == [5]
    assert await log.step(log.last, 6) == []
    log.last.in_memory_from = SIZE
    log.last.flushed = 7 * STEP - 1
    assert await log.step(log.last, 7) == []
    log.last.flushed = SIZE
    log.last.hold()
    assert await log.step(log.last, 7) == []
    log.last.release()
    assert await log.step(log.last, 7) == [6]


async def test_what_is_read_or_deleted_is_skipped(log: Log) -> None:
    assert log.files.page_cache.covers(log.last, STEP + CHUNK, STEP + CHUNK + 1)
    log.recycling.made(log.first, 0, STEP, cost=0, pace=QUICK)
    log.recycling.made(log.last, STEP, 2 * STEP, cost=0, pace=QUICK)
    log.files.files.remove(log.first)  # as a cleaner does, which closes it in a thread later
    assert await log.step(log.last, 2) == [2]
    log.first.destroy()
    log.files.page_cache.forget(log.last, STEP, 2 * STEP)
    assert not log.files.page_cache.is_read(log.last, 0, SIZE)


@pytest.mark.parametrize("error", [errno.EIO, None])
async def test_a_refusal_is_logged_and_nothing_is_tried_again(
    log: Log, error: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if error is not None:
        log.disk.fail("evict", error)
    else:
        monkeypatch.setattr(log.files.page_cache, "forget", None)
    with capture_logs() as logs:
        assert await log.step(log.first, 0) == [0]
        assert await log.step(log.first, 1) == []
    assert [entry["event"] for entry in logs] == ["log_memory_recycled", "log_memory_not_given_back"]
    assert not log.first.is_held


async def test_what_came_in_more_slowly_goes_once_the_pace_is_great(log: Log) -> None:
    """But not pages that came in at less than a quarter of the pace."""
    assert [await log.step(log.first, 0, pace=QUICK / 4 - 1), await log.step(log.first, 1, pace=QUICK / 4)] == [[], []]
    assert await log.step(log.first, 2) == [1]
    assert await log.step(log.first, 3) == [2]


async def test_what_a_step_is_worth_is_forgotten_when_the_pace_falls(log: Log) -> None:
    log.last.in_memory_from = 0
    assert await log.step(log.last, 0) == []
    log.last.in_memory_from = SIZE
    assert await log.step(log.last, 1, pace=QUICK / 2) == []


@pytest.mark.parametrize(
    ("memory", "in_memory_mib", "pace_mib", "unread_mib"),
    [(1 << 28, 64, 16, 102), (1 << 31, 256, 17, 819), (8 << 30, 1024, 68, 3276), (24 << 30, 1024, 192, 9830)],
)
def test_what_a_log_may_take_of_the_memory(memory: int, in_memory_mib: int, pace_mib: int, unread_mib: int) -> None:
    shares = log_memory(memory)
    assert tuple(share >> 20 for share in shares) == (in_memory_mib, pace_mib, unread_mib)


async def test_what_a_consumer_has_yet_to_read_stays(log: Log) -> None:
    """The log ends after step 15, and six steps of its end may stay."""
    unread = 10 * STEP + 1
    log.recycling.unread_from = lambda: unread
    assert await log.step(log.last, 1) == [1]
    assert await log.step(log.last, 2) == [], "step 10 of the log is yet to be read"
    unread = 11 * STEP
    assert await log.step(log.last, 3) == [2]
    assert await log.step(log.last, 4) == [], "step 11 is"
    unread = sys.maxsize
    assert await log.step(log.last, 5) == [3]


async def test_of_what_is_to_be_read_the_end_stays_as_far_as_it_fits(log: Log) -> None:
    log.recycling.unread_from = lambda: 0
    assert [await log.step(log.last, number) for number in (0, 1, 2, 3)] == [[0], [1], [], []]
    log.last.wrote -= 2 * STEP
    assert await log.step(log.last, 4) == []
    log.last.wrote += 2 * STEP + 1
    assert await log.step(log.last, 5) == []
