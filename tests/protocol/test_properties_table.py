"""The table of properties: generated files are current, and each name has all its columns."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimq.protocol import generate_codes, generate_properties, property_names
from trimq.protocol.property_names import FAST_NAMES, NOT_IN_A_BATCH, SLOW_NAMES, SLOW_PREFIXES

TABLE: dict[str, Any] = tomllib.loads((generate_properties.HERE / "properties.toml").read_text(encoding="utf-8"))
ENTRIES: dict[str, dict[str, Any]] = TABLE["property"]
ENTRY_NAMES = {entry["name"] for entry in ENTRIES.values()}
CONSTANTS = {f"{generate_properties.CONSTANT_PREFIX}{key}": entry["name"] for key, entry in ENTRIES.items()}
ROOT = Path(__file__).parents[2]
SEEN_BY_THE_FAST_PATH = {"KEYS", "UNIQ_KEY", "TAGS", "WAIT"}
"""Properties that the fast paths of sends read themselves."""
OF_OTHER_REQUESTS = {"REPLY_TO_CLIENT", "CORRELATION_ID"}
"""Properties that the broker reads in requests without a fast path: a request of request-reply is an ordinary send.

With authentication it reads them in sends too: then a feature of the gate takes messages with REPLY_TO_CLIENT from the
fast paths.
"""


@pytest.mark.parametrize("generator", [generate_codes, generate_properties])
def test_what_is_made_from_it_is_current(generator: Any) -> None:
    assert generator.main(["--check"]) == 0


def test_what_is_not_current_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate_properties, "NAMES_PY", tmp_path / "property_names.py")
    assert generate_properties.main(["--check"]) == 1
    assert "not current: property_names.py" in capsys.readouterr().err
    monkeypatch.setattr(generate_properties, "PROPERTIES_MD", tmp_path / "docs" / "properties.md")
    assert generate_properties.main([]) == 0
    assert generate_properties.main(["--check"]) == 0


def test_every_entry_is_whole() -> None:
    for key, entry in ENTRIES.items():
        assert set(entry) == {"name", "meaning", "fast", "batch", "set_by"}, key
        assert entry["meaning"].endswith("."), key
        assert entry["set_by"] in {"producer", "consumer", "broker", "proxy"}, key
    names = [entry["name"] for entry in ENTRIES.values()]
    assert len(names) == len(set(names))
    assert set(names) == FAST_NAMES | SLOW_NAMES
    assert {name: vars(property_names)[name] for name in CONSTANTS} == CONSTANTS
    assert not FAST_NAMES & SLOW_NAMES
    assert tuple(TABLE["prefix"]) == SLOW_PREFIXES


def _members(node: ast.expr) -> set[str]:
    """Properties whose constants an expression names."""
    return {CONSTANTS[part.id] for part in ast.walk(node) if isinstance(part, ast.Name) and part.id in CONSTANTS}


def _bound(tree: ast.Module) -> dict[str, set[str]]:
    """Names defined in a module, and the properties that they contain."""
    return {
        target.id: _members(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(target := node.target, ast.Name)
    }


def _is_of_properties(node: ast.expr) -> bool:
    """Whether an expression has a name used for the properties of messages."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return "propert" in name or name in {"shared", "_added", "_ext"}


def _operands(tree: ast.Module) -> Iterator[tuple[ast.expr, bool]]:
    """Expressions that name a property, and whether it is read there: a property that is only set need not be slow."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            if isinstance(node.func, ast.Attribute) and _is_of_properties(node.func.value):
                yield from ((argument, called != "setdefault") for argument in node.args[:1])
            elif called == "property_of":
                yield node.args[1], True
        elif isinstance(node, ast.Subscript) and _is_of_properties(node.value):
            yield node.slice, isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Compare) and any(map(_is_of_properties, node.comparators)):
            yield node.left, True
        elif isinstance(node, ast.Dict):
            yield from ((key, False) for key in node.keys if key is not None)


def asked(text: str) -> tuple[set[str], set[str]]:
    """Names of properties that a module reads, and names written as literals although there are constants."""
    tree = ast.parse(text)
    bound = _bound(tree)
    # ``for name in NAMES``: the loop variable stands for all of these names
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Name):
            bound.setdefault(node.target.id, set()).update(bound.get(node.iter.id, set()))
    names, literals = set[str](), set[str]()
    for operand, is_asked in _operands(tree):
        if isinstance(operand, ast.Constant) and isinstance(operand.value, str):
            named = {operand.value} & ENTRY_NAMES
            literals |= named
        else:
            named = _members(operand) | (bound.get(operand.id, set()) if isinstance(operand, ast.Name) else set())
        if is_asked:
            names |= named
    return names, literals


@pytest.mark.parametrize(
    ("text", "names", "literals"),
    [
        ("properties.get('DELAY')", {"DELAY"}, {"DELAY"}),
        ("'POP_CK' in message.properties", {"POP_CK"}, {"POP_CK"}),
        ("_A: Final = PROPERTY_POP_CK\nproperties.pop(_A, None)", {"POP_CK"}, set()),
        ("properties[PROPERTY_TTL]", {"TTL"}, set()),
        ("property_of(found.properties, PROPERTY_TAGS)", {"TAGS"}, set()),
        (
            "N: Final = (PROPERTY_REDIRECT, PROPERTY_TTL)\nfor name in N:\n    name in properties",
            {"REDIRECT", "TTL"},
            set(),
        ),
        ("properties[PROPERTY_CLUSTER] = 'x'\nproperties.setdefault(PROPERTY_CLUSTER, 'x')", set(), set()),
        ("properties = {'TTL': '1'}", set(), {"TTL"}),
        ("other.get('DELAY')\nproperties.get('mine')", set(), set()),
    ],
)
def test_what_is_asked_for_is_found(text: str, names: set[str], literals: set[str]) -> None:
    assert asked(text) == (names, literals)


def _asked_in(*packages: str) -> tuple[set[str], set[tuple[str, str]]]:
    names, literals = set[str](), set[tuple[str, str]]()
    for path in [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]:
        here, written_out = asked(path.read_text(encoding="utf-8"))
        names |= here
        literals |= {(str(path.relative_to(ROOT)), name) for name in written_out}
    return names, literals


def test_what_means_something_to_the_broker_is_not_fast() -> None:
    """A property that the broker's full path reads must be one that sends the message there."""
    names, _ = _asked_in("broker")
    assert {"DELAY", "TRAN_MSG", "POP_CK", "INNER_NUM", "TIMER_OUT_MS", "REAL_TOPIC"} <= names
    assert names - SEEN_BY_THE_FAST_PATH - OF_OTHER_REQUESTS <= SLOW_NAMES
    assert NOT_IN_A_BATCH <= SLOW_NAMES


def test_names_of_properties_come_from_the_table() -> None:
    """A name written as a literal is not found by a search for the uses of its constant."""
    _, literals = _asked_in("broker", "client")
    assert literals == set()
