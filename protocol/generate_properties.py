"""Generates protocol/property_names.py and docs/properties.md from protocol/properties.toml.

``python -m trimq.protocol.generate_properties`` writes both; with ``--check`` it only reports whether they are current.
"""

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trimq.protocol.generated import quoted, write_or_check

HERE = Path(__file__).resolve().parent
_COMMAND = "python -m trimq.protocol.generate_properties"
NAMES_PY = HERE / "property_names.py"
PROPERTIES_MD = HERE.parent / "docs" / "properties.md"
CONSTANT_PREFIX = "PROPERTY_"
"""Put before a table key to name its constant, as in RocketMQ's MessageConst: ``PROPERTY_KEYS``."""


def render_python(data: dict[str, Any]) -> str:
    """The text of protocol/property_names.py."""
    entries = data["property"]
    lines = [
        f'"""Names of message properties. Generated from properties.toml by ``{_COMMAND}``.',
        "",
        "A ``PROPERTY_*`` constant is a name that the broker or clients interpret (RocketMQ's MessageConst). It is a",
        "plain string: a hot path that imports it pays for one look-up of a global; an enum's member costs more.",
        '"""',
        "",
        "from typing import Final",
        "",
        *(f"{CONSTANT_PREFIX}{key}: Final = {quoted(entry['name'])}" for key, entry in entries.items()),
        "",
    ]
    for name, members, doc in (
        ("FAST_NAMES", _names(entries, fast=True), "A message with only these may take the fast path."),
        ("SLOW_NAMES", _names(entries, fast=False), "A message with one of these takes the full path."),
        ("NOT_IN_A_BATCH", _names(entries, batch=False), "A message in a batch must not have these."),
    ):
        lines += [f"{name}: Final = frozenset(", "    {"]
        lines += [f"        {quoted(member)}," for member in members]
        lines += ["    }", ")", f'"""{doc}"""', ""]
    prefixes = ", ".join(map(quoted, data["prefix"]))
    lines += [f"SLOW_PREFIXES: Final = ({prefixes})"]
    lines += [
        '"""A message with an unlisted name that starts like this takes the full path. Users have other names."""'
    ]
    return "\n".join([*lines, ""])


def _names(entries: dict[str, Any], **wanted: bool) -> Iterable[str]:
    return sorted(entry["name"] for entry in entries.values() if all(entry[key] is is_ for key, is_ in wanted.items()))


def render_markdown(data: dict[str, Any]) -> str:
    """The text of docs/properties.md."""
    lines = [
        "# Properties of messages",
        "",
        "Generated from `protocol/properties.toml`; do not edit.",
        "",
        "A message takes the fast path if all of its properties allow it (column *fast*). A name that is not listed",
        "belongs to the user: it allows the fast path, and the broker only stores it. On either path, properties are",
        "stored and delivered as they were sent.",
        "",
        "| name | meaning | set by | fast | in a batch |",
        "|---|---|---|---|---|",
    ]
    for entry in data["property"].values():
        allowed = " | ".join("yes" if entry[key] else "no" for key in ("fast", "batch"))
        lines.append(f"| `{entry['name']}` | {entry['meaning']} | {entry['set_by']} | {allowed} |")
    lines += ["", "Unlisted names with these prefixes do not allow it:", "", "| prefix | meaning |", "|---|---|"]
    lines += [f"| `{prefix}` | {meaning} |" for prefix, meaning in data["prefix"].items()]
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    """Write or check the two files. The exit code is 1 if ``--check`` finds one that is not current."""
    data = tomllib.loads((HERE / "properties.toml").read_text(encoding="utf-8"))
    return write_or_check({NAMES_PY: render_python(data), PROPERTIES_MD: render_markdown(data)}, arguments, _COMMAND)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
