"""The native extension: when it is used, the reasons why not, and that it matches its protocols."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trimq.protocol import native
from trimq.protocol.native import NATIVE, VERSION, Extension, NativeExtension, load

ROOT = Path(__file__).resolve().parents[2]
SWITCHED_OFF = os.environ.get("TRIMQ_NATIVE") == "off"


def module(version: str | None) -> ModuleType:
    made = ModuleType("trimq_native")
    if version is not None:
        made.__dict__["VERSION"] = version
        made.__dict__["NativeFault"] = RuntimeError
    return made


def state(extension: NativeExtension) -> tuple[bool, str, str]:
    assert extension.is_on == (extension.extension is not None)
    return extension.is_on, extension.reason, extension.status


def test_the_version_is_the_crates() -> None:
    cargo = tomllib.loads((ROOT / "native" / "Cargo.toml").read_text(encoding="utf-8"))
    assert cargo["workspace"]["package"]["version"] == VERSION


def test_this_process_has_what_is_installed() -> None:
    # an extension that is installed but not used would be left untested unnoticed; in CI it has to be installed
    if SWITCHED_OFF:
        assert state(NATIVE) == (False, "TRIMQ_NATIVE=off", "python (TRIMQ_NATIVE=off)")
    elif os.environ.get("CI") or not NATIVE.reason.startswith("not installed: "):
        assert state(NATIVE) == (True, "", f"native {VERSION}")
    assert native.extension is NATIVE.extension


def members(kind: type) -> dict[str, Any]:
    """The names that a protocol requires: methods, properties, attributes. Special methods are skipped."""
    return {name: made for name, made in vars(kind).items() if name[0] != "_"} | inspect.get_annotations(kind)


def public(of: Any) -> set[str]:
    return {name for name in vars(of) if name[0] != "_" and not inspect.ismodule(getattr(of, name))}


def shape(function: Any, left_out: int) -> tuple[int, set[str]]:
    """The number of positional arguments, and the names of the keyword-only ones."""
    arguments = [*inspect.signature(function).parameters.values()][left_out:]
    keywords = {argument.name for argument in arguments if argument.kind is argument.KEYWORD_ONLY}
    return len(arguments) - len(keywords), keywords


CLASSES = {"Keys": native.Keys, "Reader": native.Reader, "Messages": native.Messages, "Signers": native.Signers}


@pytest.mark.skipif(not NATIVE.is_on, reason=f"no native extension: {NATIVE.reason}")
def test_the_module_has_what_its_type_says() -> None:
    # mypy checks callers against the protocols only; this checks the protocols against the Rust module
    found = sys.modules["trimq_native"]
    assert shape(found.Reader, 0) == shape(native.MakeReader.__call__, 1)
    for kind, real, skipped in [(Extension, found, 0)] + [
        (kind, getattr(found, name), 1) for name, kind in CLASSES.items()
    ]:
        assert public(real) == members(kind).keys() | (CLASSES.keys() if real is found else set())
        for name, made in members(kind).items():
            if inspect.isfunction(made):
                assert shape(getattr(real, name), skipped) == shape(made, 1), f"{kind.__name__}.{name}"


@pytest.mark.parametrize("value", ["", "on"])
def test_a_extension_of_the_right_version_is_used(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    fake = module(VERSION)
    monkeypatch.setitem(sys.modules, "trimq_native", fake)
    for environment in ({}, {"TRIMQ_NATIVE": value}):
        found = load(environment)
        assert state(found) == (True, "", f"native {VERSION}")
        assert found.extension is fake


@pytest.mark.parametrize("value", ["off", " off "])
def test_switched_off_it_is_not_even_loaded(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} is imported"))
    assert state(load({"TRIMQ_NATIVE": value})) == (False, "TRIMQ_NATIVE=off", "python (TRIMQ_NATIVE=off)")


def test_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trimq_native", None)
    is_on, reason, status = state(load({}))
    assert (is_on, status) == (False, "python (not installed)")
    assert re.fullmatch(r"not installed: .*make native in a checkout, or pip install \./native", reason)


@pytest.mark.parametrize(("version", "shown"), [("0.0.9", "0.0.9"), (None, "unknown")])
def test_of_another_version_it_is_not_used(monkeypatch: pytest.MonkeyPatch, version: str | None, shown: str) -> None:
    monkeypatch.setitem(sys.modules, "trimq_native", module(version))
    is_on, reason, status = state(load({}))
    expected = f"version {shown} where {VERSION} is expected"
    assert (is_on, status) == (False, f"python ({expected})")
    assert reason.startswith(f"{expected}: ")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("from .trimq_native import *", "No module named 'trimq_native.trimq_native'"),
        ("raise ImportError('version GLIBC_9.9 not found')", "version GLIBC_9.9 not found"),
    ],
)
def test_one_that_cannot_be_loaded_says_why(tmp_path: Path, text: str, shown: str) -> None:
    (tmp_path / "trimq_native").mkdir()
    (tmp_path / "trimq_native" / "__init__.py").write_text(text, encoding="utf-8")
    code = "from trimq.protocol.native import NATIVE; print(NATIVE.is_on, NATIVE.status, NATIVE.reason, sep='|')"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "TRIMQ_NATIVE": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == f"False|python (cannot be loaded)|cannot be loaded: {shown}\n"


def test_turned_off_after_a_fault() -> None:
    found = NativeExtension(module(VERSION))
    assert not found.has_failed
    found.turn_off("frames: index 7 of 3")
    assert state(found) == (False, "a fault: frames: index 7 of 3", "python (a fault)")
    found.turn_off("another one, that comes of the first")
    assert found.reason == "a fault: frames: index 7 of 3"
    assert found.has_failed


def test_what_was_off_cannot_fail() -> None:
    found = NativeExtension(None, "TRIMQ_NATIVE=off")
    found.turn_off("not called")
    assert (found.reason, found.has_failed) == ("TRIMQ_NATIVE=off", False)


def imported(source: str) -> set[str]:
    """Names after import and from, and all strings that are only a name, which may be given to import_module()."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.partition(".")[0])
    return found


@pytest.mark.parametrize(
    "source", ["import trimq_native as n", "from trimq_native.x import y", "import_module('trimq_native')"]
)
def test_an_import_is_found(source: str) -> None:
    assert "trimq_native" in imported(source)
    assert "trimq_native" not in imported(f'"""About {source}."""')


def test_no_other_module_imports_it() -> None:
    modules = [path for folder in (ROOT / "trimq").iterdir() if folder.is_symlink() for path in folder.rglob("*.py")]
    assert len(modules) > 300
    assert [path.name for path in modules if "trimq_native" in imported(path.read_text(encoding="utf-8"))] == [
        "native.py"
    ]
