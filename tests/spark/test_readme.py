"""The tests that README.md names for the peculiarities of PySpark exist."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_pyspark
HERE = Path(__file__).parent


def test_the_tests_that_the_page_names_are_there() -> None:
    rows = (HERE / "README.md").read_text(encoding="utf-8").split("| what PySpark does | test |")[1].splitlines()[2:]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    assert len(rows) >= 13
    for row in rows:
        named = set(re.findall(r"`(test_\w+)`", row))
        assert named, row
        assert named <= defined, named - defined
