"""The consume queue's unit: where a message lies, how long it is, and the code of its tag.

Commit-log offset 8, size 4, tags code 8; unit k of a queue lies at byte 20 k of the queue's stream. Unit
(0, 0x7FFFFFFF, 0) fills the front of a queue that begins at a later offset. Source: RocketMQ's ConsumeQueue.
"""

import struct
from typing import Final

UNIT = struct.Struct(">qiq")
UNIT_SIZE: Final = 20
FILLER: Final = UNIT.pack(0, 0x7FFFFFFF, 0)
FILLER_SIZE: Final = 0x7FFFFFFF
MAX_OFFSET: Final = (2**63 - 1) // UNIT_SIZE
"""No queue can come to a larger offset: its unit would begin at a byte that 64 bits cannot tell."""


def round_file_size(size: int) -> int:
    """A configured file size rounded up to whole units."""
    return -(-size // UNIT_SIZE) * UNIT_SIZE
