"""The fault model has a row for every fault, and the tests that it names exist."""

import re
from pathlib import Path

import pytest

from tests.docs.named_tests import named_in, not_collected

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "fault-model.md").read_text(encoding="utf-8")
ZONES = [
    "Commit log",
    "Consume queue",
    "Index",
    "Timer",
    "Checkpoint",
    "State files",
    "Users and policies",
    "Lock and abort",
]
FAULTS = [
    "process kill",
    "power cut",
    "torn page",
    "bit flip",
    "EIO on sync",
    "ENOSPC",
    "missing, cut or wrong-sized file",
    "clock going back",
]
SHORT_NAMES = set(re.findall(r"^\| \*\*(\w+)\*\* \|", TEXT, re.MULTILINE))


def rows(zone: str) -> list[list[str]]:
    section = TEXT.split(f"\n## {zone}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("zone", ZONES)
def test_every_fault_of_a_zone_has_its_row(zone: str) -> None:
    found = rows(zone)
    assert [row[0] for row in found] == FAULTS
    for row in found:
        assert len(row) == 5
        assert all(row)
        shown = row[4]
        assert "::" in shown or "**" in shown or "no test" in shown, row
        assert set(re.findall(r"\*\*(\w+)\*\*", shown)) <= SHORT_NAMES


def test_the_tier_has_its_rows() -> None:
    found = rows("Tier")
    assert len(found) >= 15
    for row in found:
        assert len(row) == 5
        assert all(row)
        assert "::" in row[4] or "the tier cuts" in row[4], row


def test_the_bucket_has_its_rows() -> None:
    found = rows("Tier in a bucket")
    assert len(found) >= 12
    for row in found:
        assert len(row) == 5
        assert all(row)
        assert "::" in row[4], row


def test_replication_has_its_rows() -> None:
    found = rows("Replication")
    assert len(found) >= 10
    for row in found:
        assert len(row) == 5
        assert all(row)
        assert "::" in row[4]
        assert set(re.findall(r"\*\*(\w+)\*\*", row[4])) <= SHORT_NAMES


def test_the_tests_exist() -> None:
    assert len(named_in(TEXT)) > 50
    assert not_collected(TEXT) == []
