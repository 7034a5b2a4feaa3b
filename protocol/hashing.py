"""Hashes and checksums. Each is one small function, so that a native version can take its place.

The record checksum is CRC-32 as in Ethernet and zip, cut to 31 bits. crcmod holds its definition; what runs is zlib's
(or isal's where it is installed), and a test holds them together.
"""

import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final

_crc32: Callable[[Any], int]
try:
    from isal import isal_zlib

    _crc32 = isal_zlib.crc32
except ImportError:  # isal is optional: equal results, about a quarter of the time
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


_kept_hash = lru_cache(maxsize=8192)(string_hash)
_LONGEST_TAG_KEPT: Final = 128
"""Hashes of longer tags are not kept: nobody has many messages with such a tag, but they could fill the memory."""


def tags_code(tags: str) -> int:
    """The consume queue's code of a tag: its hash; 0 for no tag."""
    return _kept_hash(tags) if len(tags) <= _LONGEST_TAG_KEPT else string_hash(tags)


_LONGEST_KEPT: Final = 255
"""Longer topics are none: they could only fill the memory."""


@lru_cache(maxsize=4096)
def hash_in_front(topic: str) -> int:
    """What a topic and the ``#`` behind it give to the hash of ``topic#key``: their String.hashCode, unsigned."""
    return string_hash(topic + "#") & 0xFFFFFFFF


def key_hash(topic: str, key: str) -> int:
    """The index's hash of ``topic#key``: absolute value, 0 where that does not fit (IndexFile.indexKeyHashMethod)."""
    if key.isascii() and len(topic) <= _LONGEST_KEPT:
        value = hash_in_front(topic)
        for unit in key.encode("ascii"):
            value = (31 * value + unit) & 0xFFFFFFFF
        value = abs(value - 0x100000000 if value & 0x80000000 else value)
    else:
        value = abs(string_hash(f"{topic}#{key}"))
    return value if value <= 0x7FFFFFFF else 0


def crc32(data: Any) -> int:
    """Checksum of a body as records carry it: CRC-32 of the stored bytes, lower 31 bits; 0 for no bytes."""
    return _crc32(data) & 0x7FFFFFFF


def crc32_of_each(pieces: Iterable[Any]) -> list[int]:
    """The checksum of each piece with all its 32 bits: for who has many, and takes the upper one off all at once."""
    return list(map(_crc32, pieces))


def reference_crc32() -> Callable[[bytes], int]:
    """The same checksum by its definition in crcmod: what ``crc32`` is held against."""
    import crcmod  # noqa: PLC0415 - only a test asks for the definition

    function: Callable[[bytes], int] = crcmod.mkCrcFun(CRC32_POLYNOMIAL, initCrc=CRC32_INITIAL, xorOut=CRC32_XOR_OUT)
    return lambda data: function(data) & 0x7FFFFFFF
