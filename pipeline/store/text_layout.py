"""Recognises property texts of one layout: a matrix of bytes with a row for each text. Needs numpy.

Neighbouring records in a log mostly have the same properties, with values of equal length: this holds for ids, for most
tags, and for zero-padded numbers as keys. If names and separators are at the same positions in all texts, each property
is a range of columns of the matrix, and only the first row has to be parsed.
"""

from typing import Final, NamedTuple

import numpy as np

from trimq.protocol.property_text import NAME_END, VALUE_END

Matrix = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_NAME_END: Final = NAME_END.encode()
_VALUE_END: Final = VALUE_END.encode()
_SEPARATORS: Final = bytes(min(byte, 3) for byte in range(256))
"""Maps the bytes up to 2, which include the separators, to themselves, and all others to 3."""


class TextLayout(NamedTuple):
    """What the texts have in common: the highest byte of each column, and the columns of each property's value.

    ``values`` is in the order of each name's last pair, which is the one that counts.
    """

    highest: bytes
    values: dict[str, slice]


def layout_of(texts: Matrix, begin: int = 0) -> TextLayout | None:
    """The common layout of texts with names and separators at the same positions; None if they have none.

    ``texts`` has at least one row. Properties begin at column ``begin``; columns in front of it that differ between
    rows must not contain bytes up to 2.
    """
    # Two bytes of a column are equal, as far as separators go, if the lowest and the highest are: a byte between two
    # equal small values is that value too.
    lowest, highest = texts.min(axis=0).tobytes(), texts.max(axis=0).tobytes()
    if lowest.translate(_SEPARATORS) != highest.translate(_SEPARATORS):
        return None
    values: dict[str, slice] = {}
    for name, first, equals, stop in _pairs(texts[0, begin:].tobytes()):
        names = slice(begin + first, begin + equals)
        if lowest[names] != highest[names]:
            return None
        values.pop(name, None)
        values[name] = slice(begin + equals + 1, begin + stop)
    return TextLayout(highest, values)


def _pairs(text: bytes) -> list[tuple[str, int, int, int]]:
    """(name, begin, end of the name, end of the value) for each pair that has a name and a value."""
    found = []
    at = 0
    for piece in text.split(_VALUE_END):
        name, _, value = piece.partition(_NAME_END)
        if name and value:
            found.append((name.decode("utf-8", "replace"), at, at + len(name), at + len(piece)))
        at += len(piece) + 1
    return found
