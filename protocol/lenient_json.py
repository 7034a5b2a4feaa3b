"""JSON as fastjson writes it, with bare integer keys (``{0:12}``) and objects as keys (``{{"topic":"T"}:1}``).

``loads`` reads the standard and both extensions. An object used as a key becomes its compact JSON text, sorted by name.
``dumps_object_keys`` writes the second extension, which all official clients read.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

_MAX_DEPTH: Final = 100
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_BARE_KEY: Final = re.compile(r"-?\d+|[A-Za-z_$][A-Za-z0-9_$]*")
_scan_value = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_scan_string = json.decoder.scanstring  # type: ignore[attr-defined]


def loads(data: bytes | str) -> Any:
    """The value in ``data``. Raises ValueError with the position for invalid text.

    Half a surrogate pair is invalid, as it is in a header: it has no UTF-8 form, so it could not be sent or stored.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    text = data if isinstance(data, str) else data.decode("utf-8")
    value, end = _value(text, _skip(text, 0), 0)
    end = _skip(text, end)
    if end != len(text):
        raise ValueError(f"unexpected text after the value at {end}")
    return value


def dumps_object_keys(entries: Iterable[tuple[Any, Any]]) -> bytes:
    """A map with structs as keys, in fastjson's form ``{{"brokerName":"b"}:1}``."""
    return (
        b"{" + b",".join(msgspec.json.encode(key) + b":" + msgspec.json.encode(value) for key, value in entries) + b"}"
    )


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} at {at}")
    if text[at : at + 1] == "{":
        return _object(text, at + 1, depth)
    if text[at : at + 1] == "[":
        return _array(text, at + 1, depth)
    if text[at : at + 1] == '"':
        return _string(text, at)
    try:
        value, end = _scan_value(text, at)
    except StopIteration:
        raise ValueError(f"no value at {at}") from None
    return value, end


def _string(text: str, at: int) -> tuple[str, int]:
    found: str
    found, end = _scan_string(text, at + 1, True)
    if not found.isascii():
        try:
            found.encode()
        except UnicodeEncodeError:
            raise ValueError(f"half a surrogate pair in the string at {at}") from None
    return found, end


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {}
    at = _skip(text, at)
    while text[at : at + 1] != "}":
        key, at = _key(text, at, depth)
        at = _expect(text, at, ":")
        result[key], at = _value(text, at, depth + 1)
        at = _separator(text, at, "}")
    return result, at + 1


def _array(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    result: list[Any] = []
    at = _skip(text, at)
    while text[at : at + 1] != "]":
        item, at = _value(text, at, depth + 1)
        result.append(item)
        at = _separator(text, at, "]")
    return result, at + 1


def _key(text: str, at: int, depth: int) -> tuple[str, int]:
    start = text[at : at + 1]
    if start == '"':
        return _string(text, at)
    if start == "{":
        value, end = _object(text, at + 1, depth + 1)
        return json.dumps(value, separators=(",", ":"), sort_keys=True), end
    match = _BARE_KEY.match(text, at)
    if match is None:
        raise ValueError(f"no key at {at}")
    return match.group(), match.end()


def _expect(text: str, at: int, sign: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign!r} expected at {at}")
    return _skip(text, at + 1)


def _separator(text: str, at: int, end: str) -> int:
    """Position of the next item, or of the ``end`` character."""
    at = _skip(text, at)
    if text[at : at + 1] == ",":
        return _skip(text, at + 1)
    if text[at : at + 1] != end:
        raise ValueError(f"',' or {end!r} expected at {at}")
    return at
