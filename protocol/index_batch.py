"""Entries of an index file, many at a time: hashing keys and linking them into the slots' chains.

Two forms with the same result: one on numpy arrays (about 0.4 us a key), one in plain Python where numpy is not
installed. Both write entries, then slots; the caller writes the header last, so that its count never covers a hole.
Source: RocketMQ's IndexFile.putKey.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

from trimq.protocol.hashing import key_hash, string_hash
from trimq.protocol.index_layout import ENTRY, ENTRY_SIZE, HEADER_SIZE, entry_at

INT_MAX: Final = 0x7FFFFFFF

Message = tuple[str, tuple[str, ...], int, int]
"""Topic, keys, log offset and store time of a message."""
Row = Any
"""Numbers, one for each entry: a sequence of int, or a numpy array."""


class KeyRun(Protocol):
    """Keys of messages of one topic, as many keys for each message."""

    @property
    def kind(self) -> Hashable:
        """Runs of the same kind can be joined."""
        ...

    @property
    def keys(self) -> int:
        """How many keys there are in all."""
        ...

    def __len__(self) -> int:
        """How many messages."""
        ...

    def messages(self) -> list[Message]:
        """The messages one by one."""
        ...

    def split(self, keys: int) -> "tuple[KeyRun, KeyRun]":
        """The messages with about the first ``keys`` keys, at least one message, and the others."""
        ...

    def joined(self, others: "Sequence[KeyRun]") -> "KeyRun":
        """This one and others of the same ``kind`` behind it."""
        ...

    def flat(self) -> tuple[Row, Row, Row]:
        """As Batch.flat, as numpy arrays."""
        ...


Pending = Message | KeyRun
"""A message whose keys are not in a file yet, or a run of them."""


def each_of(entries: Iterable[Pending]) -> Iterator[Message]:
    """The messages one by one."""
    for entry in entries:
        if isinstance(entry, tuple):
            yield entry
        else:
            yield from entry.messages()


class KeyColumns(Protocol):
    """The keys of a batch's messages before it is known where those lie."""

    def __len__(self) -> int:
        """How many messages."""
        ...

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        """The keys of each message."""
        ...

    def run(self, topic: str, offsets: Sequence[int], store_timestamp: int) -> KeyRun:
        """The same with log offsets and store time."""
        ...


class Batch(Protocol):
    """What both forms offer: put entries into a file's buffer, and count or rebuild its slots."""

    def key_hashes(self, texts: Sequence[str]) -> list[int]:
        """The index's hash of each ``topic#key`` text (hashing.key_hash)."""
        ...

    def flat(self, messages: Sequence[Message]) -> tuple[Row, Row, Row]:
        """Hash, log offset and store time of each key of at least one message with a key, in their order."""
        ...

    def flat_mixed(self, entries: "Sequence[Pending]") -> tuple[Row, Row, Row]:
        """The same where runs are among the messages."""
        ...

    def seconds(self, timestamps: Row, begin: int) -> Row:
        """``seconds_since`` of each."""
        ...

    def put(self, view: memoryview, slots: int, count: int, hashes: Row, phys: Row, seconds: Row) -> int:
        """Write entries number ``count`` and up, link them; returns how many slots were empty before."""
        ...

    def link(self, view: memoryview, slots: int, count: int) -> tuple[bytes, int, bool]:
        """Chain entries 1 to ``count`` - 1 anew: slot table for them, its slots in use, whether a chain changed."""
        ...


def key_hash_of(text: str) -> int:
    """Hash of one ``topic#key`` text: absolute value, 0 where that does not fit."""
    value = abs(string_hash(text))
    return value if value <= INT_MAX else 0


def seconds_since(begin: int, store_timestamp: int) -> int:
    """An entry's time difference: whole seconds since the file's begin time, 0 without one, never negative."""
    if begin <= 0 or store_timestamp <= begin:
        return 0
    return min((store_timestamp - begin) // 1000, INT_MAX)


class PlainBatch:
    """The plain-Python form."""

    def key_hashes(self, texts: Sequence[str]) -> list[int]:
        """See Batch."""
        return [key_hash_of(text) for text in texts]

    def flat(self, messages: Sequence[Message]) -> tuple[Row, Row, Row]:
        """See Batch."""
        rows = [(key_hash(topic, key), phy, timestamp) for topic, keys, phy, timestamp in messages for key in keys]
        return tuple(zip(*rows, strict=True))  # type: ignore[return-value]

    def flat_mixed(self, entries: Sequence[Pending]) -> tuple[Row, Row, Row]:
        """See Batch."""
        return self.flat(list(each_of(entries)))

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
    """The numpy form where numpy is installed, else the plain one."""
    try:
        from trimq.protocol.index_batch_numpy import NumpyBatch  # noqa: PLC0415 - numpy is optional
    except ImportError:
        return PlainBatch()
    return NumpyBatch()
