"""Random SQL92 expressions, valid and invalid ones, and the properties of messages for them."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trimq.protocol.sql92 import ExpressionError, compile_expression


def _split(text: str, by: str = " ") -> list[str]:
    return text.split(by)


NAMES = _split("a b c d $e _f1 TAGS é A")
TEXTS = _split("|x|y|xy|it's|é|日本|😀|TRUE|true|NULL|a| x|1|1.5|'|''|--|/*", "|")
INTEGERS = _split("0 1 2 5 10 100 5L 5l 2147483647 2147483648 9007199254740993 4294967296")
LARGE = _split("9223372036854775807 9223372036854775807L 9223372036854775808 99999999999999999999 0L 007")
FRACTIONS = _split(
    "1.5 5. .5 1e2 1.0 5.0 2147483648.0 9007199254740992.0 1e400 1e-400 0.0 1E+3 1.e-1 1.7976931348623157e308 4.9e-324 "
    "2.4703282292062328e-324 1.7976931348623159e308 00.5 05e1 1.5f 0e0"
)
VALUES = _split(
    "x|y|xy|it's|é|日本|😀|1|2|5|10|1.5|true|TRUE|tRuE|false|yes|a|NULL|'|''| x|x |"
    "0|00|-0|+0|-1|+5|-5|05|5 | 5|\t5|5\n|5L|5.|.5|5.0|5e0|5e|e5|+|-|.|1.5f|1.5D|1.5e2d|1,5|1_000|--5|+-5|"
    "0x5|0x1p2|0X1.8P1|-0x.8p+1f|0x1p99999|0x0p99999999999|0x1p-99999999999999999999|0x1p99999999999999999999|-0x1p5000|"
    "0xp1|0x1.p1|0x1|1e400|-1e400|1e-400|2147483647|2147483648|-2147483648|-2147483649|-2147483647|9223372036854775807|"
    "9223372036854775808|-9223372036854775808|-9223372036854775809|9007199254740992|9007199254740993|"
    "99999999999999999999999999|0000000000000000000000000000005|NaN|-NaN|+NaN|Infinity|-Infinity|+Infinity|nan|inf|"
    "infinity|NaNf|\u0663|\uff11\uff12|-\u096b|\U0001d7d3|5\u0663|²|½|五|\u0663.\u0665|\u00a05|\u20005|\x015|5\x01",
    "|",
)
SPACES = [" "] * 12 + [
    "",
    "",
    "\t",
    "\n",
    "\f",
    "\r\n",
    "  ",
    "/* x */",
    "/**/",
    "/* * / ** */",
    "-- x\n",
    "--\r",
    "--x\r\n",
]
RELATIONS = _split("< <= > >= = <>")
SOUP = _split(
    "a b 1 1.5 'x' '' TRUE FALSE NULL NOT AND OR IS IN BETWEEN CONTAINS STARTSWITH ENDSWITH ( ) , + - = <> < <= > >= "
    "-- /* */ ' # ; != LIKE not Is iN 0 7L é \u212a \u0131\u017f NoT \x00 == . && || % * / \\ \u3000 \x0b \x1c"
)

Part = Callable[[random.Random, int], str]


def expression(rng: random.Random) -> str:
    """One expression: most follow the grammar, though not always its rules; some are changed, some are only tokens."""
    kind = rng.random()
    if kind < 0.06:
        return "".join(rng.choice(SOUP) + rng.choice(SPACES) for _ in range(rng.randrange(1, 9)))
    text = _either(rng, rng.choice([1, 1, 2, 2, 3]))
    if kind < 0.14:
        text += rng.choice(SPACES) + rng.choice(SOUP) + rng.choice(SPACES) + rng.choice(SOUP)
    elif kind < 0.26:
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(text) + 1)
            text = (
                text[:at]
                + rng.choice(["", rng.choice(SOUP), rng.choice("()'+-=<> \n")])
                + text[at + rng.randrange(2) :]
            )
    return text


def properties(rng: random.Random) -> str:
    """The properties of a message in their text form; some are damaged."""
    pieces = [f"{name}\x01{_value(rng)}" for name in NAMES if rng.random() < 0.7]
    if rng.random() < 0.15:
        pieces += rng.choices(["a\x01", "\x01x", "b", "", "a\x01y", "b\x015", "c\x01\x01", "xa\x011", "a=1"], k=2)
        rng.shuffle(pieces)
    return "\x02".join(pieces) + rng.choice(["\x02"] * 5 + [""])


def logic(rng: random.Random, depth: int = 3) -> str:
    """A condition whose parts may be true, false or null, or fail: ``a > 1`` is each of them for some message."""
    kind = rng.random() if depth else 0.0
    if kind < 0.15:
        return rng.choice([f"{name} {test}" for name in "abc" for test in _TESTS_OF_LOGIC])
    parts = [logic(rng, depth - 1) for _ in range(rng.choice([2, 2, 3]))]
    if kind < 0.45:
        return f"({' AND '.join(parts)})"
    if kind < 0.75:
        return f"({' OR '.join(parts)})"
    if kind < 0.9:
        return f"NOT ({parts[0]})"
    return rng.choice(
        [
            f"(({parts[0]}) = ({parts[1]}))",
            f"(({parts[0]}) <> ({parts[1]}))",
            f"(({parts[0]}) IS NULL)",
            f"(({parts[0]}) IS NOT NULL)",
            f"(-({parts[0]}) = ({parts[1]}))",
            f"(a > -({parts[0]}))",
            f"(({parts[0]}) NOT CONTAINS 'x')",
        ]
    )


_TESTS_OF_LOGIC = ["> 1", "> 1", "> 1", "= 5", "BETWEEN 1 AND 9", "IS NULL", "IN ('5')", "= 'x'", "= b", "CONTAINS 'x'"]


def nested(rng: random.Random) -> str:
    """A condition inside many others, each of which has it as its operand: BETWEEN compares its operand twice."""
    text = logic(rng, 1)
    for _ in range(rng.randrange(1, 9)):
        low, high = rng.choice(["1", "a"]), rng.choice(["2", "b"])
        text = rng.choice(
            [
                f"-({text}) BETWEEN {low} AND {high}",
                f"-({text}) NOT BETWEEN {low} AND {high}",
                f"-({text}) BETWEEN {low} AND {high}",
                f"({text}) NOT CONTAINS 'x'",
                f"({text}) IS NULL",
                f"NOT ({text})",
                f"a BETWEEN {low} AND -({text})",
            ]
        )
    return text


def logic_properties(rng: random.Random) -> str:
    """The properties of a message for ``logic``."""
    return "".join(f"{name}\x01{value}\x02" for name in "abc" if (value := rng.choice(["5", "5", "0", "x", "", "y"])))


def _value(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(["1", "5", "x", "true", "1.5"])
    if kind < 0.8:
        return rng.choice(VALUES)
    number = rng.choice([10, 1000, 2**31, 2**53, 2**63, 2**64])
    if kind < 0.9:
        return str(rng.randint(-number, number))
    return repr(rng.uniform(-number, number))


def _space(rng: random.Random) -> str:
    return rng.choice(SPACES)


def _word(rng: random.Random, word: str) -> str:
    """A keyword with space around it, sometimes in another case."""
    kind = rng.random()
    form = word if kind < 0.7 else word.lower() if kind < 0.9 else word.title()
    return f" {form} " if rng.random() < 0.7 else _space(rng) + form + _space(rng)


def _either(rng: random.Random, depth: int) -> str:
    text = _both(rng, depth)
    while rng.random() < 0.25:
        text += _word(rng, "OR") + _both(rng, depth)
    return text


def _both(rng: random.Random, depth: int) -> str:
    text = _equality(rng, depth)
    while rng.random() < 0.25:
        text += _word(rng, "AND") + _equality(rng, depth)
    return text


def _equality(rng: random.Random, depth: int) -> str:
    text = _comparison(rng, depth)
    while rng.random() < 0.3:
        kind = rng.randrange(4)
        if kind < 2:
            text += _space(rng) + ("=", "<>")[kind] + _space(rng) + _comparison(rng, depth)
        else:
            text += _word(rng, "IS") + ("", "NOT ")[kind - 2] + _word(rng, "NULL")
    return text


def _comparison(rng: random.Random, depth: int) -> str:
    text = _simple(rng, depth)
    if rng.random() < 0.25:
        return text
    while True:
        text += rng.choice(_TESTS)(rng, depth)
        if rng.random() < 0.97:
            return text


def _relation(rng: random.Random, depth: int) -> str:
    return _space(rng) + rng.choice(RELATIONS) + _space(rng) + _simple(rng, depth)


def _search(rng: random.Random, depth: int) -> str:
    return _negated(rng) + _word(rng, rng.choice(["CONTAINS", "STARTSWITH", "ENDSWITH"])) + _text(rng)


def _between(rng: random.Random, depth: int) -> str:
    if rng.random() < 0.6:
        first, second = sorted(rng.choices(INTEGERS[:6], k=2), key=lambda number: float(number.rstrip("lL")))
        return f"{_negated(rng)} BETWEEN {first} AND {second}"
    return _negated(rng) + _word(rng, "BETWEEN") + _simple(rng, depth) + _word(rng, "AND") + _simple(rng, depth)


def _in(rng: random.Random, depth: int) -> str:
    texts = ",".join(_space(rng) + _text(rng) for _ in range(rng.choice([1, 2, 3, 7])))
    return f"{_negated(rng)}{_word(rng, 'IN')}({texts}{_space(rng)})"


_TESTS: list[Part] = [_relation, _relation, _relation, _search, _between, _in]


def _negated(rng: random.Random) -> str:
    return _word(rng, "NOT") if rng.random() < 0.3 else ""


def _text(rng: random.Random) -> str:
    return "'" + rng.choice(TEXTS).replace("'", "''") + "'"


def _simple(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(NAMES[:7])
    if kind < 0.6:
        return _text(rng)
    if kind < 0.73:
        return rng.choice(INTEGERS)
    if kind < 0.75:
        return rng.choice(LARGE)
    if kind < 0.79:
        return rng.choice(FRACTIONS)
    if kind < 0.83:
        return _word(rng, rng.choice(["TRUE", "FALSE", "NULL"]))
    if depth <= 0 or kind < 0.84:
        return rng.choice(NAMES)
    if kind < 0.88:
        return rng.choice("+-") + _space(rng) + _simple(rng, depth - 1)
    if kind < 0.92:
        return _word(rng, "NOT") + _simple(rng, depth - 1)
    return f"({_space(rng)}{_either(rng, depth - 1)}{_space(rng)})"


# -- verdicts of RocketMQ's filter


class Case(NamedTuple):
    """An expression, and the properties of messages in their text form."""

    expression: str
    properties: list[str]


def cases(seed: int, count: int = 200) -> list[Case]:
    """The cases of a seed: those of ``logic`` and ``nested`` with six messages each, the others with three."""
    rng = random.Random(seed)
    return [_case(rng) for _ in range(count)]


def _case(rng: random.Random) -> Case:
    kind = rng.random()
    if kind < 0.3:
        return Case(logic(rng), [logic_properties(rng) for _ in range(6)])
    if kind < 0.4:
        return Case(nested(rng), [logic_properties(rng) for _ in range(6)])
    return Case(expression(rng), [properties(rng) for _ in range(3)])


def verdict(case: Case) -> str | None:
    """What this engine says in the referee's letters: T(rue), F(alse), N(ull), E(rror) a message; None: refused.

    NOT and IS NULL around the expression distinguish the messages that do not match, except if a part of the text was
    ignored: then they are all "-".
    """
    try:
        whole = compile_expression(case.expression)
    except ExpressionError:
        return None
    letters = {"T": whole}
    if whole.end == len(case.expression):
        letters["F"] = compile_expression(f"NOT ({case.expression})")
        letters["N"] = compile_expression(f"({case.expression}) IS NULL")
    rest = "E" if len(letters) > 1 else "-"
    return "".join(
        next((letter for letter, one in letters.items() if one.matches_text(text)), rest) for text in case.properties
    )


def agrees(ours: str | None, theirs: str | None) -> bool:
    """Whether two verdicts are the same, as far as ours tells."""
    if ours is None or theirs is None:
        return ours is theirs
    return all(our in (their, "-") and (our == "T") == (their == "T") for our, their in zip(ours, theirs, strict=True))


VERDICTS = Path(__file__).with_name("sql_verdicts.json")
"""What Apache's filter says of the cases of some seeds, for tests without a JVM (tests/interop/harness/referee.py)."""
RECORDED = range(20)
"""Those seeds."""


