"""Reads behind the newest end of the log: through the map only where a recent check found the pages in memory."""

import pytest

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, opened, put, settings
from trimq.broker.store.disk import page_cache
from trimq.broker.store.disk.disk import MappedPart
from trimq.broker.store.disk.page_cache import CACHED_SECONDS, CHUNK, PageCache
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.protocol.message import decode_messages

BIG = settings(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000)


class Now:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


class CountingDisk(SimDisk):
    """Counts the checks of which pages of a file are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[tuple[int, int]] = []

    def in_memory(self, fd: int, part: MappedPart) -> int:
        self.looks.append((part.begin, part.end))
        return super().in_memory(fd, part)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    clock = Now()
    monkeypatch.setattr(page_cache, "monotonic", clock)
    return clock


def _get(store: MessageStore, offset: int = 0) -> GetMessageResult | None:
    result = store.get_message(TOPIC, 0, offset, 32, 1 << 20, None)
    if result is not None:
        result.release()
    return result


def _age(store: MessageStore) -> None:
    """Make no bytes count as recently written."""
    for file in store.files.files:
        file.in_memory_from = file.size


async def test_a_chunk_is_looked_at_once_in_two_seconds(now: Now) -> None:
    disk = CountingDisk()
    async with opened(disk, BIG) as store:
        for number in range(40):
            await put(store, bytes(3000), queue_id=number % 2)
        _age(store)
        disk.looks.clear()
        first = _get(store)
        assert first is not None
        assert first.status is GetMessageStatus.FOUND
        assert [len(data) for data in first.buffers] == [first.size // first.count] * first.count
        looks = list(disk.looks)
        assert looks == [(0, store.max_phy_offset)], "several chunks at once"
        disk.looks.clear()
        assert _get(store) is not None
        assert not disk.looks
        now.time += CACHED_SECONDS + 0.1
        assert _get(store) is not None
        assert disk.looks == looks


async def test_what_has_left_memory_is_waited_for(now: Now) -> None:
    disk = CountingDisk()
    async with opened(disk, BIG) as store:
        await fill(store, 20)
        _age(store)
        assert _get(store) is not None
        disk.cold = True
        assert _get(store) is not None, "a recent check found it in memory"
        now.time += CACHED_SECONDS + 0.1
        assert _get(store) is None
        result = await store.get_message_cold(TOPIC, 0, 0, 32, 1 << 20, None)
        assert [one.queue_offset for data in result.buffers for one in decode_messages(bytes(data))] == list(range(20))
        result.release()


async def test_queries_take_the_same_path(now: Now) -> None:
    disk = CountingDisk()
    async with opened(disk, BIG) as store:
        await put(store, b"x" * 3000, keys="k1")
        (await store.query_message_cold(TOPIC, "k1", 10, 0, 1 << 60)).release()  # the index creates its first file
        _age(store)
        found = store.query_message(TOPIC, "k1", 10, 0, 1 << 60)
        assert found is not None
        assert found.count == 1
        found.release()
        disk.cold = True
        now.time += CACHED_SECONDS + 0.1
        assert store.query_message(TOPIC, "k1", 10, 0, 1 << 60) is None


async def test_records_far_apart_are_looked_at_one_by_one(now: Now) -> None:
    disk = CountingDisk()
    async with opened(disk, BIG) as store:
        for number in range(200):
            await put(store, bytes(4000), queue_id=0 if number in {0, 199} else 1)
        _age(store)
        disk.looks.clear()
        result = _get(store)
        assert result is not None
        assert result.count == 2
        assert 0 < len(disk.looks) <= 4
        assert now.time == 100.0


async def test_not_more_chunks_than_agreed_are_remembered(now: Now, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = CountingDisk()
    async with opened(disk, settings(mapped_file_size_commit_log=4 * CHUNK)) as store:
        while len(store.files.files) < 3:
            await put(store, bytes(4000))
        _age(store)
        cache = PageCache()
        first, second, third = store.files.files
        monkeypatch.setattr(page_cache, "_MOST", 2 * 4)
        assert all(cache.covers(file, 0, 10) for file in (first, second))
        disk.cold = True
        assert cache.covers(first, 0, 10), "two files are within the limit"
        disk.cold = False
        assert cache.covers(third, 0, 10)
        disk.cold = True
        assert cache.covers(third, 0, 10)
        assert not cache.covers(first, 0, 10), "forgotten"
        assert not cache.is_read(second, 0, 10), "forgotten"
        assert now.time == 100.0


async def test_only_unseen_chunks_are_looked_at_again(now: Now) -> None:
    disk = CountingDisk()
    async with opened(disk, BIG) as store:
        for _ in range(80):
            await put(store, bytes(4000))
        _age(store)
        cache = PageCache()
        (file,) = store.files.files
        assert cache.covers(file, 0, CHUNK)
        assert cache.covers(file, 2 * CHUNK, 3 * CHUNK)
        disk.looks.clear()
        assert cache.covers(file, CHUNK - 1, 3 * CHUNK)
        assert disk.looks == [(CHUNK, 2 * CHUNK)]
        file.in_memory_from = 4 * CHUNK
        assert cache.covers(file, 0, 5 * CHUNK)
        assert disk.looks[1:] == [(3 * CHUNK, 4 * CHUNK)], "recently written bytes are in memory"
        cache.forget(file, CHUNK, 2 * CHUNK)
        assert [cache.is_read(file, at * CHUNK, at * CHUNK + 1) for at in range(5)] == [True, False, True, True, False]
        disk.cold = True
        now.time += CACHED_SECONDS - 0.2
        assert cache.covers(file, 0, CHUNK)
        assert not cache.covers(file, 0, CHUNK + 1)
        now.time += 0.2
        assert not cache.is_read(file, 0, 4 * CHUNK)
        assert not cache.covers(file, 0, CHUNK)


@pytest.mark.parametrize("size", [0, -5])
async def test_a_record_of_no_bytes_is_looked_for_where_it_begins(now: Now, size: int) -> None:
    """A unit damaged by the device may point to one."""
    disk = CountingDisk()
    async with opened(disk, BIG) as store:
        for _ in range(20):
            await put(store, bytes(4000))
        _age(store)
        cache = PageCache()
        (file,) = store.files.files
        disk.cold = True
        assert not cache.covers(file, CHUNK, CHUNK + size)
        disk.cold = False
        assert all(cache.covers(file, CHUNK, CHUNK + size) for _ in range(2))
        assert now.time == 100.0


async def test_what_a_look_sees_ends_with_the_first_page_that_is_gone(
    now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = CountingDisk()
    async with opened(disk, BIG) as store:
        for _ in range(100):
            await put(store, bytes(4000))
        _age(store)
        (file,) = store.files.files
        monkeypatch.setattr(disk, "in_memory", lambda _fd, part: min(part.end, 3 * CHUNK + 4096))
        cache = PageCache()
        assert cache.covers(file, 10, 20, ahead=8)
        assert cache.covers(file, 0, 3 * CHUNK, ahead=8)
        assert not cache.covers(file, 2 * CHUNK, 3 * CHUNK + 1, ahead=8)
        disk.cold = True
        monkeypatch.undo()
        assert not cache.covers(file, 3 * CHUNK, 3 * CHUNK + 1)
    assert now.time == 100.0
