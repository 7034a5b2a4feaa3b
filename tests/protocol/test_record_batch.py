"""Batches of messages that are laid out alike give the records, ids and keys that any messages give."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol import record
from trimq.protocol.batch import BatchError, decode_batch, encode_batch, split_batch
from trimq.protocol.batch_layout import BatchLayouts
from trimq.protocol.record import pack_host
from trimq.protocol.record_batch import BatchHead, BatchMessages, ListedMessages
from trimq.protocol.record_batch_numpy import AlikeMessages

HOST = pack_host("127.0.0.1", 10911)
COUNT = 70


def head(**more: Any) -> BatchHead:
    shared = record.pack_shared(0, 1, HOST, 2, HOST, 3)
    fields = {"magic": record.MAGIC_V1, "queue_id": 3, "queue_offset": 1 << 40, "physical_offset": 1 << 41}
    return BatchHead(**(fields | {"shared": shared, "topic": b"\x05Topic"} | more))


def alike_messages(body: Any) -> AlikeMessages | None:
    found = BatchLayouts().find(body)
    return None if found is None else AlikeMessages(*found)


def alike(body: bytes) -> AlikeMessages:
    messages = alike_messages(memoryview(body))
    assert messages is not None
    return messages


@given(
    st.binary(max_size=40),
    st.lists(st.tuples(st.sampled_from(["UNIQ_KEY", "TAGS", "a"]), st.sampled_from(["x", "long" * 9])), max_size=4),
    st.booleans(),
    st.integers(-(1 << 31), (1 << 31) - 1),
)
def test_both_forms_make_the_same_records(
    body: bytes, properties: list[tuple[str, str]], is_open: bool, flag: int
) -> None:
    text = "".join(f"{name}\x01{value}{{at:03d}}\x02" for name, value in properties)
    text = text[:-1] if is_open else text
    bodies = [body[at % 7 :] + body[: at % 7] for at in range(COUNT)]
    encoded = encode_batch([(flag if at % 2 else 7, bodies[at], text.format(at=at).encode()) for at in range(COUNT)])
    forms: list[BatchMessages] = [ListedMessages(split_batch(encoded)), alike(encoded), alike(encoded).copied()]
    made = [form.records(head()) for form in forms]
    assert len({bytes(records) for records, _ in made}) == 1
    assert len({tuple(offsets) for _, offsets in made}) == 1
    assert [(form.longest, form.size, len(form), list(form.lengths())) for form in forms].count(
        (forms[0].longest, forms[0].size, COUNT, list(forms[0].lengths()))
    ) == len(forms)
    assert all(list(map(tuple, form.items())) == list(map(tuple, decode_batch(encoded))) for form in forms)
    records, offsets = made[1]
    for at, offset in enumerate(offsets):
        found = record.check_record(records, offset - (1 << 41), physical_offset=offset)
        assert found.state is record.RecordState.RECORD, found.why
        assert found.head is not None
        assert bytes(records[found.head.body_at : found.head.body_end]) == bodies[at]
        assert (found.head.queue_offset, found.head.queue_id) == ((1 << 40) + at, 3)


def test_columns_are_copies_and_records_are_new() -> None:
    """The receive buffer is overwritten as soon as the request has been served."""
    data = bytearray(encode_batch([(0, b"body", f"UNIQ_KEY\x01{at:04d}\x02".encode()) for at in range(COUNT)]))
    messages = alike_messages(memoryview(data))
    assert messages is not None
    column, kept = messages.layout.column(messages._rows, "UNIQ_KEY"), messages.copied()
    records, _ = messages.records(head())
    before = bytes(records)
    data[:] = bytes(len(data))
    assert column is not None
    assert column[3].tobytes() == b"0003"
    assert bytes(records) == before == bytes(kept.records(head())[0])


def batch_of(*last: bytes, text: bytes = b"TAGS\x01a\x02") -> bytes:
    """Messages that are alike but for the last ones."""
    return encode_batch([(0, b"body", text)] * COUNT + [(0, b"body", other) for other in last])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"short",
        encode_batch([(0, b"body", b"TAGS\x01a\x02")] * 3),
        batch_of(b"TAGS\x01ab\x02"),
        batch_of(b"TAGZ\x01a\x02"),
        batch_of(b"TAGS\x02a\x02"),
        batch_of(b"TAGS\x01\x02\x02"),
        batch_of(b"TAGS\x01\x00\x02"),
        batch_of("TAGS\x01ä".encode()),
        batch_of(text="TAGS\x01ä".encode()),
        encode_batch([(0, b"body", b"")] * COUNT + [(0, b"bod", b"")]),
        encode_batch([(0, b"body", b"ab")] * COUNT + [(0, b"bodyb", b"a")]),
        encode_batch([(0, b"x", b"p" * 5000)] * COUNT),
    ],
)
def test_what_is_not_alike_is_left_to_the_other_form(body: bytes) -> None:
    assert alike_messages(memoryview(body)) is None


@pytest.mark.parametrize("at", [0, 3, 16, 19, 24, 25])
def test_lengths_that_lie_are_not_alike(at: int) -> None:
    """Total size, body length and properties length, in the first and in a later message."""
    good = encode_batch([(0, b"body", b"TAGS\x01a\x02")] * COUNT)
    size = len(good) // COUNT
    for place in (at, size + at):
        bad = bytearray(good)
        bad[place] ^= 1
        assert alike_messages(memoryview(bad)) is None
        with pytest.raises(BatchError):
            split_batch(bytes(bad))


def test_numbers_that_do_not_fit_are_refused_by_both() -> None:
    encoded = encode_batch([(0, b"body", b"")] * COUNT)
    for form in (ListedMessages(split_batch(encoded)), alike(encoded)):
        for more in ({"queue_id": 1 << 40}, {"queue_offset": (1 << 63) - COUNT + 1}):
            with pytest.raises(struct.error):
                form.records(head(**more))


def test_a_number_of_each_message_lies_where_the_record_says() -> None:
    records, _ = alike(encode_batch([(at, b"%04d" % at, b"") for at in range(COUNT)])).records(head())
    size = len(records) // COUNT
    assert [record.decode_head(records, size * at).flag for at in range(COUNT)] == list(range(COUNT))
