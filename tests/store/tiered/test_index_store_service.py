"""The tier's key index: states of its files, restarts, power cuts, failures of the provider and of the disk."""

import errno

import pytest
import trio
import trio.testing

from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.tiered.index_stores import DIRECTORY, NOW, SEGMENTS, TOPIC, Wall, index, numbers, put
from trimq.broker.store.tiered.container.index_segment import SlotCache
from trimq.protocol.tiered_index_layout import (
    BEGIN_MAGIC,
    END_MAGIC,
    HEADER_SIZE,
    ITEM,
    Header,
    compacted_size,
    file_size,
    item_at,
    slot_at,
    slot_of,
    tiered_key_hash,
)


def local_names(disk: SimDisk) -> list[str]:
    return [name for name in disk.list(DIRECTORY) if name.isdigit()]


async def test_a_new_index_has_one_empty_file_as_apaches() -> None:
    disk = SimDisk()
    service = await index(disk)
    assert local_names(disk) == [str(NOW)]
    data = disk.content(f"{DIRECTORY}/{NOW}")
    assert len(data) == file_size(16, 9)
    assert data[:HEADER_SIZE] == Header(NOW, 0, 0, 0).encode(BEGIN_MAGIC)
    assert not any(data[HEADER_SIZE:])
    await service.close()
    assert disk.open_files() == 0


async def test_keys_are_found_in_each_state_of_a_file() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    for number in range(10):
        put(service, number, "all", f"k{number}", wall_ms=NOW + number)
        wall.ms += 1
    assert await numbers(service, "all") == list(reversed(range(10)))
    assert len(local_names(disk)) == 3
    while await service.upload_next():
        pass
    assert len(local_names(disk)) == 1
    assert len(disk.list(SEGMENTS)) == 2
    assert await numbers(service, "all") == list(reversed(range(10)))
    assert await numbers(service, "k3") == [3]
    assert await numbers(service, "all", most=3) == [9, 8, 7]
    assert await numbers(service, "none") == []
    await service.close()
    assert disk.open_files() == 0
    assert local_names(disk) == []
    assert disk.list(f"{DIRECTORY}/compacting") == []
    assert len(disk.list(SEGMENTS)) == 3
    again = await index(disk, wall)
    assert await numbers(again, "all") == list(reversed(range(10)))
    disk.check_mapped_stores()


async def test_the_item_of_a_full_file_ends_it() -> None:
    disk = SimDisk()
    service = await index(disk)
    for number in range(8):
        put(service, number, "k")
    await service.flush()
    data = disk.content(f"{DIRECTORY}/{NOW}")
    assert data[:HEADER_SIZE] == Header(NOW, NOW, 1, 8).encode(END_MAGIC)


async def test_a_file_is_filled_to_its_last_item() -> None:
    disk = SimDisk()
    service = await index(disk)
    put(service, 0, *"abcde")
    put(service, 1, *"abcd")
    await service.flush()
    first, second = local_names(disk)
    assert Header.decode(disk.content(f"{DIRECTORY}/{first}")).items == 8
    assert Header.decode(disk.content(f"{DIRECTORY}/{second}")).items == 1
    for key in "abcd":
        assert await numbers(service, key) == [1, 0]


async def test_segments_have_the_compacted_format_and_their_times_in_the_metadata() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    put(service, 0, "a", wall_ms=NOW - 5_000)
    put(service, 1, "b", wall_ms=NOW - 3_000)
    await service.close()
    (name,) = disk.list(SEGMENTS)
    assert name == "cfcd2084" + "0" * 20
    data = disk.content(f"{SEGMENTS}/{name}")
    assert len(data) == compacted_size(16, 2)
    assert data[:HEADER_SIZE] == Header(NOW, NOW - 3_000, 2, 2).encode(END_MAGIC)
    text = disk.durable_content("/store/config/tieredStoreMetadata.json")
    assert f'"size":{len(data)}'.encode() in text
    assert f'"beginTimestamp":{NOW},"endTimestamp":{NOW - 3_000}'.encode() in text


async def test_an_old_file_with_newer_messages_is_searched() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    for number in range(20):
        wall.ms = NOW + number * 1_000_000
        put(service, number, "k", wall_ms=wall.ms - 40_000)
        await service.flush()
    while await service.upload_next():
        pass
    for number in range(20):
        at = NOW + number * 1_000_000 - 40_000
        assert await numbers(service, "k", begin=at, end=at) == [number]
        assert await numbers(service, "k", begin=at + 1_000, end=at + 999_000) == []
    await service.close()
    again = await index(disk, wall)
    for number in range(20):
        at = NOW + number * 1_000_000 - 40_000
        assert await numbers(again, "k", begin=at, end=at) == [number]


