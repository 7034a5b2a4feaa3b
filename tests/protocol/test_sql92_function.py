"""The generated function: no text of a user is in its code, whatever properties are called and literals contain."""

from types import CodeType, FunctionType
from typing import cast

import pytest

from trimq.protocol import property_text
from trimq.protocol.sql92 import Expression, compile_expression
from trimq.protocol.sql92.limits import MAX_NESTING, MAX_TERMS

HOSTILE_NAMES = [
    *["text", "get", "at", "p0", "p1", "t1", "c0", "c1", "matches", "str", "to_int", "to_long", "to_finite", "compare"],
    *[
        "equal",
        "is_text",
        "__names__",
        "decode_properties",
        "EvaluationError",
        "None_",
        "True_",
        "if",
        "lambda",
        "import",
        "def",
    ],
    *[
        "return",
        "class",
        "__builtins__",
        "__class__",
        "__import__",
        "exec",
        "eval",
        "self",
        "$",
        "$$",
        "_",
        "__",
        "$text",
    ],
]
HOSTILE_TEXTS = [
    "'",
    "''",
    '"',
    '"""',
    "\\",
    "\\'",
    "\\\\'",
    "\n",
    "\r\n",
    "\x00",
    "{text}",
    "{0}",
    "%s",
    "'; import os #",
    "' or True or '",
    "') or __import__('os').system('true') or ('",
    "\\N{BULLET}",
    "\\x27",
    "\ufeff",
    "\u2028",
    "p0",
    "é😀",
]


def code_of(compiled: Expression) -> CodeType:
    return cast("FunctionType", compiled.matches_text).__code__


def constants(code: CodeType) -> set[object]:
    """The constants of a function."""
    assert not any(isinstance(one, CodeType) for one in code.co_consts), "it has no functions inside"
    return set(code.co_consts)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_property_may_have_any_name(name: str) -> None:
    compiled = compile_expression(f"{name} = 'x' AND {name} IS NOT NULL AND other > 5 AND {name} STARTSWITH 'x'")
    assert compiled.names == {name, "other"}
    assert compiled.matches({name: "x", "other": "6"})
    assert not compiled.matches({name: "y", "other": "6"})
    assert not compiled.matches({name: "x", "other": "y"})
    assert compiled.matches_text(f"{name}\x01x\x02other\x016")
    assert not compiled.matches_text("other\x016")


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_a_text_may_contain_anything(text: str) -> None:
    quoted = "'" + text.replace("'", "''") + "'"
    for condition in (
        f"a = {quoted}",
        f"a IN ({quoted}, 'zz')",
        f"a CONTAINS {quoted} AND a STARTSWITH {quoted} AND a ENDSWITH {quoted}",
        f"NOT (a <> {quoted})",
        f"NOT (a NOT IN ({quoted}))",
        f"{quoted} = a",
    ):
        compiled = compile_expression(condition)
        assert compiled.matches({"a": text}), condition
        assert not compiled.matches({"a": f"other {text} one"[::-1] + "!"}), condition
        assert compiled.matches_text(f"a\x01{text}\x02".encode()), condition


def test_the_code_contains_nothing_of_the_expression() -> None:
    """Expressions that differ only in names (of one length) and literals have the same code, and another namespace."""
    shape = "{0} = '{1}' AND {2} > {3} AND ({0} IN ('{1}', '{4}') OR {2} CONTAINS '{4}') AND {0} BETWEEN {3} AND {5}"
    one = compile_expression(shape.format("nine_long", "x", "seven_l", "5", "y", "9"))
    other = compile_expression(shape.format("__class__", "'')); exit(", "$import", "7", "__import__(''os'')", "8888"))
    first, second = code_of(one), code_of(other)
    assert first.co_code == second.co_code
    assert first.co_names == second.co_names
    assert first.co_varnames == second.co_varnames
    assert first.co_consts == second.co_consts


def test_the_functions_constants_are_the_generators_own() -> None:
    compiled = compile_expression("a = 'x' AND b > 77 OR c IN ('y', 'z') AND NOT (d = 7.5 OR e CONTAINS 'q') AND f = g")
    code = code_of(compiled)
    own = {None, True, False, "\x02", "utf-8", "replace", *range(4)}
    assert constants(code) <= own, constants(code) - own


WRAPPERS = [
    "-({}) BETWEEN 1 AND 2",
    "-({}) NOT BETWEEN 1 AND 2",
    "-({}) BETWEEN a AND b",
    "a BETWEEN -({}) AND b",
    "a NOT BETWEEN b AND -({})",
    "({}) NOT CONTAINS 'x'",
    "({}) IS NOT NULL",
    "({}) = (a > 1)",
    "({}) <> (a > 1)",
    "NOT ({})",
    "(({}) AND a > 1) IS NULL",
    "(({}) OR a > 1) IS NULL",
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_operand_is_evaluated_once(wrapper: str) -> None:
    """The code grows by the same number of bytes with each level: an operand that is written twice doubles it."""
    text = " OR ".join(["c > 1"] * 20)
    sizes = []
    for _ in range(MAX_NESTING // 3):
        sizes.append(len(code_of(Expression(text)).co_code))
        text = wrapper.format(text)
    assert sizes[-1] < 3 * sizes[0] + 2000, sizes


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("a", 1),
        ("a > 1", 1),
        ("a BETWEEN 1 AND 2", 2),
        ("-(a > 1) BETWEEN 1 AND b", 3),
        ("a > 1 AND b OR NOT (c IN ('x', 'y'))", 3),
        (" OR ".join(["a = 5"] * MAX_TERMS), MAX_TERMS),
    ],
)
def test_terms_are_the_conditions(text: str, terms: int) -> None:
    assert compile_expression(text).terms == terms


def test_the_properties_are_decoded_once_for_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them have no value where they occur last."""
    names = [f"p{number}" for number in range(12)]
    compiled = Expression(" AND ".join(f"{name} = '{name}'" for name in names))
    decoded = []

    def decode(text: str) -> dict[str, str]:
        decoded.append(text)
        return property_text.decode_properties(text)

    monkeypatch.setitem(cast("FunctionType", compiled.matches_text).__globals__, "decode_properties", decode)
    stored = "".join(f"{name}\x01{name}\x02" for name in names)
    assert compiled.matches_text(stored)
    assert decoded == []
    assert compiled.matches_text(stored + "".join(f"{name}\x01\x02" for name in names))
    assert len(decoded) == 1


def test_the_function_has_no_builtins() -> None:
    compiled = compile_expression("a = 'x'")
    assert cast("FunctionType", compiled.matches_text).__globals__["__builtins__"] == {}
