"""The search for secrets after each test: a log line, a reply or a file with one fails it, and nothing else does."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.canary import permit

ROOT = Path(__file__).parent.parent
BEGINNING = """
import base64
from tests.canary import CANARY, look_at_reply, permit, permitted_replies
import structlog
import pytest
SECRET = CANARY + "secret"
"""
FAIL = {
    "output": "def test_it():\n    print(SECRET)",
    "error_output": "import sys\ndef test_it():\n    print(SECRET, file=sys.stderr)",
    "log": "def test_it():\n    structlog.get_logger().info('event', password=SECRET)",
    "logging": "import logging\ndef test_it():\n    logging.getLogger('x').warning(SECRET)",
    "read_output": "def test_it(capsys):\n    print(SECRET)\n    capsys.readouterr()",
    "captured_log": "def test_it():\n    with structlog.testing.capture_logs():\n"
    "        structlog.get_logger().info('event', password=SECRET)",
    "reply": "def test_it():\n    look_at_reply(b'x' + SECRET.encode())",
    "file": "def test_it(tmp_path):\n    (tmp_path / 'd').mkdir()\n    (tmp_path / 'd' / 'f').write_text(SECRET)",
    "base64_file": "def test_it(tmp_path):\n"
    "    (tmp_path / 'f').write_bytes(base64.b64encode(b'xy' + SECRET.encode()))",
    "hex_output": "def test_it():\n    print(SECRET.encode().hex())",
    "large_file": "def test_it(tmp_path):\n    with (tmp_path / 'f').open('wb') as file:\n"
    "        file.truncate(1 << 30)\n        file.seek((5 << 20) - 3)\n        file.write(SECRET.encode())",
    "module": "@pytest.fixture(scope='module')\ndef made(tmp_path_factory):\n"
    "    path = tmp_path_factory.mktemp('m')\n    (path / 'f').write_text(SECRET)\n"
    "def test_it(made):\n    pass",
    "fixture": "@pytest.fixture\ndef made():\n    yield\n    print(SECRET)\ndef test_it(made):\n    pass",
}
PASS = {
    "permitted_file": "def test_it(tmp_path):\n    permit(tmp_path / 'f*')\n    (tmp_path / 'f1').write_text(SECRET)",
    "permitted_reply": "def test_it():\n    with permitted_replies():\n        look_at_reply(SECRET.encode())",
    "other_text": "def test_it(tmp_path):\n    print('canary')\n    (tmp_path / 'f').write_bytes(bytes(1 << 20))",
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says about tests of which each lets a secret appear, and about those that do not."""
    folder = tmp_path_factory.mktemp("guarded")
    permit(folder / "*")
    package = folder / "tests_of_guard"
    package.mkdir()
    names = ", ".join(f"pytest_{name}" for name in HOOKS)
    (folder / "conftest.py").write_text(f"from tests.canary_hooks import {names}\n__all__ = {names.split(', ')}\n")
    for name, text in (FAIL | PASS).items():
        (package / f"test_{name}.py").write_text(BEGINNING + text + "\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-c",
        "/dev/null",
    ]
    done = subprocess.run(
        [*command, "--rootdir", folder, "--import-mode=importlib", package],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DEBUG_TEMPROOT": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return done.stdout


HOOKS = ("configure", "runtest_makereport", "runtest_setup", "runtest_teardown")


@pytest.mark.parametrize("name", FAIL)
def test_a_secret_that_appears_fails_the_test(outcome: str, name: str) -> None:
    assert f"ERROR tests_of_guard/test_{name}.py::test_it" in outcome


@pytest.mark.parametrize("name", PASS)
def test_nothing_else_does(outcome: str, name: str) -> None:
    assert f"PASSED tests_of_guard/test_{name}.py::test_it" in outcome
    assert f"ERROR tests_of_guard/test_{name}.py" not in outcome
