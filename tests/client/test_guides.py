"""The guides' examples run, in the order in which they stand, against a real broker."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.client.servers import Servers
from trimq.broker.testing_threads import broker_in_thread

GUIDES = Path(__file__).parents[2] / "docs" / "sdk"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {"transactions": "transactions"}


def blocks(guide: Path) -> Iterator[str]:
    text = guide.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield "\n" * text.count("\n", 0, found.start(1)) + found.group(1)


@pytest.mark.anyio
@pytest.mark.parametrize("guide", sorted(path.stem for path in GUIDES.glob("*.md") if path.stem != "README"))
async def test_examples(servers: Servers, guide: str, request: pytest.FixtureRequest) -> None:
    if guide in NEEDS:
        servers.expect(request, NEEDS[guide])
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


def test_every_guide_is_listed() -> None:
    listed = set(re.findall(r"\((\S+)\.md\)", (GUIDES / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.stem for path in GUIDES.glob("*.md")} - {"README"}
