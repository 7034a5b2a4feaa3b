"""How the messages of a batch are laid out, learnt from one batch and looked for in those that follow. Needs numpy.

A batch whose messages have bodies of one length, and the same properties with values of the same lengths, is a matrix
with a row for each message, and so are its records. A client that sends one kind of message sends such batches only:
what has been learnt of one of them holds for the next as soon as its bytes are where they have to be.
"""

from typing import Any, Final

import numpy as np

from trimq.protocol import record
from trimq.protocol.alike_rows import Numbers
from trimq.protocol.alike_texts import Matrix, TextLayout, layout_of
from trimq.protocol.batch import AROUND, BODY_AT, BODY_LENGTH_AT, FLAG_AT, first_lengths
from trimq.protocol.hashing import crc32_of_each
from trimq.protocol.property_text import VALUE_END
from trimq.protocol.record_batch import BatchHead

Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_VALUE_END: Final = VALUE_END.encode()
_LONGEST_TEXT: Final = 4096
_LEAST: Final = 16
"""Fewer messages are quicker one by one."""
_LAYOUTS: Final = 32
"""Layouts known at once."""
_LARGEST_ROOM: Final = 128 * 1024
"""Bytes of records for which room is kept: 4 MiB with as many layouts as are known."""
_LOWEST: Final = 3
_SPAN: Final = 124
"""Values are ASCII, and bytes up to 2 are separators."""


class BatchLayout:
    """Messages of the same three lengths whose properties have the same names, with values at the same places.

    ``is_plain``: whether the properties are nothing but pairs of different names, each with a value; what is said of
    values counts only then. ``values``: columns of each property's value, from the properties' length on, which stands
    behind the body. ``differs``: which of these columns may be different in each message; ``lowest``: what stands in
    the others, and the lowest byte that may stand in these.
    """

    __slots__ = (
        "__weakref__",
        "_heads",
        "_room",
        "_span",
        "body_length",
        "differs",
        "is_plain",
        "lowest",
        "size",
        "text_at",
        "values",
    )

    def __init__(self, rows: Matrix, body_length: int, common: TextLayout, known: "BatchLayout | None") -> None:
        """``rows``: messages of a batch, ``common`` is about what is behind their bodies.

        ``known`` is what was known of messages of these lengths. Values that differed there, or were others than here,
        may differ from now on, though all messages of this batch have the same.
        """
        self.size = rows.shape[1]
        self.body_length = body_length
        self.text_at = BODY_AT + body_length
        self.values = common.values
        self._heads = _heads(rows)[0].copy()
        lowest, highest = (np.frombuffer(text, dtype=np.uint8) for text in (common.lowest, common.highest))
        text = common.lowest[2:]  # no separator is anywhere else in another row
        pieces = text.count(_VALUE_END) + (bool(text) and not text.endswith(_VALUE_END))
        self.is_plain = pieces == len(common.values)
        differs: Flags = lowest != highest
        if known is not None and known.values == common.values:
            differs |= known.differs | (lowest != known.lowest)
        for place in common.values.values():  # of two batches' ids other digits are the same
            differs[place] = differs[place].any()
        differs &= lowest >= _LOWEST  # a separator within a value
        self.differs: Flags = differs
        self.lowest: Matrix = np.where(differs, np.uint8(_LOWEST), lowest)
        self._span = np.where(differs, np.uint8(_SPAN), np.uint8(0))
        self._room: _Room | None = None

    @property
    def text_length(self) -> int:
        """Length of each message's properties."""
        return self.size - AROUND - self.body_length

    def fits(self, rows: Matrix) -> bool:
        """Whether messages of this size are laid out so."""
        return not (_heads(rows) != self._heads).any() and not (
            (rows[:, self.text_at :] - self.lowest > self._span).any()
        )

    def same(self, rows: Matrix, name: str) -> str | None:
        """The value of a property that all messages have in common; None where they have not, or it is no property."""
        place = self.values.get(name)
        if place is None:
            return None
        if not self.differs[place].any():
            return self.lowest[place].tobytes().decode("ascii")
        column = rows[:, self.text_at + place.start : self.text_at + place.stop]
        return column[0].tobytes().decode("ascii") if (column == column[0]).all() else None

    def column(self, rows: Matrix, name: str) -> Matrix | None:
        """Each message's value of a property as bytes of their own; None where none has it."""
        place = self.values.get(name)
        return None if place is None else rows[:, self.text_at + place.start : self.text_at + place.stop].copy()

    def bodies(self, rows: Matrix) -> list[memoryview]:
        """A view of each body."""
        view, length = rows.reshape(-1).data, self.body_length
        return [view[at : at + length] for at in range(BODY_AT, len(view), self.size)]

    def records(self, rows: Matrix, head: BatchHead) -> tuple[memoryview, Numbers]:
        """The records' bytes, back to back, good until the next call, and where each lies. Raises struct.error."""
        shape = len(rows), len(head.shared), head.topic
        room = self._room
        if room is None or room.shape != shape:
            room = _Room(self, shape)
            if len(room.bytes) <= _LARGEST_ROOM:
                self._room = room
        return room.bytes, room.fill(self, rows, head)


