"""Splits the encoded properties of many records together (format: trimq.protocol.property_text)."""

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
    """The name-value pairs of all records, without pairs that lack a name or a value.

    ``row`` is the record of a pair. Its name is [begin, equals), its value [equals + 1, end) of ``data``.
    """

    count: int
    data: Array
    row: Array
    begin: Array
    equals: Array
    end: Array

    def named(self, name: bytes) -> tuple[Array, Array]:
        """The pairs with this name, at most one a record (the last one counts): their records and their indices."""
        which = np.flatnonzero(self.equals - self.begin == len(name))
        for at, byte in enumerate(name):
            which = which[self.data[self.begin[which] + at] == byte]
        if len(which) > 1:
            last = np.append(self.row[which][1:] != self.row[which][:-1], True)
            which = which[last]
        return self.row[which], which

    def raw_values(self, which: Array) -> pa.BinaryArray:
        """The values of the pairs ``which``."""
        return gather(self.data, self.equals[which] + 1, self.end[which])

    def column(self, name: bytes) -> pa.StringArray:
        """The value of a property for each record, null if it has none."""
        rows, which = self.named(name)
        return place(as_text(self.raw_values(which)), rows, self.count)

    def words(self, name: bytes) -> tuple[Array, pa.StringArray]:
        """The words of a property: the offsets of each record's words (one more than records), and all words."""
        rows, which = self.named(name)
        values = self.raw_values(which)
        lists = np.zeros(self.count + 1, dtype=np.int32)
        data, offsets = parts(values)
        if not (data == _SPACE).any():  # fast path: each value is one word
            lists[rows + 1] = 1
            return np.cumsum(lists, dtype=np.int32), as_text(values)
        # A word begins at a letter behind a space or at the start of a value, and ends likewise. Values are adjacent in
        # ``data`` without a separator: the first and last byte of each need their own rule.
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
        """As ``words``, as a list for each record."""
        lists, words = self.words(name)
        return pa.ListArray.from_arrays(pa.array(lists), words, type=pa.list_(pa.field("element", pa.string())))

    def _differ(self, ids: Array) -> bool:
        """Whether no record has a name twice, given each pair's name as a number. False if there are too many names."""
        if not len(ids):
            return True
        if int(ids.max()) > 61:  # a bit for each name, in 64-bit integers
            return False
        bits = np.left_shift(1, ids)
        first = np.flatnonzero(np.append(True, self.row[1:] != self.row[:-1]))
        # The sum of the bits equals their union exactly if they are all different.
        return bool((np.add.reduceat(bits, first) == np.bitwise_or.reduceat(bits, first)).all())

    def maps(self) -> pa.MapArray:
        """All properties of each record. Of pairs with equal names the last one counts."""
        which = np.arange(len(self.row))
        names = as_text(gather(self.data, self.begin, self.equals))
        ids = names.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if not self._differ(ids):
            pair = self.row * (int(ids.max()) + 1) + ids
            # np.unique returns the first index of each value: in the reversed array this is the last pair.
            _, last = np.unique(pair[::-1], return_index=True)
            which = np.sort(len(which) - 1 - last)
            names = names.take(pa.array(which))
        offsets = np.zeros(self.count + 1, dtype=np.int32)
        np.cumsum(np.bincount(self.row[which], minlength=self.count), out=offsets[1:])
        return pa.MapArray.from_arrays(pa.array(offsets), names, as_text(self.raw_values(which)))


def _starts_to_finals(offsets: Array) -> Array:
    """The position of the last byte of each item that is not empty."""
    final: Array = offsets[1:][offsets[:-1] < offsets[1:]] - 1
    return final


def split_properties(texts: pa.BinaryArray) -> Properties:
    """Split the encoded properties of records into pairs."""
    count = len(texts)
    data, offsets = parts(texts)
    offsets = offsets.astype(np.int64)
    base = int(offsets[0])
    data = data[base : int(offsets[-1])]
    offsets -= base
    separators = np.flatnonzero(data == _VALUE_END)
    nonempty = offsets[:-1] < offsets[1:]
    # The separator behind the last pair is optional: the end of a text without one counts as a separator too.
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
    """The end of each pair's name; the piece's begin if it has no name separator."""
    found = np.flatnonzero(data == _NAME_END)
    if len(found) == len(begin) and bool(((found >= begin) & (found < end)).all()):  # one in each: nothing to search
        return found
    index = np.searchsorted(found, begin)
    candidate: Array = np.append(found, len(data) + 1)[index]
    return np.where(candidate < end, candidate, begin)
