"""Reads a stretch of one log file: windows of whole records, and the damaged places between them."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from trimq.pipeline.store.files import ByteSource, DataFile
from trimq.pipeline.store.heads import Array, Heads, check_bodies, has_hole, read_heads
from trimq.pipeline.store.scan import Found, chain, find_record, record_at, time_comes_back
from trimq.protocol import record

WINDOW: Final = 8 << 20
"""Bytes of the log that are decoded together."""


class Stretch(NamedTuple):
    """A part of a log file: the records that begin in [begin, stop).

    ``begin`` is the position of a record or of the file's start, ``stop`` that of a record or of the file's end.
    ``floor`` is the newest store time in front of ``begin``, used only in the newest file. ``followed``: the log
    continues behind ``stop``, so that all bytes in front of it must be records.
    """

    file: DataFile
    begin: int
    stop: int
    floor: int = 0
    is_newest: bool = False
    followed: bool = True


class Chunk(NamedTuple):
    """The whole records of one window."""

    view: memoryview
    heads: Heads


class Damage(NamedTuple):
    """Bytes of the log that are no record although records follow them. ``phy`` is a log offset."""

    file: str
    phy: int
    length: int
    why: str


class BoundaryError(Exception):
    """A record extends over the position at which the next split begins: that position is not a record's."""


