"""The numpy form of index_batch: the same bytes as its plain form, at about a tenth of the cost."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, groupby, repeat
from typing import Final, cast

import numpy as np

from trimq.protocol.alike_texts import Matrix, texts_of
from trimq.protocol.hashing import hash_in_front, key_hash
from trimq.protocol.index_batch import INT_MAX, KeyRun, Message, Pending, Row, key_hash_of
from trimq.protocol.index_layout import ENTRY_SIZE, HEADER_SIZE, entry_at
from trimq.protocol.message_keys import TAG_KEY

_LONGEST: Final = 1024
"""Longer keys are hashed one by one where they are too many letters together."""
_AT_ONCE: Final = 4096
"""Texts that are hashed together, where somebody has many of them."""
_LETTERS: Final = 1 << 16
"""Letters that are hashed together: powers are at hand up to here."""
_ENTRY_TYPE = np.dtype([("hash", ">i4"), ("phy", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])


def _powers_of(base: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    """The 0th to the last power that is needed, modulo 2**32."""
    factors = np.full(_LETTERS + 1, base, dtype=np.uint32)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint32)


_TAG_FRONT: Final = np.frombuffer(TAG_KEY.encode(), dtype=np.uint8)
_POWERS: Final = _powers_of(31)
_INVERSES: Final = _powers_of(pow(31, -1, 1 << 32))


class NumpyBatch:
    """The form on numpy arrays."""

    def key_hashes(self, texts: Sequence[str]) -> list[int]:
        """See Batch."""
        found: list[int] = []
        for begin in range(0, len(texts), _AT_ONCE):
            part = list(texts[begin : begin + _AT_ONCE])
            hashes, odd = _hashes(part, np.uint32(0))
            for at in odd:
                hashes[at] = key_hash_of(part[at])
            found += hashes.tolist()
        return found

    def flat(self, messages: Sequence[Message]) -> tuple[Row, Row, Row]:
        """See Batch."""
        topics, keys, phys, timestamps = zip(*messages, strict=True)
        widths = set(map(len, keys))
        counts: Row = widths.pop() if len(widths) == 1 else np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
        texts = list(chain.from_iterable(keys))
        if topics.count(topics[0]) == len(topics):
            front: Row = np.uint32(hash_in_front(topics[0]))
        else:
            front = np.array([hash_in_front(topic) for topic in topics], dtype=np.uint32).repeat(counts)
        hashes, odd = _hashes(texts, front)
        if odd:
            of = np.arange(len(keys)).repeat(counts)
            for at in odd:
                hashes[at] = key_hash(topics[of[at]], texts[at])
        return (
            hashes,
            np.array(phys, dtype=np.int64).repeat(counts),
            np.array(timestamps, dtype=np.int64).repeat(counts),
        )

    def flat_mixed(self, entries: Sequence[Pending]) -> tuple[Row, Row, Row]:
        """See Batch."""
        rows = []
        for kind, alike in groupby(entries, key=_kind_of):
            if kind is None:
                messages = [message for message in cast("Iterator[Message]", alike) if message[1]]
                rows += [self.flat(messages)] if messages else []
            else:
                first, *others = cast("Iterator[AlikeRun]", alike)
                rows.append((first.joined(others) if others else first).flat())
        if len(rows) == 1:
            return rows[0]
        hashes, phys, timestamps = map(np.concatenate, zip(*rows, strict=True))
        return hashes, phys, timestamps

    def seconds(self, timestamps: Row, begin: int) -> Row:
        """See Batch."""
        if begin <= 0:
            return np.zeros(len(timestamps), dtype=np.int64)
        return np.clip((timestamps - begin) // 1000, 0, INT_MAX)

    def put(self, view: memoryview, slots: int, count: int, hashes: Row, phys: Row, seconds: Row) -> int:
        """See Batch."""
        size = len(hashes)
        keys = np.asarray(hashes, dtype=np.int32)
        slot = keys % np.int32(slots)
        table = np.frombuffer(view, dtype=">i4", count=slots, offset=HEADER_SIZE)
        previous = table[slot].astype(np.int32)
        previous[(previous <= 0) | (previous >= count)] = 0
        order = np.argsort(slot, kind="stable")
        in_order = slot[order]
        again = in_order[1:] == in_order[:-1]
        if again.any():
            previous[order[1:][again]] = order[:-1][again] + count
        entries = np.empty(size, dtype=_ENTRY_TYPE)
        entries["hash"] = keys
        entries["phy"] = phys
        entries["seconds"] = seconds
        entries["previous"] = previous
        start = entry_at(slots, count)
        view[start : start + size * ENTRY_SIZE] = entries.view(np.uint8).data
        table[slot] = np.arange(count, count + size)  # of those with one slot the last stays
        return int((previous == 0).sum())

    def link(self, view: memoryview, slots: int, count: int) -> tuple[bytes, int, bool]:
        """See Batch."""
        table: np.ndarray[tuple[int], np.dtype[np.int64]] = np.zeros(slots, dtype=np.int64)
        step = 1 << 18
        changed = False
        for begin in range(1, count, step):
            size = min(step, count - begin)
            entries = np.frombuffer(view, dtype=_ENTRY_TYPE, count=size, offset=entry_at(slots, begin))
            slot = (entries["hash"].astype(np.int64) & 0xFFFFFFFF) % slots
            order = np.argsort(slot, kind="stable")
            in_order = slot[order]
            first = np.empty(size, dtype=bool)
            first[0] = True
            np.not_equal(in_order[1:], in_order[:-1], out=first[1:])
            numbers = order + begin
            previous_in_order = np.empty(size, dtype=np.int64)
            previous_in_order[1:] = numbers[:-1]
            previous_in_order[first] = table[in_order[first]]
            if not np.array_equal(entries["previous"][order], previous_in_order):
                entries["previous"][order] = previous_in_order
                changed = True
            last = np.empty(size, dtype=bool)
            last[-1] = True
            last[:-1] = first[1:]
            table[in_order[last]] = numbers[last]
        return table.astype(">i4").tobytes(), int((table > 0).sum()), changed


def _kind_of(entry: Pending) -> Hashable:
    """None for a message; runs of one kind can be joined."""
    return None if isinstance(entry, tuple) else entry.kind


class AlikeKeys:
    """KeyColumns whose keys have the same lengths for each message: a matrix of ASCII bytes for each of its keys.

    Behind these they may have one key more that is the same for all of them: that of their tag.
    """

    __slots__ = ("_columns", "_count", "_last")

    def __init__(self, columns: Sequence[Matrix], tag: str = "", count: int = 0) -> None:
        """``columns``: none is empty or a view of what will be overwritten. ``tag``: of all, "" for none.

        ``count``: how many messages, where there is no column.
        """
        self._columns = columns
        self._count = len(columns[0]) if columns else count
        self._last = TAG_KEY + tag if tag else ""

    def with_tag(self, tag: str) -> "AlikeKeys":
        """The same with the key of a tag that all of them have."""
        return AlikeKeys(self._columns, tag, self._count)

    def with_tags(self, tags: Matrix) -> "AlikeKeys":
        """The same with the key of each one's tag."""
        front = np.tile(_TAG_FRONT, (self._count, 1))
        return AlikeKeys([*self._columns, np.concatenate((front, tags), axis=1)])

    def __len__(self) -> int:
        """See KeyColumns."""
        return self._count

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        """See KeyColumns."""
        return _keys_of(self._columns, self._last, self._count)

    def run(self, topic: str, offsets: Sequence[int], store_timestamp: int) -> "AlikeRun":
        """See KeyColumns."""
        if isinstance(offsets, range):
            phys = np.arange(offsets.start, offsets.stop, offsets.step)
        else:
            phys = np.array(offsets, dtype=np.int64)
        return AlikeRun(topic, self._columns, phys, np.full(len(phys), store_timestamp), self._last)


