"""SQL92 expressions: the page's examples, Apache's recorded verdicts, limits, and properties taken out of records."""

import json
import os
import pickle
import subprocess
import sys
from itertools import islice
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lark import Token

from tests.protocol.sql_cases import (
    RECORDED,
    VERDICTS,
    Case,
    agrees,
    cases,
    digest,
    documented,
    documented_refusals,
    exact,
    expression,
    properties,
    verdict,
)
from trimq.protocol.property_text import decode_properties
from trimq.protocol.sql92 import Expression, ExpressionError, compile_expression
from trimq.protocol.sql92.expression import _remembered
from trimq.protocol.sql92.grammar import _NestingGuard
from trimq.protocol.sql92.limits import MAX_LENGTH, MAX_NESTING, MAX_TERMS


@pytest.mark.parametrize(("case", "result"), documented() + exact())
def test_the_examples_of_the_page_and_the_edges_of_numbers(case: Case, result: str) -> None:
    ours = verdict(case)
    assert ours is not None
    assert agrees(ours, result), (case, ours, result)


@pytest.mark.parametrize(("text", "position", "reason"), documented_refusals())
def test_the_refusals_of_the_page(text: str, position: int, reason: str) -> None:
    with pytest.raises(ExpressionError) as refused:
        compile_expression(text)
    assert (refused.value.position, refused.value.reason) == (position, reason)
    assert str(refused.value) == f"at position {position}: {reason}"


def test_the_page_has_examples() -> None:
    assert len(documented()) > 40
    assert len(documented_refusals()) > 20


@pytest.mark.parametrize("seed", RECORDED)
def test_the_verdicts_of_apaches_filter(seed: int) -> None:
    """tests/interop/test_sql_filter.py compares the records with the filter itself."""
    some = cases(seed)
    theirs = json.loads(VERDICTS.read_text("utf-8"))[f"{seed}:{digest(some)}"].split(" ")
    for case, one in zip(some, theirs, strict=True):
        ours = verdict(case)
        assert agrees(ours, None if one == "-" else one), f"{case} is {one}, not {ours}"


# -- properties


@given(st.randoms(use_true_random=False))
def test_every_form_of_the_properties_gives_the_same_result(rng: Random) -> None:
    text = expression(rng)
    try:
        compiled = compile_expression(text)
    except ExpressionError:
        return
    _same_in_all_forms(compiled, properties(rng))


def _same_in_all_forms(compiled: Expression, stored: str) -> None:
    raw = stored.encode()
    decoded = decode_properties(stored)
    expected = compiled.matches(decoded)
    assert compiled.matches_text(stored) is expected
    for form in (raw, bytearray(raw), memoryview(raw)):
        assert compiled.matches_text(form) is expected
    assert compiled.matches({name: decoded[name] for name in compiled.names if name in decoded}) is expected


@given(st.text("ab\x01\x02", max_size=24))
@example("a\x01")
@example("a\x01b\x02a\x01")
@example("ba\x01b")
@example("a\x01a\x01b\x02b\x01a\x01")
def test_properties_are_found_in_any_text(stored: str) -> None:
    names = ["a", "b", "aa", "ab", "ba", "bb", *[f"n{number}" for number in range(20)]]
    for name in names[:6]:
        for value in ("a", "b", "ab", "a\x01b"):
            _same_in_all_forms(compile_expression(f"{name} = '{value}'"), stored)
        _same_in_all_forms(compile_expression(f"{name} IS NULL"), stored)
    # Many properties are taken out in another way.
    _same_in_all_forms(compile_expression(" OR ".join(f"{name} = 'ab'" for name in names)), stored)


def test_the_last_property_of_a_name_counts_unless_it_is_empty() -> None:
    compiled = compile_expression("a = '2'")
    assert compiled.matches_text("a\x011\x02a\x012\x02")
    assert not compiled.matches_text("a\x012\x02a\x011\x02")
    assert compiled.matches_text("a\x012\x02a\x01\x02")
    assert compiled.matches_text("b\x01x\x02a\x012")


def test_malformed_utf_8_is_replaced_as_java_does() -> None:
    assert compile_expression("a = '\ufffd5'").matches_text(b"a\x01\xff5\x02")
    assert compile_expression("b = '5'").matches_text(b"a\x01\xe2\x82\x02b\x015\x02")


def test_names_are_the_properties_that_are_read() -> None:
    assert compile_expression("a > 1 AND (b IS NULL OR NOT c) AND TAGS IN ('x')").names == {"a", "b", "c", "TAGS"}
    assert compile_expression("a = 1 OR b CONTAINS ''").names == {"a"}
    assert compile_expression("TRUE").names == frozenset()
    assert compile_expression("TRUE").matches({})
    assert compile_expression("TRUE").matches_text(b"a\x01b\x02")


