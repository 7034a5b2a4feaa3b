"""The timer's binary files: ``timerwheel``, the files of ``timerlog``, ``config/timercheck``.

Big-endian. Times are ms since 1970 unless they say otherwise, offsets are bytes of the timer log or the commit log::

    slot of the wheel, 32 bytes:  time / precision 8 | first position 8 | last position 8 | count 4 | magic 4 (unused)
    unit of the log, 52 bytes:    size 4 (52) | previous position 8 | magic 4 | write time 8 | delay 4
                                  commit log offset 8 | record size 4 | hash of the real topic 4 | reserved 8
    end of a log file:            remaining bytes 4 | 0 8 | BLANK_MAGIC 4 | untouched
    timercheck, 4,096 bytes:      read time 8 | log position 8 | queue offset 8 | master's queue offset 8
                                  data version: state 8, time 8, counter 8 | zeros

The wheel has a fixed number of slots, whatever the precision: a time belongs to slot ``time / precision % SLOTS``, and
a slot with another time in it is empty. The units of a slot form a chain through ``previous position``, newest first.
Source: RocketMQ's TimerWheel, Slot, TimerLog, TimerCheckpoint, and TimerMessageStore.doEnqueue for the roll.
"""

import struct
from typing import Final, NamedTuple

from msgspec import Struct

SLOT: Final = struct.Struct(">qqqii")
SLOT_SIZE: Final = SLOT.size
SLOTS: Final = 2 * 7 * 24 * 3600
WHEEL_SIZE: Final = SLOTS * SLOT_SIZE
EMPTY_SLOT: Final = bytes(SLOT_SIZE)
BLANK_SLOTS: Final = 60
"""The roll window ends so many slots before half of the wheel at the latest."""

UNIT: Final = struct.Struct(">iqiqiqiiq")
UNIT_SIZE: Final = UNIT.size
NO_POSITION: Final = -1
MAGIC_DEFAULT: Final = 1
MAGIC_ROLL: Final = 2
MAGIC_DELETE: Final = 4
_MAGICS: Final = 0xF

BLANK: Final = struct.Struct(">iqi")
BLANK_SIZE: Final = BLANK.size
BLANK_MAGIC: Final = 0xCBD43194
_BLANK_MAGIC_SIGNED: Final = BLANK_MAGIC - (1 << 32)

CHECKPOINT: Final = struct.Struct(">qqqqqqq")
CHECKPOINT_SIZE: Final = 4096

PRECISIONS: Final = (100, 200, 500, 1000)


class Slot(NamedTuple):
    """A slot that is not empty: its time (ms), the positions of its first and last unit, and the number of messages.

    A delete mark counts -1.
    """

    time: int
    first: int
    last: int
    messages: int


class TimerUnit(NamedTuple):
    """A unit of the timer log. ``previous`` is NO_POSITION for the first one of a slot.

    ``time`` is TIMER_OUT_MS of the message, to the ms, or when it rolls: its slot is the one that ``time`` is in.
    """

    previous: int
    magic: int
    write_time: int
    time: int
    offset: int
    size: int
    topic_hash: int

    @property
    def rolls(self) -> bool:
        """The message is stored again at ``time``, not delivered."""
        return bool(self.magic & MAGIC_ROLL)

    @property
    def deletes(self) -> bool:
        """The message is a delete mark."""
        return bool(self.magic & MAGIC_DELETE)


class TimerCheckpoint(Struct, frozen=True):
    """What was on disk when the file was written.

    ``read_time``: all slots before it are delivered. ``log_position``: the timer log is complete up to it.
    ``queue_offset``: the messages of the timer's queue before it are in wheel and log, or delivered. The master's
    offset is the same without slaves. The rest is the data version: it changes with each of these.
    """

    read_time: int = 0
    log_position: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    timestamp: int = 0
    counter: int = 0


def snapped_precision(precision_ms: int) -> int:
    """The precision that RocketMQ uses for a configured one: the next smaller of 100, 200, 500 and 1000 ms."""
    return max((value for value in PRECISIONS if value <= precision_ms), default=PRECISIONS[0])


