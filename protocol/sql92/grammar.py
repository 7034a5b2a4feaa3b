"""The grammar and its parser: text to tree (RocketMQ's SelectorParser). lark is imported for the first expression.

RocketMQ's parser stops at the first token that cannot continue the expression, and ignores the rest of the text unless
that token is no token at all: ``a = 1 b`` is accepted as ``a = 1``. This one does so too; ``parse`` returns where.
"""

import re
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from trimq.protocol.sql92.build import TreeBuilder, too_deep
from trimq.protocol.sql92.errors import ExpressionError
from trimq.protocol.sql92.limits import MAX_LENGTH, MAX_NESTING
from trimq.protocol.sql92.nodes import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lark import Lark, Token, UnexpectedToken
    from lark.lark import PostLex

# Terminals whose names start with an underscore do not reach the tree. Python's re takes the first pattern that fits,
# not the longest as RocketMQ's lexer: the priorities decide. Only letters of ASCII are letters, in keywords too.
GRAMMAR: Final = r"""
?start: either
?either: both | either _OR both                   -> any_of
?both: equality | both _AND equality              -> all_of
?equality: comparison
    | equality _EQUAL comparison                  -> equal
    | equality _UNEQUAL comparison                -> unequal
    | equality _IS NULL                           -> is_null
    | equality _IS NOT NULL                       -> is_not_null
?comparison: unary
    | comparison LESS unary                       -> compare
    | comparison LESS_EQUAL unary                 -> compare
    | comparison GREATER unary                    -> compare
    | comparison GREATER_EQUAL unary              -> compare
    | comparison CONTAINS TEXT                    -> find
    | comparison STARTSWITH TEXT                  -> find
    | comparison ENDSWITH TEXT                    -> find
    | comparison NOT CONTAINS TEXT                -> not_find
    | comparison NOT STARTSWITH TEXT              -> not_find
    | comparison NOT ENDSWITH TEXT                -> not_find
    | comparison _BETWEEN unary _AND unary        -> between
    | comparison NOT _BETWEEN unary _AND unary    -> not_between
    | comparison _IN OPEN TEXT (_COMMA TEXT)* _CLOSE     -> within
    | comparison NOT _IN OPEN TEXT (_COMMA TEXT)* _CLOSE -> not_within
?unary: primary
    | PLUS unary                                  -> plus
    | MINUS unary                                 -> minus
    | NOT unary                                   -> negate
?primary: TEXT                                    -> text
    | INTEGER                                     -> integer
    | FRACTION                                    -> fraction
    | TRUE                                        -> truth
    | FALSE                                       -> truth
    | NULL                                        -> truth
    | WORD                                        -> variable
    | OPEN either _CLOSE                          -> parentheses

LINE_COMMENT.9: /--[^\n\r]*+[\n\r]/
BLOCK_COMMENT.9: /\/\*(?s:.*?)\*\//
SPACE: /[ \t\n\r\f]+/
%ignore LINE_COMMENT
%ignore BLOCK_COMMENT
%ignore SPACE

FRACTION.8: /[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+/
INTEGER.7: /0|[1-9][0-9]*[lL]?/
TEXT: /'[^']*(?:''[^']*)*'/
WORD: /[A-Za-z_$][A-Za-z0-9_$]*/
_EQUAL: "="
_UNEQUAL.6: "<>"
LESS_EQUAL.6: "<="
GREATER_EQUAL.6: ">="
LESS: "<"
GREATER: ">"
OPEN: "("
_CLOSE: ")"
_COMMA: ","
PLUS: "+"
MINUS: "-"
%declare _AND _OR NOT _BETWEEN _IN TRUE FALSE NULL _IS CONTAINS STARTSWITH ENDSWITH
"""

