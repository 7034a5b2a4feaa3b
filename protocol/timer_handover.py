"""What a slave needs of its master's timers: the reply to GET_TIMER_CHECK_POINT (60).

RocketMQ's slaves read the 56 bytes of the body. Those of TriMQ read the ext fields too; RocketMQ's masters send none.
"""

from collections.abc import Mapping

from msgspec import Struct

from trimq.protocol.timer_layout import TimerCheckpoint, decode_checkpoint, encode_checkpoint

_FOUND_UNTIL = "timerFoundUntil"
_FOUND_READ_TIME = "timerFoundReadTime"
_LOWEST = "timerLowestOffset"

NOTHING_PENDING = -1
NOT_KNOWN = -2


class TimerHandover(Struct, frozen=True):
    """``checkpoint`` is the master's.

    Messages of the timer's queue before the queue offset ``found_until`` that were due before ``found_read_time`` (ms
    since the epoch) are delivered.

    ``lowest``: commit log offset of the first message that may be pending; NOTHING_PENDING, or NOT_KNOWN from RocketMQ.
    """

    checkpoint: TimerCheckpoint
    found_until: int
    found_read_time: int
    lowest: int

    def ext(self) -> dict[str, str]:
        """The ext fields of the reply."""
        return {
            _FOUND_UNTIL: str(self.found_until),
            _FOUND_READ_TIME: str(self.found_read_time),
            _LOWEST: str(self.lowest),
        }

    def body(self) -> bytes:
        """The body of the reply."""
        return encode_checkpoint(self.checkpoint, padded=False)


def decode_handover(ext: Mapping[str, str], body: bytes) -> TimerHandover:
    """The handover in a reply. Raises ValueError if its body is no checkpoint, or a field is no number."""
    checkpoint = decode_checkpoint(body)
    if _LOWEST not in ext:
        return TimerHandover(checkpoint, checkpoint.master_queue_offset, checkpoint.read_time, NOT_KNOWN)
    try:
        found_until, found_read_time, lowest = (int(ext[name]) for name in (_FOUND_UNTIL, _FOUND_READ_TIME, _LOWEST))
    except KeyError as error:
        raise ValueError(f"the reply has no {error}") from None
    if min(found_until, found_read_time) < 0 or lowest < NOT_KNOWN:
        raise ValueError(f"no offsets and times of timers: {found_until}, {found_read_time}, {lowest}")
    return TimerHandover(checkpoint, found_until, found_read_time, lowest)
