"""One queue: the places of its messages in the commit log, as 20-byte units in queue order.

The newest units are in memory (the tail) and are written to the files of the queue by the flush service; units that a
kill loses from the tail are rebuilt from the log. A queue has no open file and no mapping of its own, so that a broker
with a hundred thousand queues has as many descriptors as one with ten. Source: RocketMQ's ConsumeQueue.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from trimq.protocol.file_names import offset_name
from trimq.protocol.queue_unit import FILLER, FILLER_SIZE, UNIT, UNIT_SIZE
from trimq.protocol.record import OVERHEAD_V1

_PACK: Final = UNIT.pack
_UNPACK_FROM: Final = UNIT.unpack_from


class QueueShape(NamedTuple):
    """Sizes that all queues of a store share."""

    units_per_file: int
    log_file_size: int


class ConsumeQueue:
    """The units of one (topic, queue id).

    Offsets count units. ``min_offset`` is the first message that is still in the log, ``next_offset`` the one after the
    last. The tail holds units ``tail_offset`` to ``next_offset``; those below ``written`` are in the files too.
    ``first_offset`` is the start of the oldest file. ``max_phy`` is the log offset behind the newest unit's message.
    """

    __slots__ = (
        "counted",
        "deleted",
        "directory",
        "dirty",
        "first_offset",
        "known_from",
        "made_offset",
        "max_phy",
        "min_offset",
        "next_offset",
        "on_dirty",
        "queue_id",
        "shape",
        "tail",
        "tail_offset",
        "topic",
        "units_per_file",
        "written",
    )

    def __init__(
        self,
        topic: str,
        queue_id: int,
        directory: str,
        shape: QueueShape,
        on_dirty: Callable[["ConsumeQueue"], None],
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.directory = directory
        self.shape = shape
        self.units_per_file = shape.units_per_file
        self.on_dirty = on_dirty
        self.min_offset = 0
        self.next_offset = 0
        self.first_offset = 0
        self.made_offset = 0
        """Files below this offset exist; the writer creates the one that starts here."""
        self.max_phy = 0
        self.tail = bytearray()
        self.tail_offset = 0
        self.written = 0
        self.dirty = False
        """The queue is in the writer's list."""
        self.deleted = False
        self.known_from = 0
        """Units from here on were put by this process, not found in a file."""
        self.counted = 0
        """Used by ConsumeQueueStore: this queue's share in the sum of all next offsets."""

    def restore(self, first_offset: int, min_offset: int, next_offset: int, max_phy: int) -> None:
        """Set the state of a queue whose units are all in its files."""
        self.first_offset = first_offset
        self.min_offset = min_offset
        self.next_offset = self.tail_offset = self.written = self.known_from = next_offset
        self.max_phy = max_phy
        self.tail.clear()
        self.made_offset = -(-next_offset // self.units_per_file) * self.units_per_file

    # -- writing

    def put(self, phy: int, size: int, tags_code: int, queue_offset: int) -> bool:
        """Add a message's unit. Returns False if it is already there.

        Messages come in the order of the log. Missing offsets are filled up, so that no unit is ever at another place
        than its message's own offset.
        """
        if queue_offset != self.next_offset or phy < self.max_phy:
            # The record ends before the newest one: its unit was put already.
            if phy + size <= self.max_phy:
                return False
            self._fill_up_to(queue_offset, phy)
        self.tail += _PACK(phy, size, tags_code)
        self.next_offset += 1
        self.max_phy = phy + size
        if not self.dirty:
            self.dirty = True
            self.on_dirty(self)
        return True

    def put_all(self, places: Sequence[int], sizes: Sequence[int], tags: Sequence[int], queue_offset: int) -> None:
        """Add the units of adjacent messages with offsets from ``queue_offset`` on; as ``put``."""
        if queue_offset != self.next_offset or places[0] < self.max_phy or not self.dirty:
            for phy, size, tags_code in zip(places, sizes, tags, strict=True):
                self.put(phy, size, tags_code, queue_offset)
                queue_offset += 1
            return
        self.tail += b"".join(map(_PACK, places, sizes, tags))
        self.next_offset += len(places)
        self.max_phy = places[-1] + sizes[-1]

    def put_units(self, units: bytes, queue_offset: int) -> None:
        """Add units of messages with offsets from ``queue_offset`` on, in log order; as ``put``."""
        phy, size, _ = _UNPACK_FROM(units)
        if queue_offset != self.next_offset or phy < self.max_phy or not self.dirty:
            for phy, size, tags_code in UNIT.iter_unpack(units):
                self.put(phy, size, tags_code, queue_offset)
                queue_offset += 1
            return
        last = len(units) - UNIT_SIZE
        if last:
            phy, size, _ = _UNPACK_FROM(units, last)
        self.tail += units
        self.next_offset += last // UNIT_SIZE + 1
        self.max_phy = phy + size

    def _fill_up_to(self, queue_offset: int, phy: int) -> None:
        """Make ``queue_offset`` the next offset if that is plausible. A message with an older offset goes to the end.

        Fillers of a gap point to the start of a log file: RocketMQ's readers take them for messages that were deleted.
        """
        missing = queue_offset - self.next_offset
        if missing <= 0:
            return
        if self.next_offset == 0 and self.first_offset == 0:
            self.start_at(queue_offset)
        # Plausible only if the log has enough bytes between the two records for all missing messages: an offset from a
        # damaged record must not allocate units without bound.
        elif missing * OVERHEAD_V1 <= phy - self.max_phy:
            self.tail += UNIT.pack(phy - phy % self.shape.log_file_size, FILLER_SIZE, 0) * missing
            self.next_offset = queue_offset

    def start_at(self, queue_offset: int) -> None:
        """Start an empty queue whose first messages expired long ago: its first file starts with fillers."""
        self.first_offset = self.made_offset = queue_offset // self.units_per_file * self.units_per_file
        self.tail_offset = self.written = self.first_offset
        self.tail[:] = FILLER * (queue_offset - self.first_offset)
        self.next_offset = self.min_offset = queue_offset

    def cut(self, offset: int, max_phy: int) -> None:
        """Drop the units from ``offset`` on; the caller erases them from the files."""
        self.next_offset = max(offset, self.first_offset)
        self.max_phy = max_phy
        self.min_offset = min(self.min_offset, self.next_offset)
        if self.next_offset <= self.tail_offset:
            self.tail.clear()
            self.tail_offset = self.next_offset
        else:
            del self.tail[(self.next_offset - self.tail_offset) * UNIT_SIZE :]
        self.written = min(self.written, self.next_offset)
        self.known_from = min(self.known_from, self.next_offset)
        self.made_offset = min(self.made_offset, -(-self.next_offset // self.units_per_file) * self.units_per_file)

    # -- reading

    def in_memory(self, offset: int) -> bool:
        """True if the unit at ``offset`` is in the tail."""
        return offset >= self.tail_offset

    def tail_units(self, offset: int, count: int) -> bytes:
        """Up to ``count`` units from ``offset`` on, which must be in the tail."""
        at = (offset - self.tail_offset) * UNIT_SIZE
        return bytes(self.tail[at : at + count * UNIT_SIZE])

    def file_of(self, offset: int) -> int:
        """Unit offset of the start of the file that holds ``offset``."""
        return offset - offset % self.units_per_file

    def path_of(self, file_offset: int) -> str:
        """Path of the file that starts at ``file_offset``."""
        return f"{self.directory}/{offset_name(file_offset * UNIT_SIZE)}"

    # -- for the writer

    def unwritten(self) -> int:
        """Number of units that are not in the files yet."""
        return self.next_offset - self.written

    def take(self, offset: int) -> bytes:
        """A copy of the units from ``offset`` to the end of its file or of the tail."""
        end = min(self.file_of(offset) + self.units_per_file, self.next_offset)
        return self.tail_units(offset, end - offset)

    def expire(self, offset: int) -> None:
        """Drop the units below ``offset``, which is the start of a file, whether written or not."""
        self.first_offset = offset
        if self.tail_offset < offset:
            del self.tail[: (offset - self.tail_offset) * UNIT_SIZE]
            self.tail_offset = offset
        self.written = max(self.written, offset)
        self.made_offset = max(self.made_offset, offset)

    def forget_written(self, keep: int) -> None:
        """Shrink the tail to its newest ``keep`` units, and to those that are not written yet."""
        begin = min(self.written, max(self.next_offset - keep, self.tail_offset))
        if begin > self.tail_offset:
            del self.tail[: (begin - self.tail_offset) * UNIT_SIZE]
            self.tail_offset = begin


def first_at_or_above(phy_at: Callable[[int], int], low: int, high: int, phy: int) -> int:
    """First offset in [low, high) whose unit points to ``phy`` or behind it; ``high`` if none does. Binary search."""
    while low < high:
        middle = (low + high) // 2
        if phy_at(middle) >= phy:
            high = middle
        else:
            low = middle + 1
    return low
