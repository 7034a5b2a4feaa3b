"""Layout of a bucket's manifest: a root that is replaced, and pages that are written once. TriMQ's own.

The root is JSON. It names the pages, and everything else that belongs to the history; what it does not name does not
belong to it, except for the upload objects of its epoch that follow its end. A page lists objects with messages and the
stretches of queues in them:

    "TRIMQPAG" | version (2) | 2 bytes 0 | CRC-32 of the rest (4) | zlib: topics | objects | stretches

Objects and stretches are a number (4 bytes) and so many rows. All numbers are big-endian.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from trimq.protocol.bucket_names import ObjectName
from trimq.protocol.bucket_object import BucketFormatError, Directory, decode_topics, encode_topics
from trimq.protocol.hashing import checksum

VERSION: Final = 1
MOST_ROOT_BYTES: Final = 64 * 1024
MOST_PAGE_BYTES: Final = 1024 * 1024
_MOST_PAYLOAD: Final = 256 * 1024 * 1024
"""A page that unpacks to more is refused."""

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


class Entry(NamedTuple):
    """An object and its stretches, sorted by topic, queue and offset."""

    object: StoredObject
    stretches: Sequence[Stretch]


def stretches_of(directory: Directory) -> list[Stretch]:
    """The stretches of an object."""
    found: list[Stretch] = []
    for block in directory.blocks():
        last = found[-1] if found else None
        if (
            last is not None
            and (last.topic, last.queue_id, last.end) == (block.topic, block.queue_id, block.offset)
            and last.position + last.size + 20 * last.messages == block.position
        ):
            found[-1] = last._replace(
                blocks=last.blocks + 1,
                messages=last.messages + block.messages,
                size=last.size + block.size,
                last_physical=block.last_physical,
                begin_ms=min(last.begin_ms, block.begin_ms),
                end_ms=max(last.end_ms, block.end_ms),
            )
        else:
            found.append(
                Stretch(
                    block.topic,
                    block.queue_id,
                    1,
                    block.offset,
                    block.messages,
                    block.size,
                    block.position,
                    block.first_physical,
                    block.last_physical,
                    block.begin_ms,
                    block.end_ms,
                )
            )
    return found


def encode_page(entries: Sequence[Entry]) -> bytes:
    """A page with these objects. It may be longer than MOST_PAGE_BYTES: ``split_pages`` makes shorter ones."""
    topics = list(dict.fromkeys(stretch.topic for entry in entries for stretch in entry.stretches))
    numbers = {topic: number for number, topic in enumerate(topics)}
    objects = np.array([(*entry.object[:5], 0, *entry.object[5:]) for entry in entries], OBJECT)
    rows = np.array(
        [
            (number, numbers[stretch.topic], *stretch[1:])
            for number, entry in enumerate(entries)
            for stretch in entry.stretches
        ],
        STRETCH,
    )
    payload = b"".join(
        (encode_topics(topics), _COUNT.pack(len(objects)), objects.tobytes(), _COUNT.pack(len(rows)), rows.tobytes())
    )
    packed = zlib.compress(payload, 1)
    return _PAGE.pack(_MAGIC, VERSION, checksum(packed)) + packed


def split_pages(entries: Sequence[Entry], most: int = MOST_PAGE_BYTES) -> Iterator[tuple[Sequence[Entry], bytes]]:
    """Pages of at most so many bytes that together have the entries, in their order.

    The stretches of an object that does not fit one page are in several pages.
    """
    data = encode_page(entries)
    if len(data) <= most:
        if entries:
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
    if checksum(packed) != crc:
        raise BucketFormatError("the manifest page is damaged")
    unpacker = zlib.decompressobj()
    try:
        payload = unpacker.decompress(packed, _MOST_PAYLOAD)
    except zlib.error as error:
        raise BucketFormatError("the manifest page is damaged") from error
    if not unpacker.eof:
        raise BucketFormatError("the manifest page is cut off or too large")
    topics, at = decode_topics(payload)
    objects, at = _rows(payload, at, OBJECT)
    rows, at = _rows(payload, at, STRETCH)
    if at != len(payload):
        raise BucketFormatError("the manifest page has bytes behind its rows")
    if len(rows) and (int(rows["object"].max()) >= len(objects) or int(rows["topic"].max()) >= len(topics)):
        raise BucketFormatError("the manifest page names an object or a topic that it does not have")
    entries = [Entry(StoredObject(*row[:5], *row[6:]), []) for row in objects.tolist()]
    for number, topic, *rest in rows.tolist():
        stretches = entries[number].stretches
        assert isinstance(stretches, list)
        stretches.append(Stretch(topics[topic], *rest))
    return entries


def _rows(payload: bytes, at: int, kind: Any) -> tuple[Any, int]:
    if len(payload) < at + 4:
        raise BucketFormatError("the manifest page is cut off")
    (count,) = _COUNT.unpack_from(payload, at)
    end = at + 4 + count * kind.itemsize
    if len(payload) < end:
        raise BucketFormatError("the manifest page is cut off")
    return np.frombuffer(payload, kind, count=count, offset=at + 4), end


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
    empty if there is none. ``indexes``: names of index files.
    """

    cluster: str
    broker: str
    epoch: int
    owner: str
    sequence: int = 0
    end: int = 0
    pages: tuple[PageRef, ...] = ()
    state: str = ""
    indexes: tuple[str, ...] = field(default=())


def encode_root(root: Root) -> bytes:
    """The bytes of a root. Raises BucketFormatError if they are too many."""
    value = {
        "format": VERSION,
        "cluster": root.cluster,
        "broker": root.broker,
        "epoch": root.epoch,
        "owner": root.owner,
        "sequence": root.sequence,
        "end": root.end,
        "pages": [list(page) for page in root.pages],
        "state": root.state,
        "indexes": list(root.indexes),
    }
    data = json.dumps(value, separators=(",", ":")).encode()
    if len(data) > MOST_ROOT_BYTES:
        raise BucketFormatError(f"a root of {len(data)} bytes; the limit is {MOST_ROOT_BYTES}")
    return data


def decode_root(data: Any) -> Root:
    """The root. Raises BucketFormatError."""
    try:
        value = json.loads(bytes(data))
        version = value["format"]
        root = Root(
            _checked(value, "cluster", str),
            _checked(value, "broker", str),
            _checked(value, "epoch", int),
            _checked(value, "owner", str),
            _checked(value, "sequence", int),
            _checked(value, "end", int),
            tuple(PageRef(str(name), int(length), int(objects)) for name, length, objects in value["pages"]),
            _checked(value, "state", str),
            tuple(str(name) for name in value["indexes"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BucketFormatError("the root of the manifest is damaged") from error
    if version != VERSION:
        raise BucketFormatError(f"a manifest of format {version}; this version of TriMQ reads format {VERSION}")
    return root


def _checked(value: Any, key: str, kind: type) -> Any:
    if not isinstance(value[key], kind) or isinstance(value[key], bool):
        raise TypeError(key)
    return value[key]
