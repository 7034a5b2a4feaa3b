"""Batches of index entries: hashes keys, and links entries into the chains of their slots.

Three implementations have the same result: the native extension, numpy arrays (about 0.4 us per key), and pure Python
if neither is installed. All write entries first, then slots; the caller writes the header last, so that its count never
covers an entry that was not written.
Source: RocketMQ's IndexFile.putKey.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from trimq.protocol.hashing import key_hash, string_hash
from trimq.protocol.index_layout import ENTRY, ENTRY_SIZE, HEADER_SIZE, entry_at
from trimq.protocol.native import NATIVE, Keys

INT_MAX: Final = 0x7FFFFFFF

Message = tuple[str, tuple[str, ...], int, int]
"""Topic, keys, log offset and store time of a message."""
Row = Any
"""A column of numbers, one for each entry: a sequence of int, or a numpy array."""


Pending = Message | Keys
"""A message whose keys are not in a file yet, or the hashed keys of many messages."""


class Batch(Protocol):
    """The operations of all implementations: put entries into a file's buffer, and rebuild its slots."""

    def key_hashes(self, texts: Sequence[str]) -> list[int]:
        """The index's hash of each ``topic#key`` text (hashing.key_hash)."""
        ...

    def flat(self, messages: Sequence[Message]) -> tuple[Row, Row, Row]:
        """Columns of hash, log offset and store time, with one row per key in order. At least one message has a key."""
        ...

    def flat_mixed(self, entries: "Sequence[Pending]") -> tuple[Row, Row, Row]:
        """The same for entries that include hashed keys."""
        ...

    def seconds(self, timestamps: Row, begin: int) -> Row:
        """``seconds_since`` of each timestamp."""
        ...

    def put(self, view: memoryview, slots: int, count: int, hashes: Row, phys: Row, seconds: Row) -> int:
        """Write and link entries from number ``count`` on. Returns how many of their slots were empty before."""
        ...

    def link(self, view: memoryview, slots: int, count: int) -> tuple[bytes, int, bool]:
        """Relink entries 1 to ``count`` - 1. Returns the slot table, its slots in use, and whether a chain changed."""
        ...


def key_hash_of(text: str) -> int:
    """Hash of one ``topic#key`` text: the absolute value, 0 if that overflows."""
    value = abs(string_hash(text))
    return value if value <= INT_MAX else 0


def seconds_since(begin: int, store_timestamp: int) -> int:
    """An entry's time difference: whole seconds since the file's begin time, at least 0; 0 without a begin time."""
    if begin <= 0 or store_timestamp <= begin:
        return 0
    return min((store_timestamp - begin) // 1000, INT_MAX)


class PlainBatch:
    """The implementation in pure Python."""

    def key_hashes(self, texts: Sequence[str]) -> list[int]:
        """See Batch."""
        return [key_hash_of(text) for text in texts]

    def flat(self, messages: Sequence[Message]) -> tuple[Row, Row, Row]:
        """See Batch."""
        rows = [(key_hash(topic, key), phy, timestamp) for topic, keys, phy, timestamp in messages for key in keys]
        return tuple(zip(*rows, strict=True))  # type: ignore[return-value]

    def flat_mixed(self, entries: Sequence[Pending]) -> tuple[Row, Row, Row]:
        """See Batch."""
        rows: list[tuple[int, int, int]] = []
        for entry in entries:
            if isinstance(entry, tuple):
                topic, keys, phy, timestamp = entry
                rows += [(key_hash(topic, key), phy, timestamp) for key in keys]
            else:
                rows += entry.rows()
        return tuple(zip(*rows, strict=True))  # type: ignore[return-value]

    def seconds(self, timestamps: Row, begin: int) -> Row:
        """See Batch."""
        return [seconds_since(begin, timestamp) for timestamp in timestamps]

    def put(self, view: memoryview, slots: int, count: int, hashes: Row, phys: Row, seconds: Row) -> int:
        """See Batch."""
        table = view[HEADER_SIZE : HEADER_SIZE + 4 * slots]
        entries = bytearray(ENTRY_SIZE * len(hashes))
        newest: dict[int, int] = {}
        used = 0
        for at, (key, phy, second) in enumerate(zip(hashes, phys, seconds, strict=True)):
            slot = key % slots
            previous = newest.get(slot)
            if previous is None:
                previous = int.from_bytes(table[4 * slot : 4 * slot + 4], "big", signed=True)
                # A slot may refer to an entry beyond the count, which a process wrote before it was killed.
                if previous <= 0 or previous >= count:
                    previous = 0
                    used += 1
            ENTRY.pack_into(entries, at * ENTRY_SIZE, key, phy, second, previous)
            newest[slot] = count + at
        start = entry_at(slots, count)
        view[start : start + len(entries)] = entries
        for slot, number in newest.items():
            table[4 * slot : 4 * slot + 4] = number.to_bytes(4, "big")
        return used

    def link(self, view: memoryview, slots: int, count: int) -> tuple[bytes, int, bool]:
        """See Batch."""
        table = bytearray(4 * slots)
        changed = False
        newest: dict[int, int] = {}
        at = entry_at(slots, 1)
        for number in range(1, count):
            slot = int.from_bytes(view[at : at + 4], "big") % slots
            previous = newest.get(slot, 0).to_bytes(4, "big")
            if view[at + 16 : at + 20] != previous:
                view[at + 16 : at + 20] = previous
                changed = True
            newest[slot] = number
            at += ENTRY_SIZE
        for slot, number in newest.items():
            table[4 * slot : 4 * slot + 4] = number.to_bytes(4, "big")
        return bytes(table), len(newest), changed


def make_batch() -> Batch:
    """The native implementation if the extension is on, else numpy's if it is installed, else the one in Python."""
    if NATIVE.extension is not None:
        from trimq.protocol.index_batch_native import NativeBatch  # noqa: PLC0415 - it imports this module

        return NativeBatch(NATIVE, other_batch)
    return other_batch()


def other_batch() -> Batch:
    """The implementation to use without the extension."""
    try:
        from trimq.protocol.index_batch_numpy import NumpyBatch  # noqa: PLC0415 - numpy is optional
    except ImportError:
        return PlainBatch()
    return NumpyBatch()
