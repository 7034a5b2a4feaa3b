"""The fast path of a pull: every message of the queue is wanted, and all of them are in memory and in one log file.

In a queue whose messages alternate with those of other queues every message is a separate run of bytes, so the cost per
message is the cost of a pull. Unusual cases (a filler, another file, bytes that are not a record) are left to
get_message.py.

Units that this process has put (``views_of``) agree with the records that it has written, so that no record is checked.
Others came from files: each record is compared, by ``checked_views`` (native extension) or ``in_memory_records``.
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
"""Units that a search for tags unpacks together: if most of them are wanted, one block is a whole pull."""

Found = tuple[list[memoryview], int, int]
"""Views of records, adjacent ones merged, their number and total size."""


@lru_cache(maxsize=256)
def unpacker(count: int) -> Callable[[bytes | bytearray], tuple[Any, ...]]:
    """A function that unpacks ``count`` units into one flat tuple: place, size and tag code of each in turn."""
    return struct.Struct(">" + "qiq" * count).unpack


@lru_cache(maxsize=256)
def place_unpacker(count: int) -> Callable[[bytes | bytearray], tuple[Any, ...]]:
    """As ``unpacker``, without the tag codes."""
    return struct.Struct(">" + "qi8x" * count).unpack


def views_of(
    file: MappedFile, page_cache: PageCache, places: tuple[int, ...], sizes: tuple[int, ...], limit_bytes: int
) -> Found | None:
    """Views of the records of units that this process has put; None for any unusual case.

    At least one record, then as many as fit (``limit_bytes`` is below FILLER_SIZE). The caller holds ``file`` as long
    as the views are used.
    """
    total = sum(sizes)
    # True for every filler too: the size of one is above any limit.
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
    """As ``views_of``, for units that came from a file, the first of them at ``offset``: each record is checked.

    None for any unusual case, for records that are spread over much of the log, and without the native extension.
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
    # A corrupt unit may have any value: the extension reads nothing outside of this span.
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
    """Views of checked records; ``total``: the bytes of all of them."""
    start, view = file.start, file.view
    begin, end = places[0] - start, places[-1] + sizes[-1] - start
    if end - begin == total:
        return [view[begin:end]], len(sizes), total
    if _are_joined(places, sizes):
        return _merged(view, start, places, sizes), len(sizes), total
    # The first file starts at 0: no subtraction for each record.
    if start:
        views = [view[(at := place - start) : at + size] for place, size in zip(places, sizes, strict=True)]
    else:
        views = [view[at : at + size] for at, size in zip(places, sizes, strict=True)]
    return views, len(sizes), total


def _are_joined(places: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether a search for adjacent records is worth its cost, judged by three pairs.

    If batches were sent, most records are adjacent, and each merged pair saves a view. If not, the search costs more
    than it saves.
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
    """Places and sizes of the first units whose tag code is in ``codes``, and the number of scanned units.

    None for any unusual case: a filler, tag codes that are not 32-bit hashes, or more bytes than the limit.
    """
    places: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    scanned = largest = 0
    for at in range(0, len(units), _BLOCK):
        block = units[at : at + _BLOCK]
        fields = unpacker(len(block) // UNIT_SIZE)(block)
        tags = fields[2::3]
        space = limit_count - len(places)
        if codes.issuperset(tags):
            chosen: range | list[int] = range(len(tags))
        elif min(tags) >= -0x80000000 and max(tags) <= 0x7FFFFFFF:
            chosen = [number for number, tag in enumerate(tags) if tag in codes]
        else:
            # A tag slot outside of 32 bits is not a hash, for example the due time of a delayed message.
            return None
        checked = len(tags) if len(chosen) < space else chosen[space - 1] + 1
        block_sizes = fields[1 : 3 * checked : 3]
        largest = max(largest, *block_sizes)
        if len(chosen) == len(tags):
            places += fields[: 3 * checked : 3]
            sizes += block_sizes
        elif chosen:
            places += tuple([fields[3 * number] for number in chosen[:space]])
            sizes += tuple([fields[3 * number + 1] for number in chosen[:space]])
        scanned += checked
        if len(places) >= limit_count:
            break
    # With ``largest`` on top: no filler is among the scanned units (its size alone is above any limit), and the full
    # path would not have stopped earlier.
    return None if sum(sizes) + largest > limit_bytes else (places, sizes, scanned)


def _fitting(
    places: tuple[int, ...], sizes: tuple[int, ...], limit_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Places and sizes of the units that fit, at least one, and their bytes; None if a filler is the next one."""
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
    """As ``checked_views``, in Python, for up to ``limit_count`` units.

    At least one record, then as many as fit the limits. Each is checked to be the message of its unit's offset. The
    caller holds ``file`` as long as the views are used.
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
        # Evicted pages must not be touched through the map. Within the chunks checked last no second check is needed.
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
