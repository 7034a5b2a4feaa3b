"""The fast path for texts with a uniform layout gives the same columns as the general path, or is not taken."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trimq.pipeline.store.columns import Rows
from trimq.pipeline.store.gather import as_text, gather, matrix_as_text
from trimq.pipeline.store.heads import read_heads
from trimq.pipeline.store.scan import chain
from trimq.pipeline.store.uniform_texts import uniform_texts
from trimq.protocol.record import encode_record, pack_host

pytestmark = pytest.mark.one_pyspark

COLUMNS = ("topic", "tags", "keys", "uniqId", "properties")
HOST = pack_host("127.0.0.1", 10911)


def rows_of(texts: list[bytes], topics: list[bytes], *, general: bool = False) -> Rows:
    """Rows of records with these properties and bodies of different lengths."""
    log = b""
    for number, (text, topic) in enumerate(zip(texts, topics, strict=True)):
        log += encode_record(
            topic=topic,
            body=b"." * (number % 7),
            properties=text,
            queue_id=0,
            queue_offset=number,
            physical_offset=len(log),
            born_timestamp=1,
            born_host=HOST,
            store_timestamp=2,
            store_host=HOST,
        )
    at, end = chain(memoryview(log), 0, len(log))
    assert end == len(log)
    rows = Rows(memoryview(log), read_heads(np.frombuffer(log, np.uint8), at, at), None)
    if general:
        vars(rows)["_uniform"] = None
    return rows


def columns(rows: Rows) -> list[pa.Array]:
    arrays = [rows.column(name) for name in COLUMNS]
    for array in arrays:
        array.validate(full=True)
    return arrays


@given(
    st.lists(st.text("AKT\x01\x02 é", max_size=12).map(str.encode), min_size=1, max_size=3),
    st.lists(st.sampled_from([b"Orders", b"Others", b"\xff\xfe.."]), min_size=1, max_size=2),
    st.sampled_from(
        [b"", b"UNIQ_KEY\x01%04d\x02", b"KEYS\x01%04d\x02", b"TAGS\x01a %02d", b"KEYS\x01 %03d\x02KEYS\x01b\x02"]
    ),
    st.integers(16, 60),
)
@example([b"\x01v\x02n\x01\x02A\x01\x02"], [b"T"], b"", 16)
@example([b"A\x01b\x01c\x02A\x01d", b"A\x01b\x01c\x02B\x01d"], [b"T"], b"TAGS\x01%04d\x02", 20)
@example([b"KEYS\x01\xff\xfe\x02"], [b"T"], b"UNIQ_KEY\x01%04d\x02", 40)
def test_it_gives_what_the_general_path_gives(forms: list[bytes], topics: list[bytes], end: bytes, count: int) -> None:
    texts = [forms[number % len(forms)] + (end % number if b"%" in end else end) for number in range(count)]
    names = [topics[number % len(topics)] for number in range(count)]
    assert columns(rows_of(texts, names)) == columns(rows_of(texts, names, general=True))


def is_uniform(texts: list[bytes], topics: list[bytes] | None = None) -> bool:
    rows = rows_of(texts, topics or [b"Orders"] * len(texts))
    return uniform_texts(rows.view, rows.heads) is not None


def test_it_is_taken_where_records_are_laid_out_alike() -> None:
    usual = [b"UNIQ_KEY\x01%032d\x02TAGS\x01t%d\x02" % (number, number % 3) for number in range(50)]
    assert is_uniform(usual)
    assert is_uniform(usual, [b"Topic%02d" % number for number in range(50)])
    assert is_uniform([b""] * 50)


CHANGES: list[Callable[[bytes], bytes]] = [
    lambda text: text + b"A\x01b\x02",
    lambda text: text.replace(b"TAGS", b"TAGZ"),
    lambda text: text.replace(b"TAGS\x01t", b"TAG\x01tt"),
    lambda text: text.replace(b"00\x02TAGS", b"0\x02\x02TAGS"),
    lambda text: text.replace(b"\x02TAGS", b"\x01TAGS"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_not_taken_where_one_record_differs(change: Callable[[bytes], bytes]) -> None:
    texts = [b"UNIQ_KEY\x01%032d\x02TAGS\x01t0\x02" % (100 * number) for number in range(50)]
    for which in (0, 17, 49):
        changed = [*texts[:which], change(texts[which]), *texts[which + 1 :]]
        assert changed[which] != texts[which]
        assert not is_uniform(changed)
        names = [b"Orders"] * 50
        assert columns(rows_of(changed, names)) == columns(rows_of(changed, names, general=True))


@pytest.mark.parametrize("length", [0, 1, 1024, None])
def test_ranges_of_one_length_and_of_any(length: int | None) -> None:
    chance = random.Random(1)
    window = chance.randbytes(100_000)
    begins, ends, at = [], [], 3
    while at < 90_000:
        size = chance.randrange(3000) if length is None else length
        begins.append(at)
        ends.append(at + size)
        at += size + chance.randrange(1, 900)
    found = gather(window, np.array(begins), np.array(ends))
    found.validate(full=True)
    assert found.to_pylist() == [window[begin:end] for begin, end in zip(begins, ends, strict=True)]


def test_texts_out_of_a_matrix() -> None:
    matrix = np.frombuffer("aäbccÿ".encode() * 4, dtype=np.uint8).reshape(4, -1)
    assert matrix_as_text(matrix).to_pylist() == ["aäbccÿ"] * 4
    assert matrix_as_text(matrix, np.array([1, 2, 3, 2])).to_pylist() == ["a", "ä", "bcc", "ÿ"] * 4
    assert matrix_as_text(matrix[:, 1:2]).to_pylist() == ["�"] * 4
    assert as_text(pa.array([b"a", None, b"\xff"], pa.binary())).to_pylist() == ["a", None, "�"]
    assert as_text(pa.array([b"a", None, b"c"], pa.binary()).slice(1)).to_pylist() == [None, "c"]
