"""The tests that pages name, as `tests/path.py::test_name` or `tests/path.py::TestClass::test_name`."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+(?:::\w+)?))?`")


def named_in(text: str) -> set[tuple[str, str]]:
    """The paths and names in a text; a name is empty where the whole file is named."""
    return set(_NAMED.findall(text))


def not_collected(text: str) -> list[str]:
    """What a text names, and pytest would not collect: a test that does not exist, or is none."""
    return [
        f"{path}::{name}"
        for path, name in sorted(named_in(text))
        if (name not in _collected(path) if name else not _collected(path))
    ]


@cache
def _collected(path: str) -> frozenset[str]:
    """The tests of a file, by the rules that pytest has without options."""
    if not Path(path).name.startswith("test_") or not (ROOT / path).is_file():
        return frozenset()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = set(_tests(tree))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found |= {f"{node.name}::{name}" for name in _tests(node)}
    return frozenset(found)


def _tests(node: ast.Module | ast.ClassDef) -> list[str]:
    functions = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return [each.name for each in functions if each.name.startswith("test_")]
