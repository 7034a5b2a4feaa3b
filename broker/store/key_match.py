"""Which records have a key, by their bytes: nothing of them is decoded but a few numbers.

The usual record only: sent over IPv4, its key the whole of UNIQ_KEY or KEYS, in memory. Others are left to query.py.
"""

import struct
from functools import lru_cache
from time import monotonic
from typing import Any, Final

from broker.store.mapped_file import MappedFile
from broker.store.mapped_file_queue import MappedFileQueue
from broker.store.warm_ranges import CHUNK
from protocol.hashing import crc32_of_each
from protocol.record import MAGIC_V1, MAGIC_V2, OVERHEAD_V1
from protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6
from protocol.topic_rules import MAX_RETRY_TOPIC_LENGTH, MAX_TOPIC_LENGTH

HEAD_SIZE: Final = 88
"""Bytes in front of the body, with IPv4 hosts."""
_head_at = struct.Struct(">III16xQI16xQ20xI").unpack_from
"""Size, magic, CRC of the body, place in the log, sysFlag, store time and body length."""
_UNIQUE: Final = b"UNIQ_KEY\x01"
_KEYS: Final = b"KEYS\x01"
_END: Final = b"\x02"
_END_BYTE: Final = 2
_V6: Final = BORN_HOST_V6 | STORE_HOST_V6
_LAST_HEAD: Final = CHUNK - OVERHEAD_V1
"""Where the head of a record has to begin in a chunk to lie in it as a whole."""
_CRC_BITS: Final = 0x7FFFFFFF
_LONGEST: Final = 0xFFFF
"""Bytes of properties that the number in front of them can tell."""

Matches = tuple[list[memoryview], list[MappedFile]]
"""Views of records, the oldest first, and the files that they belong to: to be held for as long as they are kept."""


def is_usual(topic: str, key: str) -> bool:
    """True for what ``matches`` knows: a topic that can be one, and one printable ASCII word, not a tag's."""
    return (
        len(topic) <= MAX_RETRY_TOPIC_LENGTH
        and key.isascii()
        and key.isprintable()
        and bool(key)
        and " " not in key
        and not key.startswith("T#")
    )


@lru_cache(maxsize=1024)
def _topic_part(topic: str) -> tuple[int, bytes]:
    """Magic and topic as they stand in a record."""
    name = topic.encode("utf-8", "replace")
    wide = len(name) > MAX_TOPIC_LENGTH
    return MAGIC_V2 if wide else MAGIC_V1, len(name).to_bytes(2 if wide else 1, "big") + name


def matches(  # noqa: PLR0912, PLR0915 - for each candidate of each query: a call more is a cost for all
    log: MappedFileQueue, offsets: list[int], topic: str, key: str, limit: int, times: tuple[int, int], most: int
) -> Matches | None:
    """Up to ``limit`` of the records at ``offsets``, newest first, that have the key and were stored in ``times`` (ms).

    None where a candidate has to be looked at in another way: it is unusual, damaged, or not known to be in memory.
    None as well for more than ``most`` bytes. Bodies that this process has put were whole when they came in: their sums
    are not made again.
    """
    file = log.find(offsets[0]) if offsets else None
    if file is None or not is_usual(topic, key):
        return None
    magic, front = _topic_part(topic)
    begin = len(front) + 2
    fronts: dict[int, bytes] = {}
    first, last = times
    word = key.encode()
    keys, unique = _KEYS + word + _END, _UNIQUE + word + _END
    covers, warm_until, now = log.warm.covers, log.warm.until, monotonic()
    own_from = log.own_from
    views: list[memoryview] = []
    bodies: list[memoryview] = []
    sums: list[int] = []
    files = [file]
    start, stop, hot_from, view = file.start, file.wrote, file.hot_from, file.view
    raw: Any = view.obj
    before = file.end
    for phy in offsets:
        at = phy - start
        if at < 0:
            file = log.find(phy)
            if file is None:
                return None
            files.append(file)
            start, stop, hot_from, view = file.start, file.wrote, file.hot_from, file.view
            raw = view.obj
            at = phy - start
        if phy >= before or at + OVERHEAD_V1 > stop:
            return None
        before = phy
        is_hot = at >= hot_from
        if (
            not is_hot
            and (at % CHUNK > _LAST_HEAD or warm_until.get(phy - at % CHUNK, 0.0) < now)
            and not covers(file, at, at + OVERHEAD_V1)
        ):
            return None
        size, own_magic, crc, place, sys_flag, store_time, body_length = _head_at(view, at)
        end = at + size
        if place != phy or own_magic != magic or sys_flag & _V6 or end > stop:
            return None
        if not first <= store_time <= last:
            continue
        if not is_hot and at % CHUNK + size > CHUNK and not covers(file, at, end):
            return None
        body_end = at + HEAD_SIZE + body_length
        text = raw[body_end:end]
        length = len(text)
        if length not in fronts:
            if not 0 <= length - begin <= _LONGEST:
                return None
            fronts[length] = front + (length - begin).to_bytes(2, "big") + keys
        if text.startswith(fronts[length]):  # many clients write KEYS first
            if text.count(_KEYS, begin) != 1:
                return None
        elif not text.startswith(fronts[length][:begin]) or not _has_key(text, begin, unique, keys, word):
            return None
        if body_length and phy < own_from:
            bodies.append(view[body_end - body_length : body_end])
            sums.append(crc)
        most -= size
        if most < 0:
            return None
        views.append(view[at:end])
        if len(views) >= limit:
            break
    if sums and [value & _CRC_BITS for value in crc32_of_each(bodies)] != sums:
        return None
    views.reverse()
    return views, files


def _has_key(text: bytes, begin: int, unique: bytes, keys: bytes, word: bytes) -> bool:
    """True where the properties from ``begin`` on have the key for sure; of two with one name, the last counts."""
    name = _KEYS
    found = text.find(keys, begin)
    if found < 0:
        name = _UNIQUE
        found = text.find(unique, begin)
    if found < 0:
        name = _KEYS
        found = text.find(_KEYS, begin)
        if found < 0:
            return False
        value_at = found + len(_KEYS)
        end = text.find(_END, value_at)
        if word not in text[value_at : end if end >= 0 else len(text)].split(b" "):
            return False
    return (found == begin or text[found - 1] == _END_BYTE) and text.count(name, begin) == 1
