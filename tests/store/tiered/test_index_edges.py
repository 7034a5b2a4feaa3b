"""Rare states of the tier's index: closed while it is read, a torn item, a given-up upload."""

import errno
from collections.abc import Sequence

import pytest
import trio

from tests.store.simdisk import SimDisk
from tests.store.tiered.index_stores import DIRECTORY, NOW, TOPIC, Wall, index, numbers, put
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
