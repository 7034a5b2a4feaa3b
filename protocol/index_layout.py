"""The index file: a hash table from a message's keys to its offset in the commit log.

Header (40 bytes): begin time 8, end time 8, begin offset 8, end offset 8, slots in use 4, entry count 4 (from 1:
entry 0 is never used). Then ``slots`` x 4 bytes: the newest entry of that slot, 0 for none. Then ``entries`` x 20
bytes: key hash 4, commit-log offset 8, seconds since the begin time 4, previous entry of the slot 4.
Source: RocketMQ's IndexHeader and IndexFile.
"""

import struct
from typing import Final

HEADER = struct.Struct(">qqqqii")
HEADER_SIZE: Final = 40
SLOT_SIZE: Final = 4
ENTRY = struct.Struct(">iqii")
ENTRY_SIZE: Final = 20


def file_size(slots: int, entries: int) -> int:
    """Size in bytes of a file with that many slots and entries."""
    return HEADER_SIZE + slots * SLOT_SIZE + entries * ENTRY_SIZE


def slot_at(slot: int) -> int:
    """Byte offset of slot number ``slot`` in a file."""
    return HEADER_SIZE + slot * SLOT_SIZE


def entry_at(slots: int, entry: int) -> int:
    """Byte offset of entry number ``entry`` in a file of ``slots`` slots."""
    return HEADER_SIZE + slots * SLOT_SIZE + entry * ENTRY_SIZE
