"""Records of a batch: all of its messages become one contiguous piece of the commit log.

Batches encoded by the native extension do not use this module (native/core/src/batch.rs).
Source: RocketMQ's MessageExtEncoder.encode(MessageExtBatch, PutMessageContext).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import Any, Final, NamedTuple, Protocol

from trimq.protocol import record
from trimq.protocol.batch import BatchColumns, BatchItem
from trimq.protocol.hashing import crc32_of_each


class BatchHead(NamedTuple):
    """The fields that all records of a batch share, and the offsets of the first one.

    ``shared`` is the result of ``record.pack_shared``. ``topic`` is the topic after its length, in MAGIC's version.
    """

    magic: int
    queue_id: int
    queue_offset: int
    physical_offset: int
    shared: bytes
    topic: bytes


class BatchMessages(Protocol):
    """Flags, bodies and properties of at least one message. Bodies may be views of a receive buffer."""

    def __len__(self) -> int: ...

    @property
    def longest(self) -> tuple[int, int]:
        """Lengths of the longest body and of the longest properties."""
        ...

    @property
    def size(self) -> int:
        """Total size of all bodies and properties in bytes."""
        ...

    def lengths(self) -> Iterable[tuple[int, int]]:
        """Each message's lengths of body and properties."""
        ...

    def items(self) -> list[BatchItem]:
        """The messages one by one."""
        ...

    def copied(self) -> "BatchMessages":
        """The same messages, with copies of the bodies."""
        ...

    def records(self, head: BatchHead) -> tuple[Any, Sequence[int]]:
        """The bytes of the consecutive records, and the physical offset of each. Raises struct.error."""
        ...


class ListedMessages:
    """Messages of any lengths, stored as columns."""

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
"""Replaces messages that are already in the log, so that these can be freed."""
