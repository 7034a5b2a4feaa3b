"""Micro-benchmarks of single functions: those that a native version could replace, and the SQL92 filter.

python -m bench.micro_benchmarks [--json FILE].
"""

import argparse
import json
import timeit
from collections.abc import Callable
from pathlib import Path

from bench.frames import BODY, send
from trimq.protocol import record
from trimq.protocol.batch import decode_batch, encode_batch
from trimq.protocol.frame import decode
from trimq.protocol.hashing import crc32, string_hash
from trimq.protocol.headers.send import SendMessageRequestHeaderV2
from trimq.protocol.index_batch import make_batch
from trimq.protocol.property_text import pairs
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.sql92 import Expression

REPEATS = 5
FLOORS = {"SQL92 filter, 3 terms, 8 properties": 200_000}
"""Calls a second that are required."""


def micro_benchmarks() -> dict[str, tuple[Callable[[], object], int]]:
    """By name: a call, and the units of work that it does."""
    frame = memoryview(send(7)[4:])
    text = "KEYS\x01k7\x02UNIQ_KEY\x017F0000011F9018B4AAC2000000000007\x02TAGS\x01TagA\x02"
    body = encode_batch([(0, BODY, text.encode())] * 32)
    pack = record.layout(0).pack
    host = record.pack_host("127.0.0.1", 10911)
    texts = [f"Requests#7F0000011F9018B4{number:016X}" for number in range(2048)]
    batch = make_batch()
    large = BODY * 64
    filtered = (
        b"UNIQ_KEY\x017F0000011F9018B4AAC2000000000007\x02KEYS\x01order-77\x02TAGS\x01TagA\x02WAIT\x01true\x02"
        b"region\x01eu-central\x02price\x0142\x02customer\x01c-123456\x02trace\x01a1b2c3d4e5f6\x02"
    )
    condition = "region = 'eu-central' AND price BETWEEN 10 AND 100 AND TAGS IN ('TagA', 'TagB')"
    matches = Expression(condition).matches_text
    return {
        "envelope of a frame": (lambda: decode(frame), 1),
        "send header (with its frame)": (lambda: decode(frame).header(SendMessageRequestHeaderV2), 1),
        "properties to names and values": (lambda: dict(pairs(text)), 1),
        "message of a batch taken out": (lambda: decode_batch(body), 32),
        "CRC of 1 KiB": (lambda: crc32(BODY), 1),
        "CRC of 64 KiB": (lambda: crc32(large), 1),
        "fixed part of a record": (lambda: pack(1, 2, 3, 4, 5, 6, 7, 0, 9, host, 10, host, 0, 0, 11), 1),
        "queue unit": (lambda: UNIT.pack(1, 2, 3), 1),
        "tag hash of 16 letters, not cached": (lambda: string_hash("ABCDEFGHIJKLMNOP"), 1),
        "SQL92 filter, 3 terms, 8 properties": (lambda: matches(filtered), 1),
        "SQL92 filter compiled": (lambda: Expression(condition), 1),
        "index hash of a key, in a batch": (lambda: batch.key_hashes(texts), 2048),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name, (call, units) in micro_benchmarks().items():
        number = max(20, 20_000 // units)
        best = min(timeit.repeat(call, number=number, repeat=REPEATS))
        results[name] = best / number / units * 1e6
        floor = FLOORS.get(name)
        mark = "" if floor is None else f"   {1e6 / results[name]:,.0f} a second, floor {floor:,}"
        print(f"{name:38s} {results[name]:7.3f} us{mark}{'  slower' if floor and 1e6 / results[name] < floor else ''}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
