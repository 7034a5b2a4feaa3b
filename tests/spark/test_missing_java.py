"""Without a Java runtime these tests are skipped; in CI, which must not pass without them, they fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_pyspark

ROOT = Path(__file__).resolve().parents[2]
TEXT = "missing: a Java runtime, on Debian and Ubuntu: apt-get install openjdk-17-jre-headless"


@pytest.mark.parametrize(("ci", "code", "outcome"), [("true", 1, "1 error"), ("", 0, "1 skipped")])
def test_no_java_is_a_failure_in_ci_and_a_skip_elsewhere(tmp_path: Path, ci: str, code: int, outcome: str) -> None:
    name = "tests/spark/test_store_source.py::test_an_empty_log_has_no_rows"
    command = [
        sys.executable,
        "-m",
        "pytest",
        name,
        "-rs",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'inner'}",
    ]
    environment = {**os.environ, "PATH": str(Path(sys.executable).parent), "CI": ci}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=150, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert outcome in done.stdout
    assert TEXT in done.stdout
