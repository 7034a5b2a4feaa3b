"""The bits of groups in RocketMQ's bloom filters: the golden values are from Apache's rocketmq-filter 5.5.0."""

import hashlib

import pytest

from trimq.protocol.bloom_filter import bit_positions, bloom_filter_data

GOLDEN = {
    "": [0, 0, 0],
    "a": [94, 99, 7],
    "G#T": [24, 26, 83],
    "abcdefghijklmno": [44, 98, 14],
    "abcdefghijklmnop": [105, 86, 76],
    "abcdefghijklmnopq": [105, 53, 43],
    "grün#Zahlungen": [48, 28, 38],
    "日本#話題": [91, 54, 94],
    "g" * 255 + "#" + "t" * 127: [84, 21, 73],
}
ALL = "61a6db35920e9189b24131cb28d6e9f851279d918d3d3f77abd586fc574dffed"
"""SHA-256 of the positions of 20,000 texts of 0 to 96 characters, a line for each as Java's Arrays.toString has it."""


@pytest.mark.parametrize("text", GOLDEN)
def test_the_bits_are_apache_s(text: str) -> None:
    assert bit_positions(text) == GOLDEN[text]


def test_the_bits_of_many_texts() -> None:
    lines = (
        f"{bit_positions(''.join(chr(33 + (number * 31 + at * 17) % 90) for at in range(number % 97)))}\n"
        for number in range(20_000)
    )
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == ALL


def test_the_element_is_group_and_topic() -> None:
    assert bloom_filter_data("billing", "Orders") == {"bitNum": 112, "bitPos": [29, 8, 99]}
