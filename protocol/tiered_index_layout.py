"""Layout of the tier's index files. Source: RocketMQ's IndexStoreFile and IndexItem.

A header, slots of 8 bytes, entries. In a local file (UNSEALED, SEALED) the first half of a slot is the number of its
newest entry, and an entry of 32 bytes names the one before it in its slot; entries count from 1, and the place of entry
0 stays empty. In an uploaded file (compacted) a slot is position and length of its entries, which stand together,
newest first, without that last field. Times in ms, time differences in s.
"""

import struct
from typing import Any, Final, NamedTuple

from trimq.protocol.hashing import string_hash

HEADER: Final = struct.Struct(">IqqII")
"""Magic, begin (time of creation), end (largest store time), used slots, number of entries."""
BEGIN_MAGIC: Final = 0xBCC50289
END_MAGIC: Final = 0xBCC50285
HEADER_SIZE: Final = HEADER.size
SLOT_SIZE: Final = 8
SLOT: Final = struct.Struct(">ii")
ENTRY: Final = struct.Struct(">iiiqiii")
"""Hash, topic id, queue id, stream position, size, time difference to begin, previous entry of the slot."""
ENTRY_SIZE: Final = ENTRY.size
COMPACT: Final = struct.Struct(">iiiqii")
COMPACT_SIZE: Final = COMPACT.size
_LARGEST: Final = 0x7FFFFFFF


class IndexItem(NamedTuple):
    """An entry: where the record of a message with the key is, and when it was stored (whole seconds, in ms)."""

    hash: int
    topic_id: int
    queue_id: int
    offset: int
    size: int
    store_ms: int


def tiered_key_hash(topic: str, key: str) -> int | None:
    """The hash of a key; None for the few keys that have none: RocketMQ cannot index them either."""
    value = abs(string_hash(f"{topic}#{key}"))
    return value if value <= _LARGEST else None


def time_difference(store_ms: int, begin_ms: int) -> int:
    """Seconds from ``begin_ms``, rounded towards it, as Java divides."""
    return int((store_ms - begin_ms) / 1000) if abs(store_ms - begin_ms) < 1 << 50 else 0


def entries_at(slots: int) -> int:
    """Where the entries begin; in a local file that is the place of entry 0, which is not used."""
    return HEADER_SIZE + SLOT_SIZE * slots


def local_size(slots: int, entries: int) -> int:
    """The length of a local file."""
    return entries_at(slots) + ENTRY_SIZE * entries


def compact_slots(size: int, count: int) -> int:
    """The number of slots of a compacted file. Raises ValueError if no number fits its length."""
    slots, rest = divmod(size - HEADER_SIZE - COMPACT_SIZE * count, SLOT_SIZE)
    if rest or slots < 1:
        raise ValueError(f"{size} bytes are no index file with {count} entries")
    return slots


def items_of(data: Any, begin_ms: int) -> list[IndexItem]:
    """The entries in a piece of a compacted file."""
    return [
        IndexItem(key, topic, queue, offset, size, begin_ms + 1000 * seconds)
        for key, topic, queue, offset, size, seconds in COMPACT.iter_unpack(data)
    ]
