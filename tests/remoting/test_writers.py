"""Only a connection's own methods queue replies and count requests in flight.

So code that has to see every reply or every request has a single place for it (docs/architecture.md, the reactor).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("remoting", "broker", "namesrv", "bench")
SERVER = "remoting/server/"
WRITERS = {
    "inflight": {f"{SERVER}connection.py"},
    "queued": {f"{SERVER}connection.py", f"{SERVER}out_buffer.py"},
    # the sender removes the chunks that it has sent
    "chunks": {f"{SERVER}connection.py", f"{SERVER}out_buffer.py", f"{SERVER}sender.py"},
    "sent": {f"{SERVER}out_buffer.py", f"{SERVER}sender.py"},
}
"""Attributes of connections, their out-buffers and the server's counts, and the modules that may change them."""
_CHANGES = {"append", "extend", "insert", "pop", "remove", "clear"}


def changes(text: str) -> Iterator[str]:
    """The attributes that a module changes, directly or through a name bound to one."""
    tree = ast.parse(text)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in WRITERS:
            names |= {target.id: node.value.attr for target in node.targets if isinstance(target, ast.Name)}

    def named(node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.Attribute) and node.attr in WRITERS:
            yield node.attr
        elif isinstance(node, ast.Name) and node.id in names:
            yield names[node.id]

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield from named(node)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield from named(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            yield from named(node.func.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("conn.inflight += 1", {"inflight"}),
        ("self.stats.inflight = conn.inflight = 0", {"inflight"}),
        ("conn.out.chunks.append(reply)\nconn.out.queued += len(reply)", {"chunks", "queued"}),
        ("chunks = out.chunks\nchunks[0] = b''", {"chunks"}),
        ("waiting = conn.out.chunks\nwaiting.clear()", {"chunks"}),
        ("del out.chunks[:2]", {"chunks"}),
        ("out.sent += 1", {"sent"}),
        ("count = conn.inflight + len(out.chunks)", set()),
        ("chunks = page_cache.chunks_of(file)\nchunks.append(1)", set()),
    ],
)
def test_changes_are_found(text: str, found: set[str]) -> None:
    assert set(changes(text)) == found


def test_only_the_connection_and_its_buffer_write() -> None:
    found: dict[str, set[str]] = {name: set() for name in WRITERS}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in changes(path.read_text(encoding="utf-8")):
                found[name].add(str(path.relative_to(ROOT)))
    assert found == WRITERS
