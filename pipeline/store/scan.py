"""Finds the positions of records: along the chain of their sizes, and by search behind damage.

The rules are those of the broker's recovery. A record is valid if offset, lengths and checksum are right. Behind damage
it must not be older than the records before it either, so that records of a file's earlier use never reappear. Bytes
that are no record are damage only if a record follows them in the log; else they are behind the end of the log.
"""

from typing import Final, NamedTuple

import numpy as np

from trimq.pipeline.store.files import ByteSource
from trimq.pipeline.store.heads import Array, has_hole
from trimq.protocol import record
from trimq.protocol.record import RecordState, check_record

_SEARCH: Final = 1 << 20
_ZEROS: Final = bytes(_SEARCH)
_MAGIC_FRONT: Final = b"\xda\xa3\x20"
_MAGICS: Final = (record.MAGIC_V1.to_bytes(4, "big"), record.MAGIC_V2.to_bytes(4, "big"))
_CONFIRM: Final = 3
"""Records that have to follow one that was found by search: a body may contain bytes that look like a record."""
_ALIKE: Final = 8
"""After so many records of one size, numpy tests how many more of that size follow, without a step for each."""
_MANY: Final = 64
"""From so many positions on, an array is cheaper than adding them to the list."""
MAX_RECORD: Final = 1 << 26
"""The largest size that is taken as a record's: 16 times the largest message that brokers accept."""


class Found(NamedTuple):
    """A valid record: its position in the file, its size and its store time."""

    at: int
    size: int
    store_timestamp: int


def chain(view: memoryview, at: int, stop: int) -> tuple[Array, int]:
    """The positions of consecutive records from ``at`` on that begin before ``stop``, and the position behind them.

    Only size and magic are checked. The chain ends at or behind ``stop``, or at the first position without a whole
    record.
    """
    unpack = record.SIZE_MAGIC.unpack_from
    version1, version2 = record.MAGIC_V1, record.MAGIC_V2
    length = len(view)
    last = min(stop, length - record.OVERHEAD_V1 + 1)  # behind it no whole record can begin
    pieces: list[Array] = []
    positions: list[int] = []
    usual = alike = 0
    while at < last:
        size, magic = unpack(view, at)
        if (magic != version1 and magic != version2) or size < 91:  # noqa: PLR1714 - half the time of a tuple
            break
        following = at + size
        if following > length:
            break
        positions.append(at)
        at = following
        if size != usual:
            usual, alike = size, 0
            continue
        alike += 1
        # After a run of equal sizes numpy compares the next records in one call.
        if alike == _ALIKE:
            alike = 0
            count = _same_size(view, at, size << 32 | magic, last)
            following = at + count * size
            if count < _MANY:
                positions += range(at, following, size)
            else:
                pieces += np.array(positions, dtype=np.int64), np.arange(at, following, size)
                positions = []
            at = following
    return np.concatenate([*pieces, np.array(positions, dtype=np.int64)]), at


def _same_size(view: memoryview, at: int, words: int, last: int) -> int:
    """The number of consecutive whole records from ``at`` on, before ``last``, that begin with the bytes ``words``."""
    size = words >> 32
    most = min(-(-(last - at) // size), (len(view) - at) // size)
    if most <= 0:
        return 0
    found = np.ndarray((most,), dtype=">u8", buffer=view, offset=at, strides=(size,)) == words
    return most if found.all() else int(np.argmin(found))


def record_at(source: ByteSource, at: int, base: int, *, check_crc: bool = True) -> Found | str:
    """The record at ``at`` of a file that begins at log offset ``base``, fully checked, or why it is not valid."""
    front = source.read(at, at + record.BLANK_SIZE)
    if len(front) < record.BLANK_SIZE:
        return "the file ends here"
    size, magic = record.SIZE_MAGIC.unpack(front)
    if magic not in (record.MAGIC_V1, record.MAGIC_V2):
        return "zeros where a record should be" if not size and not magic else f"magic {magic:#010x} is not a record's"
    if size > MAX_RECORD:
        return f"size {size} is not a record's"
    view = source.read(at, at + size)
    check = check_record(view, 0, physical_offset=base + at, check_crc=check_crc)
    if check.state is not RecordState.RECORD or check.head is None:
        return check.why
    head = check.head
    for begin, end in ((head.topic_at, head.topic_end), (head.properties_at, head.properties_end)):
        if has_hole(view, begin, end, at):
            return f"bytes {begin} to {end} contain a sector that was never written"
    return Found(at, head.size, head.store_timestamp)


def find_record(
    source: ByteSource, base: int, begin: int, end: int, after: int, *, confirmed: bool = False
) -> Found | None:
    """The first valid record that begins in [begin, end) of a file and was not stored before ``after``.

    ``confirmed``: it has to be followed by records too. A split begins anywhere, perhaps inside a body, and bytes of a
    body may look like a record.
    """
    at = begin
    while at < end:
        # Skip holes; the magic is found first, and a record begins AT_MAGIC bytes before it.
        at = max(at, source.next_data(at) - record.AT_MAGIC)
        chunk = source.read(at, min(at + _SEARCH + 7, end + 7))
        if len(chunk) < record.BLANK_SIZE:
            return None
        data = bytes(chunk)
        hit = -1 if data == _ZEROS[: len(data)] else data.find(_MAGIC_FRONT, record.AT_MAGIC)
        while hit >= 0:
            candidate = at + hit - record.AT_MAGIC
            if candidate < end and data[hit : hit + 4] in _MAGICS:
                found = record_at(source, candidate, base)
                sound = isinstance(found, Found) and found.store_timestamp >= after
                if isinstance(found, Found) and sound and (not confirmed or _is_confirmed(source, base, found)):
                    return found
            hit = data.find(_MAGIC_FRONT, hit + 1)
        at += _SEARCH
    return None


def _is_confirmed(source: ByteSource, base: int, found: Found) -> bool:
    """Whether ``found`` is followed by records, by the file's BLANK, or by the unwritten rest of the file."""
    at = found.at + found.size
    for _ in range(_CONFIRM):
        front = source.read(at, at + record.BLANK_SIZE)
        if len(front) < record.BLANK_SIZE:
            return True
        size, magic = record.SIZE_MAGIC.unpack(front)
        if (magic == record.MAGIC_BLANK and at + size == source.size) or (not size and not magic):
            return True
        following = record_at(source, at, base, check_crc=False)
        if isinstance(following, str):
            return False
        at += following.size
    return True


def time_comes_back(source: ByteSource, base: int, at: int, last: int) -> bool:
    """Whether the records from ``at`` on reach the time ``last`` again: then an older time means a clock set back."""
    while True:
        found = record_at(source, at, base, check_crc=False)
        if isinstance(found, str):
            return False
        if found.store_timestamp >= last:
            return True
        at += found.size
