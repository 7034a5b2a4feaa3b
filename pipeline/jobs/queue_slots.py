"""Which unit of its queue each record gets, where offsets are not simply one after the other.

The rules are those of the broker's own queues (RocketMQ's ConsumeQueue.putMessagePositionInfo, with offsets that were
left out filled up), for the records of one queue in the order of the log.
"""

from collections.abc import Iterator

from trimq.protocol.queue_unit import FILLER, FILLER_SIZE, UNIT, UNIT_SIZE
from trimq.protocol.record import OVERHEAD_V1


class QueueImage:
    """The units of a queue, as its files hold them: ``first`` is the offset at which ``units`` and their file begin."""

    def __init__(self, units_per_file: int, log_file_size: int) -> None:
        self._units_per_file = units_per_file
        self._log_file_size = log_file_size
        self.first = 0
        self.next = 0
        self.units = bytearray()
        self._max_phy = 0

    def put(self, phy: int, size: int, tags_code: int, queue_offset: int) -> None:
        """The next record of the log."""
        if queue_offset > self.next:
            self._fill_up_to(queue_offset, phy)
        self.units += UNIT.pack(phy, size, tags_code)
        self.next += 1
        self._max_phy = phy + size

    def take_files(self, *, to_the_end: bool = False) -> Iterator[tuple[int, bytes]]:
        """Files that are full, or all: the offset at which each begins, and its units, which are given up."""
        size = self._units_per_file * UNIT_SIZE
        while len(self.units) >= size or (to_the_end and self.units):
            file = self.first, bytes(self.units[:size])
            del self.units[:size]
            self.first += self._units_per_file
            yield file

    def _fill_up_to(self, queue_offset: int, phy: int) -> None:
        missing = queue_offset - self.next
        if not self.next:
            self.first = queue_offset // self._units_per_file * self._units_per_file
            self.units += FILLER * (queue_offset - self.first)
            self.next = queue_offset
        elif missing * OVERHEAD_V1 <= phy - self._max_phy:
            self.units += UNIT.pack(phy - phy % self._log_file_size, FILLER_SIZE, 0) * missing
            self.next = queue_offset
