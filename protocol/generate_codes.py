"""Generates protocol/codes.py and docs/codes.md from protocol/codes.toml.

``python -m trimq.protocol.generate_codes`` writes both; with ``--check`` it only reports whether they are current.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

from trimq.protocol.generated import quoted, write_or_check

HERE = Path(__file__).resolve().parent
_COMMAND = "python -m trimq.protocol.generate_codes"
CODES_PY = HERE / "codes.py"
CODES_MD = HERE.parent / "docs" / "codes.md"


def render_python(data: dict[str, Any]) -> str:
    """The text of protocol/codes.py."""
    lines = [
        f'"""Request, response and language codes. Generated from codes.toml by ``{_COMMAND}``."""',
        "",
        "from enum import IntEnum",
        "from typing import Final",
        "",
        "VERSION: Final = 479",
        '"""The version ordinal sent in frames (V5_3_3). Java clients refuse SQL92 pulls from brokers below 232."""',
        "",
        "",
    ]
    for name, doc, members in (
        (
            "LanguageCode",
            "Language of a client, as in the header's ``language``.",
            data["language"],
        ),
        (
            "RequestCode",
            "The operation of a request (RocketMQ's RequestCode).",
            _requests(data),
        ),
        (
            "ResponseCode",
            "The result of a request (RocketMQ's ResponseCode and RemotingSysResponseCode).",
            {key: entry["value"] for key, entry in data["response"].items()},
        ),
    ):
        lines += [f"class {name}(IntEnum):", f'    """{doc}"""', ""]
        lines += [f"    {key} = {value}" for key, value in members.items()]
        lines += ["", ""]
    lines.append("HELP: Final[dict[int, str]] = {")
    for entry in data["response"].values():
        lines += [
            f"    {entry['value']}: (",
            f"        {quoted(entry['help'])}",
            "    ),",
        ]
    lines += ["}", '"""Response code to its meaning and what to do about it."""', ""]
    lines.append("NOT_SUPPORTED: Final[dict[int, str]] = {")
    for feature, members in data["unsupported"].items():
        lines += [f"    {value}: {quoted(feature)}," for value in members.values()]
    lines += ["}", '"""Request code that TriMQ does not serve to the feature that it belongs to."""', ""]
    return "\n".join(lines)


def render_markdown(data: dict[str, Any]) -> str:
    """The text of docs/codes.md."""
    lines = [
        "# Codes",
        "",
        "Generated from `protocol/codes.toml`; do not edit.",
        "",
        "## Responses",
        "",
        "| code | name | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| {entry['value']} | {key} | {entry['help']} |" for key, entry in data["response"].items()]
    lines += ["", "## Requests", "", "| code | name |", "|---|---|"]
    lines += [f"| {value} | {key} |" for key, value in data["request"].items()]
    lines += ["", "## Requests that are not supported", ""]
    lines += [
        "Requests of RocketMQ 5.5.0 that are refused with REQUEST_CODE_NOT_SUPPORTED (3) and a text with the feature."
    ]
    lines += ["", "| feature | code | name |", "|---|---|---|"]
    for feature, members in data["unsupported"].items():
        lines += [f"| {feature} | {value} | {key} |" for key, value in members.items()]
    return "\n".join([*lines, ""])


def _requests(data: dict[str, Any]) -> dict[str, int]:
    """All request codes by name: first those that a server of TriMQ serves, then the others."""
    found: dict[str, int] = dict(data["request"])
    for members in data["unsupported"].values():
        found |= members
    return found


def main(arguments: list[str]) -> int:
    """Write or check the two files. The exit code is 1 if ``--check`` finds one that is not current."""
    data = tomllib.loads((HERE / "codes.toml").read_text(encoding="utf-8"))
    return write_or_check({CODES_PY: render_python(data), CODES_MD: render_markdown(data)}, arguments, _COMMAND)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
