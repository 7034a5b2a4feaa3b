"""Matches the properties of records that are in memory, for filters that cannot decide by a queue unit alone (SQL92).

Reading a record costs much more than testing a tag code, so that one call looks at few units: enough for most pulls,
and no more than the event loop can spare (protocol/sql92/cost.py). If it does not find what a pull may get, the pull is
served by a task that pauses after as many (``MessageGetter.get_cold``).
"""

from typing import Any, Final

from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.page_cache import CHUNK, PageCache
from trimq.broker.store.read.in_memory_records import Found
from trimq.broker.store.read.record_look import Place, is_message, properties_of
from trimq.broker.store.types import MessageFilter
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT
from trimq.protocol.record import OVERHEAD_V1
from trimq.protocol.sql92.cost import DECODING, SLICE, TERM

_ITERATE: Final = UNIT.iter_unpack


def matched(
    file: MappedFile,
    page_cache: PageCache,
    units: bytes | bytearray,
    limit_bytes: int,
    limit_count: int,
    offset: int,
    place: Place,
    accept: MessageFilter,
) -> tuple[Found, int] | None:
    """Views of the records that ``accept`` takes, among ``units`` from ``offset`` on, and the number of scanned units.

    None for any unusual case: a filler, another file, cold data, bytes that are not the message of their unit, or a
    slice (protocol/sql92/cost.py) that ends before the limits are reached. The caller holds ``file`` as long as the
    views are used.
    """
    match_tags, match_record = accept.match_tags, accept.match_record
    each_byte, each_record, left = accept.terms + DECODING, accept.terms * TERM, SLICE
    raw: Any = file.view.obj
    start, lowest, highest = file.start, file.in_memory_from, file.wrote
    places: list[tuple[int, int]] = []
    total = scanned = 0
    cached_from = cached_to = -1
    for phy, size, tags in _ITERATE(units):
        at = phy - start
        if size == FILLER_SIZE or size < OVERHEAD_V1 or at < 0 or at + size > highest:
            return None
        if places and (total + size > limit_bytes or len(places) >= limit_count):
            break
        if left <= 0:
            return None
        scanned += 1
        if not match_tags(tags):
            continue
        # Evicted pages must not be touched through the map. Within the chunks checked last no second check is needed.
        if at < lowest and not cached_from <= at <= cached_to - size:
            if not page_cache.covers(file, at, at + size):
                return None
            cached_from, cached_to = at - at % CHUNK, -(-(at + size) // CHUNK) * CHUNK
        if not is_message(raw, at, phy, size, offset + scanned - 1, place):
            return None
        properties = properties_of(raw, at, size, place)
        left -= len(properties) * each_byte + each_record
        if match_record(properties):
            places.append((at, at + size))
            total += size
    return (_merged(file.view, places), len(places), total), scanned


def _merged(view: memoryview, places: list[tuple[int, int]]) -> list[memoryview]:
    """Views of records, adjacent ones as one."""
    buffers: list[memoryview] = []
    begin = end = -1
    for at, behind in places:
        if at != end:
            if end >= 0:
                buffers.append(view[begin:end])
            begin = at
        end = behind
    if end >= 0:
        buffers.append(view[begin:end])
    return buffers
