"""The guides' examples run, in their order, against a real broker."""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.client.servers import Servers
from tests.docs.examples import examples
from trimq.broker.testing_threads import broker_in_thread

GUIDES = Path(__file__).parents[2] / "docs" / "sdk"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(guide: Path) -> Iterator[str]:
    text = guide.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield "\n" * text.count("\n", 0, found.start(1)) + found.group(1)


@pytest.mark.anyio
@pytest.mark.parametrize("guide", sorted(path.stem for path in GUIDES.glob("*.md") if path.stem != "README"))
async def test_examples(servers: Servers, guide: str) -> None:
    path = GUIDES / f"{guide}.md"
    names: dict[str, Any] = {"namesrv": servers.namesrv, "__name__": "guide"}
    count = 0
    for block in blocks(path):
        code = compile(block, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
        count += 1
    assert count
    for name, value in names.items():
        if name.startswith("test_"):
            fixture = broker_in_thread()
            broker = await anyio.to_thread.run_sync(fixture.__enter__)
            try:
                await value(broker)
            finally:
                await anyio.to_thread.run_sync(fixture.__exit__, None, None, None)


def test_the_suite_of_the_testing_guide(tmp_path: Path) -> None:
    """The guide's files in a folder of their own, run by pytest like a user's."""
    texts = examples("docs/sdk/testing.md")
    files = {"conftest.py": "pytest_plugins", "pytest.ini": "[pytest]", "test_shop.py": "from trimq import Message"}
    for name, begin in files.items():
        [text] = [text for text in texts if text.startswith(begin)]
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout


def test_every_guide_is_listed() -> None:
    listed = set(re.findall(r"\((\S+)\.md\)", (GUIDES / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.stem for path in GUIDES.glob("*.md")} - {"README"}
