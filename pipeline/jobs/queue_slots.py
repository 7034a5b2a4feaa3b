"""The unit of its queue that each record gets, for queues whose offsets are not consecutive.

The rules are those of the broker's own queues (RocketMQ's ConsumeQueue.putMessagePositionInfo, where skipped offsets
get fillers), applied to the records of one queue in log order.
"""

from collections.abc import Iterator

from trimq.protocol.queue_unit import FILLER, FILLER_SIZE, UNIT, UNIT_SIZE
from trimq.protocol.record import OVERHEAD_V1


class QueueImage:
    """The units of a queue as its files contain them. ``first`` is the offset of ``units[0]`` and of its file."""

    def __init__(self, units_per_file: int, log_file_size: int) -> None:
        self._units_per_file = units_per_file
        self._log_file_size = log_file_size
        self.first = 0
        self.next = 0
        self.units = bytearray()
        self._max_phy = 0

    def put(self, phy: int, size: int, tags_code: int, queue_offset: int) -> None:
        """Add the next record of the log. Its unit is the next one, which may differ from its queue offset."""
        if queue_offset > self.next:
            self._fill_up_to(queue_offset, phy)
        self.units += UNIT.pack(phy, size, tags_code)
        self.next += 1
        self._max_phy = phy + size

    def take_files(self, *, to_the_end: bool = False) -> Iterator[tuple[int, bytes]]:
        """Remove the full files, or with ``to_the_end`` all: the first offset and the units of each."""
        size = self._units_per_file * UNIT_SIZE
        while len(self.units) >= size or (to_the_end and self.units):
            file = self.first, bytes(self.units[:size])
            del self.units[:size]
            self.first += self._units_per_file
            yield file

    def _fill_up_to(self, queue_offset: int, phy: int) -> None:
        missing = queue_offset - self.next
        if not self.next:
            # The first record of a queue whose earlier ones were deleted: the queue starts in the middle of a file.
            self.first = queue_offset // self._units_per_file * self._units_per_file
            self.units += FILLER * (queue_offset - self.first)
            self.next = queue_offset
        # Fillers only if the missing records fit into the bytes of the log in between: a larger jump is a wrong offset.
        elif missing * OVERHEAD_V1 <= phy - self._max_phy:
            self.units += UNIT.pack(phy - phy % self._log_file_size, FILLER_SIZE, 0) * missing
            self.next = queue_offset
