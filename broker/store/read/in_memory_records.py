"""The usual pull in short: every message of the queue is wanted, and all of them lie in one file's memory.

A queue whose messages stand between those of others has one run of bytes for each message: what is done for each is
what a pull costs. Anything unusual (a filler, another file, bytes that are no record) is left to get_message.py.

Units that this process has put itself (``views_of``) tell the truth about records that it has written itself, so
that nothing is looked up for each of them. Others came out of files: each record is compared (``checked_views`` by the
native extension, ``in_memory_records``).
"""

import struct
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final

from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.page_cache import AHEAD, CHUNK, PageCache, is_dense
from trimq.broker.store.read.record_look import HEAD, HEAD_SIZE, V6, Place, end_of, is_message
from trimq.protocol.native import NATIVE
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE
from trimq.protocol.record import OVERHEAD_V1

_ITERATE: Final = UNIT.iter_unpack
_BLOCK: Final = 40 * UNIT_SIZE
"""Units that a look for tags unpacks at once: with most of them wanted, one block is a whole pull."""

Found = tuple[list[memoryview], int, int]
"""Views of records, side by side ones as one, their number and size."""


@lru_cache(maxsize=256)
def unpacker(count: int) -> Callable[[bytes | bytearray], tuple[Any, ...]]:
    """What unpacks ``count`` units into one flat tuple: place, size and tag code of each, one after the other."""
    return struct.Struct(">" + "qiq" * count).unpack


@lru_cache(maxsize=256)
def place_unpacker(count: int) -> Callable[[bytes | bytearray], tuple[Any, ...]]:
    """The same without the tag codes."""
    return struct.Struct(">" + "qi8x" * count).unpack


def views_of(
    file: MappedFile, page_cache: PageCache, places: tuple[int, ...], sizes: tuple[int, ...], limit_bytes: int
) -> Found | None:
    """Views of the records that units of this process tell of; None for anything unusual.

    At least one record, then as many as fit (``limit_bytes`` is below FILLER_SIZE). The caller holds ``file`` for as
    long as the views are used.
    """
    total = sum(sizes)
    if total > limit_bytes:
        fitting = _fitting(places, sizes, limit_bytes)
        if fitting is None:
            return None
        places, sizes, total = fitting
    start = file.start
    begin = places[0] - start
    end = places[-1] + sizes[-1] - start
    if begin < 0 or end > file.wrote:
        return None
    if begin < file.in_memory_from and not page_cache.covers_all(file, places, sizes):
        return None
    return _views(file, places, sizes, total)


def checked_views(
    file: MappedFile,
    page_cache: PageCache,
    units: bytes | bytearray,
    places: tuple[int, ...],
    sizes: tuple[int, ...],
    limit_bytes: int,
    offset: int,
    place: Place,
) -> Found | None:
    """The same for units that came out of a file, the first of them at ``offset``: each record is checked.

    None for anything unusual, for records that are spread over much of the log, and without the native extension.
    """
    extension = NATIVE.extension
    if extension is None:
        return None
    total = sum(sizes)
    if total > limit_bytes:
        fitting = _fitting(places, sizes, limit_bytes)
        if fitting is None:
            return None
        places, sizes, total = fitting
        units = units[: len(sizes) * UNIT_SIZE]
    start = file.start
    begin = places[0] - start
    end = places[-1] + sizes[-1] - start
    # what the device has spoilt may say anything: the extension looks at nothing outside of this span
    if not 0 <= begin < end <= file.wrote or not is_dense(end - begin, total):
        return None
    if not page_cache.covers(file, begin, end, AHEAD):
        return None
    its = place.queue_id, place.magic, place.topic_parts[place.magic]
    try:
        if not extension.are_messages(file.view[begin:end], places[0], units, offset, its):
            return None
    except extension.NativeFault as fault:
        NATIVE.turn_off(str(fault))
        return None
    return _views(file, places, sizes, total)


def _views(file: MappedFile, places: tuple[int, ...], sizes: tuple[int, ...], total: int) -> Found:
    """Views of records that are there; ``total``: bytes of all of them."""
    start, view = file.start, file.view
    begin, end = places[0] - start, places[-1] + sizes[-1] - start
    if end - begin == total:
        return [view[begin:end]], len(sizes), total
    if _are_joined(places, sizes):
        return _merged(view, start, places, sizes), len(sizes), total
    if start:
        views = [view[(at := place - start) : at + size] for place, size in zip(places, sizes, strict=True)]
    else:
        views = [view[at : at + size] for at, size in zip(places, sizes, strict=True)]
    return views, len(sizes), total


