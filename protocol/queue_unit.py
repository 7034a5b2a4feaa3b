"""The consume queue's unit: a message's commit-log offset, its size, and the code of its tag.

Commit-log offset 8, size 4, tags code 8; unit k of a queue is at byte 20 k of the queue's stream. Units
(0, 0x7FFFFFFF, 0) fill the front of a queue whose first offset is not 0. Source: RocketMQ's ConsumeQueue.
"""

import struct
from typing import Final

UNIT = struct.Struct(">qiq")
UNIT_SIZE: Final = 20
FILLER: Final = UNIT.pack(0, 0x7FFFFFFF, 0)
FILLER_SIZE: Final = 0x7FFFFFFF
MAX_OFFSET: Final = (2**63 - 1) // UNIT_SIZE
"""The largest possible queue offset: the byte offset of its unit has to fit into 64 bits."""


def is_unit_of(unit: bytes, phy: int, size: int, tags_code: int, *, delayed: bool) -> bool:
    """Whether a unit is the one of a record.

    ``tags_code`` is derived from the record. If ``delayed``, it is the latest time at which the message may be due: the
    unit has an earlier one if the message was stored after the broker's clock had been set back.
    """
    if unit == UNIT.pack(phy, size, tags_code):
        return True
    if not delayed or len(unit) != UNIT_SIZE:
        return False
    place, length, due = UNIT.unpack(unit)
    return (place, length) == (phy, size) and 0 < due <= tags_code


def round_file_size(size: int) -> int:
    """A configured file size rounded up to whole units."""
    return -(-size // UNIT_SIZE) * UNIT_SIZE
