"""An expression that is ready to be evaluated (RocketMQ's SqlFilter and Expression)."""

from collections.abc import Callable, Mapping
from typing import Any

from trimq.protocol.sql92.generate import generate
from trimq.protocol.sql92.grammar import parse


class Expression:
    """A compiled expression. It has no state: any number of threads may use it at once. It can be pickled."""

    __slots__ = ("_matches", "end", "matches_text", "names", "text")

    text: str
    """The expression as it was given."""

    names: frozenset[str]
    """The properties that it reads."""

    end: int
    """The position up to which the text was read: RocketMQ ignores what cannot continue the expression, such as a second one."""

    matches_text: Callable[[str | bytes | bytearray | memoryview], bool]
    """Whether a message matches, by its properties as they are stored (``name 0x01 value 0x02``, repeated).

    Faster than ``matches``: only the properties that the expression reads are taken out of the text.
    """

    def __init__(self, text: str) -> None:
        tree, self.end = parse(text)
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
    """Compile an SQL92 expression. Raises ExpressionError if RocketMQ would refuse it, or if it is over a limit."""
    return Expression(text)
