"""Makes the tree while the parser reads: what may be compared with what, and the limits (RocketMQ's create methods).

Each method is the callback of the grammar's rule of that name, and gets what the rule's parts became.
"""

from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

from trimq.protocol.sql92.errors import ExpressionError
from trimq.protocol.sql92.limits import MAX_NESTING, MAX_TERMS
from trimq.protocol.sql92.nodes import (
    BOOLEANS,
    And,
    Between,
    Cast,
    Compare,
    Equal,
    Find,
    In,
    Node,
    Not,
    Nothing,
    Number,
    Or,
    Property,
    Relation,
    Search,
    Text,
    Truth,
)
from trimq.protocol.sql92.values import compare_numbers, converter

if TYPE_CHECKING:
    from lark import Token

_LARGEST_LONG = 2**63 - 1


class Built(NamedTuple):
    """A node, where its text starts, how deep it is, and how many terms it has."""

    node: Node
    at: int
    depth: int = 0
    terms: int = 0


Parts = list[Built]


def _position(token: "Token") -> int:
    return token.start_pos or 0


def _unquoted(token: str) -> str:
    return token[1:-1].replace("''", "'")


class TreeBuilder:
    """The callbacks."""

    # -- primary

    def text(self, parts: list["Token"]) -> Built:
        """``'text'``, with two quotes for one."""
        (token,) = parts
        return Built(Text(_unquoted(token)), _position(token))

    def integer(self, parts: list["Token"]) -> Built:
        """``1``, ``1L``."""
        (token,) = parts
        digits = token.rstrip("lL")
        if len(digits) > 19 or int(digits) > _LARGEST_LONG:
            raise ExpressionError(_position(token), f"the number is larger than {_LARGEST_LONG}")
        return Built(Number(int(digits), literal=True), _position(token))

    def fraction(self, parts: list["Token"]) -> Built:
        """``1.5``, ``.5``, ``5.``, ``1E5``."""
        (token,) = parts
        value = float(token)
        if value in (0.0, float("inf")):
            raise ExpressionError(
                _position(token),
                "a number with a fraction or an exponent has to be between 4.9E-324 and 1.7976931348623157E308",
            )
        return Built(Number(value, literal=True), _position(token))

    def truth(self, parts: list["Token"]) -> Built:
        """TRUE, FALSE, NULL."""
        (token,) = parts
        return Built(Truth({"TRUE": True, "FALSE": False, "NULL": None}[token.type]), _position(token))

    def variable(self, parts: list["Token"]) -> Built:
        """The name of a property."""
        (token,) = parts
        return Built(Property(str(token)), _position(token))

    def parentheses(self, parts: list["Built | Token"]) -> Built:
        """``( ... )``."""
        opening, inner = cast("tuple[Token, Built]", parts)
        return _deeper(inner.node, _position(opening), inner)

    # -- unary

    def plus(self, parts: list["Built | Token"]) -> Built:
        """``+ ...``: has no effect."""
        sign, operand = cast("tuple[Token, Built]", parts)
        return _deeper(operand.node, _position(sign), operand)

    def minus(self, parts: list["Built | Token"]) -> Built:
        """``- ...``."""
        sign, operand = cast("tuple[Token, Built]", parts)
        node = operand.node
        if isinstance(node, Number):
            return _deeper(Number(-node.value, literal=False), _position(sign), operand)
        return _deeper(Nothing(node), _position(sign), operand)

    def negate(self, parts: list["Built | Token"]) -> Built:
        """``NOT ...``: stronger than a comparison, as in RocketMQ."""
        word, operand = cast("tuple[Token, Built]", parts)
        return _deeper(Not(_boolean(operand)), _position(word), operand)

    # -- comparison

    def compare(self, parts: list["Built | Token"]) -> Built:
        """``<``, ``<=``, ``>``, ``>=``."""
        left, relation, right = cast("tuple[Built, Token, Built]", parts)
        return _term(_compared(cast("Relation", str(relation)), left, right), left, right)

    def between(self, parts: Parts) -> Built:
        """``... BETWEEN ... AND ...``."""
        value, low, high = parts
        match low.node, high.node:
            case Number(first, True), Number(last, True) if compare_numbers(last, first) < 0:
                _refuse(low, f"BETWEEN needs the smaller number first, and {first} is larger than {last}")
        return _range(value, (">=", low), ("<=", high), negated=False)

    def not_between(self, parts: list["Built | Token"]) -> Built:
        """``... NOT BETWEEN ... AND ...``: its order is not checked, as in RocketMQ."""
        value, _, low, high = cast("tuple[Built, Token, Built, Built]", parts)
        return _range(value, ("<", low), (">", high), negated=True)

    def find(self, parts: list["Built | Token"]) -> Built:
        """``... CONTAINS 'text'``, STARTSWITH, ENDSWITH."""
        operand, how, text = cast("tuple[Built, Token, Token]", parts)
        return _term(Find(cast("Search", how.type), operand.node, _unquoted(text), negated=False), operand)

    def not_find(self, parts: list["Built | Token"]) -> Built:
        """``... NOT CONTAINS 'text'``, and so on."""
        operand, _, how, text = cast("tuple[Built, Token, Token, Token]", parts)
        return _term(Find(cast("Search", how.type), operand.node, _unquoted(text), negated=True), operand)

    def within(self, parts: list["Built | Token"]) -> Built:
        """``... IN ('text', ...)``."""
        operand, _, *texts = cast("tuple[Built, Token, Token]", parts)
        return _in(operand, texts, negated=False)

    def not_within(self, parts: list["Built | Token"]) -> Built:
        """``... NOT IN ('text', ...)``."""
        operand, _, _, *texts = cast("tuple[Built, Token, Token, Token]", parts)
        return _in(operand, texts, negated=True)

    # -- equality

    def equal(self, parts: Parts) -> Built:
        """``... = ...``."""
        left, right = parts
        return _term(_equal(left, right), left, right)

    def unequal(self, parts: Parts) -> Built:
        """``... <> ...``."""
        left, right = parts
        return _term(Not(_equal(left, right)), left, right)

    def is_null(self, parts: list["Built | Token"]) -> Built:
        """``... IS NULL``."""
        operand = cast("Built", parts[0])
        return _term(Equal(operand.node, Truth(None)), operand)

    def is_not_null(self, parts: list["Built | Token"]) -> Built:
        """``... IS NOT NULL``."""
        operand = cast("Built", parts[0])
        return _term(Not(Equal(operand.node, Truth(None))), operand)

    # -- logic

    def all_of(self, parts: Parts) -> Built:
        """``... AND ...``."""
        left, right = parts
        first, second = _boolean(left), _boolean(right)
        before = first.operands if isinstance(first, And) else (first,)
        after = second.operands if isinstance(second, And) else (second,)
        return _joined(And((*before, *after)), left, right)

    def any_of(self, parts: Parts) -> Built:
        """``... OR ...``."""
        left, right = parts
        first, second = _boolean(left), _boolean(right)
        before = first.operands if isinstance(first, Or) else (first,)
        after = second.operands if isinstance(second, Or) else (second,)
        return _joined(Or((*before, *after)), left, right)

    @staticmethod
    def finish(whole: Built) -> tuple[Node, int]:
        """The tree of the whole expression, and the number of its terms."""
        return _boolean(whole), max(1, whole.terms)


