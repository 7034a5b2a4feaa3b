"""Layouts of a bucket: round trips, and whatever bytes there are, an answer or BucketFormatError."""

import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimq.broker.store.tiered.bucket.index_objects import IndexName
from trimq.protocol.bucket_json import encode_json
from trimq.protocol.bucket_manifest import (
    MOST_INDEXES_BYTES,
    MOST_PAGE_BYTES,
    MOST_PAYLOAD,
    MOST_ROOT_BYTES,
    OBJECT,
    STRETCH,
    Entry,
    PageRef,
    Root,
    StoredObject,
    Stretch,
    StretchRows,
    decode_indexes,
    decode_page,
    decode_root,
    encode_indexes,
    encode_page,
    encode_root,
    split_pages,
    stretches_of,
)
from trimq.protocol.bucket_names import (
    ObjectName,
    broker_prefix,
    indexes_name,
    page_name,
    parse_name,
    parse_saved,
    state_name,
)
from trimq.protocol.bucket_object import (
    FOOTER_SIZE,
    HEADER_SIZE,
    MOST_TOPICS,
    ROW,
    Block,
    BucketFormatError,
    Directory,
    Kind,
    ObjectHeader,
    block_crc,
    decode_end,
    decode_header,
    decode_topics,
    directory_place,
    encode_end,
    encode_header,
    encode_topics,
)
from trimq.protocol.hashing import checksum

U32, I64, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**62)
TOPICS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


# -- names


@given(I64, I64, st.integers(0, 9999), st.integers(0, 10**8 - 1), st.integers(0, 9999))
def test_names(begin: int, end: int, generation: int, epoch: int, number: int) -> None:
    name = ObjectName(begin, end, generation, epoch, number)
    if not generation:
        name = name._replace(end=0, number=0)
    assert parse_name(str(name)) == name
    assert parse_saved(str(name)) is None
    assert parse_saved(page_name(epoch, epoch, number)) == (epoch, epoch)
    assert parse_saved(state_name(generation, epoch)) == (generation, epoch)
    assert parse_saved(indexes_name(generation, epoch)) == (generation, epoch)
    assert parse_name(page_name(epoch, epoch, number)) is None


@given(st.lists(I64, min_size=2, max_size=9, unique=True))
def test_names_sort_as_the_log(begins: list[int]) -> None:
    for generation in (0, 1):
        names = [str(ObjectName(begin, begin, generation, 1, 0)) for begin in sorted(begins)]
        assert names == sorted(names)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "log/1-1",
        "log/00000000000000000001-00000001 ",
        "log/00000000000000000001-00000001\n",
        "segments/00000000000000000001-00000000000000000002-0000-00000001-0000",
        "log/\uff100000000000000000001-00000001",
        "manifest/root",
        "state/\uff10" + "0" * 11 + "-00000001",
    ],
)
def test_other_names(name: str) -> None:
    assert parse_name(name) is None
    assert parse_saved(name) is None


def test_prefix() -> None:
    assert broker_prefix("", "C", "b") == "C/b/"
    assert broker_prefix("/a//b/", "C", "b") == "a/b/C/b/"
    assert broker_prefix("a", "C/1", "b?ä") == "a/C%2F1/b%3F%C3%A4/"


# -- objects


@given(st.sampled_from(Kind), U32, I64, I64, I64)
def test_header(kind: Kind, epoch: int, begin: int, end: int, created: int) -> None:
    header = ObjectHeader(kind, epoch, begin, end, created)
    data = encode_header(header)
    assert len(data) == HEADER_SIZE
    assert decode_header(data + b"more") == header


@st.composite
def blocks(draw: st.DrawFn) -> list[Block]:
    """Blocks of some queues, placed one behind the other from the header on."""
    found = []
    at = HEADER_SIZE
    keys = draw(st.lists(st.tuples(TOPICS, st.integers(-(2**31), 2**31 - 1), I64), max_size=8, unique=True))
    for topic, queue, offset in keys:
        messages, size = draw(st.integers(1, 999)), draw(st.integers(0, 10**6))
        first, last, begin, end = (draw(I64) for _ in range(4))
        found.append(Block(topic, queue, offset, messages, size, at, first, last, begin, end, draw(U32)))
        at += found[-1].length
    return found