def roll_window(slots: int, configured: int) -> int:
    """The slots from now on in which a message waits for its own time; one that is due later is stored again."""
    most = slots // 2 - BLANK_SLOTS
    return configured if 2 <= configured <= most else most


def out_time(deliver_ms: int, precision: int) -> int:
    """TIMER_OUT_MS of a message to be delivered at ``deliver_ms``: the start of the slot that ends then or later."""
    rest = deliver_ms % precision
    return deliver_ms - (rest or precision)


def place_in_window(time: int, now: int, window: int, precision: int) -> tuple[int, bool]:
    """The time of the slot for a message that is due at ``time``, and whether it has to be stored again then.

    ``now`` is a multiple of the precision, ``window`` the number of slots of the roll window. A message that is due
    soon after the window rolls half a window from now, so that the next roll has enough time.
    """
    beyond = time - now - window * precision
    if beyond < 0:
        return time, False
    return now + (window // 2 if beyond < window // 3 * precision else window) * precision, True


def pack_unit(unit: TimerUnit) -> bytes:
    """The bytes of a unit. Raises struct.error if a number does not fit."""
    return UNIT.pack(
        UNIT_SIZE,
        unit.previous,
        unit.magic,
        unit.write_time,
        unit.time - unit.write_time,
        unit.offset,
        unit.size,
        unit.topic_hash,
        0,
    )


def unpack_unit(data: bytes | bytearray | memoryview, at: int = 0) -> TimerUnit | None:
    """The unit at a position of ``data``; None if there is none: the end of the units, a BLANK, or damage."""
    if len(data) - at < UNIT_SIZE:
        return None
    size, previous, magic, write_time, delay, offset, record_size, topic_hash, _ = UNIT.unpack_from(data, at)
    if size != UNIT_SIZE or not 0 < magic <= _MAGICS:
        return None
    return TimerUnit(previous, magic, write_time, write_time + delay, offset, record_size, topic_hash)


def pack_blank(remaining: int) -> bytes:
    """The end of a file that has no room for another unit."""
    return BLANK.pack(remaining, 0, _BLANK_MAGIC_SIGNED)


def is_blank(data: bytes | bytearray | memoryview, at: int = 0) -> bool:
    """Whether a file's units end at this position because the next one did not fit."""
    return len(data) - at >= BLANK_SIZE and BLANK.unpack_from(data, at)[2] == _BLANK_MAGIC_SIGNED


def fits(position: int, file_size: int) -> bool:
    """Whether a unit has room at a position of a file: a BLANK has to fit behind it."""
    return file_size - position >= UNIT_SIZE + BLANK_SIZE


def last_unit_at(file_size: int) -> int:
    """The position of the last unit of a full file."""
    return (file_size - BLANK_SIZE) // UNIT_SIZE * UNIT_SIZE - UNIT_SIZE


def encode_checkpoint(checkpoint: TimerCheckpoint, *, padded: bool = True) -> bytes:
    """The content of timercheck; not ``padded``: the body of GET_TIMER_CHECK_POINT (60), its first 56 bytes."""
    data = CHECKPOINT.pack(
        checkpoint.read_time,
        checkpoint.log_position,
        checkpoint.queue_offset,
        checkpoint.master_queue_offset,
        checkpoint.state_version,
        checkpoint.timestamp,
        checkpoint.counter,
    )
    return data.ljust(CHECKPOINT_SIZE, b"\0") if padded else data


def decode_checkpoint(data: bytes) -> TimerCheckpoint:
    """The numbers of a timercheck. Raises ValueError if it is too short or has a negative number."""
    if len(data) < CHECKPOINT.size:
        raise ValueError(f"a timercheck has {CHECKPOINT_SIZE} bytes, this file has {len(data)}")
    numbers = CHECKPOINT.unpack_from(data)
    if min(numbers[:4]) < 0:
        raise ValueError(f"a timercheck has no negative offsets and times: {numbers[:4]}")
    return TimerCheckpoint(*numbers)
