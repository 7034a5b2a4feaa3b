"""The usual pull in one loop: every message of the queue is wanted, and all of them lie in one file's memory.

A queue whose messages stand between those of others has one run of bytes for each message: what is done for each is
what a pull costs. Anything unusual (a filler, another file, bytes that are no record) is left to get_message.py.
"""

import struct
from typing import Final

from broker.store.mapped_file import MappedFile
from protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE
from protocol.record import MAGIC_V1, MAGIC_V2

_ITERATE: Final = UNIT.iter_unpack
_FRONT: Final = struct.Struct(">II20xQ").unpack_from
"""Size, magic and physical offset of a record."""

_MAGICS: Final = frozenset({MAGIC_V1, MAGIC_V2})


def hot_records(
    file: MappedFile, units: bytes, limit_bytes: int, limit_count: int
) -> tuple[list[memoryview], int, int] | None:
    """Views of the records of ``units``, side by side ones as one, their number and size; None for anything unusual.

    At least one record, then as many as fit the limits. Both ends of each run are checked to be the records that their
    units tell of. The caller holds ``file`` for as long as the views are used.
    """
    view = file.view
    start, lowest, highest = file.start, file.hot_from, file.wrote
    buffers: list[memoryview] = []
    begin = last = last_size = 0
    end = -1
    total = count = 0
    for phy, size, _ in _ITERATE(units[: limit_count * UNIT_SIZE]):
        if total + size > limit_bytes and (count or size == FILLER_SIZE):
            if size == FILLER_SIZE:
                return None
            break
        at = phy - start
        if at != end:
            if at < lowest or at + size > highest:
                return None
            stored, magic, place = _FRONT(view, at)
            if stored != size or place != phy or magic not in _MAGICS:
                return None
            if count:
                if last != begin and not _is_record(view, last, start + last, last_size):
                    return None
                buffers.append(view[begin:end])
            begin = end = at
        last = at
        last_size = size
        end += size
        total += size
        count += 1
    if not count or end > highest or (last != begin and not _is_record(view, last, start + last, last_size)):
        return None
    buffers.append(view[begin:end])
    return buffers, count, total


def _is_record(view: memoryview, at: int, phy: int, size: int) -> bool:
    stored, magic, place = _FRONT(view, at)
    return bool(stored == size and place == phy and magic in _MAGICS)