def an_object(given_blocks: list[Block], state: bytes = b"") -> bytes:
    """The end of an object, with zeros in the place of its blocks in front."""
    at = HEADER_SIZE + sum(block.length for block in given_blocks)
    return encode_end(given_blocks, at, state)


@given(blocks(), st.binary(max_size=99))
def test_end_of_an_object(given_blocks: list[Block], state: bytes) -> None:
    end = an_object(given_blocks, state)
    length = HEADER_SIZE + sum(block.length for block in given_blocks) + len(end)
    position, size = directory_place(memoryview(end)[-FOOTER_SIZE:], length)
    assert position + size + FOOTER_SIZE == length
    for data in (end, memoryview(end)[-(size + FOOTER_SIZE) :]):
        directory = decode_end(data, length)
        assert list(directory.blocks()) == sorted(given_blocks)
        assert len(directory) == len(given_blocks)
        assert (directory.position, directory.length) == (position, length)
    directory = decode_end(end, length)
    assert (directory.state_position, directory.state_length) == (position - len(state), len(state))
    assert directory.checked_state(state) == state
    for damaged in (state + b"x", bytes([~state[0] & 255]) + state[1:] if state else b"x"):
        with pytest.raises(BucketFormatError, match="state"):
            directory.checked_state(damaged)


SAMPLE = [Block("T", 0, 5, 2, 300, 64, 0, 200, 7, 8, 1), Block("T", 0, 7, 1, 100, 404, 300, 300, 9, 9, 2)]
SAMPLE_END = an_object([*SAMPLE, Block("U", 1, 0, 1, 80, 524, 1, 2, 3, 4, 5)], b"state")
SAMPLE_LENGTH = 624 + len(SAMPLE_END)
SAMPLE_ENTRIES = [
    Entry(StoredObject(0, 9, 0, 1, 0, 999, 900), [Stretch("T", 0, 1, 5, 2, 300, 64, 0, 200, 7, 8)]),
    Entry(StoredObject(9, 20, 0, 1, 0, 99, 90), []),
    Entry(
        StoredObject(20, 30, 3, 2, 1, 99, 90),
        [Stretch("T", 0, 1, 7, 2, 300, 64, 0, 200, 7, 8), Stretch("Ü", -1, 2, 5, 2, 300, 64, 0, 200, 7, 8)],
    ),
]
SAMPLE_ROOT = Root("C1", 'b"ä', 3, "owner", 17, 1 << 40, (PageRef("manifest/page-1", 5, 6),), "state/1", "i/1")
DECODERS: list[tuple[bytes, Callable[[bytes], Any]]] = [
    (encode_header(ObjectHeader(Kind.SEGMENT, 3, 5, 900, 77)), decode_header),
    (SAMPLE_END[len(b"state") :], lambda data: decode_end(data, SAMPLE_LENGTH)),
    (encode_page(SAMPLE_ENTRIES), decode_page),
    (encode_root(SAMPLE_ROOT), decode_root),
    (encode_indexes(["index/1", "index/\u00fc"]), decode_indexes),
]


@pytest.mark.parametrize(("data", "decode"), DECODERS)
def test_each_damage_is_found(data: bytes, decode: Callable[[bytes], Any]) -> None:
    decode(data)
    for at in range(len(data)):
        for damaged in (
            data[:at],
            data[at + 1 :],
            *(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for bit in range(8)),
        ):
            with pytest.raises(BucketFormatError):
                decode(damaged)


@settings(max_examples=300)
@given(st.sampled_from(DECODERS), st.binary(max_size=300), st.integers(0, 300), st.integers(0, 300))
def test_any_bytes(layout_of: tuple[bytes, Callable[[bytes], Any]], other: bytes, begin: int, end: int) -> None:
    data, decode = layout_of
    damaged = data[:begin] + other + data[end:]
    try:
        decode(damaged)
    except BucketFormatError:
        return
    assert data in damaged