def _keys_of(columns: Sequence[Matrix], last: str, count: int) -> Iterator[tuple[str, ...]]:
    """The keys of each of ``count`` messages."""
    texts = list(map(texts_of, columns))
    if last:
        texts.append([last] * count)
    return zip(*texts, strict=True)


class AlikeRun:
    """The KeyRun of AlikeKeys."""

    __slots__ = ("_columns", "_last", "_phys", "_timestamps", "_topic", "_width")

    def __init__(self, topic: str, columns: Sequence[Matrix], phys: Row, timestamps: Row, last: str) -> None:
        """``phys``, ``timestamps``: each message's log offset and store time, arrays.

        ``last``: the last key of each of them, "" for none.
        """
        self._last = last
        self._width = len(columns) + bool(last)
        self._topic = topic
        self._columns = columns
        self._phys = phys
        self._timestamps = timestamps

    def __len__(self) -> int:
        """See KeyRun."""
        return len(self._phys)

    @property
    def keys(self) -> int:
        """See KeyRun."""
        return len(self._phys) * self._width

    @property
    def kind(self) -> tuple[str, str, *tuple[int, ...]]:
        """See KeyRun."""
        return (self._topic, self._last, *[column.shape[1] for column in self._columns])

    def messages(self) -> list[Message]:
        """See KeyRun."""
        keys = _keys_of(self._columns, self._last, len(self))
        return list(zip(repeat(self._topic), keys, self._phys.tolist(), self._timestamps.tolist(), strict=False))

    def split(self, keys: int) -> "tuple[AlikeRun, AlikeRun]":
        """See KeyRun."""
        at = max(1, keys // self._width)
        return self._part(slice(at)), self._part(slice(at, None))

    def _parts(self) -> tuple[Row, ...]:
        return (self._phys, self._timestamps, *self._columns)

    def _part(self, part: slice) -> "AlikeRun":
        columns = [column[part] for column in self._columns]
        return AlikeRun(self._topic, columns, self._phys[part], self._timestamps[part], self._last)

    def joined(self, others: Sequence[KeyRun]) -> "AlikeRun":
        """See KeyRun."""
        parts = [self._parts(), *(run._parts() for run in cast("Sequence[AlikeRun]", others))]  # noqa: SLF001
        phys, timestamps, *columns = map(np.concatenate, zip(*parts, strict=True))
        return AlikeRun(self._topic, columns, phys, timestamps, self._last)

    def flat(self) -> tuple[Row, Row, Row]:
        """See KeyRun."""
        front = hash_in_front(self._topic)
        keys = self._width
        sums = np.empty((len(self), keys), dtype=np.uint32)
        for at, column in enumerate(self._columns):
            width = column.shape[1]
            sums[:, at] = (column * _POWERS[:width][::-1]).sum(axis=1, dtype=np.uint32)
            sums[:, at] += np.uint32(front * int(_POWERS[width]) & 0xFFFFFFFF)
        if self._last:
            sums[:, -1] = key_hash(self._topic, self._last)
        hashes = _index_hash(sums.reshape(-1))
        return hashes, self._phys.repeat(keys), self._timestamps.repeat(keys)


def _hashes(texts: list[str], front: Row) -> tuple["np.ndarray[tuple[int], np.dtype[np.int32]]", list[int]]:
    """The index's hash of each text behind one whose String.hashCode is ``front``, and the places of odd texts.

    Odd ones (empty, not ASCII, very long ones among many letters) have no hash yet.
    """
    odd: list[int] = []
    joined = "".join(texts)
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    if not joined.isascii() or "" in texts or len(joined) > _LETTERS:
        odd = [at for at, text in enumerate(texts) if not text.isascii() or not 0 < len(text) <= _LONGEST]
        texts = texts.copy()
        for at in odd:
            texts[at] = "0"
        joined = "".join(texts)
        lengths[odd] = 1
    sums = _sums(np.frombuffer(joined.encode("ascii"), dtype=np.uint8), lengths)
    sums += front * _POWERS[lengths]
    return _index_hash(sums), odd


def _index_hash(sums: "np.ndarray[tuple[int], np.dtype[np.uint32]]") -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    hashes = np.abs(sums.astype(np.int32))  # the smallest number stays negative
    return np.maximum(hashes, 0)


def _sums(
    units: "np.ndarray[tuple[int], np.dtype[np.uint8]]", lengths: Row
) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    """String.hashCode of each text, unsigned: the texts' letters lie side by side.

    A letter counts 31 to the power of its distance from its text's end. That is the text's end in the row less the
    letter's place in it: so each is multiplied by the inverse power of its place, which is the same for every row, and
    what they add up to by the power of the end.
    """
    ends = np.cumsum(lengths)
    if len(units) <= _LETTERS:
        sums: np.ndarray[tuple[int], np.dtype[np.uint32]]
        sums = np.add.reduceat(units * _INVERSES[: len(units)], ends - lengths, dtype=np.uint32)
        sums *= _POWERS[ends - 1]
        return sums
    half = len(lengths) // 2
    middle = ends[half - 1]
    return np.concatenate((_sums(units[:middle], lengths[:half]), _sums(units[middle:], lengths[half:])))
