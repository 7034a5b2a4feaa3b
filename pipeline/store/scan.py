"""Where records begin: along the chain of their sizes, and behind places where that is broken.

The rules are those of the broker's recovery: a record counts where offset, lengths and checksum are right, and behind
damage only if it is not older than those before it, so that bytes of an earlier life of a file never come back. A place
where no record stands is damaged only if a record follows it in the log.
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
"""So many records have to follow one that was found by searching: bytes that a producer chose may look like one."""
_ALIKE: Final = 8
"""After so many records of one size it is tried whether more of that size follow: no step for each of them."""
_MANY: Final = 64
"""So many positions are better an array of their own."""
MAX_RECORD: Final = 1 << 26
"""A size beyond this is no size: brokers refuse messages of a sixteenth of it."""


class Found(NamedTuple):
    """A record that was found: where in its file, how long, and when it was stored."""

    at: int
    size: int
    store_timestamp: int


def chain(view: memoryview, at: int, stop: int) -> tuple[Array, int]:
    """Positions of the records that begin at ``at`` and behind one another before ``stop``, and where that ends.

    Only sizes and magic are looked at. It ends at ``stop`` or behind, or at the first place where no whole record is.
    """
    unpack = record.SIZE_MAGIC.unpack_from
    version1, version2 = record.MAGIC_V1, record.MAGIC_V2
    length = len(view)
    last = min(stop, length - record.OVERHEAD_V1 + 1)
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
    """How many whole records with these first eight bytes follow one another from ``at`` on, before ``last``."""
    size = words >> 32
    most = min(-(-(last - at) // size), (len(view) - at) // size)
    if most <= 0:
        return 0
    found = np.ndarray((most,), dtype=">u8", buffer=view, offset=at, strides=(size,)) == words
    return most if found.all() else int(np.argmin(found))


def record_at(source: ByteSource, at: int, base: int, *, check_crc: bool = True) -> Found | str:
    """The record at ``at`` of a file that begins at log offset ``base``, fully checked; why there is none."""
    front = source.read(at, at + record.BLANK_SIZE)
    if len(front) < record.BLANK_SIZE:
        return "the file ends here"
    size, magic = record.SIZE_MAGIC.unpack(front)
    if magic not in (record.MAGIC_V1, record.MAGIC_V2):
        return (
            "zeros where a record should be" if not size and not magic else f"magic {magic:#010x} is none of a record's"
        )
    if size > MAX_RECORD:
        return f"size {size} is none of a record's"
    view = source.read(at, at + size)
    check = check_record(view, 0, physical_offset=base + at, check_crc=check_crc)
    if check.state is not RecordState.RECORD or check.head is None:
        return check.why
    head = check.head
    for begin, end in ((head.topic_at, head.topic_end), (head.properties_at, head.properties_end)):
        if has_hole(view, begin, end, at):
            return f"bytes {begin} to {end} have a sector that was never written"
    return Found(at, head.size, head.store_timestamp)


def find_record(
    source: ByteSource, base: int, begin: int, end: int, after: int, *, confirmed: bool = False
) -> Found | None:
    """The first whole record that begins in [begin, end) of a file and was not stored before the time ``after``.

    ``confirmed`` asks for records behind it too: without damage in front, bytes of a body may look like a record.
    """
    at = begin
    while at < end:
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
    """True where records, the file's BLANK or its unwritten rest follow."""
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
    """True where the clock was set back: the records that follow in the file reach the time ``last`` again."""
    while True:
        found = record_at(source, at, base, check_crc=False)
        if isinstance(found, str):
            return False
        if found.store_timestamp >= last:
            return True
        at += found.size
