"""Whether a record has a key, by its bytes: nothing of it is decoded but a few numbers.

The usual record only: sent over IPv4, its key the whole of UNIQ_KEY or KEYS. Others are left to query.py.
"""

import struct
from functools import lru_cache
from typing import Final

from protocol.hashing import crc32
from protocol.record import MAGIC_V1, MAGIC_V2
from protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6
from protocol.topic_rules import MAX_RETRY_TOPIC_LENGTH, MAX_TOPIC_LENGTH

HEAD_SIZE: Final = 88
"""Bytes in front of the body, with IPv4 hosts."""
_HEAD: Final = struct.Struct(">III16xQI16xQ20xI").unpack_from
"""Size, magic, CRC of the body, place in the log, sysFlag, store time and body length."""
_UNIQUE: Final = b"UNIQ_KEY\x01"
_KEYS: Final = b"KEYS\x01"
_END: Final = b"\x02"
_END_BYTE: Final = 2
_V6: Final = BORN_HOST_V6 | STORE_HOST_V6

UNUSUAL: Final = -1


def is_usual(topic: str, key: str) -> bool:
    """True for what KeyMatcher knows: a topic that can be one, and one printable ASCII word, not a tag's."""
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


class KeyMatcher:
    """What the bytes of a record with a usual ``key`` in ``topic``, stored in ``times`` (ms, both ends), look like."""

    __slots__ = ("_begin", "_end", "_keys", "_magic", "_topic", "_unique")

    def __init__(self, topic: str, key: str, times: tuple[int, int]) -> None:
        self._magic, self._topic = _topic_part(topic)
        self._begin, self._end = times
        value = key.encode() + _END
        self._unique = _UNIQUE + value
        self._keys = _KEYS + value

    def match(self, view: memoryview, place: int, at: int, stop: int) -> int:
        """The size of the record at ``at`` if it has the key and was stored in time; 0 if not, or if damaged.

        ``stop`` is where the file's records end; from ``at`` to there are more than HEAD_SIZE bytes. UNUSUAL where it
        has to be looked at in another way.
        """
        size: int
        size, magic, crc, own_place, sys_flag, store_time, body_length = _HEAD(view, at)
        end = at + size
        if magic != self._magic or own_place != place or sys_flag & _V6 or end > stop:
            return UNUSUAL
        if not self._begin <= store_time <= self._end:
            return 0
        body_at = at + HEAD_SIZE
        body_end = body_at + body_length
        text = bytes(view[body_end:end])
        topic = self._topic
        begin = len(topic) + 2
        if (
            not text.startswith(topic)
            or len(text) < begin
            or text[begin - 2] << 8 | text[begin - 1] != len(text) - begin
        ):
            return UNUSUAL
        name = _KEYS
        found = text.find(self._keys, begin)
        if found < 0:
            name = _UNIQUE
            found = text.find(self._unique, begin)
        if found < 0 or (found > begin and text[found - 1] != _END_BYTE):
            return UNUSUAL
        if text.count(name, begin) != 1:  # of two with one name, the last counts
            return UNUSUAL
        if body_length and crc32(view[body_at:body_end]) != crc:
            return 0
        return size
