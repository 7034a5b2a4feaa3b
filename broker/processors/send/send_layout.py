"""What sends of one kind have in common, learnt from one of them. Needs numpy.

A frame that the fast way (send_direct.py) has served shows where its header has what differs from message to message:
queue, time of birth, request number, ids and keys. Frames that differ in nothing else need not be parsed.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from msgspec import DecodeError

from trimq.protocol.alike_frames import FrameLayout, Kind, Place
from trimq.protocol.alike_rows import Numbers, PlacedRows, Replies, Rows
from trimq.protocol.alike_texts import Matrix
from trimq.protocol.hashing import crc32_of_each, tags_code
from trimq.protocol.property_text import spans
from trimq.protocol.record import encode_record, layout

_HEAD_AT: Final = 8
_NUMBERS: Final = (
    (re.compile(rb'"(?:e|queueId)":"?(\d{1,4})"?[,}]'), "queue_id"),
    (re.compile(rb'"(?:g|bornTimestamp)":"?(\d{1,15})"?[,}]'), "born_timestamp"),
    (re.compile(rb'"opaque":(\d{1,9})[,}]'), "opaque"),
)
"""Longer numbers, which no client has, are left to who looks at what they mean."""
_TEXT: Final = re.compile(rb'"(?:i|properties)":"((?:[^"\\]|\\u000[12])*)"[,}]')
_SEPARATOR: Final = re.compile(rb"\\u000([12])")
_WORD: Final = re.compile("[^ ]+")
_EIGHT: Final = 8


class NotAlikeError(ValueError):
    """Messages of this kind are served one by one; the text says why."""


class _Text(NamedTuple):
    """A text that may differ: where it is in a frame, what it is made of, and where it is in the properties."""

    place: Place
    target: slice
    name: str


class SendLayout:
    """Where frames of one ``length`` have what, and the records that they become.

    ``topic``, ``tag``: of all of them. ``tags_code``: the queue unit's tag slot. ``keys``: where ``frames.columns`` has
    each key of the index but the tag's, the unique one first, ``queue_id`` and ``opaque`` where it has these. The
    numbers of ``frames`` are queue id, time of birth and opaque.
    """

    def __init__(
        self, frame: bytes, decode: Callable[[bytes], Any], store_host: bytes, added: bytes, most: int
    ) -> None:
        """Learn from a ``frame`` that the fast way has served, whose ``decode`` takes its header.

        ``added`` is what it adds to the properties. Room is made for ``most`` records at once. Raises NotAlikeError.
        """
        self.length = len(frame)
        word = int.from_bytes(frame[4:_HEAD_AT], "big")
        self.head_end = head_end = _HEAD_AT + word
        head = frame[_HEAD_AT:head_end]
        numbers = [_only(pattern, head) for pattern, _ in _NUMBERS]
        header = decode(head).header
        text = header.properties
        texts = list(_texts(head, text))
        if sum(found.name == "UNIQ_KEY" for found in texts) != 1:
            raise NotAlikeError("no unique key")
        _prove(head, decode, numbers, texts)
        self.topic: str = header.topic
        tags = [value for name, value, _ in spans(text) if name == "TAGS"]
        self.tag = tags[0] if tags else ""
        self.tags_code = tags_code(self.tag) if tags else 0
        self.frames = FrameLayout(
            frame,
            head_end,
            [_shifted(number, _HEAD_AT) for number in numbers],
            [Place(_shifted(found.place.columns, _HEAD_AT), found.place.kind) for found in texts],
        )
        at = sum(number.stop - number.start for number in numbers)
        keys: list[tuple[str, slice]] = []
        for found in texts:
            if found.name in {"UNIQ_KEY", "KEYS"}:
                keys.append((found.name, slice(at, at + found.place.width)))
            at += found.place.width
        self.keys = [place for name, place in sorted(keys, key=lambda key: key[0] == "KEYS")]
        widths = [number.stop - number.start for number in numbers]
        self.queue_id = slice(0, widths[0])
        self.opaque = slice(sum(widths[:2]), sum(widths))
        self._most = most
        self._replies: dict[tuple[bytes, int], Replies] = {}
        self.body_length = len(frame) - head_end
        properties = text.encode() + added
        self.properties_length = len(properties)
        topic = self.topic.encode()
        example = encode_record(
            topic=topic,
            body=bytes(self.body_length),
            properties=properties,
            queue_id=0,
            queue_offset=0,
            physical_offset=0,
            born_timestamp=0,
            born_host=bytes(_EIGHT),
            store_timestamp=0,
            store_host=store_host,
            flag=header.flag,
            sys_flag=header.sys_flag,
            reconsume_times=header.reconsume_times or 0,
        )
        self._records = Rows(example, most)
        body_at = layout(0).size
        text_at = len(example) - len(properties)
        self._moved = [
            (slice(head_end, len(frame)), slice(body_at, body_at + self.body_length)),
            *((_shifted(found.place.columns, _HEAD_AT), _shifted(found.target, text_at)) for found in texts),
        ]

    def fill(self, frames: memoryview, rows: Matrix, numbers: Numbers, hosts: bytes) -> PlacedRows:
        """Make the records of messages that are known to be laid out alike. ``numbers``: of ``self.frames``."""
        length, at, size = rows.shape[1], self.head_end, self.body_length
        bodies = [frames[begin : begin + size] for begin in range(at, len(frames), length)]
        return self._records.fill(rows, self._moved, crc32_of_each(bodies), numbers[:, 0], numbers[:, 1], hosts)

    def replies(self, template: bytes, offset_digits: int) -> Replies:
        """For messages whose queue offsets have so many digits; ``template``: see Replies."""
        key = (template, offset_digits)
        replies = self._replies.get(key)
        if replies is None:
            widths = [place.stop - place.start for place in (self.queue_id, self.keys[0], self.opaque)]
            replies = Replies(template, [widths[0], offset_digits, *widths[1:]], self._most)
            self._replies.clear()
            self._replies[key] = replies
        return replies


def _only(pattern: re.Pattern[bytes], head: bytes) -> slice:
    found = pattern.findall(head)
    match = pattern.search(head)
    if match is None or len(found) != 1:
        raise NotAlikeError(f"{pattern.pattern!r} is {len(found)} times in the header")
    return slice(*match.span(1))


def _shifted(columns: slice, by: int) -> slice:
    return slice(columns.start + by, columns.stop + by)


def _texts(head: bytes, decoded: str) -> Iterator[_Text]:
    """The values that may differ, of properties that the fast way has found well-formed."""
    place = _only(_TEXT, head)
    raw = head[place]
    text = _SEPARATOR.sub(lambda match: bytes((int(match[1]),)), raw).decode("ascii", "replace")
    if text != decoded or not text.isascii():
        raise NotAlikeError("properties other than ASCII, or somewhere else")
    starts = [0]
    """Where each character of the text is in ``raw``."""
    for char in text:
        starts.append(starts[-1] + (len(r"\u0001") if char < " " else 1))
    names = [name for name, _, _ in spans(text)]
    if len(set(names)) != len(names):
        raise NotAlikeError("a property is there twice")

    def found(name: str, begin: int, end: int, kind: Kind) -> _Text:
        columns = slice(place.start + starts[begin], place.start + starts[begin] + end - begin)
        return _Text(Place(columns, kind), slice(begin, end), name)

    for name, value, begin in spans(text):
        if name == "KEYS":
            for word in _WORD.finditer(value):
                yield found(name, begin + word.start(), begin + word.end(), Kind.VISIBLE)
        elif name == "UNIQ_KEY":
            yield found(name, begin, begin + len(value), Kind.WORD)
        elif name not in {"TAGS", "WAIT"}:
            yield found(name, begin, begin + len(value), Kind.PRINTABLE)


def _prove(head: bytes, decode: Callable[[bytes], Any], numbers: list[slice], texts: list[_Text]) -> None:
    """Change everything that may differ: what is decoded has to change in the same way, and in nothing else."""
    changed = bytearray(head)
    for number in numbers:
        changed[number] = bytes(byte + 1 if byte < ord("9") else byte - 1 for byte in head[number])
    before = decode(head)
    text = list(before.header.properties)
    for found in texts:
        new = bytes(ord("a") if byte != ord("a") else ord("b") for byte in head[found.place.columns])
        if not new:
            raise NotAlikeError("an empty value")
        changed[found.place.columns] = new
        text[found.target] = new.decode("ascii")
    try:
        after = decode(bytes(changed))
    except DecodeError as error:
        raise NotAlikeError(f"not what it looks like: {error}") from None
    header = before.header
    header.queue_id, header.born_timestamp, before.opaque = (int(changed[number]) for number in numbers)
    header.properties = "".join(text)
    if before != after:
        raise NotAlikeError("not what it looks like")
