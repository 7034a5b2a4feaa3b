"""Java properties files, the format of RocketMQ's configuration, read with the line number of every entry.

The rules are those of java.util.Properties.load: `#` and `!` start a comment line, `=`, `:` or blanks separate key and
value, a backslash at the end of a line continues it (leading blanks of the next line are dropped), and backslash
escapes (t, n, r, f, uXXXX) work in keys and values. Two deviations: the file is read as UTF-8 if it is valid UTF-8
(Java reads ISO-8859-1), and blanks at the end of a value are dropped, since they are never intended.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_BLANKS = " \t\f"
_USER: Final = re.compile(r"(?<=://)\S*@")


def without_password(text: str) -> str:
    """The text with *** instead of the user and the password of a URL."""
    return _USER.sub("***@", text)


class ConfigError(Exception):
    """An invalid configuration.

    Names the file and line (or the flag), the key, the value and what was expected. The password of a URL is not shown.
    """

    def __init__(self, where: str, key: str, value: str, expected: str) -> None:
        value = without_password(value)
        self.where, self.key, self.value, self.expected = where, key, value, expected
        super().__init__(f"{where}: {key}={value}: expected {expected}" if key else f"{where}: {value}: {expected}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a file.

    `line` is the line in which the entry starts, counted from 1; `last_line` differs for continued lines.
    """

    key: str
    value: str
    line: int
    last_line: int


def decode(data: bytes) -> str:
    """The text of a properties file: UTF-8 (a byte order mark is dropped), or ISO-8859-1 if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def parse(text: str, where: str = "<text>") -> list[Entry]:
    """The entries of a file in order, repeated keys included. Raises ConfigError for an invalid escape."""
    return [_entry(logical, first, last, where) for logical, first, last in _logical_lines(text)]


def _natural_lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _logical_lines(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (joined text, first line, last line) of all entries; comments and blank lines are skipped."""
    lines = _natural_lines(text)
    number = 0
    while number < len(lines):
        first = number
        line = lines[number].lstrip(_BLANKS)
        number += 1
        if not line or line[0] in "#!":
            continue
        parts: list[str] = []
        while _continues(line):
            parts.append(line[:-1])
            line = lines[number].lstrip(_BLANKS) if number < len(lines) else ""
            number += 1
        parts.append(line)
        yield "".join(parts), first + 1, min(number, len(lines))


def _continues(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _entry(line: str, first: int, last: int, where: str) -> Entry:
    end = 0
    while end < len(line) and line[end] not in "=:" + _BLANKS:
        end += 2 if line[end] == "\\" else 1
    end = min(end, len(line))
    rest = line[end:].lstrip(_BLANKS)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANKS)
    at = f"{where}:{first}"
    return Entry(_unescape(line[:end], at), _unescape(rest.rstrip(_BLANKS), at), first, last)


def _unescape(text: str, where: str) -> str:
    if "\\" not in text:
        return text
    out: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char != "\\":
            out.append(char)
        elif at < len(text):
            char = text[at]
            at += 1
            if char == "u":
                digits = text[at : at + 4]
                if len(digits) < 4 or any(d not in "0123456789abcdefABCDEF" for d in digits):
                    raise ConfigError(where, "", f"\\u{digits}", "four hexadecimal digits must follow \\u")
                out.append(chr(int(digits, 16)))
                at += 4
            else:
                out.append(_ESCAPES.get(char, char))
    # Two \u escapes may be a surrogate pair. A lone surrogate is replaced: it cannot be written as UTF-8.
    return "".join(out).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def escape(text: str, *, key: bool = False) -> str:
    """Escape a key or a value so that `parse` returns it."""
    out = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t").replace("\f", "\\f")
    if key:
        for char in "=: ":
            out = out.replace(char, "\\" + char)
        return "\\" + out if out[:1] in ("#", "!") else out
    if out.endswith(" "):
        out = out[:-1] + "\\u0020"  # a blank at either end would be dropped
    if out.startswith(" "):
        out = "\\u0020" + out[1:]
    return out


def replace_values(text: str, changes: Mapping[str, str]) -> str:
    """Change values in the text of a file, and leave comments, order and all other lines as they are.

    Keys that the file does not have are appended.
    """
    lines = _natural_lines(text)
    left = dict(changes)
    drop: set[int] = set()
    written: dict[int, str] = {}
    for entry in parse(text):
        if entry.key in changes:
            written[entry.line - 1] = f"{escape(entry.key, key=True)}={escape(changes[entry.key])}"
            drop.update(range(entry.line, entry.last_line))
            left.pop(entry.key, None)
    out = [written.get(n, line) for n, line in enumerate(lines) if n not in drop]
    while out and not out[-1]:
        out.pop()
    out.extend(f"{escape(k, key=True)}={escape(v)}" for k, v in left.items())
    return "\n".join(out) + "\n"
