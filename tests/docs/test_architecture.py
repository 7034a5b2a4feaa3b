"""docs/architecture.md names files and classes: all of them exist, each name in a file of its row."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.split("## Packages", maxsplit=1)[0].splitlines() if line.startswith(("| W", "| H"))]
PATH = re.compile(r"`((?:[a-z0-9_]+/)+(?:[a-z_]+\.[a-z]+)?|[a-z_]+\.py)`")


def paths(text: str) -> list[Path]:
    """Files and folders named in a text; a bare file name is in the folder named before it."""
    found: list[Path] = []
    folder = ROOT
    for name in PATH.findall(text):
        path = ROOT / name if "/" in name else folder / name
        if path.is_dir():
            folder = path
        found.append(path)
    return found


def defined(path: Path) -> set[str]:
    """Classes, methods as ``Class.method``, and functions of a module, or of all modules in a folder."""
    names: set[str] = set()
    for module in path.glob("*.py") if path.is_dir() else [path]:
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {
                    f"{node.name}.{item.name}"
                    for item in node.body
                    if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))
                }
    return names


def test_rows_are_found() -> None:
    assert len(ROWS) > 15


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_a_row_names_what_exists(row: str) -> None:
    _, _, where, what, _ = row.split("|")
    if "would" in row:
        where = where.replace("`timer/`", "")
    files = paths(where)
    assert [str(path) for path in files if not path.exists()] == []
    known = set().union(*[defined(path) for path in files if path.is_dir() or path.suffix == ".py"])
    assert set(re.findall(r"`([A-Za-z_.]+)`", what)) <= known


def test_paths_of_the_rules_exist() -> None:
    rules = PAGE.split("## Rules", maxsplit=1)[1]
    named = [name for name in PATH.findall(rules) if "/" in name]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
