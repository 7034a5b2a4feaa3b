"""LogRows: records that stand in the log already, and are dispatched together.

The native extension reads them (native/core/src/log.rs). Whatever is not ordinary is left to log_scan.RecordReader.
"""

from collections.abc import Collection, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import Struct

from trimq.broker.store.log.puts import Arrivals
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.native import NATIVE, Keys
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE

if TYPE_CHECKING:
    from trimq.broker.store.index.index_service import IndexService
    from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore

MOST: Final = 256 << 10
"""The most bytes that the extension reads in one call: well under a millisecond's work."""


class LogRows(Struct, gc=False):
    """Ordinary messages of any topics; implements puts.Dispatchable.

    ``queues``: (topic, queue id, queue offset of the first message, number) of each queue. ``units``: those of all
    messages, in the order of the queues. ``keys``: those of messages with the same store time each.
    """

    queues: Sequence[tuple[str, int, int, int]]
    units: bytes
    keys: Sequence[Keys]
    offsets: Sequence[int]

    sys_flag: ClassVar[int] = 0

    @property
    def topics(self) -> set[str]:
        """See Dispatchable."""
        return {topic for topic, _, _, _ in self.queues}

    @property
    def count(self) -> int:
        """Number of messages."""
        return len(self.offsets)

    def firsts(self) -> Iterator[tuple[str, int, int, int]]:
        """Topic, queue id, queue offset and log offset of the first message of each queue."""
        end = 0
        for topic, queue_id, start, count in self.queues:
            physical, _, _ = UNIT.unpack_from(self.units, end)
            yield topic, queue_id, start, physical
            end += count * UNIT_SIZE

    def is_in(self, topics: Container[str]) -> bool:
        """See Dispatchable."""
        return any(topic in topics for topic, _, _, _ in self.queues)

    def leave_out(self, topics: Collection[str]) -> None:
        """See Dispatchable. Never called: ReputMessageService dispatches such records one by one."""

    def dispatch_into(
        self, index: "IndexService | None", queues: "ConsumeQueueStore | None", _result: PutMessageResult, /
    ) -> None:
        """See Dispatchable."""
        if index is not None:
            for keys in self.keys:
                index.put_run(keys)
        if queues is None:
            return
        end = 0
        for topic, queue_id, start, count in self.queues:
            begin, end = end, end + count * UNIT_SIZE
            queues.find_or_create(topic, queue_id).put_units(self.units[begin:end], start)

    def arrivals(self, _result: PutMessageResult) -> Arrivals:
        """See Dispatchable."""
        found, end = [], 0
        for topic, queue_id, start, count in self.queues:
            begin, end = end, end + count * UNIT_SIZE
            tags_codes = [tags_code for _, _, tags_code in UNIT.iter_unpack(self.units[begin:end])]
            found.append((topic, queue_id, start + 1, tags_codes))
        return found


def read_rows(
    data: Any, physical_offset: int, *, tags: bool, without: Collection[str] = ()
) -> tuple[LogRows, PutMessageResult] | None:
    """The ordinary messages at the start of ``data``, which is at that log offset; with ``tags``, tags are keys too.

    They end before the first one of a topic in ``without``. None without the extension, and if there are fewer than
    two: then the Python code is as fast.
    """
    extension = NATIVE.extension
    if extension is None:
        return None
    try:
        size, stored, offsets, queues, units, keys = extension.log_rows(data, physical_offset, tags, list(without))
    except extension.NativeFault as fault:
        NATIVE.turn_off(str(fault))
        return None
    if len(offsets) <= 1:
        return None
    result = PutMessageResult(PutMessageStatus.PUT_OK, physical_offset, queues[0][2], size, stored, offsets=offsets)
    return LogRows(queues, units, keys, offsets), result


def checked_size(data: Any, physical_offset: int, room: int) -> tuple[int, int]:
    """The size of the ordinary, whole records at the start of ``data``, and when the last one was stored.

    ``room``: the bytes from ``physical_offset`` to the end of the log file. (0, 0) without the extension.
    """
    extension = NATIVE.extension
    if extension is None:
        return 0, 0
    try:
        return extension.log_check(data, physical_offset, room)
    except extension.NativeFault as fault:
        NATIVE.turn_off(str(fault))
        return 0, 0
