"""What master and slave send each other to replicate the commit log when controllers assign the roles. Sans-IO.

| from | bytes | meaning |
|---|---|---|
| slave | i4 1, i2 last file only, i2 learner, i8 broker id | hello, the first message of a connection |
| master | i4 1, i4 size, i8 log end, i4 last epoch, n times (i4 epoch, i8 start) | the answer: its epochs |
| slave | i4 2, i8 offset | report: the slave has the log up to this offset |
| master | i4 2, i4 size, i8 offset, i4 epoch, i8 epoch's start, i8 confirm offset, ``size`` bytes | bytes of the log |

All numbers are big-endian. A transfer of size 0 is a sign of life. Its offset is -1 on a master of RocketMQ that has
no log. A transfer is of one epoch, except that RocketMQ's master names the next epoch in the last transfer of an
epoch already: the epoch's start is the end of that transfer then. Everything below the confirm offset is
acknowledged. Source: RocketMQ's AutoSwitchHAConnection and AutoSwitchHAClient.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from trimq.protocol.epoch_file import MOST_EPOCHS, Epoch, problem_of
from trimq.protocol.ha_frames import MAX_TRANSFER, HAFrameError

HANDSHAKE: Final = 1
TRANSFER: Final = 2
"""The two states that are sent, of RocketMQ's HAConnectionState."""

_STATE: Final = struct.Struct(">i")
_HELLO: Final = struct.Struct(">ihhq")
_REPORT: Final = struct.Struct(">iq")
_EPOCHS: Final = struct.Struct(">iiqi")
_ENTRY: Final = struct.Struct(">iq")
_HEADER: Final = struct.Struct(">iiqiqq")


class Hello(NamedTuple):
    """A slave says who it is. ``last_file``: without a log, it wants only the master's last file."""

    broker_id: int
    learner: bool = False
    last_file: bool = False


class Report(NamedTuple):
    """A slave has the log up to ``offset``."""

    offset: int


class MasterEpochs(NamedTuple):
    """A master's answer to a hello: where its log ends, its last epoch, and all its epochs."""

    log_end: int
    last_epoch: int
    entries: list[Epoch]


class EpochPiece(NamedTuple):
    """Bytes of the log from ``offset`` on: part of a transfer. Empty for a sign of life.

    ``frame_end`` is the offset behind the whole transfer.
    """

    offset: int
    data: Any
    epoch: int
    epoch_start: int
    confirm_offset: int
    frame_end: int


def encode_hello(hello: Hello) -> bytes:
    """A slave's first message."""
    return _HELLO.pack(HANDSHAKE, hello.last_file, hello.learner, hello.broker_id)


def encode_report(offset: int) -> bytes:
    """A slave's report."""
    return _REPORT.pack(TRANSFER, offset)


def encode_epochs(epochs: MasterEpochs) -> bytes:
    """A master's answer to a hello."""
    body = b"".join(_ENTRY.pack(*entry) for entry in epochs.entries)
    return _EPOCHS.pack(HANDSHAKE, len(body), epochs.log_end, epochs.last_epoch) + body


def encode_header(offset: int, size: int, epoch: Epoch, confirm_offset: int) -> bytes:
    """The header of a transfer of ``size`` bytes; 0 for a sign of life."""
    return _HEADER.pack(TRANSFER, size, offset, epoch.number, epoch.start, confirm_offset)


