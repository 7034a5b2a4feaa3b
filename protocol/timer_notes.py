"""What TriMQ adds to ``config/timercheck``, in the bytes that RocketMQ's TimerCheckpoint leaves zero.

Big-endian, behind the 56 bytes of the checkpoint; nothing is written where there is nothing to note::

    CRC-32 of the 56 bytes and of what follows 4 | begin of the timer log 8

RocketMQ rewrites its 56 bytes alone, so the checksum says whether the notes belong to this checkpoint.
"""

import struct
import zlib
from typing import Final

from msgspec import Struct

from trimq.protocol.timer_layout import CHECKPOINT, CHECKPOINT_SIZE, TimerCheckpoint, encode_checkpoint

_HEAD: Final = struct.Struct(">I")
_BODY: Final = struct.Struct(">q")
NO_LOG: Final = (1 << 63) - 1
"""The ``log_begin`` that says that no unit counts: all messages are read from the timer's queue again."""


class TimerNotes(Struct, frozen=True):
    """``log_begin``: units of the timer log before this position do not count: others say the same."""

    log_begin: int = 0


NO_NOTES: Final = TimerNotes()


def encode_with_notes(checkpoint: TimerCheckpoint, notes: TimerNotes) -> bytes:
    """The content of timercheck."""
    data = encode_checkpoint(checkpoint)
    if notes == NO_NOTES:
        return data
    body = _BODY.pack(notes.log_begin)
    begin = data[: CHECKPOINT.size]
    return (begin + _HEAD.pack(zlib.crc32(begin + body)) + body).ljust(CHECKPOINT_SIZE, b"\0")


def decode_notes(data: bytes) -> TimerNotes:
    """The notes of a timercheck; none if they belong to another checkpoint."""
    if len(data) < CHECKPOINT_SIZE:
        return NO_NOTES
    begin, at = data[: CHECKPOINT.size], CHECKPOINT.size + _HEAD.size
    body = data[at : at + _BODY.size]
    if zlib.crc32(begin + body) != _HEAD.unpack_from(data, CHECKPOINT.size)[0]:
        return NO_NOTES
    return TimerNotes(*_BODY.unpack(body))
