"""Micro-benchmarks of single functions: those that a native version could replace, and the SQL92 filter.

python -m bench.micro_benchmarks [--json FILE]. Exits with 1 if a function is slower than its floor.
"""

import argparse
import json
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

from bench.frames import BODY, send
from trimq.broker.filters.sql import SqlFilter
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.page_cache import PageCache
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.read.match_properties import matched
from trimq.broker.store.read.record_look import place_of
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
PULLED = 32
"""Messages of a pull."""


def filtered_pull(expression: Expression, properties: bytes) -> Callable[[], object]:
    """What a pull with an SQL92 filter does with ``PULLED`` records of 1 KiB, all of which it returns.

    Each record is checked, its properties are found in it, and the filter is evaluated over them.
    """
    place, host = place_of("Filtered", 0), record.pack_host("127.0.0.1", 10911)
    size = record.record_size(0, len(BODY), len("Filtered"), len(properties))
    with tempfile.TemporaryDirectory(prefix="trimq-micro-") as directory:
        # The map stays when the file is gone.
        file = MappedFile.create(RealDisk(), str(Path(directory) / "0"), 0, 1 << 20, 1 << 20)
    units = bytearray()
    for number in range(PULLED):
        at = number * size
        file.view[at : at + size] = record.encode_record(
            queue_id=0,
            queue_offset=number,
            physical_offset=at,
            born_timestamp=0,
            born_host=host,
            store_timestamp=0,
            store_host=host,
            body=BODY,
            topic=b"Filtered",
            properties=properties,
        )
        units += UNIT.pack(at, size, 0)
    file.wrote = PULLED * size
    cache, accept = PageCache(), SqlFilter("", expression.matches_text, expression.terms)

    def pull() -> int:
        found = matched(file, cache, units, 1 << 20, PULLED, 0, place, accept)
        assert found is not None
        return found[0][1]

    assert pull() == PULLED
    return pull


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
        "SQL92 filter, 3 terms, 8 properties": (filtered_pull(Expression(condition), filtered), PULLED),
        "SQL92 filter compiled": (lambda: Expression(condition), 1),
        "index hash of a key, in a batch": (lambda: batch.key_hashes(texts), 2048),
    }


def missed(microseconds: dict[str, float]) -> list[str]:
    """The functions that are slower than their floor."""
    return [name for name, value in microseconds.items() if 1e6 / value < FLOORS.get(name, 0)]


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
        print(f"{name:38s} {results[name]:7.3f} us{mark}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if slower := missed(results):
        sys.exit(f"slower than the floor: {', '.join(slower)}")


if __name__ == "__main__":
    main()
