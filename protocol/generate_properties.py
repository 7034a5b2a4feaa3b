"""Makes protocol/property_names.py and docs/properties.md from protocol/properties.toml.

``python -m trimq.protocol.generate_properties`` writes both; with ``--check`` it only says whether they are current.
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
        ("FAST_NAMES", _names(entries, fast=True), "A message that has none but these may go the fast path."),
        ("SLOW_NAMES", _names(entries, fast=False), "A message that has one of these goes the full path."),
        ("NOT_IN_A_BATCH", _names(entries, batch=False), "A message of a batch may not have these."),
    ):
        lines += [f"{name}: Final = frozenset(", "    {"]
        lines += [f"        {quoted(member)}," for member in members]
        lines += ["    }", ")", f'"""{doc}"""', ""]
    prefixes = ", ".join(map(quoted, data["prefix"]))
    lines += [f"SLOW_PREFIXES: Final = ({prefixes})"]
    lines += [
        '"""A name that is not listed and begins so goes the full path. Other names that are not listed are users\'."""'
    ]
    return "\n".join([*lines, ""])


def _names(entries: dict[str, Any], **wanted: bool) -> Iterable[str]:
    return sorted(entry["name"] for entry in entries.values() if all(entry[key] is is_ for key, is_ in wanted.items()))


def render_markdown(data: dict[str, Any]) -> str:
    """The text of docs/properties.md."""
    lines = [
        "# Properties of messages",
        "",
        "Made from `protocol/properties.toml`; do not edit.",
        "",
        "A message with nothing but properties that go fast is stored without a closer look. A name that is not listed",
        "is the user's: it goes fast, and the broker only stores it. What a message came with is stored and delivered,",
        "whatever way it goes.",
        "",
        "| name | meaning | set by | fast | in a batch |",
        "|---|---|---|---|---|",
    ]
    for entry in data["property"].values():
        ways = " | ".join("yes" if entry[key] else "no" for key in ("fast", "batch"))
        lines.append(f"| `{entry['name']}` | {entry['meaning']} | {entry['set_by']} | {ways} |")
    lines += ["", "Names that begin so and are not listed do not go fast:", "", "| prefix | meaning |", "|---|---|"]
    lines += [f"| `{prefix}` | {meaning} |" for prefix, meaning in data["prefix"].items()]
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    """Writes or checks the two files; the exit code is 1 when one is not current."""
    data = tomllib.loads((HERE / "properties.toml").read_text(encoding="utf-8"))
    return write_or_check({NAMES_PY: render_python(data), PROPERTIES_MD: render_markdown(data)}, arguments, _COMMAND)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
