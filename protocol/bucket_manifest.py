"""Layout of a bucket's manifest: a root that is replaced, and pages that are written once. TriMQ's own.

The root is JSON (bucket_json.py). It names the pages, and everything else that belongs to the history; what it does not
name does not belong to it, except for the upload objects of its epoch that follow its end, and the index files in the
list that it names, which is JSON too. A page lists objects with messages and the stretches of queues in them:

    "TRIMQPAG" | version (2) | 2 bytes 0 | CRC-32 (4) | zlib: topics | objects | stretches

The CRC is that of the 12 bytes in front of it and of the rest. Objects and stretches are a number (4 bytes) and so many
rows, by columns: the first bytes of all rows, then the second ones, and so on, which halves what zlib makes of them.
The stretches are in the order of their objects. All numbers are big-endian.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, overload

import numpy as np

from trimq.protocol.bucket_json import VERSION, as_number, as_text, as_texts, decode_json, encode_json, is_damaged
from trimq.protocol.bucket_names import ObjectName
from trimq.protocol.bucket_object import BucketFormatError, Directory, decode_topics, encode_topics
from trimq.protocol.hashing import checksum
from trimq.protocol.queue_unit import UNIT_SIZE

MOST_ROOT_BYTES: Final = 64 * 1024
MOST_PAGE_BYTES: Final = 1024 * 1024
MOST_INDEXES_BYTES: Final = 16 * 1024 * 1024
"""Room for the index files of 19 years, with one in each hour."""
MOST_PAYLOAD: Final = 16 * 1024 * 1024
"""A page that unpacks to more is refused: a small page must not take much memory."""

_ROOT: Final = "root of the manifest"
_INDEXES: Final = "list of index files"
_MAGIC: Final = b"TRIMQPAG"
_PAGE: Final = struct.Struct(">8sHxxI")
_COUNT: Final = struct.Struct(">I")

OBJECT: Final = np.dtype(
    [
        ("begin", ">i8"),
        ("end", ">i8"),
        ("generation", ">u4"),
        ("epoch", ">u4"),
        ("number", ">u4"),
        ("reserved", ">u4"),
        ("length", ">u8"),
        ("directory", ">u8"),
    ]
)
"""An object in a page, 48 bytes: see StoredObject."""
STRETCH: Final = np.dtype(
    [
        ("object", ">u4"),
        ("topic", ">u4"),
        ("queue_id", ">i4"),
        ("blocks", ">u4"),
        ("offset", ">i8"),
        ("messages", ">i8"),
        ("size", ">i8"),
        ("position", ">i8"),
        ("first_physical", ">i8"),
        ("last_physical", ">i8"),
        ("begin_ms", ">i8"),
        ("end_ms", ">i8"),
    ]
)
"""A stretch in a page, 80 bytes: see Stretch. ``object`` and ``topic`` are numbers in the tables of the page."""


class Stretch(NamedTuple):
    """Consecutive messages of a queue in one object, in blocks that follow each other.

    As Block; ``blocks`` is their number, ``size`` the bytes of all records, ``position`` that of the first block.
    """

    topic: str
    queue_id: int
    blocks: int
    offset: int
    messages: int
    size: int
    position: int
    first_physical: int
    last_physical: int
    begin_ms: int
    end_ms: int

    @property
    def end(self) -> int:
        """The queue offset behind the last message."""
        return self.offset + self.messages


class StoredObject(NamedTuple):
    """An object with messages: ``begin`` and ``end`` of its part of the log, its length, where its directory begins."""

    begin: int
    end: int
    generation: int
    epoch: int
    number: int
    length: int
    directory: int

    @property
    def name(self) -> str:
        """Its name below the broker's prefix."""
        return str(ObjectName(self.begin, self.end, self.generation, self.epoch, self.number))

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """If stretches of several objects overlap, that of the greatest rank has the messages."""
        return self.generation, self.epoch, self.begin, self.number


