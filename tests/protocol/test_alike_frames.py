"""Frames laid out alike: what a place may hold, and what their numbers are."""

import struct
import zlib
from itertools import starmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.alike_frames import MOST_DIGITS, FrameLayout, Kind, Place
from trimq.protocol.alike_rows import Replies, Rows
from trimq.protocol.record import encode_record

EXAMPLE = b"{n:123,m:7,w:abc,v:a-b,p:a b}tail"
NUMBERS = [slice(3, 6), slice(9, 10)]
TEXTS = [Place(slice(13, 16), Kind.WORD), Place(slice(19, 22), Kind.VISIBLE), Place(slice(25, 28), Kind.PRINTABLE)]
HEAD_END = len(EXAMPLE) - 4


def layout() -> FrameLayout:
    return FrameLayout(EXAMPLE, HEAD_END, NUMBERS, TEXTS)


def matrix(*rows: bytes) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), -1)


def with_place(place: slice, text: bytes) -> bytes:
    assert place.stop - place.start == len(text)
    return EXAMPLE[: place.start] + text + EXAMPLE[place.stop :]


def is_alike(row: bytes) -> bool:
    return layout().columns(matrix(EXAMPLE, row, EXAMPLE)) is not None


def test_columns_and_numbers() -> None:
    other = with_place(NUMBERS[0], b"904")[: NUMBERS[1].start] + b"0" + EXAMPLE[NUMBERS[1].stop :]
    columns = layout().columns(matrix(EXAMPLE, other))
    assert columns is not None
    assert columns.tobytes() == b"1237abca-ba b" + b"9040abca-ba b"
    assert layout().numbers(columns).tolist() == [[123, 7], [904, 0]]


@pytest.mark.parametrize(
    ("place", "text", "alike"),
    [
        (NUMBERS[0], b"999", True),
        (NUMBERS[0], b"012", False),
        (NUMBERS[0], b"-12", False),
        (NUMBERS[0], b"1e2", False),
        (NUMBERS[0], b"1 2", False),
        (NUMBERS[1], b"0", True),
        (TEXTS[0].columns, b"Z09", True),
        (TEXTS[0].columns, b"a_b", False),
        (TEXTS[0].columns, b"a b", False),
        (TEXTS[0].columns, "aä".encode(), False),
        (TEXTS[1].columns, b"_/~", True),
        (TEXTS[1].columns, b"a b", False),
        (TEXTS[1].columns, b'a"b', False),
        (TEXTS[1].columns, b"a\\b", False),
        (TEXTS[1].columns, b"a\x01b", False),
        (TEXTS[1].columns, b"a\x7fb", False),
        (TEXTS[2].columns, b" , ", True),
        (TEXTS[2].columns, b'" "', False),
        (TEXTS[2].columns, b" \n ", False),
        (slice(0, 1), b"[", False),
        (slice(HEAD_END - 1, HEAD_END), b"]", False),
        (slice(HEAD_END, HEAD_END + 4), b"\x00\xff\x01\x02", True),
    ],
)
def test_what_a_place_may_hold(place: slice, text: bytes, alike: bool) -> None:
    assert is_alike(with_place(place, text)) is alike


@given(st.lists(st.tuples(st.integers(100, 999), st.integers(0, 9)), min_size=1, max_size=40))
def test_numbers_are_those_of_the_text(numbers: list[tuple[int, int]]) -> None:
    rows = [EXAMPLE[:3] + b"%d" % first + EXAMPLE[6:9] + b"%d" % second + EXAMPLE[10:] for first, second in numbers]
    columns = layout().columns(matrix(*rows))
    assert columns is not None
    assert layout().numbers(columns).tolist() == [list(pair) for pair in numbers]


def test_the_longest_number() -> None:
    text = b"9" * MOST_DIGITS
    assert FrameLayout(text, MOST_DIGITS, [slice(0, MOST_DIGITS)], []).numbers(matrix(text)).tolist() == [[int(text)]]
    with pytest.raises(ValueError, match="digits"):
        FrameLayout(text + b"9", MOST_DIGITS + 1, [slice(0, MOST_DIGITS + 1)], [])


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, (1 << 31) - 1)), min_size=1, max_size=20), st.data())
def test_records_units_and_replies_are_those_of_each(messages: list[tuple[int, int]], data: st.DataObject) -> None:
    """Against the reference encodings, one by one."""
    count = len(messages)
    start = data.draw(st.integers(1000, 9000 - count))
    physical = data.draw(st.integers(0, 1 << 60))
    fields = {"topic": b"T", "store_host": b"hoststor", "flag": 5, "sys_flag": 1, "reconsume_times": 2}
    template = b"<%016X|%d|%d|%b|%d>"

    def record(at: int, queue_id: int, born: int, queue_offset: int, offset: int) -> bytes:
        return encode_record(
            **fields,  # type: ignore[arg-type]
            body=b"body%02d" % at,
            properties=b"A\x01%02d\x02" % at,
            queue_id=queue_id,
            queue_offset=queue_offset,
            physical_offset=offset,
            born_timestamp=born,
            born_host=b"born%04d" % at,
            store_timestamp=77,
        )

    example = record(0, 0, 0, 0, 0)
    size = len(example)
    rows = Rows(example, 20)
    source = matrix(*[b"body%02d" % at + b"%02d" % at for at in range(count)])
    body_at, text_at = example.index(b"body00"), example.index(b"A\x0100") + 2
    placed = rows.fill(
        source,
        [(slice(0, 6), slice(body_at, body_at + 6)), (slice(6, 8), slice(text_at, text_at + 2))],
        [zlib.crc32(b"body%02d" % at) for at in range(count)],
        np.array([queue_id for queue_id, _ in messages]),
        np.array([born for _, born in messages]),
        b"".join(b"born%04d" % at for at in range(count)),
    )
    counts: dict[int, int] = {}
    expected, replies = [], []
    units: dict[int, bytes] = {}
    for at, (queue_id, born) in enumerate(messages):
        queue_offset = start + counts.get(queue_id, 0)
        counts[queue_id] = counts.get(queue_id, 0) + 1
        offset = physical + at * size
        expected.append(record(at, queue_id, born, queue_offset, offset))
        units[queue_id] = units.get(queue_id, b"") + struct.pack(">qiq", offset, size, -3)
        text = template % (offset, queue_id % 10, queue_offset, b"u%02d" % at, 7)
        replies.append(struct.pack(">II", len(text) + 4, len(text)) + text)
    assert placed.queue_ids == sorted(counts)
    assert placed.counts == [counts[queue_id] for queue_id in sorted(counts)]
    assert bytes(placed.records([start] * len(counts), physical, 77)) == b"".join(expected)
    assert placed.units(-3) == b"".join(units[queue_id] for queue_id in sorted(counts))
    form = Replies(template, [1, 4, 3, 1], 20)
    ids, uniques, opaques = (
        matrix(*starmap(kind, ((at, queue_id) for at, (queue_id, _) in enumerate(messages))))
        for kind in (lambda _, q: b"%d" % (q % 10), lambda at, _: b"u%02d" % at, lambda *_: b"7")
    )
    assert form.joined(placed, ids, uniques, opaques) == b"".join(replies)
    assert form.size == len(replies[0])
