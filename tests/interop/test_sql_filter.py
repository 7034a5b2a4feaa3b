"""TriMQ's SQL92 engine against its referee, Apache's filter: what is accepted, and the result for each message.

The results that are compared have all four values: true, false, null, and an evaluation that fails.
"""

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.interop.harness.referee import Referee, record, running_referee
from tests.protocol.sql_cases import (
    VERDICTS,
    Case,
    agrees,
    cases,
    documented,
    documented_refusals,
    exact,
    verdict,
)
from trimq.protocol.sql92 import ExpressionError, compile_expression
from trimq.protocol.sql92.limits import MAX_LENGTH, MAX_NESTING, MAX_TERMS


@pytest.fixture(scope="module")
def referee(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Referee]:
    with running_referee(tmp_path_factory.mktemp("referee")) as running:
        yield running


def compare(referee: Referee, seeds: range) -> Counter[str]:
    """How often each verdict was given; AssertionError for the first case about which the two disagree."""
    given: Counter[str] = Counter()
    for seed in seeds:
        some = cases(seed)
        for case, theirs in zip(some, referee.judge(some), strict=True):
            ours = verdict(case)
            assert agrees(ours, theirs), f"seed {seed}: {case} is {theirs}, not {ours}"
            given.update(["refused"] if theirs is None else theirs)
    return given


def test_random_expressions(referee: Referee) -> None:
    given = compare(referee, range(1000, 1040))
    assert given["refused"] > 2000, given
    assert min(given[letter] for letter in "TFNE") > 1000, given


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(10_000, 12_000, 100))
def test_many_random_expressions(referee: Referee, start: int) -> None:
    compare(referee, range(start, start + 100))


def test_the_examples_of_the_page_and_the_edges_of_numbers(referee: Referee) -> None:
    examples = documented() + exact()
    results = referee.judge([case for case, _ in examples])
    assert [(case.expression, result) for (case, _), result in zip(examples, results, strict=True)] == [
        (case.expression, result) for case, result in examples
    ]


def test_the_refusals_of_the_page(referee: Referee) -> None:
    refused = documented_refusals()
    results = referee.judge([Case(text, []) for text, _, _ in refused])
    assert {text: result for (text, _, _), result in zip(refused, results, strict=True)} == {
        text: None for text, _, _ in refused
    }


def test_the_recorded_verdicts_are_the_referees(referee: Referee) -> None:
    """If not: ``python -m tests.interop.harness.referee`` records them again."""
    assert record(referee) == json.loads(VERDICTS.read_text("utf-8"))


AT_THE_LIMITS = [
    "(" * MAX_NESTING + "a" + ")" * MAX_NESTING,
    "NOT " * MAX_NESTING + "a",
    "a = " + "-" * (MAX_NESTING - 2) + "5",
    "a" + " = TRUE" * MAX_NESTING,
    " OR ".join(["a = 5"] * MAX_TERMS),
    " AND ".join(["(a = 'x' OR NOT (b > 1))"] * (MAX_TERMS // 2)),
    f"a IN ({','.join(repr(str(number)) for number in range(1000))})",
    "a = '" + "x" * (MAX_LENGTH - 6) + "'",
]


def test_at_the_limits_both_agree(referee: Referee) -> None:
    messages = ["a\x015\x02b\x015", "a\x01x", "a\x017\x02b\x010", ""]
    some = [Case(text, messages) for text in AT_THE_LIMITS]
    for case, theirs in zip(some, referee.judge(some), strict=True):
        assert theirs is not None
        assert agrees(_one(case), theirs), case


def _one(case: Case) -> str:
    """Without NOT and IS NULL around the expression, which would be over the limit."""
    whole = compile_expression(case.expression)
    return "".join("T" if whole.matches_text(text) else "-" for text in case.properties)


OVER_THE_LIMITS = [
    ("(" * (MAX_NESTING + 1) + "a" + ")" * (MAX_NESTING + 1), "levels"),
    ("NOT " * (MAX_NESTING + 1) + "a", "levels"),
    ("a" + " = TRUE" * (MAX_NESTING + 1), "levels"),
    (" OR ".join(["a = 5"] * (MAX_TERMS + 1)), "conditions"),
    (" OR ".join(["a BETWEEN 1 AND 5"] * (MAX_TERMS // 2 + 1)), "conditions"),
    ("a = '" + "x" * (MAX_LENGTH - 5) + "'", "characters"),
    ("a = '\ud83d'", "half"),
]


def test_over_the_limits_only_trimq_refuses(referee: Referee) -> None:
    """The deliberate differences: RocketMQ has no limits."""
    assert None not in referee.judge([Case(text, []) for text, _ in OVER_THE_LIMITS])
    for text, reason in OVER_THE_LIMITS:
        with pytest.raises(ExpressionError, match=reason):
            compile_expression(text)


def test_thousands_of_levels_end_neither(referee: Referee) -> None:
    for deep in ("(" * 4000 + "a" + ")" * 4000, "NOT " * 2000 + "a", "-" * 8000 + "1 = 1", "(" * 8000):
        with pytest.raises(ExpressionError):
            compile_expression(deep)
    assert referee.judge([Case("(" * 8000 + "a" + ")" * 8000, [""]), Case("a = 1", ["a\x011"])])[1] == "T"
