"""One queue: where its messages lie in the commit log, as 20-byte units in their order.

The newest units are kept in memory (the tail) and written to the queue's files by the flush service; what a kill takes
from the tail is rebuilt from the log. A queue has no open file and no map of its own, so that a broker with a hundred
thousand queues has as many descriptors as one with ten. Source: RocketMQ's ConsumeQueue.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from trimq.protocol.file_names import offset_name
from trimq.protocol.queue_unit import FILLER, FILLER_SIZE, UNIT, UNIT_SIZE
from trimq.protocol.record import OVERHEAD_V1

_PACK: Final = UNIT.pack
_UNPACK_FROM: Final = UNIT.unpack_from


class QueueShape(NamedTuple):
    """What all queues of a store have in common."""

    units_per_file: int
    log_file_size: int


class ConsumeQueue:
    """The units of one (topic, queue id).

    Offsets count units. ``min_offset`` is the first message still in the log, ``next_offset`` the one after the last;
    the tail holds units ``tail_offset`` to ``next_offset``, of which those below ``written`` are in the files too.
    ``first_offset`` is where the oldest file begins. ``max_phy`` is the log offset behind the newest unit's message.
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
        """Files below this offset exist; the writer makes the one that begins here."""
        self.max_phy = 0
        self.tail = bytearray()
        self.tail_offset = 0
        self.written = 0
        self.dirty = False
        """In the list of queues that the writer looks at."""
        self.deleted = False
        self.known_from = 0
        """Units from here on were put by this process, not found in a file."""
        self.counted = 0
        """The store's: this queue's part of the sum of all next offsets."""

    def restore(self, first_offset: int, min_offset: int, next_offset: int, max_phy: int) -> None:
        """Take the state of a queue whose units are all in its files."""
        self.first_offset = first_offset
        self.min_offset = min_offset
        self.next_offset = self.tail_offset = self.written = self.known_from = next_offset
        self.max_phy = max_phy
        self.tail.clear()
        self.made_offset = -(-next_offset // self.units_per_file) * self.units_per_file

    # -- writing

    def put(self, phy: int, size: int, tags_code: int, queue_offset: int) -> bool:
        """Add a message's unit; False where it is already there.

        Messages come in the order of the log. Offsets that were left out are filled up, so that no unit ever stands at
        another place than its message's own offset.
        """
        if queue_offset != self.next_offset or phy < self.max_phy:
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
        """Add the units of messages that lie side by side and have offsets from ``queue_offset`` on; as ``put``."""
        if queue_offset != self.next_offset or places[0] < self.max_phy or not self.dirty:
            for phy, size, tags_code in zip(places, sizes, tags, strict=True):
                self.put(phy, size, tags_code, queue_offset)
                queue_offset += 1
            return
        self.tail += b"".join(map(_PACK, places, sizes, tags))
        self.next_offset += len(places)
        self.max_phy = places[-1] + sizes[-1]

    def put_units(self, units: bytes, queue_offset: int) -> None:
        """Add units of messages that have offsets from ``queue_offset`` on and lie in their order; as ``put``."""
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
        """Make ``queue_offset`` the next one where that is plausible; an older offset is given a new place at the end.

        Fillers of a gap point to the beginning of a log file: RocketMQ's readers take them for messages that are gone.
        """
        missing = queue_offset - self.next_offset
        if missing <= 0:
            return
        if self.next_offset == 0 and self.first_offset == 0:
            self._begin_at(queue_offset)
        elif missing * OVERHEAD_V1 <= phy - self.max_phy:
            self.tail += UNIT.pack(phy - phy % self.shape.log_file_size, FILLER_SIZE, 0) * missing
            self.next_offset = queue_offset

    def _begin_at(self, queue_offset: int) -> None:
        """A queue whose first messages are long expired: its first file begins with fillers."""
        self.first_offset = self.made_offset = queue_offset // self.units_per_file * self.units_per_file
        self.tail_offset = self.written = self.first_offset
        self.tail[:] = FILLER * (queue_offset - self.first_offset)
        self.next_offset = self.min_offset = queue_offset

    def cut(self, offset: int, max_phy: int) -> None:
        """Forget the units from ``offset`` on; the caller erases them from the files."""
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
        """True where the unit at ``offset`` is in the tail."""
        return offset >= self.tail_offset

    def tail_units(self, offset: int, count: int) -> bytes:
        """Up to ``count`` units from ``offset`` on, which is in the tail."""
        at = (offset - self.tail_offset) * UNIT_SIZE
        return bytes(self.tail[at : at + count * UNIT_SIZE])

    def file_of(self, offset: int) -> int:
        """The unit offset at which the file that holds ``offset`` begins."""
        return offset - offset % self.units_per_file

    def path_of(self, file_offset: int) -> str:
        """Path of the file that begins at ``file_offset``."""
        return f"{self.directory}/{offset_name(file_offset * UNIT_SIZE)}"

    # -- the writer's side

    def unwritten(self) -> int:
        """How many units are not in the files yet."""
        return self.next_offset - self.written

    def take(self, offset: int) -> bytes:
        """A copy of the units from ``offset`` to the end of its file or of the tail, for the writer."""
        end = min(self.file_of(offset) + self.units_per_file, self.next_offset)
        return self.tail_units(offset, end - offset)

    def expire(self, offset: int) -> None:
        """Units below ``offset``, where a file begins, are gone, written or not."""
        self.first_offset = offset
        if self.tail_offset < offset:
            del self.tail[: (offset - self.tail_offset) * UNIT_SIZE]
            self.tail_offset = offset
        self.written = max(self.written, offset)
        self.made_offset = max(self.made_offset, offset)

    def forget_written(self, keep: int) -> None:
        """Shrink the tail to its newest ``keep`` units and those that are not written yet."""
        begin = min(self.written, max(self.next_offset - keep, self.tail_offset))
        if begin > self.tail_offset:
            del self.tail[: (begin - self.tail_offset) * UNIT_SIZE]
            self.tail_offset = begin


def first_at_or_above(phy_at: Callable[[int], int], low: int, high: int, phy: int) -> int:
    """First offset in [low, high) whose unit points to ``phy`` or behind it; ``high`` for none. Binary search."""
    while low < high:
        middle = (low + high) // 2
        if phy_at(middle) >= phy:
            high = middle
        else:
            low = middle + 1
    return low