async def test_one_read_for_a_key_whose_slots_are_cached_two_for_others() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall, slots=2000)
    for number in range(8):
        put(service, number, f"{number}k")
    await service.close()
    again = await index(disk, wall, slots=2000)

    async def reads(key: str) -> int:
        before = len(disk.history)
        assert len(await numbers(again, key)) == 1
        return sum(call.startswith("pread ") for call in disk.history[before:])

    first = await reads("0k")
    assert first in {2, 3}
    assert await reads("0k") == 1
    block = slot_of(tiered_key_hash(TOPIC, "0k"), 2000) * 8 // 4096
    other = next(n for n in range(1, 8) if slot_of(tiered_key_hash(TOPIC, f"{n}k"), 2000) * 8 // 4096 != block)
    assert await reads(f"{other}k") == 2


def test_the_slot_cache_is_bounded() -> None:
    cache = SlotCache(10_000)
    for block in range(4):
        cache.add(0, block, bytes(4096))
        cache.get(0, 0)
    assert cache.bytes == 8192
    assert cache.get(0, 0) is not None
    assert cache.get(0, 1) is None
    cache.forget(0)
    assert cache.bytes == 0


@pytest.mark.parametrize("loss", list(Loss))
async def test_flushed_keys_survive_a_power_cut(loss: Loss) -> None:
    for seed in range(10):
        disk, wall = SimDisk(seed=seed), Wall()
        service = await index(disk, wall, slots=700, items=400)
        for number in range(200):
            put(service, number, "all", f"k{number}")
        await service.flush()
        for number in range(200, 300):
            put(service, number, f"k{number}")
        await numbers(service, "k")  # puts what waits
        after = disk.copy_after_cut(loss)
        again = await index(after, wall, slots=700, items=400)
        until = again.indexed_until(7, 0)
        assert until == 200 * 100
        for number in range(200):
            assert number in await numbers(again, f"k{number}")
        assert [n for n in await numbers(again, "all", most=200) if n < 200] == list(reversed(range(200)))
        for number in range(until // 100, 300):
            put(again, number, f"k{number}")
        await again.close()
        third = await index(after, wall, slots=700, items=400)
        for number in range(300):
            assert await numbers(third, f"k{number}") == [number]
        after.check_mapped_stores()


async def test_a_kill_loses_no_key() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    for number in range(20):
        put(service, number, f"k{number}")
    await numbers(service, "k")
    after = disk.after_kill()
    again = await index(after, wall)
    for number in range(20):
        assert await numbers(again, f"k{number}") == [number]
    assert again.indexed_until(7, 0) == 0
    assert again.indexed_until(8, 0) == 0


async def test_marks_of_a_queue_without_keys() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    put(service, 4)
    assert service.indexed_until(7, 0) == 0
    await service.flush()
    assert service.indexed_until(7, 0) == 500


async def apache_left(disk: SimDisk, wall: Wall) -> None:
    """Files as Apache's broker leaves them: without marks, with ones of 8 items that are not synced."""
    service = await index(disk, wall)
    for number in range(13):
        put(service, number, f"k{number}", "all")
    await numbers(service, "k")
    if disk.stat(f"{DIRECTORY}/durable"):
        disk.delete(f"{DIRECTORY}/durable")


async def test_files_of_apaches_broker_are_continued() -> None:
    disk, wall = SimDisk(), Wall()
    await apache_left(disk, wall)
    names = local_names(disk)
    disk = disk.after_kill()
    again = await index(disk, wall)
    assert again.indexed_until(7, 0) is None
    assert local_names(disk) == names
    assert await numbers(again, "all") == list(reversed(range(13)))
    put(again, 13, "all")
    await again.flush()
    assert local_names(disk) == names
    assert await numbers(again, "all") == list(reversed(range(14)))
    await again.close()
    disk.check_mapped_stores()


async def test_a_stale_header_and_stale_slots_lose_no_item() -> None:
    disk, wall = SimDisk(), Wall()
    await apache_left(disk, wall)
    name = f"{DIRECTORY}/{local_names(disk)[-1]}"
    fd = disk.open(name)
    for head in (bytes(HEADER_SIZE), Header(NOW, 0, 0, 1).encode(BEGIN_MAGIC), b"\xff" * HEADER_SIZE):
        disk.pwrite(fd, head + bytes(slot_at(16) - HEADER_SIZE), 0)
        again = await index(disk.after_kill(), wall)
        assert await numbers(again, "all") == list(reversed(range(13)))


async def test_loops_and_links_to_nowhere_are_repaired() -> None:
    disk, wall = SimDisk(), Wall()
    await apache_left(disk, wall)
    name = f"{DIRECTORY}/{local_names(disk)[0]}"
    fd = disk.open(name)
    for number, link in ((1, 8), (2, 2), (3, -5), (4, 1 << 30)):
        disk.pwrite(fd, link.to_bytes(4, "big", signed=True), item_at(16, number) + 28)
    again = await index(disk.after_kill(), wall)
    assert await numbers(again, "all") == list(reversed(range(13)))


async def test_a_loop_that_appears_later_ends_a_query() -> None:
    disk = SimDisk()
    service = await index(disk)
    for number in range(4):
        put(service, number, "k")
    await service.flush()
    fd = disk.open(f"{DIRECTORY}/{NOW}")
    disk.pwrite(fd, (4).to_bytes(4, "big"), item_at(16, 2) + 28)
    assert await numbers(service, "k") == [3, 2, 1]


async def test_a_damaged_segment_is_not_searched() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    put(service, 0, "k")
    await service.close()
    disk.delete(f"{DIRECTORY}/durable")  # with it the shape is known
    (name,) = disk.list(SEGMENTS)
    good = disk.content(f"{SEGMENTS}/{name}")
    fd = disk.open(f"{SEGMENTS}/{name}")
    slot = slot_of(tiered_key_hash(TOPIC, "k"), 16)
    for at, value in ((0, 1), (24, 2), (HEADER_SIZE, 5), (slot_at(slot), 1 << 30), (slot_at(slot), -1)):
        disk.pwrite(fd, good, 0)
        disk.pwrite(fd, value.to_bytes(4, "big", signed=True), at)
        again = await index(disk.after_kill(), wall)
        assert await numbers(again, "k") == [], at
    for length in (-28, 29, 56, 1 << 30):
        disk.pwrite(fd, good, 0)
        disk.pwrite(fd, length.to_bytes(4, "big", signed=True), slot_at(slot) + 4)
        again = await index(disk.after_kill(), wall)
        assert await numbers(again, "k") == [], length


async def test_a_failed_upload_is_tried_again_and_loses_nothing() -> None:
    for nth in range(1, 30):
        disk, wall = SimDisk(), Wall()
        service = await index(disk, wall)
        for number in range(20):
            put(service, number, "all")
        await service.flush()
        disk.fail("*", errno.EIO, nth)
        while True:
            try:
                if not await service.upload_next():
                    break
            except OSError:
                pass
            assert await numbers(service, "all") == list(reversed(range(20)))
        disk.clear_failures()
        await service.close()
        again = await index(disk, wall)
        assert await numbers(again, "all") == list(reversed(range(20))), nth
        bases = disk.list(SEGMENTS)
        assert len(bases) == 3


@pytest.mark.slow
async def test_a_cut_anywhere_keeps_what_was_flushed() -> None:
    """Puts, flushes, uploads and a restart, with the power cut in each call."""
    disk = SimDisk()
    calls = await _run_until_cut(disk, Wall(), [])
    assert calls is None
    total = disk.calls
    for loss in (Loss.ALL, Loss.NOTHING, Loss.PAGES, Loss.SECTORS):
        for cut in range(1, total + 1, 1 if loss is Loss.ALL else 3):
            disk = SimDisk(seed=cut)
            disk.cut_at, disk.loss = cut, loss
            flushed: list[int] = []
            after = await _run_until_cut(disk, Wall(), flushed)
            assert after is not None
            again = await index(after)
            until = again.indexed_until(7, 0)
            assert until is not None or not flushed
            assert (until or 0) >= 100 * len(flushed), (loss, cut)
            for number in range((until or 0) // 100, 24):
                put(again, number, "all", f"k{number}")
            await again.close()
            third = await index(after)
            assert sorted(await numbers(third, "all")) == list(range(24)), (loss, cut)
            for number in (0, 11, 23):
                assert await numbers(third, f"k{number}") == [number]


async def _run_until_cut(disk: SimDisk, wall: Wall, flushed: list[int]) -> SimDisk | None:
    try:
        service = await index(disk, wall)
        for number in range(24):
            put(service, number, "all", f"k{number}")
            wall.ms += 1
            if number % 5 == 4:
                await service.flush()
                flushed[:] = range(number + 1)
                await service.upload_next()
        await service.close()
    except PowerCut:
        return disk.after_cut
    except BaseExceptionGroup:
        return disk.after_cut
    return None


async def test_a_full_disk_keeps_keys_waiting_and_queries_find_them() -> None:
    disk = SimDisk()
    service = await index(disk)
    for number in range(8):
        put(service, number, "all")
    await service.flush()
    disk.capacity = disk.used()
    put(service, 8, "all")
    assert await numbers(service, "all") == list(reversed(range(9)))
    with pytest.raises(OSError, match="No space"):
        await service.flush()
    assert service.indexed_until(7, 0) == 800
    disk.capacity = 1 << 40
    await service.flush()
    assert await numbers(service, "all") == list(reversed(range(9)))
    disk.check_mapped_stores()


async def test_a_failed_sync_is_not_taken_for_a_good_one() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    for number in range(4):
        put(service, number, "all")
    disk.fail("data_sync", errno.EIO)
    with pytest.raises(OSError):
        await service.flush()
    assert service.indexed_until(7, 0) == 0
    await service.flush()
    again = await index(disk.copy_after_cut(Loss.ALL), wall)
    assert await numbers(again, "all") == [3, 2, 1, 0]


async def test_expired_files_are_deleted_and_no_longer_searched() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall, tiered_store_file_reserved_time=1)
    for number in range(20):
        put(service, number, "all", wall_ms=wall.ms)
        wall.ms += 400_000
        await service.flush()
    while await service.upload_next():
        pass
    wall.ms = NOW + 3_600_000 + 400_000 * 9
    await service.expire()
    assert len(disk.list(SEGMENTS)) == 1
    assert await numbers(service, "all") == list(reversed(range(8, 20)))
    await service.close()
    assert await numbers(await index(disk, wall), "all") == list(reversed(range(8, 20)))


async def test_old_names_get_their_stamp() -> None:
    disk, wall = SimDisk(), Wall()
    await apache_left(disk, wall)
    disk = disk.after_kill()
    disk.rename(f"{DIRECTORY}/{local_names(disk)[0]}", f"{DIRECTORY}/0000")
    fd = disk.create(f"{DIRECTORY}/1111", file_size(16, 9))
    disk.close(fd)
    again = await index(disk, wall)
    assert await numbers(again, "all") == list(reversed(range(13)))
    assert disk.stat(f"{DIRECTORY}/1111") is None


async def test_a_file_of_another_shape_is_read_if_it_is_ours() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    for number in range(3):
        put(service, number, "all")
    await service.flush()
    disk = disk.after_kill()
    again = await index(disk, wall, slots=8, items=20)
    put(again, 3, "all")
    assert await numbers(again, "all") == [3, 2, 1, 0]
    await again.close()
    third = await index(disk, wall, slots=8, items=20)
    assert await numbers(third, "all") == [3, 2, 1, 0]


async def test_a_segment_wins_over_the_local_file_with_its_stamp() -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    put(service, 0, "all")
    await service.flush()
    data = disk.content(f"{DIRECTORY}/{NOW}")
    await service.close()
    fd = disk.create(f"{DIRECTORY}/{NOW}", 0)
    disk.pwrite(fd, data, 0)
    disk.close(fd)
    wall.ms += 5
    again = await index(disk, wall)
    assert local_names(disk) == [str(NOW + 5)]
    assert await numbers(again, "all") == [0]


async def test_the_loop_uploads_and_waits_longer_after_failures(autojump_clock: trio.testing.MockClock) -> None:
    disk, wall = SimDisk(), Wall()
    service = await index(disk, wall)
    for number in range(20):
        put(service, number, "all")
    await numbers(service, "all")
    for _ in range(3):
        disk.fail("create", errno.EIO)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.run)
        await trio.sleep(9)
        assert len(local_names(disk)) == 3
        await trio.sleep(200)
        nursery.cancel_scope.cancel()
    assert len(local_names(disk)) == 1
    await service.close()
    assert disk.open_files() == 0


async def test_cold_items_are_read_in_a_thread() -> None:
    disk, wall = SimDisk(), Wall()
    await apache_left(disk, wall)
    disk = disk.after_kill()
    again = await index(disk, wall)
    disk.cold = True
    assert await numbers(again, "all") == list(reversed(range(13)))


def test_items_hold_the_places_of_apaches_fields() -> None:
    assert ITEM.size == 32
