"""What master and slave send each other to replicate the commit log (RocketMQ's HA protocol, version 1). Sans-IO.

| direction | bytes | meaning |
|---|---|---|
| slave to master | i8 offset | report: the slave has the log up to this offset |
| master to slave | i8 offset, i4 size, ``size`` bytes | bytes of the log from ``offset`` on; size 0 is a heartbeat |

All numbers are big-endian. Bytes of the log are cut anywhere, not at records.
Source: RocketMQ's DefaultHAConnection and DefaultHAClient.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

REPORT: Final = struct.Struct(">q")
HEADER: Final = struct.Struct(">qi")

MAX_TRANSFER: Final = 64 << 20
"""The most bytes of a frame that are believed: more than any haTransferBatchSize."""


class HAFrameError(ValueError):
    """The peer does not speak this protocol; the text says what is wrong."""


def encode_report(offset: int) -> bytes:
    """A slave's report."""
    return REPORT.pack(offset)


def encode_header(offset: int, size: int) -> bytes:
    """The header of a transfer of ``size`` bytes; 0 for a heartbeat."""
    return HEADER.pack(offset, size)


class ReportDecoder:
    """Decodes what arrives from a slave."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[int]:
        """The reports that ``data`` completes, in order. Raises HAFrameError."""
        data = self._rest + data
        whole = len(data) - len(data) % REPORT.size
        self._rest = data[whole:]
        reports = [offset for (offset,) in REPORT.iter_unpack(data[:whole])]
        for offset in reports:
            if offset < 0:
                raise HAFrameError(f"a slave reports the offset {offset}")
        return reports


class Piece(NamedTuple):
    """Bytes of the log from ``offset`` on: part of a frame. Empty for a heartbeat, whose offset comes next."""

    offset: int
    data: Any


class TransferDecoder:
    """Decodes what arrives from a master, in pieces: a frame need not be complete."""

    def __init__(self) -> None:
        self._head = b""
        self._offset = 0
        self._left = 0

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces in ``data``, as views of it. Raises HAFrameError."""
        view, at = memoryview(data), 0
        while at < len(view):
            if not self._left:
                missing = HEADER.size - len(self._head)
                self._head += bytes(view[at : at + missing])
                at += missing
                if len(self._head) < HEADER.size:
                    return
                self._offset, self._left = HEADER.unpack(self._head)
                self._head = b""
                if self._offset < 0 or not 0 <= self._left <= MAX_TRANSFER:
                    raise HAFrameError(f"a master sends {self._left} bytes from the offset {self._offset} on")
                if not self._left:
                    yield Piece(self._offset, view[:0])
                continue
            count = min(self._left, len(view) - at)
            yield Piece(self._offset, view[at : at + count])
            self._offset += count
            self._left -= count
            at += count
