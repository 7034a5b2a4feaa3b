"""The text form of a message's properties, as it travels and as it is stored: the one place that reads it.

``name 0x01 value 0x02``, repeated. The last 0x02 may be missing, pieces without a name or a value are passed over, of
equal names the last wins (RocketMQ's MessageDecoder). What a name means is said in properties.toml.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from trimq.protocol.property_names import FAST_NAMES, NOT_IN_A_BATCH, SLOW_NAMES, SLOW_PREFIXES

NAME_END: Final = "\x01"
VALUE_END: Final = "\x02"
_END: Final = VALUE_END.encode()
_UNIQUE: Final = b"UNIQ_KEY\x01"
KEYS_NAME: Final = b"KEYS\x01"
"""How the property KEYS begins in a record."""

_pair: Final = re.compile("(?<![^\x02])([^\x01\x02]++)\x01([^\x02]+)")
pairs: Final = _pair.findall
"""All (name, value) of a text, in its order.

A name is only looked for where a piece begins: a text without any would take the square of its length otherwise.
"""

Matcher = Callable[[str], re.Match[str] | None]


class Span(NamedTuple):
    """A property of a text: ``at`` is where its value begins."""

    name: str
    value: str
    at: int


def decode_properties(text: str) -> dict[str, str]:
    """Names to values."""
    return dict(pairs(text))


def encode_properties(properties: dict[str, str]) -> str:
    """The text form. Raises ValueError where a name or value holds one of the two separators, or a name is empty."""
    text = join_properties(properties)
    count = len(properties)
    if text.count(NAME_END) == count and text.count(VALUE_END) == count and "" not in properties:
        return text
    for name, value in properties.items():
        if not name:
            raise ValueError("a property has an empty name")
        if NAME_END in name or VALUE_END in name or NAME_END in value or VALUE_END in value:
            raise ValueError(f"the property {name[:64]!r} holds a separator (0x01 or 0x02) in its name or value")
    raise AssertionError("one of the properties holds a separator")


def join_properties(properties: dict[str, str]) -> str:
    """The text form of properties that came out of a text: no separator can be in them."""
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])


def closed(text: str) -> str:
    """The text with its last separator."""
    return text if not text or text[-1] == VALUE_END else text + VALUE_END


def spans(text: str) -> Iterator[Span]:
    """All properties of a text, with their places."""
    return (Span(found[1], found[2], found.start(2)) for found in _pair.finditer(text))


def property_of(text: str, name: str) -> str:
    """One property of a text, empty where it is not there: for who needs two of them and no more."""
    mark = f"{VALUE_END}{name}{NAME_END}"
    at = text.rfind(mark)
    if at >= 0:
        begin = at + len(mark)
    elif text.startswith(mark[1:]):
        begin = len(mark) - 1
    else:
        return ""
    end = text.find(VALUE_END, begin)
    value = text[begin:end] if end >= 0 else text[begin:]
    # an empty value does not count, an earlier one of that name does then
    return value or decode_properties(text).get(name, "")


# -- which way a message goes


def are_fast(names: Iterable[str], reserved: frozenset[str]) -> bool:
    """Whether a message with these properties may take the fast path. ``reserved``: names that features look at."""
    return not any(
        name in SLOW_NAMES or name in reserved or (name not in FAST_NAMES and name.startswith(SLOW_PREFIXES))
        for name in names
    )


@lru_cache(maxsize=8)
def ordinary(reserved: frozenset[str]) -> Matcher:
    """What matches the text of an ordinary message that waits for the disk; its groups are KEYS, UNIQ_KEY and TAGS.

    Ordinary are properties that ``are_fast``. What it does not match is not wrong, it is only looked at piece by piece.
    No part is tried twice.
    """
    known = {"KEYS": "([^\x02]+)", "UNIQ_KEY": "([0-9A-Za-z]+)", "TAGS": "([^\x02]+)", "WAIT": "true"}
    never = "(?!)"
    pieces = [f"{name}\x01{never if name in reserved else ''}{value}" for name, value in known.items()]
    others = sorted(name for name in FAST_NAMES - known.keys() - reserved if name.startswith(SLOW_PREFIXES))
    if others:
        pieces.append(f"(?:{_any(others)})\x01[^\x02]+")
    not_here = _any(sorted(SLOW_NAMES | reserved | known.keys()))
    pieces.append(f"(?!(?:{not_here})\x01|{_any(SLOW_PREFIXES)})[^\x01\x02]+\x01[^\x02]+")
    return re.compile(f"(?>(?:{'|'.join(pieces)})\x02)*+").fullmatch


def _any(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names))


# -- the texts of a batch's messages, all at once

_MARK: Final = "\x03"
"""Stands in front of each text where those of all messages are looked through together; no usual text has it in it."""
_VALUE: Final = "\x01([^\x02]+)\x02"
_usual_in_batch: Final = re.compile(
    f"{_MARK}(?:UNIQ_KEY{_VALUE}|TAGS{_VALUE}|KEYS{_VALUE}"
    f"|(?!(?:{_any(sorted({'UNIQ_KEY', 'TAGS', 'KEYS'} | NOT_IN_A_BATCH))})\x01)[^\x01-\x03]+\x01[^\x02]+\x02)*+"
    f"(?![^{_MARK}])"
).findall
"""UNIQ_KEY, TAGS and KEYS of each text that is well-formed and has nothing that a batch may not have.

Each match begins at a mark and goes to the next one: with as many matches as marks nothing has been passed over.
Of equal names the last counts.
"""


def columns_of(raw: Sequence[bytes]) -> list[tuple[str, str, str]] | None:
    """UNIQ_KEY, TAGS and KEYS of each text of a batch, empty where it has none.

    None where one is not well-formed or has a name that a batch may not have: they are to be looked at one by one.
    """
    texts = _marked(raw)
    found: list[tuple[str, str, str]] = _usual_in_batch(texts)
    return found if found and len(found) == len(raw) == texts.count(_MARK) else None


def _marked(raw: Sequence[bytes]) -> str:
    """All texts, a mark in front of each, a separator at the end of each: some clients leave the last one out.

    With it no value goes on behind the next mark; a search would come to the end for each of the marks otherwise.
    """
    mark = _MARK.encode()
    texts = mark.join([b"", *raw])
    if texts.count(_END + mark) < len(raw) - 1 or not texts.endswith(_END):
        texts = mark.join([b"", *[text if not text or text.endswith(_END) else text + _END for text in raw]])
    return texts.decode("utf-8", "replace")


# -- the bytes of a record


class KeyText(NamedTuple):
    """How the properties with a key stand in a record: KEYS with nothing else, UNIQ_KEY, and the word itself."""

    keys: bytes
    unique: bytes
    word: bytes


def key_text(key: str) -> KeyText:
    """For a printable ASCII word."""
    word = key.encode()
    return KeyText(KEYS_NAME + word + _END, _UNIQUE + word + _END, word)


def has_key_for_sure(record: bytes, begin: int, key: KeyText) -> bool:
    """True where the text from ``begin`` to the record's end has the key; False also where it takes a closer look."""
    name = KEYS_NAME
    found = record.find(key.keys, begin)
    if found < 0:
        name = _UNIQUE
        found = record.find(key.unique, begin)
    if found < 0:
        name = KEYS_NAME
        found = record.find(KEYS_NAME, begin)
        if found < 0:
            return False
        value_at = found + len(KEYS_NAME)
        end = record.find(_END, value_at)
        if key.word not in record[value_at : end if end >= 0 else len(record)].split(b" "):
            return False
    return (found == begin or record[found - 1] == _END[0]) and record.count(name, begin) == 1
