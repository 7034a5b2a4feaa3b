"""Hashes and checksums. Each is one small function, so that a native version can replace it.

The record checksum is CRC-32 as in Ethernet and zip, reduced to 31 bits. It is computed by zlib, or by isal if that is
installed; a test compares it with the definition in crcmod.
"""

import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final

_crc32: Callable[..., int]
try:
    from isal import isal_zlib

    _crc32 = isal_zlib.crc32
except ImportError:  # isal is optional: the same results in about a quarter of the time
    _crc32 = zlib.crc32

CRC32_POLYNOMIAL: Final = 0x104C11DB7
CRC32_INITIAL: Final = 0
CRC32_XOR_OUT: Final = 0xFFFFFFFF


def string_hash(text: str) -> int:
    """Java's String.hashCode: h = 31 h + c over UTF-16 code units, as a signed 32-bit number."""
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (31 * value + unit) & 0xFFFFFFFF
    else:
        raw = text.encode("utf-16-be", "surrogatepass")
        for at in range(0, len(raw), 2):
            value = (31 * value + (raw[at] << 8 | raw[at + 1])) & 0xFFFFFFFF
    return value - 0x100000000 if value & 0x80000000 else value


_cached_hash = lru_cache(maxsize=8192)(string_hash)
_LONGEST_CACHED_TAG: Final = 128
"""Hashes of longer tags are not cached: such tags are rare, and a cache of them could take much memory."""


def tags_code(tags: str) -> int:
    """The consume queue's code of a tag: its hash; 0 for no tag."""
    return _cached_hash(tags) if len(tags) <= _LONGEST_CACHED_TAG else string_hash(tags)


_LONGEST_CACHED_TOPIC: Final = 255
"""No valid topic is longer; caching longer texts would only take memory."""


@lru_cache(maxsize=4096)
def hash_in_front(topic: str) -> int:
    """The String.hashCode of ``topic#``, unsigned: the state from which the hash of ``topic#key`` continues."""
    return string_hash(topic + "#") & 0xFFFFFFFF


def key_hash(topic: str, key: str) -> int:
    """The index's hash of ``topic#key``: the absolute value, 0 if that overflows (IndexFile.indexKeyHashMethod)."""
    if key.isascii() and len(topic) <= _LONGEST_CACHED_TOPIC:
        value = hash_in_front(topic)
        for unit in key.encode("ascii"):
            value = (31 * value + unit) & 0xFFFFFFFF
        value = abs(value - 0x100000000 if value & 0x80000000 else value)
    else:
        value = abs(string_hash(f"{topic}#{key}"))
    return value if value <= 0x7FFFFFFF else 0


def checksum(data: Any, before: int = 0) -> int:
    """The CRC-32 of bytes, all 32 bits; ``before`` is that of the bytes in front of them."""
    return _crc32(data, before)


def crc32(data: Any) -> int:
    """Checksum of a body in a record: the lower 31 bits of the CRC-32 of the stored bytes; 0 for an empty body."""
    return _crc32(data) & 0x7FFFFFFF


def crc32_of_each(pieces: Iterable[Any]) -> list[int]:
    """The full 32-bit CRC of each piece, for callers with many pieces, who mask the upper bit themselves."""
    return list(map(_crc32, pieces))


def reference_crc32() -> Callable[[bytes], int]:
    """The same checksum by its definition in crcmod, to test ``crc32``."""
    import crcmod  # noqa: PLC0415 - only a test uses the definition

    function: Callable[[bytes], int] = crcmod.mkCrcFun(CRC32_POLYNOMIAL, initCrc=CRC32_INITIAL, xorOut=CRC32_XOR_OUT)
    return lambda data: function(data) & 0x7FFFFFFF