class StretchRows(Sequence[Stretch]):
    """Stretches as rows of type STRETCH: 80 bytes each, where a Stretch takes 360. ``topics`` is their table."""

    __slots__ = ("rows", "topics")

    def __init__(self, topics: Sequence[str], rows: Any) -> None:
        self.topics = topics
        self.rows = rows

    @classmethod
    def of(cls, stretches: Sequence[Stretch]) -> "StretchRows":
        """The same stretches, as rows."""
        if isinstance(stretches, StretchRows):
            return stretches
        numbers: dict[str, int] = {}
        values = [(0, numbers.setdefault(stretch.topic, len(numbers)), *stretch[1:]) for stretch in stretches]
        return cls(list(numbers), np.array(values, STRETCH))

    @classmethod
    def joined(cls, first: Sequence[Stretch], second: Sequence[Stretch]) -> "StretchRows":
        """The stretches of both."""
        return cls.of([*first, *second])

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Stretch: ...
    @overload
    def __getitem__(self, index: slice) -> "StretchRows": ...
    def __getitem__(self, index: int | slice) -> "Stretch | StretchRows":
        if isinstance(index, slice):
            return StretchRows(self.topics, self.rows[index])
        _, topic, *rest = self.rows[index].tolist()
        return Stretch(self.topics[topic], *rest)

    def __iter__(self) -> Iterator[Stretch]:
        topics = self.topics
        for _, topic, *rest in self.rows.tolist():
            yield Stretch(topics[topic], *rest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Entry(NamedTuple):
    """An object and its stretches, sorted by topic, queue and offset."""

    object: StoredObject
    stretches: Sequence[Stretch]


def stretches_of(directory: Directory) -> StretchRows:
    """The stretches of an object."""
    blocks = directory.rows
    if not len(blocks):
        return StretchRows([], np.empty(0, STRETCH))
    before, after = blocks[:-1], blocks[1:]
    follows = (
        (before["topic"] == after["topic"])
        & (before["queue_id"] == after["queue_id"])
        & (before["offset"] + before["messages"] == after["offset"])
        & (before["position"] + before["size"] + before["messages"].astype("u8") * UNIT_SIZE == after["position"])
    )
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    last = np.concatenate((first[1:], [len(blocks)])) - 1
    rows = np.zeros(len(first), STRETCH)
    for name in ("topic", "queue_id", "offset", "position", "first_physical"):
        rows[name] = blocks[name][first]
    rows["last_physical"] = blocks["last_physical"][last]
    rows["blocks"] = last - first + 1
    for name in ("messages", "size"):
        rows[name] = np.add.reduceat(blocks[name].astype("i8"), first)
    rows["begin_ms"] = np.minimum.reduceat(blocks["begin_ms"].astype("i8"), first)
    rows["end_ms"] = np.maximum.reduceat(blocks["end_ms"].astype("i8"), first)
    return StretchRows(directory.topics, rows)


def _payload(entries: Sequence[Entry]) -> bytes:
    numbers: dict[str, int] = {}
    # numpy's concatenate would change the order of the bytes.
    rows = np.empty(sum(len(entry.stretches) for entry in entries), STRETCH)
    at = 0
    # Entries that were read from one page share its table of topics, of which they may use few.
    for _, group in groupby(enumerate(map(_rows_of, entries)), lambda item: id(item[1].topics)):
        begin = at
        topics: Sequence[str] = ()
        for number, stretches in group:
            topics = stretches.topics
            own = rows[at : at + len(stretches)]
            own[:] = stretches.rows
            own["object"] = number
            at += len(stretches)
        present, places = np.unique(rows["topic"][begin:at], return_inverse=True)
        used = [numbers.setdefault(topics[topic], len(numbers)) for topic in present.tolist()]
        rows["topic"][begin:at] = np.array(used, STRETCH["topic"])[places]
    objects = np.array([(*entry.object[:5], 0, *entry.object[5:]) for entry in entries], OBJECT)
    table = encode_topics(list(numbers))
    return b"".join((table, _COUNT.pack(len(objects)), _columns(objects), _COUNT.pack(len(rows)), _columns(rows)))


def _rows_of(entry: Entry) -> StretchRows:
    return StretchRows.of(entry.stretches)


def _columns(rows: Any) -> bytes:
    return rows.view("u1").reshape(len(rows), rows.itemsize).T.tobytes()  # type: ignore[no-any-return]


def encode_page(entries: Sequence[Entry]) -> bytes:
    """A page with these objects. It may be larger than ``decode_page`` takes: ``split_pages`` makes smaller ones."""
    return _pack(_payload(entries))


def _pack(payload: bytes) -> bytes:
    packed = zlib.compress(payload, 1)
    head = _PAGE.pack(_MAGIC, VERSION, 0)[:-4]
    return head + _COUNT.pack(checksum(packed, checksum(head))) + packed


def split_pages(entries: Sequence[Entry], most: int = MOST_PAGE_BYTES) -> Iterator[tuple[Sequence[Entry], bytes]]:
    """Pages of at most so many bytes that together have the entries, in their order.

    The stretches of an object that does not fit one page are in several pages.
    """
    if not entries:
        return
    payload = _payload(entries)
    if len(payload) <= MOST_PAYLOAD:
        data = _pack(payload)
        if len(data) <= most:
            yield entries, data
            return
    if len(entries) > 1:
        half = len(entries) // 2
        parts: tuple[Sequence[Entry], ...] = (entries[:half], entries[half:])
    else:
        stored, stretches = entries[0]
        half = len(stretches) // 2
        if not half:
            raise BucketFormatError(f"a page of {most} bytes has no room for one stretch")
        parts = ([Entry(stored, stretches[:half])], [Entry(stored, stretches[half:])])
    for part in parts:
        yield from split_pages(part, most)


def decode_page(data: Any) -> list[Entry]:
    """The objects of a page. Raises BucketFormatError."""
    data = bytes(data)
    if len(data) < _PAGE.size or data[:8] != _MAGIC:
        raise BucketFormatError("no page of a manifest: its first bytes are others")
    _, version, crc = _PAGE.unpack_from(data)
    if version != VERSION:
        raise BucketFormatError(f"a manifest page of format {version}; this version of TriMQ reads format {VERSION}")
    packed = data[_PAGE.size :]
    if len(data) > MOST_PAGE_BYTES or checksum(packed, checksum(data[: _PAGE.size - 4])) != crc:
        raise BucketFormatError("the manifest page is damaged")
    unpacker = zlib.decompressobj()
    try:
        payload = unpacker.decompress(packed, MOST_PAYLOAD)
    except zlib.error as error:
        raise BucketFormatError("the manifest page is damaged") from error
    if not unpacker.eof or unpacker.unused_data:
        raise BucketFormatError("the manifest page is cut off or too large")
    topics, at = decode_topics(payload)
    objects, at = _rows(payload, at, OBJECT)
    rows, at = _rows(payload, at, STRETCH)
    if at != len(payload):
        raise BucketFormatError("the manifest page has bytes behind its rows")
    numbers = rows["object"].astype("i8")
    if len(rows) and (int(numbers.max()) >= len(objects) or int(rows["topic"].max()) >= len(topics)):
        raise BucketFormatError("the manifest page names an object or a topic that it does not have")
    if (np.diff(numbers) < 0).any():
        raise BucketFormatError("the stretches of the manifest page are not in the order of its objects")
    edges = np.searchsorted(numbers, np.arange(len(objects) + 1)).tolist()
    return [
        Entry(StoredObject(*row[:5], *row[6:]), StretchRows(topics, rows[edges[number] : edges[number + 1]]))
        for number, row in enumerate(objects.tolist())
    ]


def _rows(payload: bytes, at: int, kind: Any) -> tuple[Any, int]:
    if len(payload) < at + 4:
        raise BucketFormatError("the manifest page is cut off")
    (count,) = _COUNT.unpack_from(payload, at)
    end = at + 4 + count * kind.itemsize
    if len(payload) < end:
        raise BucketFormatError("the manifest page is cut off")
    columns = np.frombuffer(payload[at + 4 : end], "u1").reshape(kind.itemsize, count)
    return np.ascontiguousarray(columns.T).reshape(-1).view(kind), end


class PageRef(NamedTuple):
    """A page as the root names it: name below the broker's prefix, bytes, number of objects."""

    name: str
    length: int
    objects: int


@dataclass(frozen=True)
class Root:
    """The root of a manifest.

    ``epoch`` and ``owner`` (random) say which broker may replace it, and ``sequence`` grows with each replacement.
    ``end``: the log offset behind all that its pages cover. ``state``: name of the object with topics, groups, offsets;
    empty if there is none. ``indexes``: the same of the list of index files.
    """

    cluster: str
    broker: str
    epoch: int
    owner: str
    sequence: int = 0
    end: int = 0
    pages: tuple[PageRef, ...] = ()
    state: str = ""
    indexes: str = ""


def encode_root(root: Root) -> bytes:
    """The bytes of a root. Raises BucketFormatError if they are too many."""
    value = {
        "cluster": root.cluster,
        "broker": root.broker,
        "epoch": root.epoch,
        "owner": root.owner,
        "sequence": root.sequence,
        "end": root.end,
        "pages": [list(page) for page in root.pages],
        "state": root.state,
        "indexes": root.indexes,
    }
    return encode_json(value, _ROOT, MOST_ROOT_BYTES)


def decode_root(data: Any) -> Root:
    """The root. Raises BucketFormatError."""
    value = decode_json(data, _ROOT, MOST_ROOT_BYTES)
    try:
        return Root(
            as_text(value["cluster"]),
            as_text(value["broker"]),
            as_number(value["epoch"]),
            as_text(value["owner"]),
            as_number(value["sequence"]),
            as_number(value["end"]),
            tuple(
                PageRef(as_text(name), as_number(length), as_number(objects))
                for name, length, objects in value["pages"]
            ),
            as_text(value["state"]),
            as_text(value["indexes"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise is_damaged(_ROOT) from error


def encode_indexes(names: Sequence[str]) -> bytes:
    """The bytes of a list of index files. Raises BucketFormatError if they are too many."""
    return encode_json({"names": list(names)}, _INDEXES, MOST_INDEXES_BYTES)


def decode_indexes(data: Any) -> tuple[str, ...]:
    """The names of index files in a list. Raises BucketFormatError."""
    value = decode_json(data, _INDEXES, MOST_INDEXES_BYTES)
    try:
        return as_texts(value["names"])
    except (ValueError, KeyError, TypeError) as error:
        raise is_damaged(_INDEXES) from error
