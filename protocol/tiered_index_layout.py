"""The index file of the tiered store: from the keys of a message to its place in the stream of its queue.

Header (28 bytes): magic 4, begin time 8 (when the file was created), end time 8 (the largest store time), slots in
use 4, item count 4. Then 8 bytes for each slot. A file has one of two formats:

- unsealed (a local file): a slot has the number of its newest item in its first 4 bytes, 0 for none. Items have 32
  bytes and are numbered from 1; the place of item 0 stays empty. The last field is the previous item of the slot.
- compacted (a segment of the tier): a slot has the position of its first item and the length of its group in bytes.
  Items have 28 bytes, without the last field, and stand in groups in the order of the slots, the newest first.

Times are ms. An item's time is in whole seconds after the begin time, rounded towards it; it may be negative.
Source: RocketMQ's IndexStoreFile and IndexItem.
"""

import struct
from typing import Final, NamedTuple

from trimq.protocol.hashing import string_hash

HEADER: Final = struct.Struct(">Iqqii")
HEADER_SIZE: Final = 28
BEGIN_MAGIC: Final = 0xBCC50289
"""An unsealed file that still takes items."""
END_MAGIC: Final = 0xBCC50285
"""A compacted file; also an unsealed one whose last item was put."""
SLOT_SIZE: Final = 8
GROUP: Final = struct.Struct(">ii")
"""A slot of a compacted file."""
ITEM: Final = struct.Struct(">iiiqiii")
"""Hash, topic id, queue id, stream position, size, seconds, previous item."""
ITEM_SIZE: Final = 32
COMPACT_ITEM: Final = struct.Struct(">iiiqii")
COMPACT_ITEM_SIZE: Final = 28


class Header(NamedTuple):
    """The fields of a header behind the magic number."""

    begin_ms: int
    end_ms: int
    used_slots: int
    items: int

    def encode(self, magic: int) -> bytes:
        """The 28 bytes."""
        return HEADER.pack(magic, *self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> "Header":
        """The fields of the first bytes of a file. Raises ValueError if the magic number is not one of ours."""
        magic, *fields = HEADER.unpack_from(data)
        if magic not in {BEGIN_MAGIC, END_MAGIC}:
            raise ValueError(f"{magic:#x} is not the magic number of an index file")
        return cls(*fields)


class IndexItem(NamedTuple):
    """A message that may have a key: where it stands, and its store time in ms, exact to a second."""

    key_hash: int
    topic_id: int
    queue_id: int
    offset: int
    size: int
    store_ms: int


def file_size(slots: int, items: int) -> int:
    """Size of an unsealed file. It takes one item less than ``items``: number 0 is never used."""
    return HEADER_SIZE + slots * SLOT_SIZE + items * ITEM_SIZE


def compacted_size(slots: int, count: int) -> int:
    """Size of a compacted file with ``count`` items."""
    return HEADER_SIZE + slots * SLOT_SIZE + count * COMPACT_ITEM_SIZE


def slot_at(slot: int) -> int:
    """Position of a slot."""
    return HEADER_SIZE + slot * SLOT_SIZE


def item_at(slots: int, number: int) -> int:
    """Position of an item in an unsealed file."""
    return HEADER_SIZE + slots * SLOT_SIZE + number * ITEM_SIZE


def tiered_key_hash(topic: str, key: str) -> int:
    """The hash of ``topic#key``: the absolute value as in Java, where the smallest integer stays negative."""
    value = abs(string_hash(f"{topic}#{key}"))
    return value if value <= 0x7FFFFFFF else -0x80000000


def slot_of(key_hash: int, slots: int) -> int:
    """The slot of a hash. RocketMQ fails to store the negative one; here it has the slot of its absolute value."""
    return abs(key_hash) % slots


def time_diff(begin_ms: int, store_ms: int) -> int:
    """An item's seconds: Java's division rounds towards zero, and its int has 32 bits (here limited, not wrapped)."""
    milliseconds = store_ms - begin_ms
    seconds = abs(milliseconds) // 1000
    return max(-0x80000000, min(seconds if milliseconds >= 0 else -seconds, 0x7FFFFFFF))
