"""Bounds of an expression. RocketMQ has none: there a long one costs memory and time, a deep one the thread's stack.

They keep the compilation of an expression below a tenth of a second, and the generated code far below the limits of
Python's own compiler. One evaluation does each term once at most, on properties of up to 32 KB. The text is measured
before anything reads it, the others while it is parsed.
"""

from typing import Final

MAX_LENGTH: Final = 8192
"""Characters of an expression."""

MAX_NESTING: Final = 32
"""Levels of an expression: parentheses, NOT and signs, and a comparison is a level above what it compares."""

MAX_TERMS: Final = 256
"""Comparisons and other conditions, BETWEEN counted twice; the values of IN are not counted."""
