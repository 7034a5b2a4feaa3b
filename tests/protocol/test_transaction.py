"""The records of transactions: op bodies, and halves as they are stored."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.property_text import join_properties
from trimq.protocol.record import RecordError, encode_record, pack_host
from trimq.protocol.transaction import (
    NotAHalfError,
    again_properties,
    committed_properties,
    decode_half,
    make_half,
    number_of,
    op_body,
    op_offsets,
    resumed_from,
    resumed_properties,
)

HALF = {"REAL_TOPIC": "T", "REAL_QID": "3", "PGROUP": "P", "UNIQ_KEY": "u", "TRAN_MSG": "true"}
HOST = pack_host("127.0.0.1", 10911)


def record_of(properties: dict[str, str], **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "topic": b"RMQ_SYS_TRANS_HALF_TOPIC",
        "body": b"body",
        "properties": join_properties(properties).encode(),
        "queue_id": 0,
        "queue_offset": 9,
        "physical_offset": 900,
        "born_timestamp": 1000,
        "born_host": HOST,
        "store_timestamp": 2000,
        "store_host": HOST,
    }
    return encode_record(**(fields | changes))


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_the_body_of_an_op_record(offsets: list[int]) -> None:
    assert op_offsets(op_body(offsets)) == offsets


def test_apaches_bodies_are_read() -> None:
    # guards bodies as Apache's broker writes them, and without the last comma
    assert op_body([0, 1, 7, 12]) == b"0,1,7,12,"
    assert op_offsets(b"0,1,7,12,") == op_offsets(b"0,1,7,12") == [0, 1, 7, 12]
    assert op_offsets(b"") == []


@pytest.mark.parametrize("body", [b"-1,", b"1;2,", b"1,,2", b" 1,", b"1" * 20, "\u0661,".encode(), b"\xff" * 5000])
def test_other_bodies_are_damaged(body: bytes) -> None:
    # guards the start: what it takes for offsets would end other halves
    with pytest.raises(ValueError, match="no list of offsets"):
        op_offsets(body)


def test_a_half() -> None:
    half = decode_half(record_of(HALF))
    assert (half.offset, half.physical_offset, half.origin, half.times) == (9, 900, 9, 0)
    assert (half.topic, half.queue_id, half.group, bytes(half.body)) == ("T", 3, "P", b"body")
    assert half.is_first
    assert half.since == 2000


def test_a_half_that_was_stored_again() -> None:
    half = decode_half(record_of(HALF | {"TRAN_PREPARED_QUEUE_OFFSET": "4", "TRANSACTION_CHECK_TIMES": "2"}))
    assert (half.origin, half.times, half.is_first, half.since) == (4, 2, False, 1000)
    # Apache's copies have no link; their age is still that of the first record, which the client's clock tells
    copy = decode_half(record_of(HALF | {"TRANSACTION_CHECK_TIMES": "1"}))
    assert (copy.origin, copy.is_first, copy.since) == (9, True, 1000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRAN_PREPARED_QUEUE_OFFSET", "10"),
        ("TRAN_PREPARED_QUEUE_OFFSET", "-1"),
        ("TRAN_PREPARED_QUEUE_OFFSET", "9" * 30),
        ("TRANSACTION_CHECK_TIMES", "x"),
    ],
)
def test_impossible_numbers_in_properties_are_ignored(name: str, value: str) -> None:
    half = decode_half(record_of(HALF | {name: value}))
    assert (half.origin, half.times, half.queue_id) == (9, 0, 3)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"REAL_QID": "\u0663"}, "REAL_QID"),
        ({"REAL_QID": "99999999999"}, "REAL_QID"),
        ({"REAL_TOPIC": "../../evil"}, "REAL_TOPIC"),
        ({"REAL_TOPIC": "RMQ_SYS_TRANS_OP_HALF_TOPIC"}, "REAL_TOPIC"),
        ({"REAL_TOPIC": "rmq_sys_wheel_timer"}, "REAL_TOPIC"),
    ],
)
def test_a_half_for_a_place_that_is_none_cannot_be_committed(changes: dict[str, str], word: str) -> None:
    # guards the op queue against forged records, and the disk against files outside the store
    record = record_of(HALF | changes)
    with pytest.raises(NotAHalfError, match=word):
        decode_half(record)
    half = decode_half(record, any_place=True)
    assert word in half.problem
    assert (half.topic, half.queue_id, half.group) == ("", 0, "P")
    assert not decode_half(record_of(HALF), any_place=True).problem


def test_other_records_are_no_halves() -> None:
    for record in (
        record_of(HALF, topic=b"T"),
        record_of(HALF, queue_id=1),
        record_of({"PGROUP": "P"}),
    ):
        with pytest.raises(NotAHalfError):
            decode_half(record)
    with pytest.raises(RecordError):
        decode_half(record_of(HALF)[:50])


def test_the_properties_of_each_record_of_a_half() -> None:
    forged = {"TRANSACTION_CHECK_TIMES": "9", "TRAN_PREPARED_QUEUE_OFFSET": "1", "TRAN_RESUMED_OFFSET": "900"}
    sent = {"UNIQ_KEY": "u", "a": "b"} | forged
    make_half(sent, "T", 2, "P")
    assert sent == {
        "UNIQ_KEY": "u", "a": "b", "TRAN_MSG": "true", "PGROUP": "P",
        "__transactionId__": "u", "REAL_TOPIC": "T", "REAL_QID": "2",
    }  # fmt: skip
    half = decode_half(record_of(sent))
    assert committed_properties(half) == {
        name: value for name, value in sent.items() if name not in ("REAL_TOPIC", "REAL_QID")
    }
    again = again_properties(half, 3)
    assert again == sent | {"TRAN_PREPARED_QUEUE_OFFSET": "9", "TRANSACTION_CHECK_TIMES": "3"}
    third = again_properties(decode_half(record_of(again, queue_offset=20)), 4)
    assert third == sent | {"TRAN_PREPARED_QUEUE_OFFSET": "9", "TRANSACTION_CHECK_TIMES": "4"}
    expired = decode_half(record_of(again, queue_offset=20))
    resumed = resumed_properties(expired)
    assert resumed == sent | {"TRANSACTION_CHECK_TIMES": "0", "TRAN_RESUMED_OFFSET": "900"}
    assert resumed_from(join_properties(resumed).encode()) == 900
    assert resumed_from(join_properties(again).encode()) == -1


def test_a_group_of_the_request_does_not_replace_that_of_the_message() -> None:
    sent = {"UNIQ_KEY": "u", "PGROUP": "own"}
    make_half(sent, "T", 0, "other")
    assert sent["PGROUP"] == "own"


def test_numbers() -> None:
    assert [number_of(text, 7) for text in (None, "", "12", "-1", "1.5", "1" * 19)] == [7, 7, 12, 7, 7, 7]