class SlaveDecoder:
    """Decodes what arrives from a slave. A hello comes first; RocketMQ's slave repeats it if the answer takes long."""

    def __init__(self) -> None:
        self._rest = b""
        self._reports = False

    def feed(self, data: bytes) -> list[Hello | Report]:
        """The messages that ``data`` completes, in order. Raises HAFrameError."""
        data = self._rest + data
        at = 0
        found: list[Hello | Report] = []
        while len(data) - at >= _STATE.size:
            (state,) = _STATE.unpack_from(data, at)
            if state == HANDSHAKE and not self._reports:
                if len(data) - at < _HELLO.size:
                    break
                _, last_file, learner, broker_id = _HELLO.unpack_from(data, at)
                if broker_id < 0:
                    raise HAFrameError(f"a slave has the broker id {broker_id}")
                found.append(Hello(broker_id, learner == 1, last_file == 1))
                at += _HELLO.size
            elif state == TRANSFER:
                if len(data) - at < _REPORT.size:
                    break
                _, offset = _REPORT.unpack_from(data, at)
                if offset < 0:
                    raise HAFrameError(f"a slave reports the offset {offset}")
                self._reports = True
                found.append(Report(offset))
                at += _REPORT.size
            else:
                raise HAFrameError(f"a slave sends a message with the state {state}")
        self._rest = data[at:]
        return found


class MasterDecoder:
    """Decodes what arrives from a master: its epochs, then transfers, in pieces that need not be complete."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._has_epochs = False
        self._left = 0
        self._piece = EpochPiece(0, b"", 0, 0, 0, 0)
        """What follows of the present transfer, without data."""

    def feed(self, data: bytes) -> Iterator[MasterEpochs | EpochPiece]:
        """What is in ``data``; log bytes as views of it. Raises HAFrameError."""
        view, at = memoryview(data), 0
        while at < len(view):
            if not self._left:
                missing = self._wanted() - len(self._head)
                self._head += view[at : at + missing]
                at += missing
                if len(self._head) < self._wanted():
                    continue  # the size of the list is known only now, or all of ``data`` was taken
                head, self._head = bytes(self._head), bytearray()
                if self._has_epochs:
                    self._begin(head)
                    if not self._left:
                        yield self._piece._replace(data=view[:0])
                else:
                    self._has_epochs = True
                    yield _decode_epochs(head)
                continue
            count = min(self._left, len(view) - at)
            piece = self._piece
            self._piece = piece._replace(offset=piece.offset + count)
            self._left -= count
            yield piece._replace(data=view[at : at + count])
            at += count

    def _wanted(self) -> int:
        """The bytes of the present head, as far as it is known. Raises HAFrameError."""
        if self._has_epochs:
            return _HEADER.size
        if len(self._head) < _EPOCHS.size:
            return _EPOCHS.size
        state, size, _, _ = _EPOCHS.unpack_from(self._head)
        if state != HANDSHAKE or size % _ENTRY.size or not 0 <= size <= MOST_EPOCHS * _ENTRY.size:
            raise HAFrameError(f"a master answers with the state {state} and {size} bytes of epochs")
        return _EPOCHS.size + int(size)

    def _begin(self, head: bytes) -> None:
        state, size, offset, epoch, start, confirm = _HEADER.unpack(head)
        if state != TRANSFER:
            raise HAFrameError(f"a master sends a message with the state {state}")
        if not 0 <= size <= MAX_TRANSFER or (offset < 0 and (size or offset != -1)) or confirm < -1:
            raise HAFrameError(f"a master sends {size} bytes from the offset {offset} on, confirmed up to {confirm}")
        problem = problem_of([Epoch(epoch, start)])
        if problem:
            raise HAFrameError(f"a master sends {size} bytes from the offset {offset} on: {problem}")
        self._left = size
        self._piece = EpochPiece(offset, b"", epoch, start, confirm, offset + size)


def _decode_epochs(data: bytes) -> MasterEpochs:
    _, _, log_end, last_epoch = _EPOCHS.unpack_from(data)
    entries = [Epoch(*entry) for entry in _ENTRY.iter_unpack(data[_EPOCHS.size :])]
    problem = problem_of(entries)
    if log_end < 0 or problem:
        raise HAFrameError(f"a master has a log up to {log_end}{f': {problem}' if problem else ''}")
    return MasterEpochs(log_end, last_epoch, entries)
