"""Values as RocketMQ's Java code compares them: texts that are numbers, int and long, double, and truth values.

An integer literal is an int or, outside -2147483647 .. 2147483647, a long; a text that is compared with it must be an
integer of that range, in the form that Integer.parseInt or Long.parseLong reads. Beside a literal with a fraction or an
exponent, and where two properties are compared by ``<`` or ``>``, a text must have the form that Double.valueOf reads.
A text of another form makes the evaluation fail, and the message does not match.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Final

Value = str | bool | int | float | None


class EvaluationError(ValueError):
    """RocketMQ raises here: the message does not match, whatever the rest of the expression says."""


_LARGEST_INT: Final = 2**31 - 1
_LARGEST_LONG: Final = 2**63 - 1
_integer: Final = re.compile("([+-]?)(0*+)([0-9]{0,19})").fullmatch
_decimal: Final = re.compile(
    r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?[fFdD]?", re.ASCII
).fullmatch
_hexadecimal: Final = re.compile(
    r"([+-]?0[xX](?:[0-9a-fA-F]++\.?|[0-9a-fA-F]*+\.[0-9a-fA-F]++)[pP][+-]?[0-9]++)[fFdD]?", re.ASCII
).fullmatch
_named: Final = re.compile("[+-]?(?:NaN|Infinity)").fullmatch
_CONTROLS: Final = "".join(map(chr, range(0x21)))
"""What Java's String.trim removes."""


def to_int(text: str) -> int:
    """The text as Java's int. Raises EvaluationError if it is not one."""
    if len(text) < 10 and text.isascii() and text.isdigit():
        return int(text)
    return _whole(text, _LARGEST_INT)


def to_long(text: str) -> int:
    """The text as Java's long. Raises EvaluationError if it is not one."""
    if len(text) < 19 and text.isascii() and text.isdigit():
        return int(text)
    return _whole(text, _LARGEST_LONG)


def _whole(text: str, largest: int) -> int:
    found = _integer(text) if text.isascii() else _of_any_script()(text)
    if found is None or not (found[2] or found[3]):
        raise EvaluationError(text)
    value = int(found[3] or "0")
    if found[1] == "-":
        value = -value
    if not -largest - 1 <= value <= largest:
        raise EvaluationError(text)
    return value


@cache
def _of_any_script() -> Callable[[str], re.Match[str] | None]:
    """As ``_integer``: Java reads the digits of all scripts that fit into 16 bits."""
    digits = [char for char in map(chr, range(1 << 16)) if char.isdecimal()]
    zeros = "".join(char for char in digits if not int(char))
    return re.compile(f"([+-]?)([{zeros}]*+)([{''.join(digits)}]{{0,19}})").fullmatch


def to_double(text: str) -> float:
    """The text as Java's double. Raises EvaluationError if it is not one."""
    text = text.strip(_CONTROLS)
    if _decimal(text):
        return float(text.rstrip("fFdD"))
    if _named(text):
        return float(text)
    found = _hexadecimal(text)
    if found is None:
        raise EvaluationError(text)
    try:
        return float.fromhex(found[1])
    except OverflowError:
        return _far(found[1])


def _far(text: str) -> float:
    """A hexadecimal number whose exponent Python refuses."""
    mantissa, _, exponent = text.lower().partition("p")
    sign = -1.0 if mantissa.startswith("-") else 1.0
    zero = exponent.startswith("-") or not mantissa.lstrip("+-").removeprefix("0x").strip("0.")
    return math.copysign(0.0 if zero else math.inf, sign)


def to_finite(text: str) -> float:
    """The text as a double that is compared with a literal: not-a-number is larger than each literal, as in Java."""
    value = to_double(text)
    return value if value == value else math.inf  # noqa: PLR0124 - false for not-a-number only


def compare_texts(left: str, right: str) -> int:
    """Below, at or above zero, as Double.compareTo: -0.0 is less than 0.0, and NaN is the largest value."""
    one, other = to_double(left), to_double(right)
    if one < other:
        return -1
    if one > other:
        return 1
    first, second = _order(one), _order(other)
    return (first > second) - (first < second)


def _order(value: float) -> tuple[bool, float, float]:
    if math.isnan(value):
        return True, 0.0, 0.0
    return False, value, math.copysign(1.0, value)


def compare_numbers(left: float, right: float) -> int:
    """Below, at or above zero. An integer is rounded to a double if the other number is one."""
    if type(left) is not type(right):
        left, right = float(left), float(right)
    return (left > right) - (left < right)


def compare(left: str | float, right: str | float) -> int:
    """Below, at or above zero, for ``<`` and its kin. Raises EvaluationError if a text is not the number needed."""
    if isinstance(left, str):
        if isinstance(right, str):
            return compare_texts(left, right)
        left = converter(right)(left)
    elif isinstance(right, str):
        right = converter(left)(right)
    return compare_numbers(left, right)


def converter(number: float) -> Callable[[str], int | float]:
    """What reads a text as a number of the same Java type."""
    if type(number) is float:
        return to_finite
    return to_int if -_LARGEST_INT <= number <= _LARGEST_INT else to_long


def equal(left: Value, right: Value) -> bool | None:
    """``=`` of two values, null included. Raises EvaluationError for a text that is no number, and for truth = text."""
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    if isinstance(left, bool):
        if isinstance(right, str):
            raise EvaluationError(right)  # RocketMQ casts the wrong side here
        return isinstance(right, bool) and left is right
    if isinstance(right, bool):
        return isinstance(left, str) and (left.lower() == "true") is right
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    return compare(left, right) == 0


def is_text(value: Value) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)
