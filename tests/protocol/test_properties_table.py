"""The table of properties: what is made from it is current, and it says of each name what there is to say."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from trimq.protocol import generate_codes, generate_properties
from trimq.protocol.property_names import FAST_NAMES, NOT_IN_A_BATCH, SLOW_NAMES, SLOW_PREFIXES, PropertyName

TABLE: dict[str, Any] = tomllib.loads((generate_properties.HERE / "properties.toml").read_text(encoding="utf-8"))
ENTRIES: dict[str, dict[str, Any]] = TABLE["property"]


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
    assert {name.value for name in PropertyName} == set(names) == FAST_NAMES | SLOW_NAMES
    assert not FAST_NAMES & SLOW_NAMES
    assert tuple(TABLE["prefix"]) == SLOW_PREFIXES


def test_what_means_something_to_the_broker_is_not_fast() -> None:
    """Where the broker's code asks for a property, the name must be one that brings the message there."""
    assert {"DELAY", "TRAN_MSG", "POP_CK", "INNER_NUM", "INNER_MULTI_DISPATCH", "MSG_REGION"} <= SLOW_NAMES
    assert NOT_IN_A_BATCH <= SLOW_NAMES