class LogWalk:
    """One pass over a stretch. Afterwards ``end`` is the position at which it ended, ``newest`` the newest time."""

    def __init__(self, source: ByteSource, stretch: Stretch, *, check_crc: bool = True, window: int = WINDOW) -> None:
        self._source = source
        self._stretch = stretch
        self._base = stretch.file.start
        self._check_crc = check_crc
        self._window = window
        self._tolerated = 0
        self.end = stretch.begin
        self.newest = stretch.floor

    def __iter__(self) -> Iterator[Chunk | Damage]:
        """Chunks and damages in log order. Raises BoundaryError if the next split begins inside a record."""
        while self.end < self._stretch.stop:
            chunk, why = self._next_chunk()
            if chunk is not None:
                yield chunk
            if why is None:
                continue
            damage = self._skip(why)
            if damage is None:
                return
            yield damage
        if self.end > self._stretch.stop:
            raise BoundaryError(
                f"a record of {self._stretch.file.path} extends to {self.end}, over {self._stretch.stop}, where "
                "another record seemed to begin: read this store with splitSize=0"
            )

    def _next_chunk(self) -> tuple[Chunk | None, str | None]:
        """The records from ``end`` on, and why the chain breaks behind them; None if it may continue."""
        at = self.end
        view = self._source.read(at, at + self._window)
        positions, length = chain(view, 0, self._stretch.stop - at)
        if not len(positions):
            return self._first_of_another_kind(view)
        heads = read_heads(np.frombuffer(view, np.uint8), positions, positions + (self._base + at))
        count, why = self._count_good(view, heads)
        if count < len(positions):
            self.end = at + int(positions[count])
            heads = heads.take(np.arange(count))
        else:
            self.end = at + length
        if count:
            self.newest = max(self.newest, int(heads.store_timestamp.max()))
        return Chunk(view, heads) if count else None, why

    def _count_good(self, view: memoryview, heads: Heads) -> tuple[int, str | None]:
        """The number of valid records before the first that is not, and what is wrong with that one."""
        # The cheap checks first; each later one sees only the records in front of the first bad one.
        good = heads.ok.copy()
        sound = heads if good.all() else heads.take(np.arange(int(np.argmin(good))))
        if self._check_crc and len(sound):
            good[: len(sound)] &= check_bodies(view, sound)
        if len(sound):
            good[: len(sound)] &= ~_holes(view, sound, self.end)
        if self._stretch.is_newest:
            self._check_times(heads, good)
        if good.all():
            return len(heads), None
        bad = int(np.argmin(good))
        # Only the reason: if the record itself is valid, its time must have been refused.
        found = record_at(self._source, self.end + int(heads.at[bad]), self._base)
        return bad, found if isinstance(found, str) else "a record of an earlier use of this file"

    def _check_times(self, heads: Heads, good: Array) -> None:
        """Clear ``good`` for a record that is older than one before it and belongs to an earlier use of the file.

        A clock that was set back has the same symptom, but then later records reach the old time again.
        """
        times = heads.store_timestamp
        before = np.maximum.accumulate(np.concatenate(([self.newest], times)))[:-1]
        for number in np.flatnonzero((times < before) & good).tolist():
            last = int(before[number])
            if last <= self._tolerated:  # this step back was accepted at an earlier record; do not search again
                continue
            if not time_comes_back(self._source, self._base, self.end + int(heads.at[number]), last):
                good[number] = False
                return
            self._tolerated = last

    def _first_of_another_kind(self, view: memoryview) -> tuple[None, str | None]:
        """Handle a window that does not begin with a whole record: a BLANK, a larger record, or damage (the reason)."""
        at = self.end
        if len(view) < record.BLANK_SIZE:
            self.end = self._stretch.stop
            return None, None
        size, magic = record.SIZE_MAGIC.unpack_from(view)
        if magic == record.MAGIC_BLANK:
            if at + size == self._source.size:
                self.end = self._stretch.stop
                return None, None
            return None, f"a BLANK of {size} bytes, but the file has {self._source.size - at} more"
        found = record_at(self._source, at, self._base, check_crc=False)
        if isinstance(found, Found) and found.size > len(view):
            self._window = max(self._window, found.size)  # read again with a window that has all of it
            return None, None
        return None, found if isinstance(found, str) else "the record extends over the end of the file"

    def _skip(self, why: str) -> Damage | None:
        """Move ``end`` to the next record behind damage. None if there is none: the log ends here."""
        begin, stop = self.end, self._stretch.stop
        following = self._find_next(begin, stop)
        if following is None:
            # Records follow behind ``stop`` if the stretch is followed: all bytes up to there are damaged.
            if not self._stretch.followed:
                return None
            following = stop
        self.end = following
        return Damage(self._stretch.file.path, self._base + begin, following - begin, why)

    def _find_next(self, begin: int, stop: int) -> int | None:
        after = self.newest if self._stretch.is_newest else 0
        # Most damage is inside a record whose size is still right: try the position behind it before searching.
        front = self._source.read(begin, begin + 4)
        size = int.from_bytes(front, "big")
        if record.OVERHEAD_V1 <= size < stop - begin:
            found = record_at(self._source, begin + size, self._base)
            if isinstance(found, Found) and found.store_timestamp >= after:
                return begin + size
        if begin + size == stop and self._stretch.followed and size:
            return stop
        found_later = find_record(self._source, self._base, begin + 1, stop, after)
        return found_later.at if found_later is not None else None


def _holes(view: memoryview, heads: Heads, to_file: int) -> Array:
    """A mask of the records whose topic or properties contain a sector that was never written.

    The checksum covers only the body. Topic and properties contain no zero bytes when they are intact, so that only
    records with a zero byte at the edge of one, or with long ones, have to be examined.
    """
    window = np.frombuffer(view, dtype=np.uint8)
    holes = np.zeros(len(heads), dtype=bool)
    # A text of at most one sector length touches two sectors: if the part in one is zeros, its first or last byte is.
    last = len(window) - 1
    ends = heads.topic_at, heads.topic_end - 1, np.minimum(heads.properties_at, last), heads.properties_end - 1
    suspicious = np.zeros(len(heads), dtype=bool)
    for place in ends:
        suspicious |= window[place] == 0
    long = (heads.properties_end - heads.properties_at > 512) | (heads.topic_end - heads.topic_at > 512)
    for number in np.flatnonzero(suspicious | long).tolist():
        topic = int(heads.topic_at[number]), int(heads.topic_end[number])
        properties = int(heads.properties_at[number]), int(heads.properties_end[number])
        holes[number] = any(has_hole(view, begin, end, to_file) for begin, end in (topic, properties))
    return holes
