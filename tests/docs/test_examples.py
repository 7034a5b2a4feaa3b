"""Every example on a page is run by a test, or examples.py has the reason why not."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.broker.wire_client import WireClient, send_ext
from tests.docs.examples import NOT_RUN, PAGES, ROOT, RUN_BY, TARGETS, examples
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode, ResponseCode


def runner(page: str, example: str) -> str | None:
    return next((test for begin, test in RUN_BY.get(page, {}).items() if example.startswith(begin)), None)


def test_pages_are_found() -> None:
    assert {"README.md", "docs/operate.md", "docs/sdk/produce.md", "tests/interop/README.md"} <= set(PAGES)
    assert not [page for page in PAGES if ".venv" in page]


def test_both_forms_of_an_example_are_seen(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pages")
    page = folder / "page.md"
    page.write_text(
        "# Title\n\n    one\n\n      two\n\nText\n    goes on\n\n```sh\nthree\n```\n\n"
        "1. A list\n\n       its paragraph\n\n   ```python\n   four\n   ```\n\nText:\n\n    five\n"
    )
    assert examples(str(page)) == ["three", "four", "one\n\n  two", "five"]


@pytest.mark.parametrize("page", PAGES)
def test_every_example_is_run(page: str) -> None:
    for example in examples(page):
        assert runner(page, example), (
            f"no test runs this example of {page}; name its test in tests/docs/examples.py:\n{example}"
        )


def test_every_entry_has_its_example() -> None:
    for page, entries in RUN_BY.items():
        texts = examples(page)
        for begin in entries:
            assert [text for text in texts if text.startswith(begin)], (page, begin)


@pytest.mark.parametrize(
    "test", sorted({test for page in RUN_BY.values() for test in page.values() if not test.startswith(NOT_RUN)})
)
def test_the_tests_exist(test: str) -> None:
    path, name = test.split("::")
    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_handler_is_the_brokers() -> None:
    [example] = examples("docs/add-a-request-code.md")
    source = (ROOT / "broker" / "processors" / "offset.py").read_text(encoding="utf-8")
    assert "".join(f"    {line}\n" if line else "\n" for line in example.splitlines()) in source


async def test_the_check_is_a_feature(tmp_path: Path) -> None:
    [example] = examples("docs/add-a-check.md")
    module: dict[str, Any] = {}
    exec(compile(example, "add-a-check.md", "exec"), module)
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        unsigned = send_ext("Orders", {"UNIQ_KEY": "U1"})
        assert (await client.ask(RequestCode.SEND_MESSAGE_V2, unsigned, b"x")).code == 0
        broker.gate.register(module["FEATURE"])
        for ext, code in (
            (unsigned, ResponseCode.NO_PERMISSION),
            (unsigned | {"Signature": "s"}, ResponseCode.SUCCESS),
        ):
            assert (await client.ask(RequestCode.SEND_MESSAGE_V2, ext, b"x")).code == code
        assert (await client.pull("Orders")).code == ResponseCode.SUCCESS


def test_the_commands_for_tests_exist() -> None:
    """These commands run the tests themselves, so only the existence of their targets, files and options is checked."""
    lines = [
        line
        for page, entries in RUN_BY.items()
        for example in examples(page)
        if runner(page, example) == TARGETS and entries
        for line in example.splitlines()
    ]
    assert len(lines) > 15
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in lines:
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "make":
            assert re.search(rf"^{words[1]}: ", makefile, re.MULTILINE), line
        else:
            assert words[:3] == ["python", "-m", "pytest"], line
            done = subprocess.run(
                [sys.executable, *words[1:], "--collect-only", "-q", "-p", "no:cacheprovider"],
                cwd=ROOT,
                check=False,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (line, done.stdout[-500:])
