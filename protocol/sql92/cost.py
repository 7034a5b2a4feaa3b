"""What the evaluation of properties (SQL92) may cost at once in the event loop.

Records are evaluated in slices, and others are served between them. A slice ends after ``AT_ONCE`` records, and earlier
where the texts of properties are long or the expression has many terms. It has one record at least.
"""

from typing import Final

AT_ONCE: Final = 64
"""Records in a slice at most."""
SLICE: Final = 1 << 19
"""The cost of a slice.

A term of an expression costs one for each byte of the properties: at most 5 ns, where CONTAINS finds its text almost
everywhere in a long property. So a slice takes less than 3 ms, and the usual one, of short properties, some tenths of
one.
"""
LEAST: Final = SLICE // AT_ONCE
DECODING: Final = 8
"""What a byte costs besides, if the properties have to be decoded."""
TERM: Final = 64
"""What a term costs besides, however short the properties are."""


def cost(length: int, terms: int) -> int:
    """The cost of evaluating an expression of so many terms over properties of a length in bytes."""
    return max(LEAST, length * (terms + DECODING) + TERM * terms)
