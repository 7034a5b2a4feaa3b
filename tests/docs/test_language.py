"""Code and documents use the field's words: a few words that hide who does what are not used (CONTRIBUTING.md)."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".rs", ".md", ".toml", ".go", ".java", ".conf", ".yml", ".diff", ".sh", ""}
FOREIGN = {"LICENSE", "CHANGELOG.md", "tests/docs/test_language.py", "changelog.d/23.names.change.md"}
AVOIDED = {
    "somebody": "the client, another task, a caller",
    "nobody": "no client, no task",
    "whoever": "the caller, the task that",
    "told": "notified, reported, given",
    "mend": "repair, fix",
    "mends": "repairs, fixes",
    "mended": "repaired, fixed",
    "leaf": "the native extension",
    "fast way": "fast path",
    "short way": "fast path",
    "full way": "full path",
    "half-way": "midway",
    "as if nothing had happened": "silently",
    "comes to that": "in addition it costs",
}
"""Each word with those that say it better."""
PATTERN = re.compile(r"\b(" + "|".join(word.replace(" ", r"\s+") for word in AVOIDED) + r")\b", re.IGNORECASE)


def found_in(text: str) -> list[str]:
    """The avoided words of a text, also as parts of names such as ``nobody_waits``."""
    text = text.replace("start_mends", "")  # a key of `mqstore verify --json`, which scripts read
    return [match.group() for match in PATTERN.finditer(text.replace("_", " "))]


def files() -> list[str]:
    """Tracked files that people read."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not in a git checkout")
    return [
        name
        for name in listed.stdout.splitlines()
        if Path(name).suffix in SUFFIXES
        and name not in FOREIGN
        and (ROOT / name).is_file()
        and not (ROOT / name).is_symlink()
    ]


def test_avoided_words_are_found() -> None:
    assert found_in("def nobody_waits(): told\nby the full\nway, halfway") == ["nobody", "told", "full\nway"]


def test_the_fields_words_are_used() -> None:
    named = files()
    assert len(named) > 500
    found = {
        name: words
        for name in named
        if (words := found_in((ROOT / name).read_text(encoding="utf-8", errors="replace")))
    }
    assert found == {}, f"say it with the field's words: {AVOIDED}"
