"""Functions shared by the generators of code and documentation."""

import sys
from pathlib import Path


def quoted(text: str) -> str:
    """A Python string literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def write_or_check(wanted: dict[Path, str], arguments: list[str], command: str) -> int:
    """Write the files; with ``--check`` only report those that are not current, with exit code 1 if there are any."""
    if "--check" in arguments:
        stale = [
            path.name for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        if stale:
            print(f"not current: {', '.join(stale)}; run {command}", file=sys.stderr)
        return 1 if stale else 0
    for path, text in wanted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0
