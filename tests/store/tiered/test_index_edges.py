"""Rare states of the tier's index: closed while it is read, a torn item, a given-up upload."""

import errno
from collections.abc import Sequence

import pytest
import trio
from structlog.testing import capture_logs

from tests.store.simdisk import SimDisk
from tests.store.tiered.index_stores import DIRECTORY, NOW, SEGMENTS, TOPIC, Wall, index, numbers, put
from trimq.broker.store.index.index_file import Cold
from trimq.broker.store.tiered.container.index_marks import FileMark, decode_marks, encode_marks
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.broker.store.tiered.driver.file_segment import Piece
from trimq.broker.store.tiered.driver.posix import PosixFileSegment
from trimq.protocol.tiered_index_layout import ITEM, item_at, slot_of, tiered_key_hash


async def test_a_file_that_a_thread_reads_is_closed_when_it_has_read() -> None:
    disk = SimDisk()
    service = await index(disk)
    put(service, 3, "k")
    await service.flush()
    (file,) = service._local.values()
    file.hold()
    await service.close(upload=False)
    assert disk.open_files() == 1
    found = file.select_cold(tiered_key_hash(TOPIC, "k"), 0, 1 << 50, 9)
    assert [item.offset for item in found] == [300]
    file.release()
    assert disk.open_files() == 0


async def test_a_torn_item_of_our_own_file_and_what_follows_are_cut() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall, slots=3, items=60)
    for number in range(10):
        put(service, number, f"k{number}")
    await service.flush()
    for number in range(10, 30):
        put(service, number, f"k{number}")
    await numbers(service, "k")
    (file,) = service._local.values()
    items = {number: ITEM.unpack_from(file._view, item_at(3, number)) for number in range(1, 31)}
    newest = dict.fromkeys(range(3), 0)
    torn = 0
    for number, item in items.items():
        # Without its hash it seems to be one of slot 0, whose newest item is another one than that in its link.
        if number > 12 and slot_of(item[0], 3) and newest[0] != item[-1]:
            torn = number
            break
        newest[slot_of(item[0], 3)] = number
    assert torn
    after = disk.after_kill()
    fd = after.open(f"{DIRECTORY}/{file.stamp}")
    after.pwrite(fd, bytes(4), item_at(3, torn))
    after.close(fd)
    again = await index(after, wall, slots=3, items=60)
    (file,) = again._local.values()
    assert file.count == torn - 1
    assert again.indexed_until(7, 0) == 1000


async def test_a_segment_does_not_keep_the_times_of_a_file_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    for number in range(20):
        wall.ms += 1000
        put(service, number, "all", wall_ms=wall.ms)
        await service.flush()
    first, second = sorted(service._local)[:2]

    async def failing(_self: PosixFileSegment, _pieces: Sequence[Piece], _position: int) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EIO, "the provider has failed")

    with monkeypatch.context() as patch:
        patch.setattr(PosixFileSegment, "write", failing)
        with pytest.raises(OSError, match="provider"):
            await service.upload_next()
    after = disk.after_kill()
    after.delete(f"{DIRECTORY}/{first}")
    again = await index(after, wall)
    assert again._flat.segments[-1].min_timestamp == first
    assert await again.upload_next()
    assert again._flat.segments[-1].min_timestamp == second > NOW
    assert set(await numbers(again, "all")) == set(range(8, 20))


def local_names(disk: SimDisk) -> list[str]:
    return sorted(name for name in disk.list(DIRECTORY) if name.isdigit())


async def test_a_disk_without_space_for_the_index_does_not_end_the_start() -> None:
    disk = SimDisk()
    disk.fail("reserve", errno.ENOSPC)
    with capture_logs() as logs:
        service = await index(disk)
    assert [entry["event"] for entry in logs] == ["tiered_index_no_space"]
    assert local_names(disk) == []
    put(service, 0, "k")
    assert await numbers(service, "k") == [0]


async def test_a_local_file_that_cannot_be_opened_is_left_out_and_closed() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    put(service, 0, "k")
    await service.close(upload=False)
    disk.fail("pread", errno.EIO, 2)
    wall.ms += 5
    with capture_logs() as logs:
        again = await index(disk, wall)
    assert [entry["event"] for entry in logs] == ["tiered_index_file_not_opened"]
    assert local_names(disk) == [str(NOW), str(NOW + 5)]
    assert disk.open_files() == 1
    assert await numbers(again, "k") == []


async def both(disk: SimDisk, wall: Wall) -> bytes:
    """Upload a file, and put its local form back, as after a kill before it was deleted. Returns that form."""
    service = await index(disk, wall)
    put(service, 0, "all")
    await service.flush()
    data = disk.content(f"{DIRECTORY}/{NOW}")
    await service.close()
    fd = disk.create(f"{DIRECTORY}/{NOW}", 0)
    disk.pwrite(fd, data, 0)
    disk.close(fd)
    disk.delete(f"{DIRECTORY}/durable")
    wall.ms += 5
    return data


async def test_a_segment_that_cannot_be_read_is_decided_later() -> None:
    disk, wall = SimDisk(), Wall()
    await both(disk, wall)
    with capture_logs() as logs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixFileSegment, "_read", failing)
        service = await index(disk, wall)
        assert await numbers(service, "all") == [0]
    assert "tiered_index_not_readable" in [entry["event"] for entry in logs]
    assert local_names(disk) == [str(NOW), str(NOW + 5)]
    put(service, 1, "all")
    assert await service.upload_next()
    assert local_names(disk) == [str(NOW + 5)]
    assert await numbers(service, "all") == [1, 0]


