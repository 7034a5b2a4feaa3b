"""Request frames that are laid out alike: a matrix of bytes with a row for each frame. Needs numpy.

Clients that send one kind of message send frames of one length whose headers differ in a few places only: numbers with
as many digits, ids with as many letters. What stands in those places are columns of the matrix, and nothing has to be
parsed but the first frame.
"""

from collections.abc import Sequence
from enum import IntFlag
from typing import Final, NamedTuple

import numpy as np

from trimq.protocol.alike_texts import Matrix

MOST_DIGITS: Final = 18
"""Longer numbers do not fit the columns' sums."""


class Kind(IntFlag):
    """What may stand in a column."""

    DIGIT = 1
    LEADING = 2
    """A digit other than 0: the first one of a number that has more."""
    WORD = 4
    """An ASCII letter or digit."""
    VISIBLE = 8
    """Printable ASCII that stands for itself in a JSON text, but for the space."""
    PRINTABLE = 16
    """The same and the space."""


def _kinds() -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    kinds = np.zeros(256, dtype=np.uint8)
    for byte in range(0x20, 0x7F):
        char = chr(byte)
        if char in '"\\':
            continue
        kinds[byte] |= Kind.PRINTABLE
        if char != " ":
            kinds[byte] |= Kind.VISIBLE
        if char.isalnum():
            kinds[byte] |= Kind.WORD
        if char.isdigit():
            kinds[byte] |= Kind.DIGIT
            if char != "0":
                kinds[byte] |= Kind.LEADING
    return kinds


_KINDS: Final = _kinds()


class Place(NamedTuple):
    """Columns of a frame that may differ from row to row; DIGIT is for a number without a sign."""

    columns: slice
    kind: Kind

    @property
    def width(self) -> int:
        """How many columns."""
        return int(self.columns.stop - self.columns.start)


class FrameLayout:
    """Where frames may differ from an example of them.

    ``places`` are side by side in what ``columns`` gives out, numbers first.
    """

    def __init__(self, example: bytes, head_end: int, numbers: Sequence[slice], texts: Sequence[Place]) -> None:
        """``example`` up to ``head_end`` is compared, but for the places. Raises ValueError for too long a number."""
        places = [*(Place(number, Kind.DIGIT) for number in numbers), *texts]
        self._example = np.frombuffer(example, dtype=np.uint8, count=head_end)
        self._fixed = np.full(head_end, 0xFF, dtype=np.uint8)
        needed: list[int] = []
        for columns, kind in places:
            self._fixed[columns] = 0
            needed += [kind] * (columns.stop - columns.start)
        self._at = np.concatenate([np.arange(place.columns.start, place.columns.stop) for place in places])
        digits = sum(number.stop - number.start for number in numbers)
        self._weights = np.zeros((digits, len(numbers)), dtype=np.int64)
        at = 0
        for column, number in enumerate(numbers):
            width = number.stop - number.start
            if width > MOST_DIGITS:
                raise ValueError(f"a number of {width} digits is none of a header's")
            if width > 1:
                needed[at] = Kind.LEADING
            self._weights[at : at + width, column] = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
            at += width
        self._bias = ord("0") * self._weights.sum(axis=0)
        self._needed = np.array(needed, dtype=np.uint8)

    def columns(self, rows: Matrix) -> Matrix | None:
        """Copies of the places' columns, side by side; None where a row is laid out in another way."""
        if ((rows[:, : len(self._example)] ^ self._example) & self._fixed).max():
            return None
        columns = rows.take(self._at, axis=1)
        if not (_KINDS.take(columns) & self._needed).min():
            return None
        return columns

    def numbers(self, columns: Matrix) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        """The numbers of each row."""
        numbers: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
        numbers = columns[:, : len(self._weights)].astype(np.int64) @ self._weights
        numbers -= self._bias
        return numbers
