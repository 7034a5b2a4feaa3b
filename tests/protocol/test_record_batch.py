"""A batch gives the same records as its messages one by one."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol import record
from trimq.protocol.batch import BatchError, decode_batch, encode_batch, split_batch
from trimq.protocol.record import pack_host
from trimq.protocol.record_batch import BatchHead, ListedMessages

HOST = pack_host("127.0.0.1", 10911)
FIRST = 1 << 41


def head(**more: Any) -> BatchHead:
    shared = record.pack_shared(0, 1, HOST, 2, HOST, 3)
    fields = {"magic": record.MAGIC_V1, "queue_id": 3, "queue_offset": 1 << 40, "physical_offset": FIRST}
    return BatchHead(**(fields | {"shared": shared, "topic": b"\x05Topic"} | more))


@given(
    st.lists(
        st.tuples(st.integers(-(1 << 31), (1 << 31) - 1), st.binary(max_size=40), st.binary(max_size=20)),
        min_size=1,
        max_size=9,
    )
)
def test_records_are_those_of_single_messages(messages: list[tuple[int, bytes, bytes]]) -> None:
    encoded = encode_batch(messages)
    listed = ListedMessages(split_batch(encoded))
    records, offsets = listed.records(head())
    expected, at = [], FIRST
    for number, (flag, body, text) in enumerate(messages):
        assert offsets[number] == at
        expected.append(
            record.encode_record(
                topic=b"Topic",
                body=body,
                properties=text,
                queue_id=3,
                queue_offset=(1 << 40) + number,
                physical_offset=at,
                born_timestamp=1,
                born_host=HOST,
                store_timestamp=2,
                store_host=HOST,
                flag=flag,
                reconsume_times=3,
            )
        )
        at += len(expected[-1])
    assert bytes(records) == b"".join(expected)
    assert bytes(listed.copied().records(head())[0]) == bytes(records)
    assert list(map(tuple, listed.items())) == list(map(tuple, decode_batch(encoded)))
    assert list(listed.lengths()) == [(len(body), len(text)) for _, body, text in messages]
    assert listed.size == sum(len(body) + len(text) for _, body, text in messages)


@pytest.mark.parametrize("at", [0, 3, 16, 19, 24, 25])
def test_lengths_that_lie_are_refused(at: int) -> None:
    """Total size, body length and properties length, in the first and in a later message."""
    good = encode_batch([(0, b"body", b"TAGS\x01a\x02")] * 20)
    size = len(good) // 20
    for place in (at, size + at):
        bad = bytearray(good)
        bad[place] ^= 1
        with pytest.raises(BatchError):
            split_batch(bytes(bad))


def test_numbers_that_do_not_fit_are_refused() -> None:
    listed = ListedMessages(split_batch(encode_batch([(0, b"body", b"")] * 20)))
    for more in ({"queue_id": 1 << 40}, {"queue_offset": (1 << 63) - 19}):
        with pytest.raises(struct.error):
            listed.records(head(**more))