async def test_a_segment_that_was_uploaded_in_part_is_uploaded_again() -> None:
    disk, wall = SimDisk(), Wall()
    await both(disk, wall)
    (name,) = disk.list(SEGMENTS)
    fd = disk.open(f"{SEGMENTS}/{name}")
    disk.pwrite(fd, b"bad!", 0)
    disk.close(fd)
    service = await index(disk, wall)
    assert await numbers(service, "all") == [0]
    put(service, 1, "all")
    await service.close()
    assert local_names(disk) == []
    assert await numbers(await index(disk, wall), "all") == [1, 0]


async def failing(_self: PosixFileSegment, *_arguments: object) -> bytes:
    await trio.lowlevel.checkpoint()
    raise OSError(errno.EIO, "the provider has failed")


async def several(disk: SimDisk, wall: Wall) -> IndexStoreService:
    """An index with two uploaded files and a local one; messages 0 to 23 have the key."""
    service = await index(disk, wall)
    for number in range(24):
        wall.ms += 1000
        put(service, number, "all", wall_ms=wall.ms)
        await service.flush()
    while await service.upload_next():
        pass
    return service


async def test_files_that_cannot_be_read_are_left_out_or_fail_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, wall = SimDisk(), Wall()
    service = await several(disk, wall)
    assert await numbers(service, "all") == list(range(23, -1, -1))
    local = len([number for number in await numbers(service, "all") if number >= 16])
    monkeypatch.setattr(PosixFileSegment, "_read", failing)
    with capture_logs() as logs:
        assert len(await numbers(service, "all")) == local
    assert [entry["event"] for entry in logs] == ["tiered_index_partly_searched"]
    with pytest.raises(OSError, match="the provider has failed"):
        await service.query(TOPIC, "all", 9, NOW, NOW + 4_000)
    assert await service.query(TOPIC, "all", 9, NOW + 4_000, NOW) == []
    assert await service.query(TOPIC, "all", 0, NOW, NOW + 4_000) == []


async def test_a_file_that_expires_during_a_query_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    service = await several(SimDisk(), Wall())
    remote = dict(service._remote)

    async def gone(_self: PosixFileSegment, *_arguments: object) -> bytes:
        await trio.lowlevel.checkpoint()
        service._remote.clear()
        raise OSError(errno.ENOENT, "no such file")

    with monkeypatch.context() as patch:
        patch.setattr(PosixFileSegment, "_read", gone)
        assert await service.query(TOPIC, "all", 9, NOW, NOW + 4_000) == []
    service._remote.update(remote)
    assert len(await service.query(TOPIC, "all", 9, NOW, NOW + 4_000)) == 4


async def test_an_upload_that_is_not_complete_keeps_the_local_file(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    service = await index(disk)
    for number in range(12):
        put(service, number, "all")
    await service.flush()
    first = min(service._local)
    file = service._local[first]
    find = service._find_uploaded

    async def nothing(_stamp: int) -> None:
        await trio.lowlevel.checkpoint()

    with monkeypatch.context() as patch:
        patch.setattr(service, "_find_uploaded", nothing)
        with pytest.raises(OSError, match="is not complete in the tier"):
            await service.upload_next()
    assert local_names(disk)[0] == str(first)
    assert await find(first) is not None
    assert await service.upload_next()
    await service._upload(file)  # a second call finds it gone
    assert len(service._flat.segments) == 1
    assert await numbers(service, "all") == list(range(11, -1, -1))


async def test_nothing_expires_if_deletion_is_off() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall, tiered_store_delete_file_enable=False, tiered_store_file_reserved_time=1)
    put(service, 0, "all")
    await service.flush()
    await service._upload(service._local[min(service._local)])
    wall.ms += 10 * 3_600_000
    await service.expire()
    assert len(disk.list(SEGMENTS)) == 1


async def test_a_stop_that_can_neither_upload_nor_flush_ends() -> None:
    disk = SimDisk()
    service = await index(disk)
    put(service, 0, "k")
    for _ in range(40):
        disk.fail("data_sync", errno.EIO)
    with capture_logs() as logs:
        await service.close()
    assert [entry["event"] for entry in logs] == ["tiered_index_not_uploaded", "tiered_index_not_flushed"]
    disk.clear_failures()
    assert disk.open_files() == 0
    assert await numbers(await index(disk), "k") == [0]


async def test_a_long_chain_is_followed_in_a_thread() -> None:
    disk = SimDisk()
    service = await index(disk, slots=1, items=1200)
    for number in range(1100):
        put(service, number, "all" if number < 5 else f"k{number}")
    assert await numbers(service, "all") == [4, 3, 2, 1, 0]
    (file,) = service._local.values()
    key = tiered_key_hash(TOPIC, "all")
    with pytest.raises(Cold):
        file.select(key, 0, 1 << 50, 9, wait=False)


def test_marks_that_are_damaged_are_no_marks() -> None:
    data = encode_marks([FileMark(NOW, 16, 9, 3, NOW)], {(7, 0): 300})
    found = decode_marks(data)
    assert found is not None
    assert found.positions == {(7, 0): 300}
    for bad in (None, data[:-1], data + b"x", b"X" + data[1:], data[:20] + b"!" + data[21:], data[:5]):
        assert decode_marks(bad) is None
