"""The stretches of one queue, packed: there may be a hundred thousand queues, most of them with a stretch or two."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from trimq.protocol.bucket_manifest import StoredObject, Stretch

_WIDTH: Final = 9
_EXACT: Final = 8
_OFFSET, _MESSAGES, _FIRST, _LAST, _BEGIN_MS, _END_MS = 0, 1, 5, 6, 7, 8


class Part(NamedTuple):
    """A stretch in an object. ``end``: behind the last message of it that is read here; a later one may go on."""

    end: int
    stored: StoredObject
    stretch: Stretch


class StretchTable:
    """Stretches by their offsets. If they overlap, that of the later generation, then epoch, has the messages."""

    __slots__ = ("_has_overlaps", "_numbers", "_objects")

    def __init__(self) -> None:
        self._numbers = array("q")
        """The numbers of each stretch: all of Stretch but its queue."""
        self._objects: tuple[StoredObject, ...] = ()
        self._has_overlaps = False

    @classmethod
    def of(cls, numbers: bytes, objects: tuple[StoredObject, ...], *, has_overlaps: bool) -> "StretchTable":
        """The table of these rows: nine native numbers for each object, sorted by offset."""
        table = cls()
        table._numbers.frombytes(numbers)
        table._objects, table._has_overlaps = objects, has_overlaps
        return table

    def __contains__(self, stored: object) -> bool:
        return stored in self._objects

    def _offset(self, row: int) -> int:
        return self._numbers[row * _WIDTH + _OFFSET]

    def _end(self, row: int) -> int:
        return self._numbers[row * _WIDTH + _OFFSET] + self._numbers[row * _WIDTH + _MESSAGES]

    @property
    def first(self) -> int | None:
        """The first offset; None if there is no stretch."""
        return self._numbers[_OFFSET] if self._objects else None

    @property
    def size(self) -> int:
        """Bytes of all records."""
        return sum(self._numbers[2::_WIDTH])

    @property
    def messages(self) -> int:
        """The messages of all stretches; those where they overlap count more than once."""
        return sum(self._numbers[_MESSAGES::_WIDTH])

    @property
    def log_range(self) -> tuple[int, int] | None:
        """The log offsets of the first and of the last message; None if there is no stretch."""
        return (min(self._numbers[_FIRST::_WIDTH]), max(self._numbers[_LAST::_WIDTH])) if self._objects else None

    @property
    def begin_ms(self) -> int:
        """The smallest store time of the first stretch; there is one."""
        return self._numbers[_BEGIN_MS]

    @property
    def end_ms(self) -> int:
        """The largest store time of the last stretch; there is one."""
        return self._numbers[_END_MS - _WIDTH]

    def add(self, stored: StoredObject, stretch: Stretch) -> None:
        """Add a stretch, unless it is there."""
        rows = range(len(self._objects))
        row = bisect_right(rows, stretch.offset, key=self._offset)
        if any(self._objects[other] == stored for other in self._rows_at(stretch.offset)):
            return
        self._has_overlaps = (
            self._has_overlaps
            or (row > 0 and self._end(row - 1) > stretch.offset)
            or (row < len(rows) and self._offset(row) < stretch.end)
        )
        numbers = stretch.offset, stretch.messages, stretch.size, stretch.position, stretch.blocks, *stretch[7:]
        at = row * _WIDTH
        if row < _EXACT:  # without the room that an array reserves when it grows
            self._numbers = self._numbers[:at] + array("q", numbers) + self._numbers[at:]
        else:
            self._numbers[at:at] = array("q", numbers)
        self._objects = (*self._objects[:row], stored, *self._objects[row:])

    def _rows_at(self, offset: int) -> range:
        rows = range(len(self._objects))
        return range(bisect_left(rows, offset, key=self._offset), bisect_right(rows, offset, key=self._offset))

    def replace(self, gone: Collection[StoredObject], new: Sequence[tuple[StoredObject, Stretch]]) -> None:
        """Remove all stretches of some objects and add others, in one step."""
        kept = [row for row, stored in enumerate(self._objects) if stored not in gone]
        numbers = array("q")
        for row in kept:
            numbers += self._numbers[row * _WIDTH : (row + 1) * _WIDTH]
        self._numbers = numbers
        self._objects = tuple([self._objects[row] for row in kept])
        ends = 0
        self._has_overlaps = False
        for row in range(len(kept)):
            self._has_overlaps |= self._offset(row) < ends
            ends = max(ends, self._end(row))
        for stored, stretch in new:
            self.add(stored, stretch)

    def stretch(self, row: int, topic: str, queue_id: int) -> Stretch:
        """A stretch with its queue."""
        offset, messages, size, position, blocks, *rest = self._numbers[row * _WIDTH : (row + 1) * _WIDTH]
        return Stretch(topic, queue_id, blocks, offset, messages, size, position, *rest)

    def items(self, topic: str, queue_id: int) -> Iterator[tuple[StoredObject, Stretch]]:
        """All stretches and their objects."""
        for row, stored in enumerate(self._objects):
            yield stored, self.stretch(row, topic, queue_id)

    def at(self, offset: int, topic: str, queue_id: int) -> Part | None:
        """The stretch with an offset; None in a gap."""
        row = bisect_right(range(len(self._objects)), offset, key=self._offset) - 1
        end = self._end(row) if row >= 0 else offset
        if self._has_overlaps:
            row, end = self._best(offset)
        if row < 0 or end <= offset:
            return None
        return Part(end, self._objects[row], self.stretch(row, topic, queue_id))

    def _best(self, offset: int) -> tuple[int, int]:
        best = -1
        for row in range(len(self._objects)):
            if self._offset(row) <= offset < self._end(row) and (best < 0 or self._rank(row) > self._rank(best)):
                best = row
        if best < 0:
            return best, offset
        end = self._end(best)
        for row in range(len(self._objects)):
            if offset < self._offset(row) < end and self._rank(row) > self._rank(best):
                end = self._offset(row)
        return best, end

    def _rank(self, row: int) -> tuple[int, int, int, int]:
        return self._objects[row].rank

    def next_begin(self, offset: int) -> int | None:
        """Where the next stretch behind an offset begins."""
        row = bisect_right(range(len(self._objects)), offset, key=self._offset)
        return self._offset(row) if row < len(self._objects) else None

    def has_physical(self, physical: int) -> bool:
        """Whether a stretch may have the record of a log offset."""
        return next(self._rows_with(physical), None) is not None

    def with_physical(self, physical: int, topic: str, queue_id: int) -> list[tuple[StoredObject, Stretch]]:
        """The stretches that may have the record of a log offset, those that count first."""
        rows = sorted(self._rows_with(physical), key=self._rank, reverse=True)
        return [(self._objects[row], self.stretch(row, topic, queue_id)) for row in rows]

    def _rows_with(self, physical: int) -> Iterator[int]:
        numbers = self._numbers
        for row in range(len(self._objects)):
            at = row * _WIDTH
            if numbers[at + _FIRST] <= physical <= numbers[at + _LAST]:
                yield row
