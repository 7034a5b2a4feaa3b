"""The tree of an expression (RocketMQ's package org.apache.rocketmq.filter.expression).

Signs are gone from it: a number with a minus is a ``Number``, and a minus before anything else gives null, ``Nothing``.
``<>`` is a negated ``Equal``, IS NULL an ``Equal`` with null. And, Or hold all operands of a chain.
"""

from typing import Literal, NamedTuple

Relation = Literal["<", "<=", ">", ">="]
Search = Literal["CONTAINS", "STARTSWITH", "ENDSWITH"]


class Text(NamedTuple):
    """A text literal."""

    value: str


class Number(NamedTuple):
    """A number: ``literal`` if it was written without a minus, since only such numbers are constants in RocketMQ."""

    value: int | float
    literal: bool


class Truth(NamedTuple):
    """TRUE, FALSE, or NULL as None."""

    value: bool | None


class Property(NamedTuple):
    """A property of the message: a text, or null if the message does not have it."""

    name: str


class Nothing(NamedTuple):
    """The minus of something that is no number: null. The operand is evaluated, because that can fail."""

    operand: "Node"


class Cast(NamedTuple):
    """A property where a truth value is expected: false, since it is a text; null if the message does not have it."""

    operand: Property


class Not(NamedTuple):
    """NOT."""

    operand: "Node"


class And(NamedTuple):
    """All operands of a chain of AND."""

    operands: tuple["Node", ...]


class Or(NamedTuple):
    """All operands of a chain of OR."""

    operands: tuple["Node", ...]


class Equal(NamedTuple):
    """``=`` and, with ``Truth(None)`` on the right, IS NULL."""

    left: "Node"
    right: "Node"


class Compare(NamedTuple):
    """``<``, ``<=``, ``>``, ``>=``."""

    relation: Relation
    left: "Node"
    right: "Node"


class Between(NamedTuple):
    """BETWEEN, or NOT BETWEEN if ``negated``, of a property and two numbers of one Java type; else two ``Compare``."""

    operand: Property
    low: Number
    high: Number
    negated: bool


class In(NamedTuple):
    """IN, or NOT IN if ``negated``."""

    operand: Property
    values: frozenset[str]
    negated: bool


class Find(NamedTuple):
    """CONTAINS, STARTSWITH, ENDSWITH, or NOT of it if ``negated``. Never null."""

    how: Search
    operand: "Node"
    text: str
    negated: bool


Node = Text | Number | Truth | Property | Nothing | Cast | Not | And | Or | Equal | Compare | Between | In | Find
BOOLEANS = (Truth, Cast, Not, And, Or, Equal, Compare, Between, In, Find)
"""The nodes whose value is true, false or null (RocketMQ's BooleanExpression)."""