def too_deep(at: int) -> ExpressionError:
    """The error for an expression with too many levels."""
    return ExpressionError(at, f"the expression is nested more than {MAX_NESTING} levels deep")


def _deeper(node: Node, at: int, operand: Built) -> Built:
    depth = operand.depth + 1
    if depth > MAX_NESTING:
        raise too_deep(at)
    return Built(node, at, depth, operand.terms)


def _term(node: Node, first: Built, *others: Built, terms: int = 1) -> Built:
    """A comparison: a level deeper than its operands."""
    depth = max([first.depth, *[other.depth for other in others]])
    terms += first.terms + sum(other.terms for other in others)
    return _counted(Built(node, first.at, depth + 1, terms))


def _joined(node: Node, left: Built, right: Built) -> Built:
    """A chain of AND or OR has the depth of its deepest operand: it becomes one node, however long it is."""
    alone = sum(isinstance(side.node, Property | Truth) for side in (left, right))
    return _counted(Built(node, left.at, max(left.depth, right.depth), left.terms + right.terms + alone))


def _counted(built: Built) -> Built:
    if built.depth > MAX_NESTING:
        raise too_deep(built.at)
    if built.terms > MAX_TERMS:
        raise ExpressionError(built.at, f"the expression has more than {MAX_TERMS} conditions")
    return built


def _boolean(operand: Built) -> Node:
    node = operand.node
    if isinstance(node, BOOLEANS):
        return node
    if not isinstance(node, Property):
        _refuse(operand, "a condition is expected here, not a value")
    return Cast(node)


def _compared(relation: Relation, left: Built, right: Built) -> Compare:
    for operand in (left, right):
        if isinstance(operand.node, (Text, *BOOLEANS)):
            _refuse(operand, f"only properties and numbers can be compared by {relation}")
    return Compare(relation, left.node, right.node)


def _range(value: Built, first: tuple[Relation, Built], second: tuple[Relation, Built], *, negated: bool) -> Built:
    """BETWEEN: RocketMQ compares the value twice. No operand but a property or a number may be in the tree twice."""
    (relation, low), (opposite, high) = first, second
    node: Node | None = _between(value, low, high, negated=negated)
    if node is None:
        one, other = _compared(relation, value, low), _compared(opposite, value, high)
        both = Or((one, other)) if negated else And((one, other))
        # A minus gives null, unless its evaluation fails: neither limit is evaluated, the second time is as the first.
        node = one if isinstance(value.node, Nothing) else both
    return _term(node, value, low, high, terms=2)


def _between(value: Built, low: Built, high: Built, *, negated: bool) -> Between | None:
    if not (isinstance(value.node, Property) and isinstance(low.node, Number) and isinstance(high.node, Number)):
        return None
    if converter(low.node.value) is not converter(high.node.value):
        return None
    return Between(value.node, low.node, high.node, negated)


def _equal(left: Built, right: Built) -> Equal:
    for operand in (left, right):
        if isinstance(operand.node, Truth) and operand.node.value is None:
            _refuse(operand, "NULL cannot be compared: use IS NULL or IS NOT NULL")
    literal = isinstance(right.node, Text) or (isinstance(right.node, Number) and right.node.literal)
    if isinstance(left.node, Truth) and literal:
        _refuse(right, "TRUE and FALSE cannot be compared with a text or a number")
    return Equal(left.node, right.node)


def _refuse(operand: Built, reason: str) -> NoReturn:
    raise ExpressionError(operand.at, reason)


def _in(operand: Built, texts: list["Token"], *, negated: bool) -> Built:
    if not isinstance(operand.node, Property):
        _refuse(operand, "only a property can be looked up by IN")
    return _term(In(operand.node, frozenset(map(_unquoted, texts)), negated), operand)
