"""The tier's index files: layout, compaction against following the chains, restart after a kill and a power cut."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from tests.store.simdisk import Loss, SimDisk
from tests.store.tiered.test_flat_message_file import flat_files
from trimq.broker.store.tiered.container.index_compaction import compact
from trimq.broker.store.tiered.container.index_store_file import LocalIndexFile
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.protocol.tiered_index_layout import (
    COMPACT_SIZE,
    ENTRY,
    HEADER,
    HEADER_SIZE,
    SLOT,
    compact_slots,
    entries_at,
    tiered_key_hash,
)

SLOTS, ENTRIES = 7, 60
BEGIN = 1_000_000
keys = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1 << 40), st.integers(91, 999)),
    max_size=ENTRIES - 2,
)


def by_chains(view: memoryview, count: int) -> bytes:
    """The compacted file as RocketMQ makes it: slot by slot, along the chains."""
    table, entries, used = b"", b"", 0
    for slot in range(SLOTS):
        group = b""
        (number,) = struct.unpack_from(">i", view, HEADER_SIZE + 8 * slot)
        while number > 0:
            at = entries_at(SLOTS) + ENTRY.size * number
            group += bytes(view[at : at + COMPACT_SIZE])
            number = ENTRY.unpack_from(view, at)[6]
        used += bool(group)
        table += SLOT.pack(entries_at(SLOTS) + len(entries), len(group))
        entries += group
    _, begin, end, _, _ = HEADER.unpack_from(view)
    return HEADER.pack(0xBCC50285, begin, end, used, count) + table + entries


@given(keys, st.integers(1, 9))
def test_compaction_is_what_following_the_chains_gives(puts: list[tuple[int, ...]], piece: int) -> None:
    disk = SimDisk()
    disk.make_directory("/index")
    file = LocalIndexFile.create(disk, f"/index/{BEGIN}", SLOTS, ENTRIES)
    file.put([(*put, BEGIN + 5_000 * number) for number, put in enumerate(puts)])  # type: ignore[misc]
    found = b"".join(compact(file._view, SLOTS, file.begin_ms, file.end_ms, file.count, piece))
    assert found == by_chains(file._view, len(puts))
    assert compact_slots(len(found), len(puts)) == SLOTS
    disk.check_mapped_stores()


@given(keys, st.sampled_from(Loss))
def test_a_file_is_continued_after_a_power_cut(puts: list[tuple[int, ...]], loss: Loss) -> None:
    disk = SimDisk()
    disk.make_directory("/index")
    disk.sync_directory("/")
    file = LocalIndexFile.create(disk, f"/index/{BEGIN}", SLOTS, ENTRIES)
    rows = [(*put, BEGIN + 5_000 * number) for number, put in enumerate(puts)]
    half = len(rows) // 2
    file.put(rows[:half])  # type: ignore[arg-type]
    file.sync()
    file.put(rows[half:])  # type: ignore[arg-type]
    for survivor in (disk.after_kill(), disk.power_cut(loss)):
        again = LocalIndexFile.open(survivor, f"/index/{BEGIN}", SLOTS, ENTRIES)
        assert again.count >= half
        for number, row in enumerate(rows[: again.count]):
            found = again.query(row[0])
            same = [at for at in range(again.count) if rows[at][0] == row[0]]
            assert len(found) == len(same)
            assert found[len(same) - 1 - same.index(number)][1:5] == row[1:5]
        extra = (3, 1, 1, 77, 100, BEGIN)
        again.put([extra])
        assert again.query(3)[0][:5] == extra[:5]
        survivor.check_mapped_stores()


async def test_a_full_file_is_uploaded_and_answers_from_the_tier() -> None:
    disk = SimDisk()
    options = {
        "tiered_store_index_file_max_hash_slot_num": SLOTS,
        "tiered_store_index_file_max_index_num": 10,
    }
    files = flat_files(disk, **options)
    now = BEGIN
    index = IndexStoreService(disk, "/store", files.config, files.index_file(), files.metadata, lambda: now)
    await index.load()
    for number in range(25):
        now += 1_000
        await index.put("T", 4, 1, [((f"k{number}", "shared"), 100 * number, 100, now)])
    await index.upload_full()
    names = [name for name in disk.list("/store/tiered_index_file") if name.isdigit()]
    assert len(names) == 1

    async def check(its: IndexStoreService) -> None:
        for number in range(25):
            found = await its.query("T", 4, f"k{number}", 0, 1 << 60)
            assert [(item.offset, item.queue_id, item.size) for item in found] == [(100 * number, 1, 100)]
        shared = await its.query("T", 4, "shared", 0, 1 << 60)
        assert sorted(item.offset for item in shared) == [100 * number for number in range(25)]
        assert await its.query("T", 5, "shared", 0, 1 << 60) == []

    await check(index)
    index.close()
    for clean in (False, True):
        files = flat_files(disk, **options)
        await files.load()
        again = IndexStoreService(disk, "/store", files.config, files.index_file(), files.metadata, lambda: now)
        await again.load()
        await check(again)
        if clean:
            await again.upload_all()
            assert [name for name in disk.list("/store/tiered_index_file") if name.isdigit()] == []
            await check(again)
        again.close()


def test_the_hash_is_that_of_the_original() -> None:
    assert tiered_key_hash("TT", "a") == abs(hash_of("TT#a"))


def hash_of(text: str) -> int:
    value = 0
    for char in text:
        value = (31 * value + ord(char)) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
