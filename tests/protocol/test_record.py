"""Records, ids, properties, batches: layouts compared with worked examples, and damage that must be detected."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol import sysflag
from trimq.protocol.batch import BatchError, decode_batch, encode_batch
from trimq.protocol.hashing import crc32, key_hash, reference_crc32, string_hash, tags_code
from trimq.protocol.message import decode_message, decode_messages
from trimq.protocol.message_id import UniqueIdGenerator, decode_offset_id, encode_offset_id
from trimq.protocol.property_text import decode_properties, encode_properties
from trimq.protocol.record import (
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    OVERHEAD_V1,
    RecordError,
    RecordState,
    check_record,
    decode_head,
    encode_record,
    host_flags,
    pack_host,
    record_size,
    unpack_host,
)

V4 = pack_host("127.0.0.1", 10911)
V6 = pack_host("2001:db8::1", 10911)


def record(
    body: bytes = b"hello",
    topic: bytes = b"T",
    properties: bytes = b"TAGS\x01a\x02",
    born: bytes = V4,
    store: bytes = V4,
) -> bytes:
    return encode_record(
        topic=topic,
        body=body,
        properties=properties,
        queue_id=3,
        queue_offset=4,
        physical_offset=5,
        born_timestamp=6,
        born_host=born,
        store_timestamp=7,
        store_host=store,
        flag=8,
        sys_flag=host_flags(born, store),
        reconsume_times=9,
        prepared_transaction_offset=10,
    )


def test_every_field_of_a_v1_record_stands_where_the_format_says() -> None:
    data = record()
    assert len(data) == OVERHEAD_V1 + 5 + 1 + 7
    assert struct.unpack_from(">IIIiiqqiq", data) == (
        len(data),
        MAGIC_V1,
        crc32(b"hello"),
        3,
        8,
        4,
        5,
        0,
        6,
    )
    assert data[48:56] == bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
    assert struct.unpack_from(">q8siqi", data, 56) == (7, V4, 9, 10, 5)
    assert data[88:] == b"hello" + b"\x01T" + b"\x00\x07TAGS\x01a\x02"


@pytest.mark.parametrize("born", [V4, V6])
@pytest.mark.parametrize("store", [V4, V6])
@pytest.mark.parametrize("length", [1, 127, 128, 255])
def test_sizes_follow_hosts_and_topic_length(born: bytes, store: bytes, length: int) -> None:
    data = record(topic=b"t" * length, born=born, store=store)
    extra = (len(born) + len(store) - 16) + (1 if length > 127 else 0)
    assert len(data) == OVERHEAD_V1 + extra + 5 + length + 7 == record_size(host_flags(born, store), 5, length, 7)
    assert decode_head(data).magic == (MAGIC_V2 if length > 127 else MAGIC_V1)
    message = decode_message(data)
    assert (message.topic, message.body, message.properties) == (
        "t" * length,
        b"hello",
        {"TAGS": "a"},
    )
    assert message.born_host == unpack_host(born)
    assert message.size == len(data)


def test_records_back_to_back() -> None:
    assert [m.body for m in decode_messages(record(b"a") + record(b"") + record(b"ccc"))] == [b"a", b"", b"ccc"]


@given(st.data())
def test_no_single_flipped_bit_of_a_body_or_a_length_passes(
    data: st.DataObject,
) -> None:
    good = bytearray(record())
    position = data.draw(st.sampled_from([*range(12), *range(84, 94), *range(95, 97)]))
    good[position] ^= 1 << data.draw(st.integers(0, 7))
    assert check_record(good, 0).state is not RecordState.RECORD


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_decode_or_raise_record_error(data: bytes) -> None:
    check_record(data, 0)
    with suppress(RecordError):
        decode_messages(data)


def test_what_stands_in_a_log() -> None:
    data = record()
    assert check_record(data, 0, physical_offset=5).state is RecordState.RECORD
    stale = check_record(data, 0, physical_offset=6)
    assert stale.state is RecordState.DAMAGED
    assert "offset field is 5" in stale.why
    assert check_record(bytes(20), 0).state is RecordState.EMPTY
    blank = check_record(struct.pack(">II", 99, MAGIC_BLANK) + bytes(91), 0)
    assert (blank.state, blank.size) == (RecordState.BLANK, 99)
    assert check_record(data[:-1], 0).state is RecordState.DAMAGED


def test_offset_message_ids() -> None:
    assert encode_offset_id(V4, 0x1234) == "7F000001" + "00002A9F" + "0000000000001234"
    assert decode_offset_id("7F00000100002A9F0000000000001234") == (V4, 0x1234)
    assert len(encode_offset_id(V6, 1)) == 56
    with pytest.raises(ValueError, match="32 or 56"):
        decode_offset_id("AB")


def test_unique_ids_differ_and_have_the_length_of_their_address() -> None:
    generator = UniqueIdGenerator(bytes([127, 0, 0, 1]), pid=0x1234)
    ids = {generator.next(1_700_000_000_000) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(text) == 32 and text.startswith("7F0000011234") for text in ids)
    month_later = generator.next(1_702_684_800_000)
    assert int(month_later[20:28], 16) == 1_702_684_800_000 - 1_701_388_800_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("TagA", 2598919),
        ("hello", 99162322),
        ("polygenelubricants", -(2**31)),
        ("日本", 835047),
        ("😀", 1772899),
    ],
)
def test_string_hash_is_javas(text: str, expected: int) -> None:
    assert string_hash(text) == expected
    assert tags_code(text) == expected


def test_key_hash_has_no_sign() -> None:
    assert key_hash("T", "k") == abs(string_hash("T#k"))
    for topic in ("T", "BenchmarkTest", "\u00e4", "t" * 300):
        for key in ("", "k1", "\u00e4", "polygenelubricants", "x" * 99):
            value = abs(string_hash(f"{topic}#{key}"))
            assert key_hash(topic, key) == (value if value < 1 << 31 else 0)
    assert key_hash("polygenelubricants"[:0], "") == abs(string_hash("#"))


@given(st.binary(max_size=300))
def test_the_fast_checksum_is_the_one_crcmod_defines(data: bytes) -> None:
    assert crc32(data) == reference_crc32()(data)


PROPERTY_TEXT = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]),
    min_size=1,
    max_size=12,
)


@given(st.dictionaries(PROPERTY_TEXT, PROPERTY_TEXT, max_size=6))
def test_properties_come_back_with_and_without_the_last_separator(
    properties: dict[str, str],
) -> None:
    text = encode_properties(properties)
    assert decode_properties(text) == properties
    assert decode_properties(text[:-1]) == properties


def test_of_equal_property_names_the_last_wins() -> None:
    assert decode_properties("a\x011\x02a\x012\x02\x02b\x01\x02\x01c\x02") == {"a": "2"}


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**31), 2**31 - 1),
            st.binary(max_size=40),
            st.binary(max_size=40),
        ),
        max_size=5,
    )
)
def test_batches_come_back(messages: list[tuple[int, bytes, bytes]]) -> None:
    items = decode_batch(encode_batch(messages))
    assert [(item.flag, bytes(item.body), item.properties) for item in items] == messages


@given(st.binary(max_size=100))
def test_a_batch_body_decodes_or_is_a_batch_error(data: bytes) -> None:
    with suppress(BatchError):
        decode_batch(data)


@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 5), st.data())
def test_messages_of_one_shape_are_held_to_their_lengths(count: int, body: int, text: int, data: st.DataObject) -> None:
    """Change one number of one message: whatever is accepted as a batch is a valid batch, message by message."""
    batch = bytearray(encode_batch([(at, b"b" * body, b"p" * text) for at in range(count)]))
    size = len(batch) // count
    at = data.draw(st.integers(0, count - 1)) * size + data.draw(st.sampled_from([3, 19, 20 + body + 1]))
    batch[at] = data.draw(st.integers(0, 60))
    try:
        items = decode_batch(batch)
    except BatchError:
        return
    again = encode_batch([(item.flag, bytes(item.body), item.properties) for item in items])
    assert again == bytes(batch)


def test_ipv6_mapped_addresses_are_packed_as_ipv4() -> None:
    assert pack_host("::ffff:127.0.0.1", 10911) == V4
    assert host_flags(V6, V4) == sysflag.BORN_HOST_V6


def test_several_unique_ids_at_once_are_those_that_one_at_a_time_would_be() -> None:
    generator = UniqueIdGenerator(bytes([127, 0, 0, 1]), pid=0x1234)
    prefix, numbers = generator.several(5)
    ids = [prefix.decode() + f"{number & 0xFFFF:04X}" for number in numbers]
    assert len(set(ids)) == 5
    following = generator.next()
    assert int(following[-4:], 16) == (numbers[-1] + 1) & 0xFFFF
    generator._counter = 0xFFFE
    _, numbers = generator.several(4)
    assert [number & 0xFFFF for number in numbers] == [0xFFFF, 0, 1, 2]
    assert generator.next()[-4:] == "0003"
