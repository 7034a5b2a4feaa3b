"""Properties of many records at once, out of their encoded text (trimq.protocol.message)."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from trimq.pipeline.store.gather import as_text, gather, parts, place
from trimq.pipeline.store.heads import Array

_NAME_END: Final = 1
_VALUE_END: Final = 2
_SPACE: Final = 32


@dataclass
class Properties:
    """The name-value pairs of all records, those without a name or a value left out.

    ``row`` is the record that a pair belongs to; names are [begin, equals), values [equals + 1, end) of ``data``.
    """

    count: int
    data: Array
    row: Array
    begin: Array
    equals: Array
    end: Array

    def named(self, name: bytes) -> tuple[Array, Array]:
        """The pairs of that name, at most one a record (the last counts): their records, and which pairs they are."""
        which = np.flatnonzero(self.equals - self.begin == len(name))
        for at, byte in enumerate(name):
            which = which[self.data[self.begin[which] + at] == byte]
        if len(which) > 1:
            last = np.append(self.row[which][1:] != self.row[which][:-1], True)
            which = which[last]
        return self.row[which], which

    def raw_values(self, which: Array) -> pa.BinaryArray:
        """The values of some pairs."""
        return gather(self.data, self.equals[which] + 1, self.end[which])

    def column(self, name: bytes) -> pa.StringArray:
        """The value of one property for each record, null where it has none."""
        rows, which = self.named(name)
        return place(as_text(self.raw_values(which)), rows, self.count)

    def words(self, name: bytes) -> tuple[Array, pa.StringArray]:
        """The words of one property: where those of each record begin (one more than records), and all of them."""
        rows, which = self.named(name)
        values = self.raw_values(which)
        lists = np.zeros(self.count + 1, dtype=np.int32)
        data, offsets = parts(values)
        if not (data == _SPACE).any():
            lists[rows + 1] = 1
            return np.cumsum(lists, dtype=np.int32), as_text(values)
        offsets = offsets.astype(np.int64)
        data = data[: offsets[-1]] if len(offsets) else data
        letter = data != _SPACE
        begins = letter.copy()
        begins[1:] &= ~letter[:-1]
        starts = offsets[:-1][offsets[:-1] < offsets[1:]]
        begins[starts] = letter[starts]
        stops = letter.copy()
        stops[:-1] &= ~letter[1:]
        finals = _starts_to_finals(offsets)
        stops[finals] = letter[finals]
        first = np.flatnonzero(begins)
        counts = np.zeros(self.count, dtype=np.int64)
        counts[rows] = np.diff(np.searchsorted(first, offsets))
        np.cumsum(counts, out=lists[1:])
        return lists, as_text(gather(data, first, np.flatnonzero(stops) + 1))

    def word_lists(self, name: bytes) -> pa.ListArray:
        """The same as a list for each record."""
        lists, words = self.words(name)
        return pa.ListArray.from_arrays(pa.array(lists), words, type=pa.list_(pa.field("element", pa.string())))

    def _differ(self, ids: Array) -> bool:
        """True where no record has a name twice, given each pair's name as a number; False also where nobody knows."""
        if not len(ids):
            return True
        if int(ids.max()) > 61:
            return False
        bits = np.left_shift(1, ids)
        first = np.flatnonzero(np.append(True, self.row[1:] != self.row[:-1]))
        # the sum of different bits is their union
        return bool((np.add.reduceat(bits, first) == np.bitwise_or.reduceat(bits, first)).all())

    def maps(self) -> pa.MapArray:
        """All properties of each record; of equal names the last counts."""
        which = np.arange(len(self.row))
        names = as_text(gather(self.data, self.begin, self.equals))
        ids = names.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if not self._differ(ids):
            pair = self.row * (int(ids.max()) + 1) + ids
            # of a reversed array, unique tells the first of each, which is the last
            _, kept = np.unique(pair[::-1], return_index=True)
            which = np.sort(len(which) - 1 - kept)
            names = names.take(pa.array(which))
        offsets = np.zeros(self.count + 1, dtype=np.int32)
        np.cumsum(np.bincount(self.row[which], minlength=self.count), out=offsets[1:])
        return pa.MapArray.from_arrays(pa.array(offsets), names, as_text(self.raw_values(which)))


def _starts_to_finals(offsets: Array) -> Array:
    """The last byte of each item that has any."""
    final: Array = offsets[1:][offsets[:-1] < offsets[1:]] - 1
    return final


def split_properties(texts: pa.BinaryArray) -> Properties:
    """Take the encoded texts of records apart."""
    count = len(texts)
    data, offsets = parts(texts)
    offsets = offsets.astype(np.int64)
    base = int(offsets[0])
    data = data[base : int(offsets[-1])]
    offsets -= base
    separators = np.flatnonzero(data == _VALUE_END)
    nonempty = offsets[:-1] < offsets[1:]
    # a text may end without a separator: its end counts as one
    open_end = np.zeros(count, dtype=bool)
    open_end[nonempty] = data[offsets[1:][nonempty] - 1] != _VALUE_END
    extra = offsets[1:][open_end]
    before = np.searchsorted(separators, extra)
    end = np.insert(separators, before, extra)
    is_separator = np.insert(np.ones(len(separators), dtype=np.int64), before, 0)
    begin = np.zeros(len(end), dtype=np.int64)
    begin[1:] = end[:-1] + is_separator[:-1]
    ends_before = np.searchsorted(separators, offsets[1:]) + np.cumsum(open_end)
    row = np.repeat(np.arange(count), np.diff(ends_before, prepend=0))
    equals = _first_name_end(data, begin, end)
    good = (equals > begin) & (equals + 1 < end)
    if not good.all():
        row, begin, equals, end = row[good], begin[good], equals[good], end[good]
    return Properties(count, data, row, begin, equals, end)


def _first_name_end(data: Array, begin: Array, end: Array) -> Array:
    """Where each pair's name ends; its begin for a piece that is no pair."""
    found = np.flatnonzero(data == _NAME_END)
    if len(found) == len(begin) and bool(((found >= begin) & (found < end)).all()):
        return found
    index = np.searchsorted(found, begin)
    candidate: Array = np.append(found, len(data) + 1)[index]
    return np.where(candidate < end, candidate, begin)
