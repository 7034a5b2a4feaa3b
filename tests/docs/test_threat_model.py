"""docs/threat-model.md and the defaults of docs/security.md: rows are complete, and their tests exist."""

import re
from pathlib import Path

import pytest

from tests.docs.named_tests import named_in, not_collected
from trimq.broker.config import SCHEMA
from trimq.namesrv.config import SCHEMA as NAMESRV_SCHEMA
from trimq.remoting.config.options import options_of

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
OPTIONS = {opt.key: opt for schema in (SCHEMA, NAMESRV_SCHEMA) for each in schema.sections for opt in options_of(each)}
VULNERABILITIES = [
    "CVE-2019-17572",
    "CVE-2023-33246",
    "CVE-2023-37582",
    "CVE-2024-23321",
    "CVE-2023-34462",
]
ISSUES = {
    *(1279, 1839, 1842, 1893, 1966, 3115, 3326, 3922, 4524, 5303, 6768, 6958, 7486, 7542, 8108, 8613, 8776, 8882),
    *(9138, 9176, 9349, 9446, 9539, 9561, 9761, 9763, 9769, 9862),
    *(10110, 10370, 10498, 10925, 10956, 10957, 10997, 11082, 11178, 11182),
}
"""RocketMQ's issues and pull requests that are about security. 7475 is beside the vulnerabilities."""


def rows(text: str, heading: str) -> list[list[str]]:
    section = text.split(f"\n## {heading}\n")[1].split("\n## ", maxsplit=1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    "heading", ["RocketMQ's ten facts", "Known vulnerabilities", "Issues of RocketMQ about security"]
)
def test_every_row_says_what_happens_here_and_which_test_shows_it(heading: str) -> None:
    for row in rows(TEXT, heading):
        assert len(row) == 4, row
        assert all(row), row
        assert all(name for _, name in named_in(row[3])), row
        assert named_in(row[3]), row


def test_the_ten_facts_have_their_rows() -> None:
    assert [row[0] for row in rows(TEXT, "RocketMQ's ten facts")] == [str(number) for number in range(1, 11)]


def test_each_vulnerability_has_its_row() -> None:
    first = [row[0] for row in rows(TEXT, "Known vulnerabilities")]
    assert [text for text in first if text.startswith("CVE-")] == VULNERABILITIES
    assert set(re.findall(r"CVE-\d+-\d+", TEXT)) == set(VULNERABILITIES)


def test_each_issue_has_its_row() -> None:
    found = [int(number) for row in rows(TEXT, "Issues of RocketMQ about security") for number in row[0].split(", ")]
    assert len(found) == len(set(found))
    assert set(found) == ISSUES


def test_who_attacks_is_in_rows_of_three_answers() -> None:
    found = rows(TEXT, "Who attacks, and from where")
    assert len(found) >= 12
    assert all(len(row) == 3 and all(row) for row in found)


@pytest.mark.parametrize("page", ["security", "threat-model"])
def test_the_tests_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert not_collected(text) == []
    assert len(named_in(TEXT)) > 50


def test_what_pytest_would_not_collect_is_seen() -> None:
    here = "tests/docs/test_threat_model.py"
    wrong = [
        f"{here}::rows",
        f"{here}::test_none",
        "tests/docs/test_none.py::test_a",
        "tests/docs/named_tests.py::test_a",
    ]
    good = f"`{here}::test_each_issue_has_its_row` `{here}`"
    assert not_collected(good + "".join(f" `{name}`" for name in wrong)) == sorted(wrong)


def test_the_defaults_are_those_of_the_code() -> None:
    found = rows(SECURITY, "Defaults")
    assert len(found) > 30
    for name, default, why, wanted in found:
        opt = OPTIONS[name.strip("`")]
        assert default.strip("`") == opt.text(opt.default), name
        assert why
        assert wanted
        assert opt.dynamic == ("can be changed by a request" in why or why.startswith("as above, with Sub")), name
