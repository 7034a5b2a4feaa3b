"""Records of a batch: all of its messages become one piece of the commit log.

What the native extension lays out does not come here (native/core/src/batch.rs).
Source: RocketMQ's MessageExtEncoder.encode(MessageExtBatch, PutMessageContext).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import Any, Final, NamedTuple, Protocol

from trimq.protocol import record
from trimq.protocol.batch import BatchColumns, BatchItem
from trimq.protocol.hashing import crc32_of_each


class BatchHead(NamedTuple):
    """What the records of a batch have in common, and the offsets of the first one.

    ``shared`` is ``record.pack_shared``'s, ``topic`` the topic with its length in front, as MAGIC says.
    """

    magic: int
    queue_id: int
    queue_offset: int
    physical_offset: int
    shared: bytes
    topic: bytes


class BatchMessages(Protocol):
    """Flags, bodies and properties of at least one message; bodies may be views of a receive buffer."""

    def __len__(self) -> int: ...

    @property
    def longest(self) -> tuple[int, int]:
        """Length of the longest body and of the longest properties."""
        ...

    @property
    def size(self) -> int:
        """Bytes of all bodies and properties together."""
        ...

    def lengths(self) -> Iterable[tuple[int, int]]:
        """Each message's length of body and properties."""
        ...

    def items(self) -> list[BatchItem]:
        """The messages one by one."""
        ...

    def copied(self) -> "BatchMessages":
        """The same with bytes of their own."""
        ...

    def records(self, head: BatchHead) -> tuple[Any, Sequence[int]]:
        """The records' bytes, back to back, and the physical offset of each. Raises struct.error."""
        ...


class ListedMessages:
    """Messages of any lengths, each part of all of them in a sequence."""

    __slots__ = ("_bodies", "_columns", "_texts")

    def __init__(self, columns: BatchColumns) -> None:
        self._columns = columns
        self._bodies = list(map(len, columns.bodies))
        self._texts = list(map(len, columns.properties))

    def __len__(self) -> int:
        return len(self._bodies)

    @property
    def longest(self) -> tuple[int, int]:
        """See BatchMessages."""
        return max(self._bodies), max(self._texts)

    @property
    def size(self) -> int:
        """See BatchMessages."""
        return sum(self._bodies) + sum(self._texts)

    def lengths(self) -> Iterable[tuple[int, int]]:
        """See BatchMessages."""
        return zip(self._bodies, self._texts, strict=True)

    def items(self) -> list[BatchItem]:
        """See BatchMessages."""
        return list(map(BatchItem, *self._columns))

    def copied(self) -> "ListedMessages":
        """See BatchMessages."""
        flags, bodies, properties = self._columns
        return ListedMessages(BatchColumns(flags, list(map(bytes, bodies)), properties))

    def records(self, head: BatchHead) -> tuple[bytes, Sequence[int]]:
        """See BatchMessages."""
        flags, bodies, properties = self._columns
        count = len(bodies)
        fixed = record.around_shared(len(head.shared))
        around = fixed.size + len(head.topic) + 2
        sizes = [around + body + text for body, text in zip(self._bodies, self._texts, strict=True)]
        *offsets, _ = accumulate(sizes, initial=head.physical_offset)
        tails = {length: head.topic + length.to_bytes(2, "big") for length in set(self._texts)}
        parts: list[Any] = [None] * (4 * count)
        parts[::4] = map(
            fixed.pack,
            sizes,
            repeat(head.magic),
            [crc & 0x7FFFFFFF for crc in crc32_of_each(bodies)],
            repeat(head.queue_id),
            flags,
            range(head.queue_offset, head.queue_offset + count),
            offsets,
            repeat(head.shared),
            self._bodies,
        )
        parts[1::4] = bodies
        parts[2::4] = map(tails.__getitem__, self._texts)
        parts[3::4] = properties
        return b"".join(parts), offsets


NO_MESSAGES: Final = ListedMessages(BatchColumns((), (), ()))
"""What stands for messages that are in the log."""
