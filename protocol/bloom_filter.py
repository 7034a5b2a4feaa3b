"""The bits that a consumer group has in RocketMQ's bloom filters, as consumerFilter.json names them.

RocketMQ writes such filters into the consume queue extension. A broker that reads consumerFilter.json ignores all of
its entries if one has no bits, or bits of a filter of another size. The size follows from expectConsumerNumUseFilter
(32) and maxErrorRateOfBloomFilter (20 %).

Source: RocketMQ's BloomFilter, with Guava's murmur3_128.
"""

from typing import Any, Final

BITS: Final = 112
_HASHES: Final = 3
_WORD: Final = (1 << 64) - 1
_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F


def bloom_filter_data(group: str, topic: str) -> dict[str, Any]:
    """The ``bloomFilterData`` of a group's expression for a topic."""
    return {"bitNum": BITS, "bitPos": bit_positions(f"{group}#{topic}")}


def bit_positions(text: str) -> list[int]:
    """The bits of a text, which need not be distinct."""
    value = murmur3(text.encode("utf-8", "replace"))
    low, high = value & 0xFFFFFFFF, value >> 32
    found = []
    for number in range(1, _HASHES + 1):
        combined = (low + number * high) & 0xFFFFFFFF
        if combined & 0x80000000:  # negative in Java, which then takes the complement
            combined ^= 0xFFFFFFFF
        found.append(combined % BITS)
    return found


def murmur3(data: bytes) -> int:
    """The first half of MurmurHash3_x64_128 with the seed 0."""
    one = two = 0
    length = len(data)
    whole = length & ~15
    for at in range(0, whole, 16):
        one ^= _mixed_first(data[at : at + 8])
        one = ((_rotated(one, 27) + two) * 5 + 0x52DCE729) & _WORD
        two ^= _mixed_second(data[at + 8 : at + 16])
        two = ((_rotated(two, 31) + one) * 5 + 0x38495AB5) & _WORD
    one ^= _mixed_first(data[whole : whole + 8]) ^ length
    two ^= _mixed_second(data[whole + 8 :]) ^ length
    one = (one + two) & _WORD
    two = (two + one) & _WORD
    return (_final(one) + _final(two)) & _WORD


def _mixed_first(part: bytes) -> int:
    return _rotated(int.from_bytes(part, "little") * _C1 & _WORD, 31) * _C2 & _WORD


def _mixed_second(part: bytes) -> int:
    return _rotated(int.from_bytes(part, "little") * _C2 & _WORD, 33) * _C1 & _WORD


def _rotated(word: int, bits: int) -> int:
    word &= _WORD
    return (word << bits | word >> 64 - bits) & _WORD


def _final(word: int) -> int:
    word ^= word >> 33
    word = word * 0xFF51AFD7ED558CCD & _WORD
    word ^= word >> 33
    word = word * 0xC4CEB9FE1A85EC53 & _WORD
    return word ^ word >> 33