def _are_joined(places: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether it is worth to look for records that lie side by side: a few of them tell.

    Where batches were sent, most do, and each pair costs a view; where not, to look at all costs more than it brings.
    """
    middle = len(places) // 2
    return (
        places[0] + sizes[0] == places[1]
        or places[-2] + sizes[-2] == places[-1]
        or places[middle - 1] + sizes[middle - 1] == places[middle]
    )


def tagged(
    units: bytes, codes: frozenset[int], limit_bytes: int, limit_count: int
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Places and sizes of the first units whose tag code is one of ``codes``, and how many units were scanned.

    None for anything unusual: a filler, codes that are no 32-bit hashes, or so many bytes that they end the row.
    """
    places: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    scanned = largest = 0
    for at in range(0, len(units), _BLOCK):
        block = units[at : at + _BLOCK]
        fields = unpacker(len(block) // UNIT_SIZE)(block)
        tags = fields[2::3]
        room = limit_count - len(places)
        if codes.issuperset(tags):
            chosen: range | list[int] = range(len(tags))
        elif min(tags) >= -0x80000000 and max(tags) <= 0x7FFFFFFF:
            chosen = [number for number, tag in enumerate(tags) if tag in codes]
        else:
            return None
        looked_at = len(tags) if len(chosen) < room else chosen[room - 1] + 1
        block_sizes = fields[1 : 3 * looked_at : 3]
        largest = max(largest, *block_sizes)
        if len(chosen) == len(tags):
            places += fields[: 3 * looked_at : 3]
            sizes += block_sizes
        elif chosen:
            places += tuple([fields[3 * number] for number in chosen[:room]])
            sizes += tuple([fields[3 * number + 1] for number in chosen[:room]])
        scanned += looked_at
        if len(places) >= limit_count:
            break
    return None if sum(sizes) + largest > limit_bytes else (places, sizes, scanned)


def _fitting(
    places: tuple[int, ...], sizes: tuple[int, ...], limit_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Places and sizes of those that fit, at least one, and their bytes; None where a filler ends the row."""
    count = bisect_right(list(accumulate(sizes)), limit_bytes)
    if sizes[count] == FILLER_SIZE:
        return None
    count = count or 1
    return places[:count], sizes[:count], sum(sizes[:count])


def _merged(view: memoryview, start: int, places: tuple[int, ...], sizes: tuple[int, ...]) -> list[memoryview]:
    buffers: list[memoryview] = []
    begin = end = places[0] - start
    for place, size in zip(places, sizes, strict=True):
        at = place - start
        if at != end:
            buffers.append(view[begin:end])
            begin = at
        end = at + size
    buffers.append(view[begin:end])
    return buffers


def in_memory_records(
    file: MappedFile,
    page_cache: PageCache,
    units: bytes | bytearray,
    limit_bytes: int,
    limit_count: int,
    offset: int,
    place: Place,
) -> Found | None:
    """The same for units that came out of a file, ``limit_count`` of them at most, the first of them at ``offset``.

    At least one record, then as many as fit the limits. Each is checked to be the message of its unit's offset. The
    caller holds ``file`` for as long as the views are used.
    """
    view = file.view
    raw: Any = view.obj
    start, lowest, highest = file.start, file.in_memory_from, file.wrote
    buffers: list[memoryview] = []
    begin = 0
    end = -1
    total = count = 0
    cached_from = cached_to = -1
    queue_id, magic, part, ends = place.queue_id, place.magic, place.topic_parts[place.magic], place.ends
    width = len(part) + 2
    for phy, size, _ in _ITERATE(units[: limit_count * UNIT_SIZE]):
        if total + size > limit_bytes and (count or size == FILLER_SIZE):
            if size == FILLER_SIZE:
                return None
            break
        at = phy - start
        if at < 0 or at + size > highest or size < OVERHEAD_V1:
            return None
        if at < lowest and not cached_from <= at <= cached_to - size:
            if not page_cache.covers(file, at, at + size):
                return None
            cached_from, cached_to = at - at % CHUNK, -(-(at + size) // CHUNK) * CHUNK
        stored, its_magic, its_queue, its_offset, its_phy, sys_flag, body = HEAD(raw, at)
        if stored != size or its_phy != phy or its_offset != offset + count or its_queue != queue_id:
            return None
        if its_magic != magic or sys_flag & V6:
            if not is_message(raw, at, phy, size, offset + count, place):
                return None
        else:
            name_at = at + HEAD_SIZE + body
            if raw[name_at : name_at + width] != (ends.get(size - body) or end_of(place, size - body)):
                return None
        if at != end:
            if count:
                buffers.append(view[begin:end])
            begin = end = at
        end += size
        total += size
        count += 1
    if not count:
        return None
    buffers.append(view[begin:end])
    return buffers, count, total
