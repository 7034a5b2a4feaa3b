"""The tier's index: bytes as Apache's 5.5.0 wrote them, and compaction against a walk along the chains."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimq.protocol.index_batch import make_batch
from trimq.protocol.native import NATIVE
from trimq.protocol.tiered_index_batch import (
    KeysOfMessage,
    Scan,
    compact,
    items_of,
    items_of_columns,
    matching,
    put,
    put_with_numpy,
    scan,
)
from trimq.protocol.tiered_index_layout import (
    BEGIN_MAGIC,
    COMPACT_ITEM,
    COMPACT_ITEM_SIZE,
    END_MAGIC,
    GROUP,
    HEADER_SIZE,
    ITEM,
    Header,
    compacted_size,
    file_size,
    item_at,
    slot_at,
    slot_of,
    tiered_key_hash,
    time_diff,
)

BATCH = make_batch()


def test_the_bytes_of_apaches_segment() -> None:
    # The first segment of a run of 5.5.0 with 1000 slots and 4000 items
    head = bytes.fromhex("bcc50285000001a209a74b2b000001a209aaf869000003e500000f9f")
    header = Header.decode(head)
    assert header == (0x1A209A74B2B, 0x1A209AAF869, 997, 3999)
    assert header.encode(END_MAGIC) == head
    assert compacted_size(1000, header.items) == 120_000
    assert compacted_size(1000, 3201) == 97_656
    assert file_size(1000, 4000) == 136_028
    assert GROUP.unpack(bytes.fromhex("00001f5c00000054")) == (compacted_size(1000, 0), 3 * COMPACT_ITEM_SIZE)
    item = bytes.fromhex("7672c4e8000000000000000100000000002272b3000008be000000ec")
    assert COMPACT_ITEM.unpack(item) == (0x7672C4E8, 0, 1, 0x2272B3, 0x8BE, 0xEC)
    assert slot_of(0x7672C4E8, 1000) == 0
    (found,) = matching(item, 0x7672C4E8, header.begin_ms, 0, 1 << 60, 9)
    assert found == (0x7672C4E8, 0, 1, 0x2272B3, 0x8BE, header.begin_ms + 236_000)


def test_default_sizes() -> None:
    assert file_size(5_000_000, 20_000_000) == 680_000_028
    assert compacted_size(5_000_000, 0) == 40_000_028


def test_another_magic_number_is_refused() -> None:
    with pytest.raises(ValueError, match="magic"):
        Header.decode(bytes(28))


def test_the_smallest_hash_stays_negative() -> None:
    topic, key = _smallest()
    assert tiered_key_hash(topic, key) == -0x80000000
    items = items_of(BATCH, [KeysOfMessage(topic, 1, 2, (key, "other"), 3, 4, 5)]).since(0)
    assert items["hash"].tolist() == [-0x80000000, tiered_key_hash(topic, "other")]
    assert slot_of(-0x80000000, 1000) == 648


def _smallest() -> tuple[str, str]:
    """A topic and a key whose text hashes to the smallest integer."""
    value = 0
    for unit in b"T#":
        value = value * 31 + unit

    def units(number: int, left: int) -> str | None:
        if not left:
            return None if number else ""
        for unit in range(33, 127):
            rest, wrong = divmod(number - unit, 31)
            if not wrong and rest >= 0 and (before := units(rest, left - 1)) is not None:
                return before + chr(unit)
        return None

    rest = (0x80000000 - value * 31**7) % 2**32
    return "T", next(found for high in range(1 << 10) if (found := units(rest + high * 2**32, 7)) is not None)


@pytest.mark.parametrize(("store_ms", "seconds"), [(0, 0), (999, 0), (1000, 1), (-999, 0), (-1000, -1), (-1999, -1)])
def test_seconds_are_rounded_towards_the_begin(store_ms: int, seconds: int) -> None:
    assert time_diff(7, store_ms + 7) == seconds
    assert items_of(BATCH, [KeysOfMessage("T", 0, 0, ("k",), 0, 1, store_ms + 7)]).since(7)["seconds"].tolist() == [
        seconds
    ]


class Referee:
    """An unsealed file written item by item, as IndexStoreFile.putKey does."""

    def __init__(self, slots: int, items: int, begin_ms: int) -> None:
        self.data = bytearray(file_size(slots, items))
        self.slots, self.begin_ms = slots, begin_ms
        self.count = self.used = 0

    def put(self, messages: Iterable[KeysOfMessage]) -> None:
        for message in messages:
            for key in message.keys:
                hashed = tiered_key_hash(message.topic, key)
                at = slot_at(slot_of(hashed, self.slots))
                (old,) = GROUP.unpack_from(self.data, at)[:1]
                self.count += 1
                self.used += old == 0
                fields = message.topic_id, message.queue_id, message.offset, message.size
                seconds = time_diff(self.begin_ms, message.store_ms)
                ITEM.pack_into(self.data, item_at(self.slots, self.count), hashed, *fields, seconds, old)
                self.data[at : at + 4] = self.count.to_bytes(4, "big")

    def compacted(self, header: bytes) -> bytes:
        groups, items = bytearray(), bytearray()
        for slot in range(self.slots):
            number = GROUP.unpack_from(self.data, slot_at(slot))[0]
            begin = len(items)
            while number > 0:
                *fields, number = ITEM.unpack_from(self.data, item_at(self.slots, number))
                items += COMPACT_ITEM.pack(*fields)
            groups += GROUP.pack(compacted_size(self.slots, 0) + begin, len(items) - begin)
        return header + groups + items


MESSAGES = st.lists(
    st.builds(
        KeysOfMessage,
        topic=st.sampled_from(["T", "ÄÖ"]),
        topic_id=st.integers(0, 3),
        queue_id=st.integers(0, 3),
        keys=st.lists(st.sampled_from(["a", "b", "c", "ключ", "", "long" * 40]) | st.text(max_size=3), max_size=4).map(
            tuple
        ),
        offset=st.integers(0, 1 << 40),
        size=st.integers(1, 1 << 22),
        store_ms=st.integers(0, 100_000),
    ).filter(lambda message: bool(message.keys)),
    max_size=40,
)


@settings(max_examples=150)
@given(MESSAGES, st.integers(1, 40), st.lists(st.integers(1, 10), max_size=5))
def test_batches_write_what_single_puts_write(messages: list[KeysOfMessage], slots: int, sizes: list[int]) -> None:
    total = sum(len(message.keys) for message in messages)
    referee = Referee(slots, total + 1, 50_000)
    referee.put(messages)
    data = bytearray(file_size(slots, total + 1))
    view = memoryview(data)
    count = used = at = 0
    for size in [*sizes, len(messages) or 1]:
        part = messages[at : at + size]
        at += size
        if part:
            items = items_of(BATCH, part)
            used += put(view, slots, count, items, 50_000)
            count += len(items)
    assert data == referee.data
    assert (count, used) == (referee.count, referee.used)

    header = Header(50_000, 7, used, count).encode(END_MAGIC)
    out = bytearray(compacted_size(slots, count))
    for _ in compact(lambda at, size: bytes(data[at : at + size]), slots, count, header, memoryview(out)):
        pass
    assert out == referee.compacted(header)

    # Recovery finds the same items, whatever slots and links say
    scanned = bytearray(data)
    scanned[HEADER_SIZE : slot_at(slots)] = b"\xff" * (8 * slots)
    for number in range(1, count + 1):
        scanned[item_at(slots, number) + 28 : item_at(slots, number) + 32] = number.to_bytes(4, "big")
    result = _scan(scanned, slots, total, exact=False)
    assert (result.items, result.used_slots) == (count, used)
    scanned[HEADER_SIZE : slot_at(slots)] = data[HEADER_SIZE : slot_at(slots)]
    assert scanned == data


@pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")
@given(
    slots=st.integers(1, 9),
    known=st.lists(st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(0, 30), max_size=8),
    lost=st.lists(st.integers(0, 30), max_size=8),
    new=st.lists(
        st.tuples(st.integers(0, 30) | st.just(-(1 << 31)), st.integers(0, 1 << 60), st.integers(-(1 << 45), 1 << 45)),
        max_size=9,
    ),
    begin=st.integers(0, 1 << 40),
    stale=st.lists(st.tuples(st.integers(0, 8), st.integers(-5, 40)), max_size=3),
)
def test_the_extension_puts_what_numpy_puts(
    slots: int,
    known: list[int],
    lost: list[int],
    new: list[tuple[int, int, int]],
    begin: int,
    stale: list[tuple[int, int]],
) -> None:
    """Also over items that a killed process has left, and slots that lead nowhere."""
    extension = NATIVE.extension
    assert extension is not None
    files = [bytearray(file_size(slots, len(known) + len(lost) + len(new) + 2)) for _ in range(2)]
    hashes, positions, times = (np.array([row[at] for row in new], np.int64) for at in range(3))
    items = items_of_columns(1, 2, hashes, positions, 7, times)
    for file in files:
        for count, others in ((0, known), (len(known), lost)):
            old = items_of_columns(3, 4, np.array(others, np.int64), 5, 6, np.zeros(len(others), np.int64))
            put_with_numpy(memoryview(file), slots, count, old.since(0))
        for slot, number in stale:
            file[slot_at(slot % slots) : slot_at(slot % slots) + 4] = number.to_bytes(4, "big", signed=True)
    used = extension.put_tier_items(
        memoryview(files[0]), slots, len(known), items.items.view(np.uint8), begin, items.times
    )
    assert used == put_with_numpy(memoryview(files[1]), slots, len(known), items.since(begin))
    assert files[0] == files[1]
    many = np.zeros(32 * 100, np.uint8)
    with pytest.raises(extension.NativeFault, match="do not fit"):
        extension.put_tier_items(memoryview(files[0]), slots, len(known), many, begin, np.zeros(100, np.int64))
    assert files[0] == files[1]


def _scan(data: bytearray, slots: int, limit: int, *, durable: int = 0, exact: bool) -> Scan:
    def write(at: int, piece: bytes) -> None:
        data[at : at + len(piece)] = piece

    *_, result = scan(lambda at, size: bytes(data[at : at + size]), write, slots, limit, durable=durable, exact=exact)
    assert result is not None
    return result


def _filled(slots: int, count: int, items: int) -> bytearray:
    referee = Referee(slots, items, 0)
    referee.put(KeysOfMessage("T", 0, 0, (f"k{n}",), n * 100, 100, n * 1000) for n in range(count))
    return referee.data


def test_many_items_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimq.protocol.tiered_index_batch._STEP", 7)
    referee = Referee(5, 60, 0)
    referee.put(KeysOfMessage("T", 0, 0, (f"k{n % 9}",), n * 100, 100, n * 1000) for n in range(50))
    header = Header(0, 0, referee.used, 50).encode(END_MAGIC)
    out = bytearray(compacted_size(5, 50))
    data = referee.data
    steps = list(compact(lambda at, size: bytes(data[at : at + size]), 5, 50, header, memoryview(out)))
    assert out == referee.compacted(header)
    assert len(steps) > 14
    before = bytes(data)
    result = _scan(data, 5, 59, exact=True)
    assert (result.items, result.first_second, result.last_second) == (50, 0, 49)
    assert data == before


@pytest.mark.parametrize("exact", [False, True])
def test_items_behind_a_lost_one_are_cut(exact: bool) -> None:
    data = _filled(3, 20, 30)
    data[item_at(3, 8) : item_at(3, 9)] = bytes(32)
    assert _scan(data, 3, 29, exact=exact).items == 7


def test_a_torn_item_is_found_by_its_link() -> None:
    data = _filled(3, 20, 30)
    # The first sector is lost, with the hash: size, time and link are there, but this link belongs to another slot
    torn = next(n for n in range(9, 20) if _slot(data, n) and _newest(data, n, 0) != _link(data, n))
    data[item_at(3, torn) : item_at(3, torn) + 4] = bytes(4)
    assert _scan(bytearray(data), 3, 29, exact=False).items == 20
    assert _scan(bytearray(data), 3, 29, exact=True, durable=torn).items >= torn
    assert _scan(data, 3, 29, exact=True).items == torn - 1


def _slot(data: bytearray, number: int) -> int:
    return slot_of(ITEM.unpack_from(data, item_at(3, number))[0], 3)


def _link(data: bytearray, number: int) -> int:
    return int(ITEM.unpack_from(data, item_at(3, number))[-1])


def _newest(data: bytearray, below: int, slot: int) -> int:
    return max((n for n in range(1, below) if _slot(data, n) == slot), default=0)


def test_durable_items_are_kept_though_one_is_damaged() -> None:
    data = _filled(3, 20, 30)
    data[item_at(3, 8) : item_at(3, 9)] = bytes(32)
    result = _scan(data, 3, 29, durable=15, exact=True)
    assert result.items >= 15


def test_magic_numbers() -> None:
    assert BEGIN_MAGIC == 0xCCDDEEFF ^ (1880681586 + 4)
    assert END_MAGIC == 0xCCDDEEFF ^ (1880681586 + 8)
