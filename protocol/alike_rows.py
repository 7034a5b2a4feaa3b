"""Records, units and replies of messages that are laid out alike, each of its own queue and client. Needs numpy.

What all of them have in common stands in every row of a matrix beforehand; the rest is written by column.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import Any, Final

import numpy as np

from trimq.protocol import record
from trimq.protocol.alike_texts import Matrix
from trimq.protocol.queue_unit import UNIT_SIZE

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_AT_BORN_TIMESTAMP: Final = 40
_AT_BORN_HOST: Final = 48
_HOST: Final = 8
_AT_STORE_TIMESTAMP: Final = 56
_UNIT: Final = np.dtype([("offset", ">i8"), ("size", ">i4"), ("tags", ">i8")])
assert _UNIT.itemsize == UNIT_SIZE
_FIELD: Final = re.compile(rb"%016X|%d|%b")
_TENS: Final = 10 ** np.arange(18, -1, -1, dtype=np.int64)
_WORDS: Final = 8


def packed_units(offsets: Numbers, size: int, tags_code: int) -> bytes:
    """Queue units of messages of one size and tag, side by side."""
    units = np.empty(len(offsets), dtype=_UNIT)
    units["offset"] = offsets
    units["size"] = size
    units["tags"] = tags_code
    return units.tobytes()


class Rows:
    """Room for the records of up to ``most`` messages like ``example``, and what becomes of them; hosts are IPv4."""

    def __init__(self, example: bytes, most: int) -> None:
        """``example`` is a whole record (``record.encode_record``)."""
        size = self.size = len(example)
        records = self._records = np.tile(np.frombuffer(example, dtype=np.uint8), (most, 1))
        self._bytes = records.reshape(-1).data

        def column(kind: str, at: int) -> Any:
            return np.ndarray(most, kind, records, at, (size,))

        self._checksums = column(">u4", record.AT_BODY_CRC)
        self._queue_ids = column(">i4", record.AT_QUEUE_ID)
        self._queue_offsets = column(">i8", record.AT_QUEUE_OFFSET)
        self._physical_offsets = column(">i8", record.AT_PHYSICAL_OFFSET)
        self._born_timestamps = column(">i8", _AT_BORN_TIMESTAMP)
        self._store_timestamps = column(">i8", _AT_STORE_TIMESTAMP)
        self._steps = np.arange(0, most * size, size, dtype=np.int64)

    def fill(
        self,
        rows: Matrix,
        moved: Sequence[tuple[slice, slice]],
        checksums: Sequence[int],
        queue_ids: Numbers,
        born: Numbers,
        hosts: bytes,
    ) -> "PlacedRows":
        """Put in what came with the messages; the result is about these, its ``records`` until the next ``fill``.

        ``moved``: columns of ``rows`` and where they belong in a record. ``checksums``: all 32 bits of each body's CRC.
        ``born``: time of birth of each, ``hosts`` their packed clients one behind another.
        """
        count = len(rows)
        records = self._records[:count]
        for source, target in moved:
            records[:, target] = rows[:, source]
        records[:, _AT_BORN_HOST : _AT_BORN_HOST + _HOST] = np.frombuffer(hosts, dtype=np.uint8).reshape(-1, _HOST)
        self._checksums[:count] = np.array(checksums, dtype=np.uint32) & 0x7FFFFFFF
        self._queue_ids[:count] = queue_ids
        self._born_timestamps[:count] = born
        return PlacedRows(self, queue_ids)

    def place(self, queue_offsets: Numbers, physical_offset: int, store_timestamp: int) -> tuple[memoryview, Numbers]:
        """The records, and the physical offset of each."""
        count = len(queue_offsets)
        physical_offsets = self._steps[:count] + physical_offset
        self._queue_offsets[:count] = queue_offsets
        self._physical_offsets[:count] = physical_offsets
        self._store_timestamps[:count] = store_timestamp
        return self._bytes[: count * self.size], physical_offsets


class PlacedRows:
    """Messages in the order they came in, and by queue.

    ``queue_ids``, ``counts``: the queues that have some, and how many each. ``queue_offsets`` and ``physical_offsets``
    of each message are there when ``records`` has placed them.
    """

    __slots__ = ("_order", "_rows", "counts", "physical_offsets", "queue_ids", "queue_offsets")

    def __init__(self, rows: Rows, queue_ids: Numbers) -> None:
        self._rows = rows
        counts = np.bincount(queue_ids)
        ids = np.flatnonzero(counts)
        self.queue_ids: list[int] = ids.tolist()
        self.counts: list[int] = counts[ids].tolist()
        self._order = queue_ids.argsort(kind="stable") if len(ids) > 1 else np.arange(len(queue_ids))
        self.queue_offsets: Numbers = self._order
        self.physical_offsets: Numbers = self._order

    def __len__(self) -> int:
        return len(self._order)

    def records(self, starts: Sequence[int], physical_offset: int, store_timestamp: int) -> memoryview:
        """Back to back; ``starts``: the next offset of each of ``queue_ids``."""
        before = [0, *accumulate(self.counts[:-1])]
        by_queue = np.arange(len(self))
        by_queue += np.repeat(list(map(sub, starts, before)), self.counts)
        offsets = np.empty_like(by_queue)
        offsets[self._order] = by_queue
        self.queue_offsets = offsets
        records, self.physical_offsets = self._rows.place(offsets, physical_offset, store_timestamp)
        return records

    def units(self, tags_code: int) -> bytes:
        """The queues' units, those of each of ``queue_ids`` side by side."""
        return packed_units(self.physical_offsets[self._order], self._rows.size, tags_code)


class Replies:
    """Frames made of a template, for rows whose fields have the same widths.

    The template's fields are %016X, %d, %d, %b, %d: physical offset, queue id, queue offset, unique key, opaque.
    """

    def __init__(self, template: bytes, widths: Sequence[int], most: int) -> None:
        """``widths`` of all fields but the first, which has 16."""
        literals = _FIELD.split(template)
        at = _WORDS
        self._places: list[slice] = []
        frame = bytearray(_WORDS)
        for literal, width in zip(literals, (16, *widths, 0), strict=True):
            at = len(frame) + len(literal)
            frame += literal + bytes(width)
            self._places.append(slice(at, at + width))
        size = self.size = len(frame)
        frame[:_WORDS] = (size - 4).to_bytes(4, "big") + (size - _WORDS).to_bytes(4, "big")
        self._rows = np.tile(np.frombuffer(frame, dtype=np.uint8), (most, 1))

    def joined(self, rows: PlacedRows, queue_ids: Matrix, uniques: Matrix, opaques: Matrix) -> bytes:
        """The replies side by side, each of ``size`` bytes. Fields of the requests are columns of their text."""
        count = len(rows)
        replies = self._rows[:count]
        offset, queue_id, queue_offset, unique, opaque, _ = self._places
        text = rows.physical_offsets.astype(">i8").tobytes().hex().upper().encode()
        replies[:, offset] = np.frombuffer(text, dtype=np.uint8).reshape(count, -1)
        replies[:, queue_id] = queue_ids
        width = queue_offset.stop - queue_offset.start
        replies[:, queue_offset] = rows.queue_offsets[:, None] // _TENS[-width:] % 10 + ord("0")
        replies[:, unique] = uniques
        replies[:, opaque] = opaques
        return replies.tobytes()
