"""Checks the messages of an object in a bucket, and index files. Plain functions: they may run in threads."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from trimq.protocol.bucket_manifest import StoredObject, Stretch
from trimq.protocol.bucket_object import Block, Directory, block_crc
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.record import OVERHEAD_V1, RecordState, check_record
from trimq.protocol.tiered_index_batch import COMPACT_TYPE
from trimq.protocol.tiered_index_layout import COMPACT_ITEM_SIZE, END_MAGIC, HEADER, HEADER_SIZE, SLOT_SIZE

_READ: Final = 4 * 1024 * 1024
_SLOT: Final = np.dtype([("at", ">i4"), ("length", ">i4")])


class Checked(NamedTuple):
    """The messages of a block that are right, their bytes, and what is wrong."""

    messages: int
    bytes: int
    faults: list[str]


def place_of(block: Block) -> str:
    """The messages of a block, for people."""
    return f"{block.topic}/{block.queue_id} messages {block.offset} to {block.offset + block.messages - 1}"


def check_block(stored: StoredObject, block: Block, data: Any) -> Checked:
    """Compare a block with its checksum and its row, and each unit with its record."""
    if len(data) != block.length:
        return Checked(0, 0, [f"{place_of(block)}: {stored.name} ends before them"])
    if block_crc(data, ()) != block.crc:
        return Checked(0, 0, [f"{place_of(block)}: their checksum in {stored.name} is another one"])
    units = list(UNIT.iter_unpack(data[: block.messages * UNIT_SIZE]))
    faults = list(_row_faults(stored, block, units))
    if sum(size for _, size, _ in units) != block.size:
        return Checked(0, 0, [*faults, f"{place_of(block)}: their units do not fit their records in {stored.name}"])
    view = memoryview(data)[block.messages * UNIT_SIZE :]
    at, good, size_of_good = 0, 0, 0
    times: list[int] = []
    for number, (physical, size, _) in enumerate(units):
        why, time_ms = _record_fault(block, view[at : at + max(size, 0)], physical, size, block.offset + number)
        if why:
            faults.append(f"{block.topic}/{block.queue_id} message {block.offset + number} in {stored.name}: {why}")
        else:
            good += 1
            size_of_good += size
        times.append(time_ms)
        at += size
    if not faults and (min(times), max(times)) != (block.begin_ms, block.end_ms):
        faults.append(
            f"{place_of(block)} were stored from {min(times)} to {max(times)}, the directory of {stored.name} says "
            f"{block.begin_ms} to {block.end_ms}"
        )
    return Checked(good, size_of_good, faults)


def _row_faults(stored: StoredObject, block: Block, units: list[tuple[int, int, int]]) -> Iterator[str]:
    first, last = units[0][0], units[-1][0]
    if (first, last) != (block.first_physical, block.last_physical):
        yield (
            f"{place_of(block)} have log offsets {first} to {last}, the directory of {stored.name} says "
            f"{block.first_physical} to {block.last_physical}"
        )
    if first < stored.begin or last + units[-1][1] > stored.end:
        yield (
            f"{place_of(block)} lie outside of the log from {stored.begin} to {stored.end}, which {stored.name} covers"
        )
    before = -1
    for number, (physical, _, _) in enumerate(units):
        if physical <= before:
            name = f"{block.topic}/{block.queue_id} message {block.offset + number}"
            yield f"{name} is not behind the one before in the log"
            return
        before = physical


def _record_fault(block: Block, data: Any, physical: int, size: int, offset: int) -> tuple[str, int]:
    """What is wrong with a record, and its store time (ms)."""
    if size < OVERHEAD_V1:
        return f"its unit says {size} bytes, which no message has", 0
    found = check_record(data, 0, physical_offset=physical)
    head = found.head
    if found.state is not RecordState.RECORD or head is None:
        return f"its record is damaged: {found.why or found.state.value}", 0
    topic = bytes(data[head.topic_at : head.topic_end])
    if (found.size, head.queue_offset, head.queue_id) != (size, offset, block.queue_id):
        return f"its record is message {head.queue_offset} of queue {head.queue_id}, {found.size} bytes", 0
    if topic != block.topic.encode():
        return f"its record is one of topic {topic.decode('utf-8', 'replace')}", 0
    return "", head.store_timestamp


def living(stretches: Sequence[Stretch], directory: Directory) -> list[Block]:
    """The blocks of the stretches, by their places in the object."""
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for stretch in stretches:
        ranges.setdefault((stretch.topic, stretch.queue_id), []).append((stretch.offset, stretch.end))
    found = [
        block
        for block in directory.blocks()
        if any(begin <= block.offset < end for begin, end in ranges.get((block.topic, block.queue_id), ()))
    ]
    return sorted(found, key=lambda block: block.position)


def runs(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Blocks that follow each other, up to 4 MiB; a longer block alone."""
    run: list[Block] = []
    for block in blocks:
        begin = run[0].position if run else 0
        if run and (
            run[-1].position + run[-1].length != block.position or block.position + block.length - begin > _READ
        ):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def check_run(stored: StoredObject, run: Sequence[Block], data: bytes) -> list[Checked]:
    """Check blocks that follow each other."""
    view: Any = memoryview(data)
    base = run[0].position
    return [
        check_block(stored, block, view[block.position - base : block.position - base + block.length]) for block in run
    ]


def check_index(data: Any, end: int) -> tuple[int, list[str]]:
    """The entries of a compacted index file, and what is wrong. ``end``: that of the log in the bucket."""
    if len(data) < HEADER_SIZE:
        return 0, ["it has no header"]
    magic, _, _, _, items = HEADER.unpack_from(data)
    slots, rest = divmod(len(data) - HEADER_SIZE - items * COMPACT_ITEM_SIZE, SLOT_SIZE)
    if magic != END_MAGIC or items < 0 or slots <= 0 or rest:
        return 0, [f"{items} entries do not make {len(data)} bytes"]
    table = np.frombuffer(data, _SLOT, slots, HEADER_SIZE)
    used = table[table["length"] != 0]
    begin = HEADER_SIZE + slots * SLOT_SIZE
    lengths = used["length"].astype(np.int64)
    if (lengths < 0).any() or (lengths % COMPACT_ITEM_SIZE).any() or int(lengths.sum()) != items * COMPACT_ITEM_SIZE:
        return 0, [f"its slots do not lead to {items} entries"]
    if (used["at"].astype(np.int64) != begin + np.cumsum(lengths) - lengths).any():
        return 0, ["its slots do not lead to entries that follow each other"]
    found = np.frombuffer(data, COMPACT_TYPE, items, begin)
    faults = []
    wanted = np.repeat(np.flatnonzero(table["length"] != 0), lengths // COMPACT_ITEM_SIZE)
    misplaced = int((np.abs(found["hash"].astype(np.int64)) % slots != wanted).sum())
    if misplaced:
        faults.append(f"{misplaced} entries stand in the slot of another key")
    places, sizes = found["offset"].astype(np.int64), found["size"].astype(np.int64)
    outside = int(((places < 0) | (sizes < OVERHEAD_V1) | (places + sizes > end)).sum())
    if outside:
        faults.append(f"{outside} entries lead to no message below log offset {end}")
    return items, faults
