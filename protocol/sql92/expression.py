"""An expression that is ready to be evaluated (RocketMQ's SqlFilter and Expression)."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from trimq.protocol.sql92.generate import generate
from trimq.protocol.sql92.grammar import parse


class Expression:
    """A compiled expression. It has no state: any number of threads may use it at once. It can be pickled."""

    __slots__ = ("_matches", "end", "matches_text", "names", "terms", "text")

    text: str
    """The expression as it was given."""

    names: frozenset[str]
    """The properties that it reads."""

    terms: int
    """Its comparisons and other conditions, BETWEEN counted twice: an evaluation does each of them at most once."""

    end: int
    """The position up to which the text was read: RocketMQ ignores the rest if it cannot continue the expression."""

    matches_text: Callable[[str | bytes | bytearray | memoryview], bool]
    """Whether a message matches, by its properties as they are stored (``name 0x01 value 0x02``, repeated).

    Faster than ``matches``: only the properties that the expression reads are taken out of the text.
    """

    def __init__(self, text: str) -> None:
        tree, self.terms, self.end = parse(text)
        self._matches, self.names = generate(tree)
        self.matches_text = self._matches
        self.text = text

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Whether a message with these properties matches. False also if the evaluation fails or its result is null."""
        return self._matches(None, properties.get)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return compile_expression, (self.text,)


def compile_expression(text: str) -> Expression:
    """Compile an SQL92 expression. Raises ExpressionError if RocketMQ would refuse it, or if it is over a limit.

    A few comparisons take half a millisecond, the largest expression up to 70 ms. The first call imports lark and
    prepares the grammar, some 60 ms: a program that must not wait makes it in a thread. Expressions that were compiled
    before are remembered, the last 100 as in RocketMQ, since every heartbeat of a consumer repeats its own.
    """
    return _remembered(text)


_remembered = lru_cache(maxsize=100)(Expression)
