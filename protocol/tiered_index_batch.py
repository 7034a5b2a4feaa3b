"""Operations on many items of a tiered index file at once, with numpy: put, relink, compact, select.

Layouts: tiered_index_layout. All are plain functions on buffers. Those that walk through a whole file work in slices,
so that a thread that runs them leaves the interpreter to the event loop in between.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from trimq.protocol.index_batch import Batch
from trimq.protocol.native import NATIVE
from trimq.protocol.tiered_index_layout import (
    COMPACT_ITEM_SIZE,
    HEADER_SIZE,
    ITEM_SIZE,
    SLOT_SIZE,
    IndexItem,
    compacted_size,
    item_at,
    tiered_key_hash,
)

_FIELDS: Final = [
    ("hash", ">i4"),
    ("topic", ">i4"),
    ("queue", ">i4"),
    ("offset", ">i8"),
    ("size", ">i4"),
    ("seconds", ">i4"),
]
COMPACT_TYPE: Final = np.dtype(_FIELDS)
ITEM_TYPE: Final = np.dtype([*_FIELDS, ("previous", ">i4")])
_STEP: Final = 1 << 14
"""Items of a slice: about a millisecond for each operation."""
_INT_MIN: Final = -0x80000000


class KeysOfMessage(NamedTuple):
    """The keys of a message, and where it stands: stream position, size; its store time in ms."""

    topic: str
    topic_id: int
    queue_id: int
    keys: tuple[str, ...]
    offset: int
    size: int
    store_ms: int


class Scan(NamedTuple):
    """What stands in an unsealed file: items that can be used, the slot table, slots in use, range of the seconds."""

    items: int
    table: Any
    used_slots: int
    first_second: int
    last_second: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyItems:
    """Items, one for each key, in the order of their messages: without seconds and links, which depend on the file.

    ``times``: the store time of each in ms.
    """

    items: Any
    times: Any

    def __len__(self) -> int:
        return len(self.items)

    def part(self, begin: int, end: int) -> "KeyItems":
        """The items from one number to another."""
        return KeyItems(self.items[begin:end], self.times[begin:end])

    def since(self, begin_ms: int) -> Any:
        """The items of a file that began at a time."""
        items = self.items.copy()
        milliseconds = self.times - begin_ms
        seconds = np.abs(milliseconds) // 1000 * np.sign(milliseconds)
        items["seconds"] = np.clip(seconds, _INT_MIN, 0x7FFFFFFF)
        return items


def items_of_bytes(items: bytes, times: bytes) -> KeyItems:
    """The items that the native extension has made (native.TierBatch)."""
    return KeyItems(np.frombuffer(items, ITEM_TYPE), np.frombuffer(times, np.int64))


def items_of_columns(topic_id: int, queue_id: int, hashes: Any, offsets: Any, sizes: Any, times: Any) -> KeyItems:
    """The items of messages of one queue: tiered_key_hash, stream position, size and store time (ms) of each key."""
    items = np.zeros(len(hashes), dtype=ITEM_TYPE)
    items["hash"] = hashes
    items["topic"], items["queue"] = topic_id, queue_id
    items["offset"], items["size"] = offsets, sizes
    return KeyItems(items, np.asarray(times, dtype=np.int64))


def items_of(batch: Batch, messages: Sequence[KeysOfMessage]) -> KeyItems:
    """The items of messages of any queues."""
    if not any(message.keys for message in messages):
        return KeyItems(np.zeros(0, dtype=ITEM_TYPE), np.zeros(0, dtype=np.int64))
    hashes, offsets, times = batch.flat([(m.topic, m.keys, m.offset, m.store_ms) for m in messages])
    counts = np.fromiter((len(m.keys) for m in messages), dtype=np.int64, count=len(messages))
    sizes = np.array([m.size for m in messages], dtype=np.int64).repeat(counts)
    found = items_of_columns(0, 0, hashes, offsets, sizes, times)
    items = found.items
    if not np.all(items["hash"]):  # the local index stores 0 for the smallest integer
        texts = [(m.topic, key) for m in messages for key in m.keys]
        for at in np.flatnonzero(items["hash"] == 0):
            items["hash"][at] = tiered_key_hash(*texts[at])
    items["topic"] = np.array([m.topic_id for m in messages], dtype=np.int64).repeat(counts)
    items["queue"] = np.array([m.queue_id for m in messages], dtype=np.int64).repeat(counts)
    return found


def put(view: memoryview, slots: int, count: int, items: KeyItems, begin_ms: int) -> int:
    """Write items behind the ``count`` of a file that began at a time, and link them.

    Returns how many of their slots were empty before. The caller writes the header last.
    """
    extension = NATIVE.extension
    if extension is not None:
        try:
            return extension.put_tier_items(
                view, slots, count, items.items.view(np.uint8), begin_ms, np.ascontiguousarray(items.times)
            )
        except extension.NativeFault as fault:
            # It checks what it gets before it writes. After a panic amid it, the changed slots would begin new chains:
            # the items before are found again once the file is compacted, or at the next start.
            NATIVE.turn_off(str(fault))
    return put_with_numpy(view, slots, count, items.since(begin_ms))


def put_with_numpy(view: memoryview, slots: int, count: int, items: Any) -> int:
    """As ``put``, of items with seconds (KeyItems.since). Items first, then slots."""
    slot = _slots_of(items["hash"], slots)
    table = _table(view, slots)
    previous = table[slot].astype(np.int64)
    previous[(previous <= 0) | (previous > count)] = 0
    # Items of one slot become neighbours, in their order: each refers to the one before it in this batch.
    order = np.argsort(slot, kind="stable")
    again = slot[order][1:] == slot[order][:-1]
    if again.any():
        previous[order[1:][again]] = order[:-1][again] + (count + 1)
    items["previous"] = previous
    start = item_at(slots, count + 1)
    view[start : start + len(items) * ITEM_SIZE] = items.view(np.uint8).data
    table[slot] = np.arange(count + 1, count + 1 + len(items))  # among items of one slot, the last assignment wins
    return int((previous == 0).sum())


def scan(
    read: Callable[[int, int], bytes],
    write: Callable[[int, bytes], None],
    slots: int,
    limit: int,
    *,
    durable: int,
    exact: bool,
) -> Iterator[Scan | None]:
    """Find the items that can be used and link them again, whatever header and slots say. The last value is the result.

    ``limit`` is the largest item number. The first ``durable`` items are kept in any case. Behind them the items end
    before the first that no writer stores and, if ``exact``, before the first whose link is not the one to be expected:
    it was torn by a power cut. Corrected links are written.
    """
    table = np.zeros(slots, dtype=np.int32)
    count = 0
    low, high = 0x7FFFFFFF, _INT_MIN
    while count < limit:
        begin = count + 1
        size = min(_STEP, limit - count)
        data = bytearray(read(item_at(slots, begin), size * ITEM_SIZE))
        items = np.frombuffer(data, dtype=ITEM_TYPE, count=len(data) // ITEM_SIZE)
        size = len(items)
        trusted = max(0, min(durable - count, size))
        good = _is_plausible(items)
        kept = trusted + int(np.argmin(np.append(good[trusted:], False)))
        if kept and exact:
            expected = _links(items[:kept], table, slots, begin)[0]
            same = np.append((items["previous"][:kept] == expected)[trusted:], False)
            kept = trusted + int(np.argmin(same))
        if not kept:
            break
        items = items[:kept]
        expected, last = _links(items, table, slots, begin)
        slot, numbers = last
        table[slot] = numbers
        if not np.array_equal(items["previous"], expected):
            items["previous"] = expected
            write(item_at(slots, begin), bytes(data[: kept * ITEM_SIZE]))
        seconds = items["seconds"][items["size"] > 0]
        if len(seconds):
            low, high = min(low, int(seconds.min())), max(high, int(seconds.max()))
        count += kept
        if kept < size:
            break
        yield None
    yield Scan(count, table, int((table > 0).sum()), min(low, high) if count else 0, high if count else 0)


def slot_table(table: Any) -> bytes:
    """The slots of an unsealed file as they are stored."""
    stored = np.zeros((len(table), 2), dtype=">i4")
    stored[:, 0] = table
    return stored.tobytes()


def compact(
    read: Callable[[int, int], bytes], slots: int, count: int, header: bytes, out: memoryview
) -> Iterator[None]:
    """Write the compacted form of an unsealed file with ``count`` linked items into ``out``. Yields after each slice.

    The order is the one of the chains: that of the slots, and in each the newest item first.
    """
    counts = np.zeros(slots, dtype=np.int64)
    for begin in range(1, count + 1, _STEP):
        np.add.at(counts, _slots_of(_read_items(read, slots, begin, count)["hash"], slots), 1)
        yield
    following = np.cumsum(counts) - counts
    first = compacted_size(slots, 0)
    groups = np.frombuffer(out, dtype=">i4", count=2 * slots, offset=HEADER_SIZE)
    for begin in range(0, slots, _STEP):
        part = slice(begin, begin + _STEP)
        groups[::2][part] = first + following[part] * COMPACT_ITEM_SIZE
        groups[1::2][part] = counts[part] * COMPACT_ITEM_SIZE
        yield
    target = np.frombuffer(out, dtype=f"V{COMPACT_ITEM_SIZE}", count=count, offset=first)
    for begin in reversed(range(1, count + 1, _STEP)):
        forward = _read_items(read, slots, begin, count)
        items = forward[::-1]
        slot = _slots_of(items["hash"], slots)
        order = np.argsort(slot, kind="stable")
        in_order = slot[order]
        places = np.arange(len(order))
        starts = np.append(True, in_order[1:] != in_order[:-1])
        rank = places - np.maximum.accumulate(np.where(starts, places, 0))
        rows = forward.view(np.uint8).reshape(-1, ITEM_SIZE)[::-1][order, :COMPACT_ITEM_SIZE]
        target[following[in_order] + rank] = np.ascontiguousarray(rows).view(f"V{COMPACT_ITEM_SIZE}")[:, 0]
        np.add.at(following, slot, 1)
        yield
    out[:HEADER_SIZE] = header


def matching(data: bytes, key_hash: int, begin_ms: int, first_ms: int, last_ms: int, limit: int) -> list[IndexItem]:
    """The first ``limit`` compacted items with a hash and a time that may be from ``first_ms`` to ``last_ms``."""
    items = np.frombuffer(data, dtype=COMPACT_TYPE)
    rows = items[(items["hash"] == key_hash) & (items["size"] > 0)].tolist()
    found: list[IndexItem] = []
    for row in rows:
        if len(found) >= limit:
            break
        if may_be_in(begin_ms, row[5], first_ms, last_ms):
            found.append(IndexItem(row[0], row[1], row[2], row[3], row[4], begin_ms + row[5] * 1000))
    return found


def may_be_in(begin_ms: int, seconds: int, first_ms: int, last_ms: int) -> bool:
    """Whether an item can be of a message from ``first_ms`` to ``last_ms``: its time is rounded towards the begin."""
    stored = begin_ms + seconds * 1000
    return stored + (999 if seconds >= 0 else 0) >= first_ms and stored - (999 if seconds <= 0 else 0) <= last_ms


def _read_items(read: Callable[[int, int], bytes], slots: int, begin: int, count: int) -> Any:
    size = min(_STEP, count + 1 - begin)
    return np.frombuffer(read(item_at(slots, begin), size * ITEM_SIZE), dtype=ITEM_TYPE, count=size)


def _table(view: memoryview, slots: int) -> Any:
    return np.frombuffer(view, dtype=">i4", count=slots * SLOT_SIZE // 4, offset=HEADER_SIZE)[::2]


def _slots_of(hashes: Any, slots: int) -> Any:
    return np.abs(hashes.astype(np.int64)) % slots


def _is_plausible(items: Any) -> Any:
    hashes = items["hash"]
    return (
        (items["size"] > 0)
        & (items["offset"] >= 0)
        & (items["topic"] >= 0)
        & (items["queue"] >= 0)
        & ((hashes >= 0) | (hashes == _INT_MIN))
    )


def _links(items: Any, table: Any, slots: int, begin: int) -> tuple[Any, tuple[Any, Any]]:
    """The links that items should have, and the slots that they change with their newest items."""
    slot = _slots_of(items["hash"], slots)
    order = np.argsort(slot, kind="stable")
    in_order = slot[order]
    different = in_order[1:] != in_order[:-1]
    first, last = np.append(True, different), np.append(different, True)
    numbers = order + begin
    in_chain = np.empty(len(items), dtype=np.int64)
    in_chain[1:] = numbers[:-1]
    in_chain[first] = table[in_order[first]]
    expected = np.empty(len(items), dtype=np.int64)
    expected[order] = in_chain
    return expected, (in_order[last], numbers[last])
