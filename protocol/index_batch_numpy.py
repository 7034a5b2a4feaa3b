"""The numpy implementation of index_batch: the same bytes as in pure Python, at about a tenth of the cost."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Final, cast

import numpy as np

from trimq.protocol.hashing import hash_in_front, key_hash
from trimq.protocol.index_batch import INT_MAX, Message, Pending, Row, key_hash_of
from trimq.protocol.index_layout import ENTRY_SIZE, HEADER_SIZE, entry_at
from trimq.protocol.native import Keys

_LONGEST: Final = 1024
"""If the texts have more than _LETTERS characters together, keys longer than this are hashed one by one."""
_BATCH: Final = 4096
"""The most texts that are hashed together."""
_LETTERS: Final = 1 << 16
"""The most characters that are hashed together: powers are precomputed up to this number."""
_ENTRY_TYPE = np.dtype([("hash", ">i4"), ("phy", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])


def _powers_of(base: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    """All powers of ``base`` up to the last one needed, modulo 2**32."""
    factors = np.full(_LETTERS + 1, base, dtype=np.uint32)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint32)


_POWERS: Final = _powers_of(31)
_INVERSES: Final = _powers_of(pow(31, -1, 1 << 32))


class NumpyBatch:
    """The implementation with numpy arrays."""

    def key_hashes(self, texts: Sequence[str]) -> list[int]:
        """See Batch."""
        found: list[int] = []
        for begin in range(0, len(texts), _BATCH):
            part = list(texts[begin : begin + _BATCH])
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
        for hashed, alike in groupby(entries, key=lambda entry: not isinstance(entry, tuple)):
            if hashed:
                found = [row for run in cast("Iterator[Keys]", alike) for row in run.rows()]
                hashes, phys, timestamps = np.array(found, dtype=np.int64).reshape(-1, 3).T
                rows.append((hashes.astype(np.int32), phys, timestamps))
            else:
                messages = [message for message in cast("Iterator[Message]", alike) if message[1]]
                rows += [self.flat(messages)] if messages else []
        if len(rows) == 1:
            return rows[0]
        hashes, phys, timestamps = map(np.concatenate, zip(*rows, strict=True))
        return hashes, phys, timestamps

    def seconds(self, timestamps: Row, begin: int) -> Row:
        """See Batch."""
        if begin <= 0:
            return np.zeros(len(timestamps), dtype=np.int64)
        # np.asarray: the row may be one of the extension, which has failed since
        return np.clip((np.asarray(timestamps) - begin) // 1000, 0, INT_MAX)

    def put(self, view: memoryview, slots: int, count: int, hashes: Row, phys: Row, seconds: Row) -> int:
        """See Batch."""
        size = len(hashes)
        keys = np.asarray(hashes, dtype=np.int32)
        slot = keys % np.int32(slots)
        table = np.frombuffer(view, dtype=">i4", count=slots, offset=HEADER_SIZE)
        previous = table[slot].astype(np.int32)
        previous[(previous <= 0) | (previous >= count)] = 0  # as in PlainBatch: not counted, from a killed process
        # Entries of one slot become neighbours, in their order: each refers to the one before it in this batch.
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
        table[slot] = np.arange(count, count + size)  # among entries with the same slot, the last assignment wins
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
            # Chains within this part come from neighbours; the first entry of a slot continues the part before.
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


def _hashes(texts: list[str], front: Row) -> tuple["np.ndarray[tuple[int], np.dtype[np.int32]]", list[int]]:
    """The index's hash of each text after a prefix with the String.hashCode ``front``, and the positions of odd texts.

    Odd texts (empty, not ASCII, or very long ones among many characters) have no valid hash in the result.
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
    hashes = np.abs(sums.astype(np.int32))  # the smallest integer stays negative
    return np.maximum(hashes, 0)


def _sums(
    units: "np.ndarray[tuple[int], np.dtype[np.uint8]]", lengths: Row
) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    """String.hashCode of each text, unsigned. ``units`` has the characters of all texts, one text after the other.

    A character counts times 31 to the power of its distance from the end of its text. This distance is the text's end
    minus the character's position, both counted over all texts. So each character is multiplied by the inverse power of
    its position, which is the same for every call, and the sum of a text by the power of its end.
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
