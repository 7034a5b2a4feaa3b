"""Finds the records that have a key by comparing bytes; only a few numbers of each record are decoded.

For usual records only: sent over IPv4, the key being the whole of UNIQ_KEY or KEYS, in memory. query.py does the rest.
"""

import struct
from functools import lru_cache
from typing import Any, Final

from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.disk.page_cache import CHUNK
from trimq.protocol.hashing import crc32_of_each
from trimq.protocol.message_keys import TAG_KEY
from trimq.protocol.property_text import KEYS_NAME, has_key_for_sure, key_text
from trimq.protocol.record import MAGIC_V1, MAGIC_V2, OVERHEAD_V1
from trimq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6
from trimq.protocol.topic_rules import MAX_RETRY_TOPIC_LENGTH, MAX_TOPIC_LENGTH

HEAD_SIZE: Final = 88
"""Bytes in front of the body, with IPv4 hosts."""
_head_at = struct.Struct(">II20xQI16xQ20xI").unpack_from
"""Size, magic, physical offset, sysFlag, store time and body length."""
_crc_at = struct.Struct(">8xI").unpack_from
_V6: Final = BORN_HOST_V6 | STORE_HOST_V6
_LAST_HEAD: Final = CHUNK - OVERHEAD_V1
"""The last position in a chunk at which the head of a record still fits into it."""
_CRC_BITS: Final = 0x7FFFFFFF
_LONGEST: Final = 0xFFFF
"""The most bytes of properties that their length field can express."""

Matches = tuple[list[bytes], int]
"""Records, oldest first, and their total size in bytes."""


def is_usual(topic: str, key: str) -> bool:
    """True if ``matches`` supports the query: a possible topic, and one printable ASCII word, not the key of a tag."""
    return (
        len(topic) <= MAX_RETRY_TOPIC_LENGTH
        and key.isascii()
        and key.isprintable()
        and bool(key)
        and " " not in key
        and not key.startswith(TAG_KEY)
    )


@lru_cache(maxsize=1024)
def _topic_part(topic: str) -> tuple[int, bytes]:
    """Magic and topic as encoded in a record."""
    name = topic.encode("utf-8", "replace")
    wide = len(name) > MAX_TOPIC_LENGTH
    return MAGIC_V2 if wide else MAGIC_V1, len(name).to_bytes(2 if wide else 1, "big") + name


def _add_beginning(fronts: dict[int, bytes], length: int, front: bytes, keys: bytes) -> bytes | None:
    """Compute what ``length`` bytes behind a body start with if KEYS comes first, and add it to ``fronts``.

    None if the properties cannot have that length.
    """
    properties = length - len(front) - 2
    if not 0 <= properties <= _LONGEST:
        return None
    beginning = fronts[length] = front + properties.to_bytes(2, "big") + keys
    return beginning


def matches(  # noqa: PLR0912, PLR0915 - runs for each candidate of each query: one more call is a cost for all
    log: MappedFileQueue, offsets: list[int], topic: str, key: str, limit: int, times: tuple[int, int], most: int
) -> Matches | None:
    """Up to ``limit`` of the records at ``offsets``, newest first, that have the key and were stored in ``times`` (ms).

    None if a candidate needs the full path: it is unusual, damaged, or not known to be in memory. None as well for more
    than ``most`` bytes, since the records are copied. Bodies that this process has put were whole when they came in:
    their checksums are not computed again.
    """
    file = log.find(offsets[0]) if offsets else None
    if file is None or not is_usual(topic, key):
        return None
    magic, front = _topic_part(topic)
    begin = len(front) + 2
    fronts: dict[int, bytes] = {}
    first, last = times
    text = key_text(key)
    keys = text.keys
    page_cache = log.page_cache
    covers, chunks, tick = page_cache.covers, page_cache.chunks_of(file), page_cache.tick()
    own_from = log.own_from
    found: list[bytes] = []
    bodies: list[memoryview] = []
    sums: list[int] = []
    left = most
    start, stop, in_memory_from, view = file.start, file.wrote, file.in_memory_from, file.view
    raw: Any = view.obj
    before = file.end
    for phy in offsets:
        at = phy - start
        if at < 0:
            file = log.find(phy)
            if file is None:
                return None
            start, stop, in_memory_from, view = file.start, file.wrote, file.in_memory_from, file.view
            raw, chunks = view.obj, page_cache.chunks_of(file)
            at = phy - start
        # Offsets fall strictly from entry to entry; others come from a damaged index.
        if phy >= before or at + OVERHEAD_V1 > stop:
            return None
        before = phy
        is_in_memory = at >= in_memory_from
        within = at % CHUNK
        # Most records are in a chunk that has just been checked: compare its tick before the call of ``covers``.
        if (
            not is_in_memory
            and (within > _LAST_HEAD or chunks[at // CHUNK] <= tick)
            and not covers(file, at, at + OVERHEAD_V1)
        ):
            return None
        size, own_magic, place, sys_flag, store_time, body_length = _head_at(view, at)
        end = at + size
        if place != phy or own_magic != magic or sys_flag & _V6 or end > stop:
            return None
        if not first <= store_time <= last:
            continue
        left -= size
        if left < 0 or (not is_in_memory and within + size > CHUNK and not covers(file, at, end)):
            return None
        # A copy: find and compare on bytes are much faster than on a view, and the answer needs the copy anyway.
        record = raw[at:end]
        behind = HEAD_SIZE + body_length
        length = size - behind
        beginning = fronts.get(length) or _add_beginning(fronts, length, front, keys)
        if beginning is None:
            return None
        if record.startswith(beginning, behind):  # many clients write KEYS first
            has_key = record.count(KEYS_NAME, behind + begin) == 1
        else:
            has_key = record.startswith(beginning[:begin], behind) and has_key_for_sure(record, behind + begin, text)
        if not has_key:
            return None
        if body_length and phy < own_from:
            bodies.append(view[at + HEAD_SIZE : at + behind])
            sums += _crc_at(record)
        found.append(record)
        if len(found) >= limit:
            break
    # All checksums in one call: that costs less than one call for each body.
    is_whole = not sums or [value & _CRC_BITS for value in crc32_of_each(bodies)] == sums
    found.reverse()
    return (found, most - left) if is_whole else None
