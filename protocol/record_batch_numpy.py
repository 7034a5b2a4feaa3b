"""The form of record_batch for messages that are laid out alike: whole columns of all records are moved at once.

A batch whose messages have bodies of one length, and the same properties with values of the same lengths, is a matrix
with a row for each message, and so are its records. What lies side by side in both moves in one go: body length and
body, properties' length and properties.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final

import numpy as np

from protocol import record
from protocol.alike_texts import Matrix, TextLayout, layout_of
from protocol.batch import AROUND, BODY_AT, BODY_LENGTH_AT, FLAG_AT, BatchItem, first_lengths
from protocol.hashing import crc32_of_each
from protocol.message import VALUE_END
from protocol.record_batch import BatchHead

_VALUE_END: Final = VALUE_END.encode()
_LEAST: Final = 32
"""Fewer messages are quicker one by one."""
_LONGEST_TEXT: Final = 4096


class AlikeMessages:
    """``values``: where the value of each property is in a row; all are ASCII, no name comes twice."""

    __slots__ = ("_body_length", "_common", "_rows", "_text_at", "_view")

    def __init__(self, rows: Matrix, body_length: int, common: TextLayout) -> None:
        """``rows``: the messages of a batch body; ``common`` is about the columns behind the bodies."""
        self._rows = rows
        self._view = rows.reshape(-1).data
        self._body_length = body_length
        self._text_at = BODY_AT + body_length
        self._common = common

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def longest(self) -> tuple[int, int]:
        """See BatchMessages."""
        return self._body_length, self._rows.shape[1] - self._body_length - AROUND

    @property
    def size(self) -> int:
        """See BatchMessages."""
        return len(self._rows) * sum(self.longest)

    def lengths(self) -> Iterable[tuple[int, int]]:
        """See BatchMessages."""
        return repeat(self.longest, len(self._rows))

    @property
    def is_plain(self) -> bool:
        """True where the texts are nothing but pairs of different names, each with a value."""
        text = self._common.lowest[2:]  # no separator is anywhere else in another row
        pieces = text.count(_VALUE_END) + (bool(text) and not text.endswith(_VALUE_END))
        return pieces == len(self.values)

    @property
    def values(self) -> dict[str, slice]:
        """Name of each property to its columns behind the bodies."""
        return self._common.values

    def bodies(self) -> list[memoryview]:
        """A view of each body."""
        size, length, view = self._rows.shape[1], self._body_length, self._view
        return [view[at : at + length] for at in range(BODY_AT, len(view), size)]

    def items(self) -> list[BatchItem]:
        """See BatchMessages."""
        flags = np.ndarray(len(self._rows), ">i4", self._rows, FLAG_AT, (self._rows.shape[1],)).tolist()
        texts = self._rows[:, AROUND + self._body_length :]
        return list(map(BatchItem, flags, self.bodies(), [text.tobytes() for text in texts]))

    def column(self, name: str) -> Matrix | None:
        """Each message's value of a property as bytes of their own; None where none has it."""
        place = self.values.get(name)
        if place is None:
            return None
        return self._rows[:, self._text_at + place.start : self._text_at + place.stop].copy()

    def same(self, name: str) -> str | None:
        """The value of a property that all messages have in common; None where they have not."""
        place = self.values.get(name)
        return None if place is None else self._common.same(place)

    def copied(self) -> "AlikeMessages":
        """See BatchMessages."""
        return AlikeMessages(self._rows.copy(), self._body_length, self._common)

    def records(self, head: BatchHead) -> tuple[Any, Sequence[int]]:
        """See BatchMessages."""
        rows, length = self._rows, self._body_length
        count = len(rows)
        fixed = record.around_shared(len(head.shared))
        body_end = fixed.size + length
        topic_end = body_end + len(head.topic)
        size = topic_end + rows.shape[1] - BODY_AT - length
        offsets = range(head.physical_offset, head.physical_offset + count * size, size)
        first, _ = (  # the last one's numbers have to fit too
            fixed.pack(size, head.magic, 0, head.queue_id, 0, head.queue_offset + at, offsets[at], head.shared, length)
            for at in (0, count - 1)
        )
        records = np.empty((count, size), dtype=np.uint8)
        records[:, : fixed.size] = np.frombuffer(first, dtype=np.uint8)
        checksums = np.array(crc32_of_each(self.bodies()), dtype=np.uint32)
        numbers = np.arange(count, dtype=np.int64)
        np.ndarray(count, ">u4", records, record.AT_BODY_CRC, (size,))[:] = checksums & 0x7FFFFFFF
        np.ndarray(count, ">i8", records, record.AT_QUEUE_OFFSET, (size,))[:] = numbers + head.queue_offset
        np.ndarray(count, ">i8", records, record.AT_PHYSICAL_OFFSET, (size,))[:] = numbers * size + head.physical_offset
        records[:, record.AT_FLAG : record.AT_FLAG + 4] = rows[:, FLAG_AT : FLAG_AT + 4]
        records[:, fixed.size - 4 : body_end] = rows[:, BODY_LENGTH_AT : BODY_AT + length]
        records[:, body_end:topic_end] = np.frombuffer(head.topic, dtype=np.uint8)
        records[:, topic_end:] = rows[:, BODY_AT + length :]
        return records.reshape(-1).data, offsets


def alike_messages(data: Any) -> AlikeMessages | None:
    """The messages of a batch body where they are laid out alike; None where they are not, or are no batch."""
    end = len(data)
    lengths = first_lengths(data)
    if lengths is None:
        return None
    size, body_length, text_length = lengths
    if end % size or end // size < _LEAST or text_length > _LONGEST_TEXT:
        return None
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
    heads = np.ndarray((len(rows), 5), np.int32, data, 0, (size, 4))
    if (heads[:, ::4] != heads[0, ::4]).any():
        return None
    common = layout_of(rows[:, BODY_AT + body_length :], begin=2)
    if common is None or not common.lowest[2:].isascii() or not common.highest[2:].isascii():
        return None
    length = text_length.to_bytes(2, "big")
    if not common.lowest[:2] == common.highest[:2] == length:
        return None
    return AlikeMessages(rows, body_length, common)
