"""What TriMQ adds to ``config/timercheck``, in the bytes that RocketMQ's TimerCheckpoint leaves zero.

Big-endian, behind the 56 bytes of the checkpoint; nothing is written where there is nothing to note::

    CRC-32 of a byte 1 (this layout), the 56 bytes and all bytes that follow 4 | begin of the timer log 8
    queue is read again: until this queue offset 8, what was due before this time is delivered 8
    messages that are due from this time on, before the read time, wait 8 | in slots up to this time 8
    number of rests 4
    rest of a slot: time of the slot 8 | offset in the commit log 8 | number 4 | offsets in the commit log 8 each

RocketMQ rewrites its 56 bytes alone, so the checksum says whether the notes belong to this checkpoint.
"""

import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from operator import lt
from typing import Final, NamedTuple

from msgspec import Struct

from trimq.protocol.timer_layout import CHECKPOINT, CHECKPOINT_SIZE, TimerCheckpoint, encode_checkpoint

_LAYOUT: Final = b"\x01"
_CRC: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">qqqqqi")
_REST: Final = struct.Struct(">qqi")
_OFFSET_SIZE: Final = 8
_CRC_END: Final = CHECKPOINT.size + _CRC.size
_BODY_SIZE: Final = CHECKPOINT_SIZE - _CRC_END
NO_LOG: Final = (1 << 63) - 1
"""The ``log_begin`` that says that no unit counts: all messages are read from the timer's queue again."""
MOST_LEFT: Final = (_BODY_SIZE - _HEAD.size - _REST.size) // _OFFSET_SIZE
"""Offsets for which there is room."""


class SlotRest(NamedTuple):
    """What is left of a slot that was delivered in part.

    Of its messages those from the commit log offset ``until`` on, and those before it at the offsets ``left``.
    """

    time: int
    until: int
    left: tuple[int, ...]

    def shortened(self, most: int) -> "SlotRest":
        """With at most so many offsets: from the first that has no room on, all messages are left."""
        if len(self.left) <= most:
            return self
        return SlotRest(self.time, self.left[most], self.left[:most])

    def numbers(self, offsets: Sequence[int]) -> Sequence[int]:
        """The places in a slot, whose messages are at these offsets, of those that are left.

        All if the offsets do not rise: RocketMQ has written units once more, and places say nothing then.
        """
        if not all(map(lt, offsets, islice(offsets, 1, None))):
            return range(len(offsets))
        numbers = array("q")
        for offset in self.left:
            at = bisect_left(offsets, offset)
            if at < len(offsets) and offsets[at] == offset:
                numbers.append(at)
        numbers.extend(range(bisect_left(offsets, self.until), len(offsets)))
        return numbers


def rest_of(time: int, offsets: Sequence[int], numbers: Sequence[int]) -> SlotRest:
    """The rest of a slot: inverse of ``numbers``, if there is room for all."""
    # How many places were left out before each number does not fall; behind the last gap it is all of them.
    gaps = len(offsets) - len(numbers)
    tail = bisect_left(range(len(numbers)), gaps, key=lambda at: numbers[at] - at)
    end = tail + gaps
    until = offsets[end] if end < len(offsets) else offsets[-1] + 1
    left = tuple(offsets[number] for number in numbers[: min(tail, MOST_LEFT + 1)])
    return SlotRest(time, until, left).shortened(MOST_LEFT)


class TimerNotes(Struct, frozen=True):
    """``log_begin``: units of the timer log before this position do not count: others say the same.

    ``found_until`` and ``found_read_time``: wheel and log were lost, and the queue is read from its beginning; messages
    before this queue offset that were due before this time are delivered. ``late_since``: of the messages that were due
    from this time on, and before the read time, some wait in later slots, up to that of ``late_until``. ``rests`` of
    slots: their other messages are delivered.
    """

    log_begin: int = 0
    found_until: int = 0
    found_read_time: int = 0
    late_since: int = 0
    late_until: int = 0
    rests: tuple[SlotRest, ...] = ()


NO_NOTES: Final = TimerNotes()


def encode_with_notes(checkpoint: TimerCheckpoint, notes: TimerNotes) -> bytes:
    """The content of timercheck.

    Rests for which there is no room are shortened, or left out: then all messages of the slot count as left.
    """
    data = encode_checkpoint(checkpoint)
    if notes == NO_NOTES:
        return data
    rests = b""
    number = 0
    for rest in notes.rests:
        most = (_BODY_SIZE - _HEAD.size - len(rests) - _REST.size) // _OFFSET_SIZE
        if most >= 0:
            time, until, left = rest.shortened(most)
            rests += _REST.pack(time, until, len(left)) + struct.pack(f">{len(left)}q", *left)
            number += 1
    found = notes.found_until, notes.found_read_time
    head = _HEAD.pack(notes.log_begin, *found, notes.late_since, notes.late_until, number)
    body = (head + rests).ljust(_BODY_SIZE, b"\0")
    begin = data[: CHECKPOINT.size]
    return begin + _CRC.pack(zlib.crc32(_LAYOUT + begin + body)) + body


def decode_notes(data: bytes) -> TimerNotes:
    """The notes of a timercheck; none if they belong to another checkpoint, or have another layout."""
    if len(data) < CHECKPOINT_SIZE:
        return NO_NOTES
    body = data[_CRC_END:CHECKPOINT_SIZE]
    if zlib.crc32(_LAYOUT + data[: CHECKPOINT.size] + body) != _CRC.unpack_from(data, CHECKPOINT.size)[0]:
        return NO_NOTES
    log_begin, found_until, found_read_time, late_since, late_until, number = _HEAD.unpack_from(body)
    at = _HEAD.size
    rests = []
    for _ in range(number):
        if at + _REST.size > _BODY_SIZE:
            return NO_NOTES
        time, until, count = _REST.unpack_from(body, at)
        at += _REST.size
        if not 0 <= count <= (_BODY_SIZE - at) // _OFFSET_SIZE:
            return NO_NOTES
        rests.append(SlotRest(time, until, struct.unpack_from(f">{count}q", body, at)))
        at += count * _OFFSET_SIZE
    if number < 0 or any(body[at:]):
        return NO_NOTES
    return TimerNotes(log_begin, found_until, found_read_time, late_since, late_until, tuple(rests))