class _Room:
    """Room for the records of batches of one layout, shape and topic; ``shape``: messages, bytes in common, topic.

    It does not know its layout: with a cycle both would stay until the garbage collection, which comes seldom.
    """

    def __init__(self, layout: BatchLayout, shape: tuple[int, int, bytes]) -> None:
        self.shape = shape
        count, shared, topic = shape
        self._fixed = record.around_shared(shared)
        body_at = self._fixed.size
        topic_at = body_at + layout.body_length
        text_at = topic_at + len(topic)
        size = self.size = text_at + layout.size - layout.text_at
        records = np.empty((count, size), dtype=np.uint8)
        records[:, topic_at:text_at] = np.frombuffer(topic, dtype=np.uint8)
        self.bytes = records.reshape(-1).data
        self._fronts = records[:, :body_at]
        self._flags = records[:, record.AT_FLAG : record.AT_FLAG + 4]
        self._bodies = records[:, body_at - 4 : topic_at]
        self._texts = records[:, text_at:]

        def column(kind: str, at: int) -> Any:
            return np.ndarray(count, kind, records, at, (size,))

        self._checksums = column(">u4", record.AT_BODY_CRC)
        self._queue_offsets = column(">i8", record.AT_QUEUE_OFFSET)
        self._physical_offsets = column(">i8", record.AT_PHYSICAL_OFFSET)
        self._numbers = np.arange(count, dtype=np.int64)
        self._steps = self._numbers * size

    def fill(self, layout: BatchLayout, rows: Matrix, head: BatchHead) -> Numbers:
        """Put messages in; the physical offset of each."""
        last = len(rows) - 1
        end = head.physical_offset + last * self.size
        front, _ = (  # the last one's numbers have to fit too
            self._fixed.pack(self.size, head.magic, 0, head.queue_id, 0, head.queue_offset + at, offset, head.shared, 0)
            for at, offset in ((0, head.physical_offset), (last, end))
        )
        self._fronts[:] = np.frombuffer(front, dtype=np.uint8)
        self._checksums[:] = np.array(crc32_of_each(layout.bodies(rows)), dtype=np.uint32) & 0x7FFFFFFF
        self._queue_offsets[:] = self._numbers + head.queue_offset
        physical_offsets = self._steps + head.physical_offset
        self._physical_offsets[:] = physical_offsets
        self._flags[:] = rows[:, FLAG_AT : FLAG_AT + 4]
        self._bodies[:] = rows[:, BODY_LENGTH_AT : layout.text_at]
        self._texts[:] = rows[:, layout.text_at :]
        return physical_offsets


class BatchLayouts:
    """The layouts that were seen last."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], BatchLayout] = {}

    def find(self, data: Any) -> tuple[Matrix, BatchLayout] | None:
        """The messages of a batch body, a row for each; None where they are not laid out alike, or are no batch."""
        lengths = first_lengths(data)
        if lengths is None:
            return None
        size, body_length, text_length = lengths
        if len(data) % size or len(data) // size < _LEAST or text_length > _LONGEST_TEXT:
            return None
        rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
        layout = known = self._known.get(lengths)
        if layout is None or not layout.fits(rows):
            layout = _learnt(rows, body_length, known)
        if layout is None:
            return None
        if known is not None:
            del self._known[lengths]
        elif len(self._known) >= _LAYOUTS:
            del self._known[next(iter(self._known))]
        self._known[lengths] = layout
        return rows, layout


def _heads(rows: Matrix) -> Any:
    """Total size and body length of each message, in the machine's order."""
    return np.ndarray((len(rows), 2), np.int32, rows, 0, (rows.shape[1], BODY_LENGTH_AT))


def _learnt(rows: Matrix, body_length: int, known: BatchLayout | None) -> BatchLayout | None:
    heads = _heads(rows)
    if (heads != heads[0]).any():
        return None
    common = layout_of(rows[:, BODY_AT + body_length :], begin=2)
    if common is None or not common.lowest[2:].isascii() or not common.highest[2:].isascii():
        return None
    length = (rows.shape[1] - AROUND - body_length).to_bytes(2, "big")
    if not common.lowest[:2] == common.highest[:2] == length:
        return None
    return BatchLayout(rows, body_length, common, known)
