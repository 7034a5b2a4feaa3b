"""Checks whether bytes of the log are the message that a queue's unit, an index entry or a message id refers to.

A corrupt unit may lead to a record of another queue, and a record may name another topic, queue or offset than it was
stored with: a consumer would take one message for another. The checksum of the body is not computed here.
"""

import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple

from trimq.protocol.record import AT_PHYSICAL_OFFSET, MAGIC_V1, MAGIC_V2, OVERHEAD_V1, SIZE_MAGIC
from trimq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6
from trimq.protocol.topic_rules import MAX_TOPIC_LENGTH

_SIZE_MAGIC: Final = SIZE_MAGIC.unpack_from
HEAD: Final = struct.Struct(">II4xi4xqqI44xI").unpack_from
"""Size, magic, queue id, queue offset, physical offset, sysFlag and, between IPv4 hosts, body length of a record."""
HEAD_SIZE: Final = 88
V6: Final = BORN_HOST_V6 | STORE_HOST_V6
_V6_MORE: Final = 12
"""Additional bytes of an IPv6 host."""
_LONGEST_V1: Final = 0xFF
_LONGEST: Final = 0xFFFF
_ENDS: Final = 256

_MAGICS: Final = frozenset({MAGIC_V1, MAGIC_V2})


class Place(NamedTuple):
    """The fields that each message of a queue must carry: its queue id, and its topic as encoded for each magic."""

    queue_id: int
    magic: int
    """The magic of most records."""
    topic_parts: dict[int, bytes]
    ends: dict[int, bytes]
    """Results of ``end_of``."""


@lru_cache(maxsize=10_000)
def place_of(topic: str, queue_id: int) -> Place:
    """The place of the messages of a queue."""
    name = topic.encode()
    parts = {MAGIC_V2: len(name).to_bytes(2, "big") + name}
    if len(name) <= _LONGEST_V1:
        parts[MAGIC_V1] = len(name).to_bytes(1, "big") + name
    magic = MAGIC_V1 if len(name) <= MAX_TOPIC_LENGTH else MAGIC_V2
    return Place(queue_id, magic, parts, {})


def end_of(place: Place, length: int) -> bytes | None:
    """Topic and length of the properties, as encoded in a usual record of ``length`` bytes without its body.

    None if the properties cannot have that length.
    """
    part = place.topic_parts[place.magic]
    properties = length - HEAD_SIZE - len(part) - 2
    if not 0 <= properties <= _LONGEST:
        return None
    if len(place.ends) >= _ENDS:
        place.ends.clear()
    end = place.ends[length] = part + properties.to_bytes(2, "big")
    return end


def is_message(data: Any, at: int, phy: int, size: int, queue_offset: int, place: Place) -> bool:
    """True if ``data``, which has ``size`` bytes from ``at`` on, holds the message of a queue's offset there.

    There is a record of that size; its ``phy``, queue, offset and topic are the expected ones, and its lengths fit.
    """
    if size < OVERHEAD_V1:
        return False
    stored, magic, queue_id, offset, physical, sys_flag, before = HEAD(data, at)
    if stored != size or physical != phy or offset != queue_offset or queue_id != place.queue_id:
        return False
    if sys_flag & V6:
        more = _V6_MORE * (bool(sys_flag & BORN_HOST_V6) + bool(sys_flag & STORE_HOST_V6))
        head = HEAD_SIZE + more
        if size < head:
            return False
        before = int.from_bytes(data[at + head - 4 : at + head], "big") + more
    part = place.topic_parts.get(magic)
    if part is None:
        return False
    properties = size - HEAD_SIZE - before - len(part) - 2
    if not 0 <= properties <= _LONGEST:
        return False
    at += HEAD_SIZE + before
    found: bool = data[at : at + len(part) + 2] == part + properties.to_bytes(2, "big")
    return found


def properties_of(data: Any, at: int, size: int, place: Place) -> bytes:
    """The encoded properties of a record for which ``is_message`` is true."""
    _, magic, _, _, _, sys_flag, before = HEAD(data, at)
    if sys_flag & V6:
        head = HEAD_SIZE + _V6_MORE * (bool(sys_flag & BORN_HOST_V6) + bool(sys_flag & STORE_HOST_V6))
        before = int.from_bytes(data[at + head - 4 : at + head], "big") + head - HEAD_SIZE
    return bytes(data[at + HEAD_SIZE + before + len(place.topic_parts[magic]) + 2 : at + size])


def begins_record(data: Any, phy: int, length: int) -> bool:
    """True if ``data`` has ``length`` bytes and starts with a record that names ``phy`` as its offset."""
    if len(data) != length or length < AT_PHYSICAL_OFFSET + 8:
        return False
    size, magic = _SIZE_MAGIC(data)
    return (
        size <= length
        and magic in _MAGICS
        and int.from_bytes(data[AT_PHYSICAL_OFFSET : AT_PHYSICAL_OFFSET + 8], "big") == phy
    )
