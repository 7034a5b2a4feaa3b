"""Builds objects with messages, for uploads and for joins. Sans-IO: the caller writes the pieces.

Messages of a queue that follow each other share blocks, however they were added. Nothing is copied but what is small,
and checksums are computed by ``take`` and ``finish`` only: these two may run in a thread.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from trimq.broker.store.tiered.bucket.record_columns import store_times
from trimq.protocol.bucket_object import (
    BLOCK_BYTES,
    BLOCK_MESSAGES,
    HEADER_SIZE,
    Block,
    Directory,
    ObjectHeader,
    block_crc,
    decode_end,
    encode_end,
    encode_header,
)
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE

_SMALL: Final = 64 * 1024
"""Shorter pieces are joined: a piece has its cost on the way to the object store."""
_JOINED: Final = 1024 * 1024


class _Part:
    """A block that is being filled: as Block, with the pieces of its units and records."""

    __slots__ = (
        *("begin_ms", "end_ms", "first_physical", "last_physical", "messages", "offset", "queue_id", "records"),
        *("size", "topic", "units"),
    )

    def __init__(self, topic: str, queue_id: int, offset: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.offset = offset
        self.messages = 0
        self.size = 0
        self.units: list[Any] = []
        self.records: list[Any] = []
        self.first_physical, self.last_physical = 1 << 63, -1
        self.begin_ms, self.end_ms = 1 << 63, -(1 << 63)

    @property
    def order(self) -> tuple[str, int, int]:
        return self.topic, self.queue_id, self.offset

    def block(self, position: int, units: bytes) -> Block:
        numbers = self.first_physical, self.last_physical, self.begin_ms, self.end_ms
        crc = block_crc(units, self.records)
        return Block(self.topic, self.queue_id, self.offset, self.messages, self.size, position, *numbers, crc)


class ObjectBuilder:
    """One object. ``add`` all messages, then ``finish``.

    A long object may leave in parts: ``take`` gives what is complete so far, ``finish`` the rest. The order of the
    queues in the object is that of their names, within what is taken together.
    """

    def __init__(self, header: ObjectHeader) -> None:
        self.header = header
        self._began = False
        self._open: dict[tuple[str, int], _Part] = {}
        self._complete: list[_Part] = []
        self._last: tuple[str, int] | None = None
        self._blocks: list[Block] = []
        self._position = HEADER_SIZE
        self.messages = 0
        self.size = 0
        """Bytes of all records and units so far."""

    def add(
        self, topic: str, queue_id: int, offset: int, units: bytes, records: Any, begin_ms: int, end_ms: int
    ) -> None:
        """Add messages of a queue with consecutive offsets, the first of which is ``offset``.

        ``units``: with the offsets of the log; ``records``: a buffer or a list of buffers, which must not change before
        they are written. ``begin_ms`` and ``end_ms``: smallest and largest store time. If the messages go to several
        blocks, the times of each are taken from the records. Raises ValueError if units and records do not fit.
        """
        pieces = [
            memoryview(piece).cast("B") for piece in (records if isinstance(records, list | tuple) else (records,))
        ]
        table = np.frombuffer(units, UNIT_TYPE)
        sizes = table["size"].astype(np.int64)
        ends = np.cumsum(sizes)
        total = sum(piece.nbytes for piece in pieces)
        if not len(table) or int(sizes.min()) <= 0 or int(ends[-1]) != total:
            raise ValueError(f"units of {topic}/{queue_id} at {offset} do not fit their records, {total} bytes")
        begin, key = 0, (topic, queue_id)
        if self._last != key:
            self._last = key
        while begin < len(table):
            part = self._part(key, offset + begin)
            before = int(ends[begin - 1]) if begin else 0
            last = int(np.searchsorted(ends, before + BLOCK_BYTES - part.size, "right"))
            last = min(last, begin + BLOCK_MESSAGES - part.messages)
            if last <= begin:
                if part.messages:
                    self._close(key)
                    continue
                last = begin + 1
            its = list(_cut(pieces, before, int(ends[last - 1])))
            if last - begin < len(table):
                times = store_times(its[0] if len(its) == 1 else b"".join(its), sizes[begin:last])
                times = times[times >= 0]
                own = (int(times.min()), int(times.max())) if len(times) else (begin_ms, end_ms)
            else:
                own = begin_ms, end_ms
            places = table["phy"][begin:last]
            part.messages += last - begin
            part.size += int(ends[last - 1]) - before
            part.units.append(units[begin * UNIT_SIZE : last * UNIT_SIZE])
            part.records += its
            part.first_physical = min(part.first_physical, int(places.min()))
            part.last_physical = max(part.last_physical, int(places.max()))
            part.begin_ms, part.end_ms = min(part.begin_ms, own[0]), max(part.end_ms, own[1])
            begin = last
        self.messages += len(table)
        self.size += total + len(table) * UNIT_SIZE

    def _part(self, key: tuple[str, int], offset: int) -> _Part:
        part = self._open.get(key)
        if part is None or part.offset + part.messages != offset:
            self._close(key)
            part = self._open[key] = _Part(*key, offset)
        return part

    def _close(self, key: tuple[str, int]) -> None:
        part = self._open.pop(key, None)
        if part is not None and part.messages:
            self._complete.append(part)

    def take(self) -> list[Any]:
        """The next pieces of the object: all but the block that the queue which was added last goes on with."""
        for key in list(self._open):
            if key != self._last:
                self._close(key)
        return self._taken()

    def finish(self, state: bytes = b"", end: int | None = None) -> tuple[list[Any], Directory]:
        """The rest of the object, all of it without ``take``; and its directory. ``state``: see encode_end.

        ``end``: where its part of the log ends, if that was not known before; without ``take`` only.
        """
        if end is not None:
            self.header = self.header._replace(end=end)
        for key in list(self._open):
            self._close(key)
        pieces = self._taken()
        rest = encode_end(self._blocks, self._position, state)
        directory = decode_end(rest, self._position + len(rest))
        return [*pieces, rest], directory

    def _taken(self) -> list[Any]:
        found: list[Any] = []
        if not self._began:
            found.append(encode_header(self.header))
            self._began = True
        for part in sorted(self._complete, key=_order):
            units = b"".join(part.units)
            block = part.block(self._position, units)
            self._blocks.append(block)
            self._position += block.length
            found += (units, *part.records)
        self._complete.clear()
        return list(_joined(found))


def _order(part: _Part) -> tuple[str, int, int]:
    return part.order


def _cut(pieces: Sequence[memoryview], begin: int, end: int) -> Iterator[memoryview]:
    """The bytes [begin, end) of the pieces."""
    at = 0
    for piece in pieces:
        first, last = max(begin - at, 0), min(end - at, piece.nbytes)
        if first < last:
            yield piece[first:last]
        at += piece.nbytes


def _joined(pieces: Sequence[Any]) -> Iterator[Any]:
    """The pieces, small ones joined."""
    small: list[Any] = []
    size = 0
    for piece in pieces:
        length = len(piece)
        if small and (length >= _SMALL or size + length > _JOINED):
            yield b"".join(small)
            small, size = [], 0
        if length >= _SMALL:
            yield piece
        else:
            small.append(piece)
            size += length
    if small:
        yield b"".join(small)