def test_a_later_format_is_named_first() -> None:
    header = encode_header(ObjectHeader(Kind.LOG, 1, 2, 3, 4))
    with pytest.raises(BucketFormatError, match="an object of format 2"):
        decode_header(header[:8] + b"\0\2" + bytes(54))
    page = encode_page(SAMPLE_ENTRIES)
    with pytest.raises(BucketFormatError, match="a manifest page of format 7"):
        decode_page(page[:8] + b"\0\7" + b"other bytes")
    for other in (b'{"format":2}', b'{"format": 2, "pages": {}, "x": [1.5]}'):
        with pytest.raises(BucketFormatError, match="a root of the manifest of format 2"):
            decode_root(other)


def _end(directory: bytes, at: int = HEADER_SIZE, **changed: int) -> bytes:
    """An end with this directory, and a right checksum."""
    fields = {"position": at, "size": len(directory), "state": at, "state_length": 0, "state_crc": 0}
    fields |= {"length": at + len(directory) + FOOTER_SIZE} | changed
    footer = struct.pack(">QIQIIQ", *fields.values())
    return directory + footer + struct.pack(">I8s", checksum(footer, checksum(directory)), b"TRIMQEND")


def _table(count: int, rows: bytes, topics: bytes = encode_topics(["T"])) -> bytes:
    return topics + struct.pack(">I", count) + rows


def _row(**fields: int) -> bytes:
    row = np.zeros(1, ROW)
    for name, value in {"position": 64, "messages": 1, **fields}.items():
        row[name] = value
    return row.tobytes()


def test_a_directory_that_says_what_is_not_so() -> None:
    assert len(decode_end(_end(_table(0, b"")), 64 + len(_end(_table(0, b""))))) == 0
    for directory, text in (
        (_table(1, b""), "another length"),
        (_table(0, _row()), "another length"),
        (_table(2**32 - 1, b""), "another length"),
        (_table(1, _row()), "outside"),  # there is no room for a block in front of the directory
        (encode_topics(["T"]) + b"\0", "cut off"),
        (b"", "damaged"),
        (struct.pack(">I", 2**32 - 1), "4294967295 topics"),
        (struct.pack(">IH", 1, 9) + b"T", "topics"),
        (struct.pack(">IH", 1, 0) + b"T", "topics"),
        (struct.pack(">IH", 1, 1) + b"\xff", "topics"),
    ):
        data = _end(directory)
        with pytest.raises(BucketFormatError, match=text):
            decode_end(data, HEADER_SIZE + len(data))
    for row in (
        _row(topic=1),
        _row(position=63),
        _row(position=200),
        _row(position=2**64 - 1),
        _row(messages=7),
        _row(size=130),
        _row(messages=2**32 - 1, size=2**32 - 1),
    ):
        data = _end(_table(1, row), at=200)
        with pytest.raises(BucketFormatError, match="directory of the object names"):
            decode_end(data, 200 + len(data))
    data = _end(_table(1, _row(size=116)), at=200)
    assert len(decode_end(data, 200 + len(data))) == 1


def test_a_footer_that_says_what_is_not_so() -> None:
    directory = _table(0, b"")
    right = HEADER_SIZE + len(_end(directory))
    for changed in ({"position": 65}, {"size": 8}, {"state": 63, "state_length": 1}, {"state": 65}, {"length": 9}):
        with pytest.raises(BucketFormatError, match="footer"):
            decode_end(_end(directory, **changed), right)
    with pytest.raises(BucketFormatError, match="not complete"):
        decode_end(_end(directory)[1:], right)


def test_checksum_of_a_block() -> None:
    assert block_crc(b"ab", [b"c", memoryview(b"de")]) == zlib.crc32(b"abcde")


# -- stretches