def digest(some: list[Case]) -> str:
    """A checksum of cases: recorded verdicts are those of exactly these texts."""
    return f"{zlib.crc32(repr(some).encode()):08x}"


# -- the tables of docs/sql92.md

PAGE = Path(__file__).parents[2] / "docs" / "sql92.md"
RESULTS = {"true": "T", "false": "F", "null": "N", "fails": "E"}


def documented() -> list[tuple[Case, str]]:
    """The examples of the page: a row has an expression, a message's properties and the result, all in backquotes."""
    found = re.findall(r"^\| `(.*?)` \| (.*?) \| (true|false|null|fails) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    return [(Case(text, ["\x02".join(_pairs(columns))]), RESULTS[result]) for text, columns, result in found]


def _pairs(columns: str) -> list[str]:
    return [pair.replace("=", "\x01", 1) for pair in re.findall("`(.*?)`", columns)]


def documented_refusals() -> list[tuple[str, int, str]]:
    """The refused expressions of the page, with position and reason."""
    found = re.findall(r"^\| `(.*?)` \| (\d+) \| (.*?) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    return [(text, int(position), reason) for text, position, reason in found]


# -- the edges of numbers

EXACT = [
    ("a < b", "a=-0.0", "b=0.0", "T"),
    ("a < b", "a=0.0", "b=-0.0", "F"),
    ("a >= b", "a=NaN", "b=NaN", "T"),
    ("a < b", "a=Infinity", "b=NaN", "T"),
    ("a > b", "a=0x1p-1074", "b=0x1p-1075", "T"),
    ("a < 1.5", "a=0x0p99999999999999999999", "", "T"),
    ("a < 1.5", "a=0x0.00p99999999999999999999", "", "T"),
    ("a < 1.5", "a=0x1p-99999999999999999999", "", "T"),
    ("a > 1.5", "a=0x1p99999999999999999999", "", "T"),
    ("a > 1.5", "a=-0x1p99999999999999999999", "", "F"),
    ("a > 1.5", "a=0x1p5000d", "", "T"),
    ("a BETWEEN 1.5 AND 5", "a=2.5", "", "E"),
    ("a BETWEEN 1 AND 5.5", "a=5.0", "", "E"),
    ("a BETWEEN 1 AND 5.5", "a=5", "", "T"),
    ("a NOT BETWEEN 5 AND 2147483648", "a=1", "", "T"),
    ("a NOT BETWEEN 5 AND 2147483648", "a=2147483649", "", "E"),
    ("a > 2147483648", "a=9223372036854775807", "", "T"),
    ("a > 2147483648", "a=9999999999999999999", "", "E"),
    ("a > -2147483648", "a=-9223372036854775808", "", "F"),
    ("a > -2147483648", "a=-9223372036854775809", "", "E"),
    ("a = 2147483647", "a=2147483648", "", "E"),
    ("a = 999999999", "a=0999999999", "", "T"),
    ("a > 1", "a=9999999999", "", "E"),
    ("a > 1", "a=-2147483648", "", "F"),
    ("a > 1", "a=-2147483649", "", "E"),
    ("9007199254740993 = 9007199254740992.0", "", "", "T"),
    ("9007199254740993 = 9007199254740992", "", "", "F"),
    ("2147483648 = 2147483648.0", "", "", "T"),
    ("5 = '5.0'", "", "", "E"),
    ("5.0 = '5'", "", "", "T"),
    ("'' = 5", "", "", "E"),
    ("-5 = -5.0", "", "", "T"),
    ("('x' = a) IS NOT NULL", "a=y", "", "T"),
    ("-(a > 1) BETWEEN b AND 2", "a=5", "b=x", "N"),
    ("-(a > 1) NOT BETWEEN 1 AND b", "a=x", "b=1", "E"),
    ("a > 5", "a=\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0666", "", "T"),
    ("a > 5", "a=\u0660\u0660\u0666x", "", "E"),
    ("TRUE = -5", "", "", "F"),
    ("5 = TRUE", "", "", "F"),
    ("5 NOT CONTAINS '5'", "", "", "F"),
    ("-(-2147483648) = a", "a=2147483648", "", "T"),
    ("a BETWEEN 5 AND 5L", "a=5", "", "T"),
    ("a BETWEEN 9007199254740993 AND 9007199254740992.0", "a=5", "", "F"),
]
"""Expression, two properties, and the verdict."""


def exact() -> list[tuple[Case, str]]:
    """``EXACT`` as cases."""
    return [
        (Case(text, ["\x02".join(pair.replace("=", "\x01", 1) for pair in pairs if pair)]), result)
        for text, *pairs, result in EXACT
    ]
