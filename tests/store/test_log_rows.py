"""Records that the native extension reads from the log, beside the same read one by one.

The reference is what RecordReader and ReputMessageService do in Python. ``make nightly`` tries thousands of examples.
"""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, check_all, fill, opened, put
from trimq.broker.store.log import log_rows
from trimq.broker.store.log.log_rows import LogRows, checked_size, read_rows
from trimq.broker.store.log.log_scan import Blank, LogRecord, NoRecordError, RecordReader
from trimq.protocol import record
from trimq.protocol.dispatch_rules import IN_QUEUE, KIND, unit_tags_code
from trimq.protocol.hashing import key_hash
from trimq.protocol.message_keys import index_keys
from trimq.protocol.native import NATIVE
from trimq.protocol.property_text import decode_properties
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

needs_native = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")
START = (5 << 30) + 77
FILE = 1 << 30
HOST, HOST_V6 = record.pack_host("10.0.0.1", 10911), record.pack_host("2001:db8::1", 10911)
TOPICS = (b"A", b"Orders", "Größe".encode(), b"L" * 127)
PIECES = (
    "UNIQ_KEY\x01U1\x02",
    "KEYS\x01a b  c\x02",
    "TAGS\x01red\x02",
    "TAGS\x01\x02",
    "KEYS\x01ä\x02",
    "x\x02",
    "y\x01z\x02",
)


@dataclass(frozen=True)
class One:
    """A record before it has its place. ``skips`` is added to its queue offset."""

    topic: bytes = b"A"
    queue_id: int = 0
    body: bytes = b"body"
    properties: bytes = b""
    sys_flag: int = 0
    later: int = 0
    skips: int = 0
    born_host: bytes = HOST


ordinary = st.builds(
    One,
    topic=st.sampled_from(TOPICS),
    queue_id=st.integers(0, 2),
    body=st.binary(max_size=30),
    properties=st.lists(st.sampled_from(PIECES[:3]), max_size=3, unique=True).map(
        lambda found: "".join(found).encode()
    ),
    sys_flag=st.sampled_from([0, 1, 8]),
    later=st.sampled_from([0, 0, 0, 1, 1000]),
)
odd = st.builds(
    One,
    topic=st.sampled_from([b"A", SCHEDULE_TOPIC.encode(), b"\xff", b"a\0b", b""]),
    queue_id=st.sampled_from([0, -1]),
    body=st.binary(max_size=30),
    properties=st.lists(st.sampled_from([*PIECES, "DELAY\x013\x02", "\0", "\ud800"]), max_size=4).map(
        lambda found: "".join(found).encode("utf-8", "surrogatepass")
    ),
    sys_flag=st.sampled_from([0, 4, 8, 12, 0x10]),
    skips=st.sampled_from([0, 0, 1, -1, 1 << 40]),
)


def log_of(ones: list[One]) -> tuple[bytes, list[int]]:
    """The log from START on, and the position of each record in it."""
    data, places, offsets, now = b"", [], dict[tuple[bytes, int], int](), 1_700_000_000_000
    for one in ones:
        now += one.later
        queue = one.topic, one.queue_id
        offset = offsets.get(queue, 7) + one.skips
        in_queue = IN_QUEUE[one.sys_flag & KIND]
        places.append(len(data))
        data += record.encode_record(
            topic=one.topic,
            body=one.body,
            properties=one.properties,
            queue_id=one.queue_id,
            queue_offset=max(0, offset) if in_queue else 0,
            physical_offset=START + len(data),
            born_timestamp=now,
            born_host=HOST_V6 if one.sys_flag & 0x10 else HOST,
            store_timestamp=now,
            store_host=HOST,
            sys_flag=one.sys_flag,
        )
        offsets[queue] = max(0, offset) + in_queue
    return data, places


def by_python(data: bytes) -> list[LogRecord]:
    """The records at the start, up to the first that is no whole record."""
    reader, found, at = RecordReader(FILE), list[LogRecord](), 0
    while at < len(data):
        try:
            one = reader.read(data, at, START + at)
        except (NoRecordError, UnicodeEncodeError):
            break
        if isinstance(one, Blank):
            break
        found.append(one)
        at += one.size
    return found


Dispatched = tuple[dict[tuple[str, int], list[tuple[int, bytes]]], list[tuple[int, int, int]]]


def expected(records: list[LogRecord], *, tags: bool) -> Dispatched:
    """Units of each queue, with their offsets, and (hash, log offset, store time) of each key."""
    units: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
    keys = []
    for one in records:
        code = unit_tags_code(one.topic, one.properties, one.store_timestamp, (0,))
        unit = UNIT.pack(one.phy, one.size, code)
        units.setdefault((one.topic, one.queue_id), []).append((one.queue_offset, unit))
        words = index_keys(decode_properties(one.properties), tags=tags)
        keys += [(key_hash(one.topic, word), one.phy, one.store_timestamp) for word in words]
    return units, keys


def seen(rows: LogRows) -> Dispatched:
    """The same of what the extension has read."""
    units: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
    at = 0
    for topic, queue_id, start, count in rows.queues:
        own = units.setdefault((topic, queue_id), [])
        for number in range(count):
            own.append((start + number, rows.units[at : at + UNIT_SIZE]))
            at += UNIT_SIZE
    assert at == len(rows.units)
    return units, [row for keys in rows.keys for row in keys.rows()]


