"""Property texts that are laid out alike: a matrix of bytes with a row for each text. Needs numpy.

Most neighbours in a log have the same properties with values of the same length: ids have, tags often, keys
that are numbers. Where they stand at the same places in all texts, a property is a column of the matrix, and no
separator has to be searched for but in the first row.
"""

from typing import Final, NamedTuple

import numpy as np

from trimq.protocol.property_text import NAME_END, VALUE_END

Matrix = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_NAME_END: Final = NAME_END.encode()
_VALUE_END: Final = VALUE_END.encode()
_SEPARATORS: Final = bytes(min(byte, 3) for byte in range(256))
"""Leaves separators as they are (bytes up to 2), and makes everything else the same."""


class TextLayout(NamedTuple):
    """What texts have in common: the highest byte of each column, and where their values are.

    ``values``: columns of each property's value. Names come in the order of their last pairs, which are the ones that
    count.
    """

    highest: bytes
    values: dict[str, slice]


def layout_of(texts: Matrix, begin: int = 0) -> TextLayout | None:
    """How texts are laid out whose separators and names are in the same places; None where they are not.

    ``texts`` has at least one row; properties begin at column ``begin``. What stands before it has to be free of bytes
    up to 2 where it differs.
    """
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
    """Name, begin, name's end and value's end of each pair that has a name and a value."""
    found = []
    at = 0
    for piece in text.split(_VALUE_END):
        name, _, value = piece.partition(_NAME_END)
        if name and value:
            found.append((name.decode("utf-8", "replace"), at, at + len(name), at + len(piece)))
        at += len(piece) + 1
    return found
