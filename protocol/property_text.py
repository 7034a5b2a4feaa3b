"""The text form of a message's properties, on the wire and in the store. Only this module parses it.

``name 0x01 value 0x02``, repeated. The last 0x02 may be missing, pieces without a name or a value are skipped, and of
equal names the last one counts (RocketMQ's MessageDecoder). For the meaning of names see properties.toml.
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
"""The start of the property KEYS in a record."""

_pair: Final = re.compile("(?<![^\x02])([^\x01\x02]++)\x01([^\x02]+)")
pairs: Final = _pair.findall
"""All (name, value) pairs of a text, in order.

The pattern matches a name only at the start of a piece: otherwise a text without any pair would take quadratic time.
"""

Matcher = Callable[[str], re.Match[str] | None]


class Span(NamedTuple):
    """A property of a text: ``at`` is the position of its value."""

    name: str
    value: str
    at: int


def decode_properties(text: str) -> dict[str, str]:
    """Names to values."""
    return dict(pairs(text))


def encode_properties(properties: dict[str, str]) -> str:
    """The text form. Raises ValueError if a name or value contains one of the two separators, or a name is empty."""
    text = join_properties(properties)
    count = len(properties)
    if text.count(NAME_END) == count and text.count(VALUE_END) == count and "" not in properties:
        return text
    for name, value in properties.items():
        if not name:
            raise ValueError("a property has an empty name")
        if NAME_END in name or VALUE_END in name or NAME_END in value or VALUE_END in value:
            raise ValueError(f"the property {name[:64]!r} contains a separator (0x01 or 0x02) in its name or value")
    raise AssertionError("one of the properties contains a separator")


def join_properties(properties: dict[str, str]) -> str:
    """The text form of properties decoded from a text, which therefore cannot contain separators."""
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])


def closed(text: str) -> str:
    """The text, with its last separator added if it is missing."""
    return text if not text or text[-1] == VALUE_END else text + VALUE_END


def spans(text: str) -> Iterator[Span]:
    """All properties of a text, with their positions."""
    return (Span(found[1], found[2], found.start(2)) for found in _pair.finditer(text))


def property_of(text: str, name: str) -> str:
    """One property of a text, or "". Faster than decoding all, for callers that need one or two of them."""
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
    # An empty value does not count; then an earlier one of that name does.
    return value or decode_properties(text).get(name, "")


# -- fast path or full path


def are_fast(names: Iterable[str], reserved: frozenset[str]) -> bool:
    """Whether a message with these properties may take the fast path. ``reserved``: names that features have to see."""
    return not any(
        name in SLOW_NAMES or name in reserved or (name not in FAST_NAMES and name.startswith(SLOW_PREFIXES))
        for name in names
    )


@lru_cache(maxsize=8)
def ordinary(reserved: frozenset[str]) -> Matcher:
    """A matcher for the properties' text of an ordinary message that waits for the disk (no WAIT=false).

    Its groups are KEYS, UNIQ_KEY and TAGS. Properties are ordinary if ``are_fast``. A text that does not match may be
    ordinary too; it then has to be checked piece by piece. The pattern never backtracks.
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


# -- the texts of all messages of a batch together

_MARK: Final = "\x03"
"""Put before each text when the texts of all messages are searched together; ordinary texts do not contain it."""
_VALUE: Final = "\x01([^\x02]+)\x02"
_usual_in_batch: Final = re.compile(
    f"{_MARK}(?:UNIQ_KEY{_VALUE}|TAGS{_VALUE}|KEYS{_VALUE}"
    f"|(?!(?:{_any(sorted({'UNIQ_KEY', 'TAGS', 'KEYS'} | NOT_IN_A_BATCH))})\x01)[^\x01-\x03]+\x01[^\x02]+\x02)*+"
    f"(?![^{_MARK}])"
).findall
"""UNIQ_KEY, TAGS and KEYS of each text that is well-formed and has no property that is not allowed in a batch.

Each match goes from one mark to the next: if there are as many matches as marks, nothing was skipped. Of equal names
the last one counts.
"""


def columns_of(raw: Sequence[bytes]) -> list[tuple[str, str, str]] | None:
    """UNIQ_KEY, TAGS and KEYS of each text of a batch, empty if it has none.

    None if a text is not well-formed or has a name that is not allowed in a batch: then they are checked one by one.
    """
    texts = _marked(raw)
    found: list[tuple[str, str, str]] = _usual_in_batch(texts)
    return found if found and len(found) == len(raw) == texts.count(_MARK) else None


def _marked(raw: Sequence[bytes]) -> str:
    """All texts, each with a mark before it and a separator at its end, which some clients leave out.

    The separator keeps a value from extending over the next mark; otherwise the search from each mark could run to the
    end of all texts.
    """
    mark = _MARK.encode()
    texts = mark.join([b"", *raw])
    if texts.count(_END + mark) < len(raw) - 1 or not texts.endswith(_END):
        texts = mark.join([b"", *[text if not text or text.endswith(_END) else text + _END for text in raw]])
    return texts.decode("utf-8", "replace")


# -- the bytes of a record


class KeyText(NamedTuple):
    """The encoded properties of a key: KEYS with this word only, UNIQ_KEY with it, and the word itself."""

    keys: bytes
    unique: bytes
    word: bytes


def key_text(key: str) -> KeyText:
    """The encoded properties of ``key``, a printable ASCII word."""
    word = key.encode()
    return KeyText(KEYS_NAME + word + _END, _UNIQUE + word + _END, word)


def has_key_for_sure(record: bytes, begin: int, key: KeyText) -> bool:
    """True if the text from ``begin`` to the record's end has the key. False: it has not, or a full check is needed."""
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
    # The property must start at a boundary, and be the only one of its name: of several, the last one counts.
    return (found == begin or record[found - 1] == _END[0]) and record.count(name, begin) == 1
