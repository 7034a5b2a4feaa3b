"""The forms of record_batch for messages that are laid out alike: whole columns of all records are moved at once.

AlikeMessages is for a batch that takes the full way into the store, BatchRows for one that takes the fast way.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from trimq.protocol.alike_rows import Numbers, packed_units
from trimq.protocol.alike_texts import Matrix
from trimq.protocol.batch import AROUND, FLAG_AT, BatchItem
from trimq.protocol.batch_layout import BatchLayout
from trimq.protocol.record_batch import BatchHead


class AlikeMessages:
    """See BatchMessages."""

    __slots__ = ("_rows", "layout")

    def __init__(self, rows: Matrix, layout: BatchLayout) -> None:
        """``rows``: the messages of a batch body, which are laid out as ``layout`` says."""
        self._rows = rows
        self.layout = layout

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def longest(self) -> tuple[int, int]:
        """See BatchMessages."""
        return self.layout.body_length, self.layout.text_length

    @property
    def size(self) -> int:
        """See BatchMessages."""
        return len(self._rows) * sum(self.longest)

    def lengths(self) -> Iterable[tuple[int, int]]:
        """See BatchMessages."""
        return repeat(self.longest, len(self._rows))

    def items(self) -> list[BatchItem]:
        """See BatchMessages."""
        rows, layout = self._rows, self.layout
        flags = np.ndarray(len(rows), ">i4", rows, FLAG_AT, (layout.size,)).tolist()
        texts = rows[:, AROUND + layout.body_length :]
        return list(map(BatchItem, flags, layout.bodies(rows), [text.tobytes() for text in texts]))

    def copied(self) -> "AlikeMessages":
        """See BatchMessages."""
        return AlikeMessages(self._rows.copy(), self.layout)

    def records(self, head: BatchHead) -> tuple[Any, Sequence[int]]:
        """See BatchMessages. The bytes are good until the next batch of this layout."""
        records, _ = self.layout.records(self._rows, head)
        count, first = len(self._rows), head.physical_offset
        return records, range(first, first + len(records), len(records) // count)


class BatchRows:
    """See AlikeRows: the records of a batch, all of them in one queue."""

    __slots__ = ("_layout", "_offsets", "_place", "_rows", "_shared", "_size", "counts")

    def __init__(
        self, rows: Matrix, layout: BatchLayout, place: tuple[int, int, bytes], shared: Callable[[int], bytes]
    ) -> None:
        """``rows``: the messages of a batch body, laid out as ``layout`` says.

        ``place``: magic, queue id, and the topic with its length in front. ``shared`` makes ``record.pack_shared``'s
        bytes for a store time.
        """
        self._rows: Matrix | None = rows
        self._layout = layout
        self._place = place
        self._shared = shared
        self._size = 0
        self._offsets: Numbers | None = None
        self.counts = (len(rows),)

    def __len__(self) -> int:
        return self.counts[0]

    def records(self, starts: Sequence[int], physical_offset: int, store_timestamp: int) -> memoryview:
        """See AlikeRows. Once only, and good until the next batch of this layout. Raises struct.error."""
        rows, self._rows = self._rows, None  # it is a view of what will be overwritten
        assert rows is not None
        magic, queue_id, topic = self._place
        head = BatchHead(magic, queue_id, starts[0], physical_offset, self._shared(store_timestamp), topic)
        records, self._offsets = self._layout.records(rows, head)
        self._size = len(records) // len(rows)
        return records

    def units(self, tags_code: int) -> bytes:
        """See AlikeRows."""
        assert self._offsets is not None
        return packed_units(self._offsets, self._size, tags_code)