@needs_native
@given(st.lists(ordinary, min_size=2, max_size=12), st.booleans())
def test_ordinary_records_are_all_read_in_one_call(ones: list[One], tags: bool) -> None:
    data, places = log_of(ones)
    found = read_rows(data, START, tags=tags)
    assert found is not None
    rows, result = found
    records = by_python(data)
    assert len(records) == len(ones) == rows.count
    assert seen(rows) == expected(records, tags=tags)
    assert (result.physical_offset, result.size) == (START, len(data))
    assert result.store_timestamp == records[-1].store_timestamp
    assert list(result.offsets or ()) == [START + place for place in places]
    assert rows.topics == {one.topic for one in records}
    assert checked_size(data, START, len(data) + 8) == (len(data), records[-1].store_timestamp)
    # The file has to have 8 bytes left behind a record.
    assert checked_size(data, START, len(data) + 7)[0] == places[-1]


@needs_native
@given(st.lists(ordinary | odd, max_size=8), st.integers(0, 2000), st.integers(0, 255), st.booleans())
@example([One(), One(skips=1)], 2000, 0, False)
@example([One(), One(), One(properties=b"TAGS\x01\x02")], 2000, 0, True)
def test_nothing_is_read_that_python_does_not_read_so(ones: list[One], at: int, byte: int, tags: bool) -> None:
    """With one byte changed, and the end cut: what the extension reads is what Python reads, or less."""
    data, _ = log_of(ones)
    damaged = bytearray(data)
    if at < len(damaged):
        damaged[at] = byte
    data = bytes(damaged[: len(damaged) - at % 5])
    records = by_python(data)
    size, stored = checked_size(data, START, FILE)
    sizes = [sum(one.size for one in records[:count]) for count in range(len(records) + 1)]
    assert size in sizes
    if size:
        assert stored == records[sizes.index(size) - 1].store_timestamp
    found = read_rows(data, START, tags=tags)
    if found is None:
        return
    rows, result = found
    covered = records[: rows.count]
    assert result.size == sum(one.size for one in covered)
    assert all(IN_QUEUE[one.sys_flag & KIND] for one in covered)
    assert seen(rows) == expected(covered, tags=tags)


@needs_native
@pytest.mark.parametrize(
    "one",
    [
        One(sys_flag=4),
        One(sys_flag=12),
        One(sys_flag=0x10),
        One(topic=SCHEDULE_TOPIC.encode(), properties=b"DELAY\x013\x02"),
        One(properties=b"TAGS\x01\x02"),
        One(properties=b"KEYS\x01\xff\x02"),
        One(properties=b"KEYS\x01a\0\x02"),
        One(queue_id=-1),
        One(skips=1),
        One(topic=b""),
    ],
)
def test_what_is_not_ordinary_is_left_to_python(one: One) -> None:
    data, places = log_of([One(), One(), one, One()])
    found = read_rows(data, START, tags=False)
    assert found is not None
    assert (found[0].count, found[1].size) == (2, places[2])
    assert read_rows(data[places[2] :], START + places[2], tags=False) is None or one.skips


@needs_native
def test_a_fault_of_the_extension_switches_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = log_of([One(), One()])

    class Faulty:
        NativeFault = RuntimeError

        def log_rows(self, *_arguments: Any) -> None:
            raise RuntimeError("a fault")

        log_check = log_rows

    for read in (lambda: read_rows(data, START, tags=False), lambda: checked_size(data, START, FILE)):
        with patch.object(log_rows, "NATIVE") as native:
            native.extension = Faulty()
            assert read() in {None, (0, 0)}
            native.turn_off.assert_called_once_with("a fault")


async def test_a_store_that_was_left_behind_is_the_same_by_both_ways() -> None:
    """With arrivals, a topic that was deleted meanwhile, and records that only Python dispatches."""
    heard: list[list[tuple[object, ...]]] = []
    for extension in (NATIVE.extension, None):
        with patch.object(NATIVE, "extension", extension):
            async with opened(SimDisk()) as store:
                await fill(store, 3)
                await put(store, b"gone", topic="Gone")
                position = store.dispatcher.position
                store.dispatcher.position = -1
                on_behind, store.dispatcher.on_behind = store.dispatcher.on_behind, lambda: None
                await put(store, b"gone", topic="Gone")
                await fill(store, 30, first=3)
                await fill(store, 30, queue_id=1)
                await put(store, b"half", sys_flag=4)
                await put(store, b"later", topic=SCHEDULE_TOPIC, queue_id=2, more="DELAY\x013\x02")
                await fill(store, 20, queue_id=2)
                await store.delete_topic("Gone")
                await fill(store, 20, first=30, queue_id=1)
                arrived: list[tuple[object, ...]] = []
                store.message_arriving.append(lambda *one, to=arrived: to.append(one))
                store.dispatcher.position, store.dispatcher.on_behind = position, on_behind
                await store._reput.catch_up()
                assert store.dispatch_behind_bytes == 0
                await check_all(store, {(TOPIC, 0): 33, (TOPIC, 1): 50, (TOPIC, 2): 20})
                heard.append([one[:4] for one in arrived])
    assert heard[0] == heard[1]
    assert len(heard[0]) == 101


def test_without_the_extension_nothing_is_read() -> None:
    data, _ = log_of([One(), One()])
    with patch.object(NATIVE, "extension", None):
        assert read_rows(data, START, tags=False) is None
        assert checked_size(data, START, FILE) == (0, 0)


def test_one_record_is_left_to_python() -> None:
    data, _ = log_of([One()])
    assert read_rows(data, START, tags=False) is None