_KEYWORDS: Final = {
    name.lstrip("_"): name
    for name in "NOT _AND _OR _BETWEEN _IN TRUE FALSE NULL _IS CONTAINS STARTSWITH ENDSWITH".split()  # noqa: SIM905
}
_PREFIXES: Final = frozenset({"PLUS", "MINUS", "NOT"})
_EXPECTED: Final = {"OPEN": "'('", "TEXT": "a text"}


class Parsed(NamedTuple):
    """An expression as a tree, the number of its terms, and the position up to which its text was read."""

    tree: Node
    terms: int
    end: int


def parse(text: str) -> Parsed:
    """Parse an expression.

    Raises ExpressionError if RocketMQ refuses the expression, or if it is over a limit.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            MAX_LENGTH, f"the expression has {len(text)} characters; at most {MAX_LENGTH} are allowed"
        )
    half = _half_a_character(text)
    if half is not None:
        raise ExpressionError(half.start(), f"{half[0]!r} is half a character (a surrogate without its pair)")
    from lark import UnexpectedCharacters, UnexpectedToken  # noqa: PLC0415 - imported by the first expression

    try:
        return Parsed(*_parse(text), len(text))
    except UnexpectedToken as error:
        if error.token.type == "$END":
            raise ExpressionError(len(text), f"the expression ends here, but {_expected(error)} is missing") from None
        stop = cast("int", error.pos_in_stream)  # lark knows it, its type does not
        refusal = ExpressionError(stop, f"{str(error.token)[:40]!r} is not allowed here; expected {_expected(error)}")
    except UnexpectedCharacters as error:
        at = cast("int", error.pos_in_stream)
        raise ExpressionError(at, _unreadable(text, at)) from None
    try:
        return Parsed(*_parse(text[:stop]), stop)
    except UnexpectedToken:
        raise refusal from None


_half_a_character: Final = re.compile("[\ud800-\udfff]").search


def _parse(text: str) -> tuple[Node, int]:
    return TreeBuilder.finish(_parser().parse(text))  # type: ignore[arg-type] # the builder's result, not a tree


@cache
def _parser() -> "Lark":
    from lark import Lark  # noqa: PLC0415 - as in parse

    parser = Lark(
        GRAMMAR,
        parser="lalr",
        lexer="basic",
        transformer=TreeBuilder(),
        lexer_callbacks={"WORD": _word},
        postlex=cast("PostLex", _NestingGuard()),  # without that base class, which would load lark at once
    )
    parser.parse("a")  # completes the lexer, so that threads can share it from now on
    return parser


class _NestingGuard:
    """Refuses an expression at the token that nests it too deep, before the rest is read.

    Without it thousands of signs would be read first, and each two of them could start a comment that ends nowhere.
    """

    always_accept = ()

    def process(self, stream: "Iterator[Token]") -> "Iterator[Token]":
        """The tokens of a text, unchanged."""
        opened = signs = 0
        for token in stream:
            if token.type in _PREFIXES:
                signs += 1
            elif token.type == "OPEN":
                opened += 1
            else:
                opened -= token.type == "_CLOSE"
                signs = 0
            if opened + signs > MAX_NESTING:
                raise too_deep(cast("int", token.start_pos))
            yield token


def _word(token: "Token") -> "Token":
    """A keyword, in any case, becomes a terminal of its own."""
    token.type = _KEYWORDS.get(token.upper(), token.type)
    return token


def _expected(error: "UnexpectedToken") -> str:
    """What the grammar allows in place of a token; after a complete condition only what closes it is named."""
    names = error.expected
    if "WORD" in names:
        return "a value"
    if "_CLOSE" in names:
        return "')'"
    return " or ".join(sorted(_EXPECTED.get(name, name.lstrip("_")) for name in names))


def _unreadable(text: str, position: int) -> str:
    if text[position] == "'":
        return "the text that starts here has no closing quote"
    if text.startswith("/*", position):
        return "the comment that starts here has no end (*/)"
    return f"the character {text[position]!r} is not allowed here"