@given(blocks())
def test_stretches_are_blocks_that_follow_each_other(given_blocks: list[Block]) -> None:
    divided = []
    for block in given_blocks:
        half = block.messages // 2
        if not half or block.offset + block.messages > 2**62:
            divided.append(block)
            continue
        first = block._replace(messages=half, size=block.size // 2)
        rest = block.messages - half, block.size - first.size
        second = block._replace(
            offset=block.offset + half, messages=rest[0], size=rest[1], position=block.position + first.length
        )
        divided += [first, second._replace(begin_ms=5, end_ms=3, first_physical=9, last_physical=10)]
    end = an_object(divided)
    directory = decode_end(end, HEADER_SIZE + sum(block.length for block in divided) + len(end))
    found = stretches_of(directory)
    assert list(found) == _stretches_one_by_one(directory)
    assert sum(stretch.blocks for stretch in found) == len(divided)
    assert sum(stretch.messages for stretch in found) == sum(block.messages for block in divided)


def _stretches_one_by_one(directory: Directory) -> list[Stretch]:
    """The definition: blocks that continue the one before become a part of its stretch."""
    found: list[Stretch] = []
    for block in directory.blocks():
        last = found[-1] if found else None
        if (
            last is not None
            and (last.topic, last.queue_id, last.end) == (block.topic, block.queue_id, block.offset)
            and last.position + last.size + 20 * last.messages == block.position
        ):
            found[-1] = last._replace(
                blocks=last.blocks + 1,
                messages=last.messages + block.messages,
                size=last.size + block.size,
                last_physical=block.last_physical,
                begin_ms=min(last.begin_ms, block.begin_ms),
                end_ms=max(last.end_ms, block.end_ms),
            )
        else:
            found.append(Stretch(block.topic, block.queue_id, 1, *block[2:-1]))
    return found


STRETCHES = st.builds(Stretch, TOPICS, st.integers(-(2**31), 2**31 - 1), U32, *[I64] * 8)
ENTRIES = st.lists(
    st.builds(Entry, st.builds(StoredObject, I64, I64, U32, U32, U32, U64, U64), st.lists(STRETCHES, max_size=5)),
    max_size=6,
)


@given(st.lists(STRETCHES, max_size=9), st.slices(9))
def test_rows_are_a_sequence_of_stretches(stretches: list[Stretch], part: slice) -> None:
    rows = StretchRows.of(stretches)
    assert StretchRows.of(rows) is rows
    assert rows == stretches
    assert stretches == rows
    assert list(rows) == stretches
    assert len(rows) == len(stretches)
    assert list(reversed(rows)) == stretches[::-1]
    assert rows[part] == stretches[part]
    assert [rows[number] for number in range(len(rows))] == stretches
    assert StretchRows.joined(rows, stretches) == stretches * 2
    assert rows != 1
    with pytest.raises(IndexError):
        rows[len(rows)]
    with pytest.raises(TypeError):
        hash(rows)


# -- pages


@given(ENTRIES)
def test_pages(entries: list[Entry]) -> None:
    page = encode_page(entries)
    decoded = decode_page(page)
    assert decoded == entries
    assert decode_page(encode_page(decoded)) == entries
    assert decode_page(encode_page(decoded[::2])) == entries[::2]


@given(ENTRIES, st.integers(150, 600))
def test_pages_of_a_limited_size(entries: list[Entry], most: int) -> None:
    single = [Entry(stored, [one]) for stored, its in entries for one in its]
    without = [Entry(stored, []) for stored, its in entries if not its]
    try:
        parts = list(split_pages(entries, most))
    except BucketFormatError as error:
        assert "no room" in str(error)  # noqa: PT017 - some inputs fit, some do not
        assert any(len(encode_page([entry])) > most for entry in [*single, *without])
        return
    for part, page in parts:
        assert len(page) <= most
        assert decode_page(page) == list(part)
    found = [entry for part, _ in parts for entry in part]
    assert [Entry(stored, [one]) for stored, its in found for one in its] == single
    assert [entry.object for entry in found if not entry.stretches] == [entry.object for entry in without]


def test_a_page_that_would_unpack_to_too_much_is_divided() -> None:
    one = Stretch("T", 0, 1, 0, 1, 1, 64, 0, 0, 0, 0)
    count = MOST_PAYLOAD // STRETCH.itemsize + 1
    rows = np.repeat(StretchRows.of([one]).rows, count)
    rows = np.frombuffer(rows.tobytes(), STRETCH) if rows.dtype == STRETCH else rows.astype(STRETCH)
    entry = Entry(StoredObject(0, 1, 0, 1, 0, 1, 1), StretchRows(["T"], rows))
    parts = list(split_pages([entry]))
    assert len(parts) == 2
    assert sum(len(decode_page(page)[0].stretches) for _, page in parts) == count
    with pytest.raises(BucketFormatError, match="too large"):
        decode_page(encode_page([entry]))


def _page(payload: bytes, behind: bytes = b"") -> bytes:
    packed = zlib.compress(payload) + behind
    head = b"TRIMQPAG\0\1\0\0"
    return head + struct.pack(">I", checksum(packed, checksum(head))) + packed


def test_a_page_that_says_what_is_not_so() -> None:
    objects = struct.pack(">I", 1) + bytes(OBJECT.itemsize)
    topics = encode_topics(["T"])

    def stretch(number: int, topic: int) -> bytes:
        row = np.zeros(1, STRETCH)
        row["object"], row["topic"] = number, topic
        return struct.pack(">I", 1) + row.tobytes()

    two = np.zeros(2, STRETCH)
    two["object"] = [1, 0]
    backwards = struct.pack(">I", 2) + two.view("u1").reshape(2, -1).T.tobytes()
    assert len(decode_page(_page(topics + objects + stretch(0, 0)))) == 1
    for payload, text in (
        (b"", "topics"),
        (topics, "cut off"),
        (topics + struct.pack(">I", 2**32 - 1), "cut off"),
        (topics + objects, "cut off"),
        (topics + objects + struct.pack(">I", 2**32 - 1), "cut off"),
        (topics + objects + stretch(1, 0), "does not have"),
        (topics + objects + stretch(0, 1), "does not have"),
        (topics + objects + stretch(2**32 - 1, 0), "does not have"),
        (topics + objects + stretch(0, 0) + b"x", "behind its rows"),
        (topics + struct.pack(">I", 2) + bytes(2 * OBJECT.itemsize) + backwards, "not in the order"),
    ):
        with pytest.raises(BucketFormatError, match=text):
            decode_page(_page(payload))
    with pytest.raises(BucketFormatError, match="cut off or too large"):
        decode_page(_page(topics + objects + stretch(0, 0), b"x"))
    head = b"TRIMQPAG\0\1\0\0"
    with pytest.raises(BucketFormatError, match="damaged"):
        decode_page(head + struct.pack(">I", checksum(b"no zlib", checksum(head))) + b"no zlib")


def test_small_bytes_do_not_take_much_memory() -> None:
    bomb = _page(bytes(4 * MOST_PAYLOAD))
    assert len(bomb) < MOST_PAGE_BYTES
    for data, decode in (
        (bomb, decode_page),
        (_page(b"", behind=bytes(MOST_PAGE_BYTES)), decode_page),
        (struct.pack(">I", MOST_TOPICS + 1) + bytes(3 * MOST_TOPICS + 3), decode_topics),
        (struct.pack(">I", 2**32 - 1) + b"\0\1a" * 9, decode_topics),
        (b"[" * MOST_ROOT_BYTES, decode_root),
        (b"[" * 10 * MOST_ROOT_BYTES, decode_root),
        (b'{"format":1,"epoch":' + b"9" * 60_000 + b"}", decode_root),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(BucketFormatError):
                decode(data)
            assert tracemalloc.get_traced_memory()[1] < 4 * MOST_PAYLOAD
        finally:
            tracemalloc.stop()


def test_a_stretch_in_memory_takes_its_row() -> None:
    stretches = [Stretch("topic", 0, 1, at, 1, 2000, 64, at * 2000, at * 2000, at, at) for at in range(1000)]
    page = encode_page([Entry(StoredObject(at, at + 1, 0, 1, 0, 1, 1), stretches) for at in range(100)])
    tracemalloc.start()
    try:
        entries = decode_page(page)
        taken = tracemalloc.get_traced_memory()[0] / 100_000
    finally:
        tracemalloc.stop()
    assert len(entries) == 100
    assert taken < 90


# -- root


@given(
    st.builds(
        Root,
        TOPICS,
        TOPICS,
        I64,
        TOPICS,
        I64,
        I64,
        st.lists(st.builds(PageRef, TOPICS, I64, I64), max_size=9).map(tuple),
        TOPICS,
        TOPICS,
    )
)
def test_roots(root: Root) -> None:
    data = encode_root(root)
    assert decode_root(memoryview(data)) == root
    assert json.loads(data)["crc"] == checksum(data[: data.rindex(b',"crc"')])


def _root(**changed: Any) -> bytes:
    """A root with other members, and a right checksum."""
    value = json.loads(encode_root(SAMPLE_ROOT)) | changed
    del value["crc"]
    front = json.dumps({name: member for name, member in value.items() if member != "none"}).encode()[:-1]
    return front + b',"crc":%d}' % checksum(front)


@pytest.mark.parametrize(
    "changed",
    [
        {"epoch": "1"},
        {"epoch": -1},
        {"epoch": True},
        {"epoch": 1.0},
        {"epoch": float("inf")},
        {"epoch": None},
        {"end": "none"},
        {"owner": 5},
        {"owner": "\ud800"},
        {"pages": [["name", 1]]},
        {"pages": [["name", 1, "2"]]},
        {"pages": [[7, 1, 2]]},
        {"pages": [["name", float("inf"), 2]]},
        {"pages": 5},
        {"pages": [5]},
        {"indexes": [5]},
        {"indexes": None},
        {"indexes": ["index/1"]},
        {"format": True},
        {"format": "1"},
        {"format": None},
        {"format": "none"},
    ],
)
def test_a_root_with_other_members_is_refused(changed: dict[str, Any]) -> None:
    assert decode_root(_root()) == SAMPLE_ROOT
    assert decode_root(_root(more=[1])) == SAMPLE_ROOT
    with pytest.raises(BucketFormatError, match="damaged"):
        decode_root(_root(**changed))


@pytest.mark.parametrize("data", [b"", b"5", b"[]", b"null", b"\xff", b'{"format":1}', b"[" * 50_000])
def test_no_root(data: bytes) -> None:
    with pytest.raises(BucketFormatError, match="damaged"):
        decode_root(data)


def test_a_root_is_not_larger_than_its_limit() -> None:
    ref = PageRef(page_name(1, 1, 0), 1_000_000, 50_000)
    assert len(encode_root(Root("C", "b", 1, "o", pages=(ref,) * 1100))) <= MOST_ROOT_BYTES
    with pytest.raises(BucketFormatError, match="the limit is 65536"):
        encode_root(Root("C", "b", 1, "o", pages=(ref,) * 1200))
    with pytest.raises(BucketFormatError, match="the limit is 65536"):
        decode_root(b" " * (MOST_ROOT_BYTES + 1))


# -- list of index files


@given(st.lists(TOPICS, max_size=9))
def test_lists_of_index_files(names: list[str]) -> None:
    assert decode_indexes(memoryview(encode_indexes(names))) == tuple(names)


@pytest.mark.parametrize("members", [{}, {"names": "index/1"}, {"names": [5]}, {"names": ["\ud800"]}])
def test_a_list_with_other_members_is_refused(members: dict[str, Any]) -> None:
    with pytest.raises(BucketFormatError, match="the list of index files is damaged"):
        decode_indexes(encode_json(members, "test", 1000))


def test_a_list_has_room_for_the_hours_of_19_years() -> None:
    names = [str(IndexName(number, number, number, number, 1)) for number in range(19 * 8766)]
    data = encode_indexes(names)
    assert decode_indexes(data) == tuple(names)
    with pytest.raises(BucketFormatError, match="the limit is 16777216"):
        encode_indexes(names + names[:20_000])
    with pytest.raises(BucketFormatError, match="the limit is 16777216"):
        decode_indexes(b" " * (MOST_INDEXES_BYTES + 1))