# -- the object


def test_an_expression_can_be_compared_and_pickled() -> None:
    one = compile_expression("a = 'x' b")
    copy = pickle.loads(pickle.dumps(one))
    assert (copy, hash(copy), copy.text, copy.end) == (one, hash(one), "a = 'x' b", 8)
    assert copy.matches({"a": "x"})
    assert repr(one) == "Expression(\"a = 'x' b\")"
    assert one != compile_expression("a = 'x'")
    assert one != "a = 'x' b"


def test_a_heartbeats_expression_is_compiled_once() -> None:
    _remembered.cache_clear()
    assert compile_expression("a = 'again'") is compile_expression("a = 'again'")
    for number in range(300):
        compile_expression(f"a = {number}")
    assert _remembered.cache_info().currsize == 100


def test_an_import_of_the_package_does_not_load_lark() -> None:
    code = """
import sys
from trimq.protocol.sql92 import compile_expression
assert "lark" not in sys.modules
assert compile_expression("a = 1").matches({"a": "1"})
assert "lark" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)


# -- limits


LEVELS = "the expression is nested more than 32 levels deep"
CONDITIONS = "the expression has more than 256 conditions"


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("a" * (MAX_LENGTH + 1), MAX_LENGTH, "the expression has 8193 characters; at most 8192 are allowed"),
        ("(" * (MAX_NESTING + 1) + "a" + ")" * (MAX_NESTING + 1), MAX_NESTING, LEVELS),
        ("b OR " + "-" * (MAX_NESTING + 1) + "a IS NULL", 5 + MAX_NESTING, LEVELS),
        ("b OR " + "-(" * (MAX_NESTING // 2) + "+a" + ")" * (MAX_NESTING // 2) + "IS NULL", 37, LEVELS),
        ("(a = " * 17 + "-5" + ")" * 17, 5, LEVELS),
        ("NOT " * 2000, 4 * MAX_NESTING, LEVELS),
        ("a" + " = TRUE" * (MAX_NESTING + 1), 0, LEVELS),
        (" OR ".join(["a = 5"] * (MAX_TERMS + 1)), 0, CONDITIONS),
        (" OR ".join(["a NOT BETWEEN 1 AND b"] * (MAX_TERMS // 2 + 1)), 0, CONDITIONS),
        (" AND ".join(["a", "TRUE"] * (MAX_TERMS // 2 + 1)), 0, CONDITIONS),
        ("a = '\ud83d'", 5, "'\\ud83d' is half a character (a surrogate without its pair)"),
    ],
)
def test_over_a_limit(text: str, position: int, reason: str) -> None:
    with pytest.raises(ExpressionError) as refused:
        compile_expression(text)
    assert (refused.value.position, refused.value.reason) == (position, reason)


def test_signs_that_could_start_comments_are_not_searched_for_their_ends() -> None:
    """Each pair of them would be compared with the rest of the line: the number of tokens read is bounded instead."""
    tokens = _NestingGuard().process(Token("MINUS", "-", start_pos=at) for at in range(8000))
    assert len(list(islice(tokens, MAX_NESTING))) == MAX_NESTING
    with pytest.raises(ExpressionError, match=LEVELS):
        next(tokens)


@pytest.mark.parametrize(
    "text",
    [
        "(" * (MAX_NESTING - 1) + "a > 5" + ")" * (MAX_NESTING - 1),
        "NOT (" * (MAX_NESTING // 2) + "a" + ")" * (MAX_NESTING // 2),
        "(b > 1 OR c > 1 AND " * (MAX_NESTING // 2) + "a" + " = d)" * (MAX_NESTING // 2),
        "NOT (b > 1 OR c > 1 AND -" * 7 + "(a > 1)" + " = d)" * 7,
        "(a = 'x' AND (" * 12 + "a > 5" + " OR b > 5))" * 12,
        " OR ".join(["a = 5"] * MAX_TERMS),
        " AND ".join([f"n{number} > 5" for number in range(MAX_TERMS)]),
        "NOT (" + " OR ".join([f"(a = 'x' AND b > {number})" for number in range(MAX_TERMS // 2)]) + ")",
        "(" + " AND ".join(["(-(a > 5) = (b < 1))"] * (MAX_TERMS // 3)) + ") IS NULL",
        "(" + " OR ".join(["-(a > 5)  = -(b < 1)"] * (MAX_TERMS // 3 - 1)) + ") = TRUE = (FALSE IS NULL)",
    ],
)
def test_at_a_limit_python_can_compile_the_function(text: str) -> None:
    """The nesting that the generated source may have is bounded by Python too."""
    try:
        compiled = compile_expression(text)
    except ExpressionError as error:
        pytest.fail(f"{text[:60]}: {error}")
    _same_in_all_forms(compiled, "a\x017\x02b\x010")
