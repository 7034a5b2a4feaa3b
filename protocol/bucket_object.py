"""Layout of the objects with messages in a bucket: upload objects and segments. TriMQ's own.

    header (64 bytes) | block | block | ... | state | directory | footer (48 bytes)

The footer: position and length of the directory, position, length and CRC-32 of the state, length of the object, CRC-32
of the directory and of the footer up to here, "TRIMQEND".

A block holds consecutive messages of one queue: their units (20 bytes each: log offset, size, tags code), then their
records, as they stand in the log. The directory has a row for each block, sorted by topic, queue and offset. All
numbers are big-endian.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

from trimq.protocol.hashing import checksum
from trimq.protocol.queue_unit import UNIT_SIZE

VERSION: Final = 1
HEADER_SIZE: Final = 64
FOOTER_SIZE: Final = 48
BLOCK_BYTES: Final = 4 * 1024 * 1024
"""A block has no more bytes of records than this, unless it has one message only."""
BLOCK_MESSAGES: Final = 65_536
"""Most messages of a block."""
MOST_TOPICS: Final = 1 << 24

_MAGIC: Final = b"TRIMQOBJ"
_END: Final = b"TRIMQEND"
_HEADER: Final = struct.Struct(">8sHBxIqqq20xI")
_FOOTER: Final = struct.Struct(">QIQIIQI8s")
_FOOTER_CRC: Final = 36
_COUNT: Final = struct.Struct(">I")
_SHORT: Final = struct.Struct(">H")

ROW: Final = np.dtype(
    [
        ("topic", ">u4"),
        ("queue_id", ">i4"),
        ("offset", ">i8"),
        ("messages", ">u4"),
        ("size", ">u4"),
        ("position", ">u8"),
        ("first_physical", ">i8"),
        ("last_physical", ">i8"),
        ("begin_ms", ">i8"),
        ("end_ms", ">i8"),
        ("crc", ">u4"),
        ("reserved", ">u4"),
    ]
)
"""A row of the directory, 72 bytes: see Block. ``topic`` is a number in the table of topics."""


class BucketFormatError(ValueError):
    """Bytes of a bucket that are not what they should be: damaged, cut off, or of a later version."""


class Kind(IntEnum):
    """What wrote an object: an upload, or a join of several objects."""

    LOG = 0
    SEGMENT = 1


class ObjectHeader(NamedTuple):
    """The first 64 bytes of an object: the stretch [begin, end) of the log that it covers, epoch of its owner, time."""

    kind: Kind
    epoch: int
    begin: int
    end: int
    created_ms: int


class Block(NamedTuple):
    """Consecutive messages of a queue in an object.

    ``offset``: queue offset of the first; ``size``: bytes of the records; ``position``: where its units begin in the
    object, the records follow them. ``first_physical`` and ``last_physical``: log offsets of the first and last record;
    ``begin_ms`` and ``end_ms``: smallest and largest store time. ``crc``: CRC-32 of units and records.
    """

    topic: str
    queue_id: int
    offset: int
    messages: int
    size: int
    position: int
    first_physical: int
    last_physical: int
    begin_ms: int
    end_ms: int
    crc: int

    @property
    def length(self) -> int:
        """Bytes of the block in the object."""
        return self.messages * UNIT_SIZE + self.size


def encode_header(header: ObjectHeader) -> bytes:
    """The first 64 bytes of an object."""
    data = _HEADER.pack(_MAGIC, VERSION, *header, 0)[:-4]
    return data + _COUNT.pack(checksum(data))


def decode_header(data: Any) -> ObjectHeader:
    """The header at the start of ``data``. Raises BucketFormatError."""
    data = bytes(data[:HEADER_SIZE])
    if len(data) < HEADER_SIZE or data[:8] != _MAGIC:
        raise BucketFormatError("no object of TriMQ: its first bytes are others")
    _, version, kind, epoch, begin, end, created_ms, crc = _HEADER.unpack(data)
    if version != VERSION:
        raise BucketFormatError(f"an object of format {version}; this version of TriMQ reads format {VERSION}")
    if crc != checksum(data[:-4]) or kind > max(Kind):
        raise BucketFormatError("the header of the object is damaged")
    return ObjectHeader(Kind(kind), epoch, begin, end, created_ms)


class Directory:
    """The end of an object: its blocks, and where the state is.

    ``rows`` (of type ROW) are sorted by topic, queue id and offset. ``position``: where it begins in the object;
    ``length``: that of the object. ``state_length`` is 0 without a state.
    """

    __slots__ = ("length", "position", "rows", "state_crc", "state_length", "state_position", "topics")

    def __init__(
        self,
        topics: Sequence[str],
        rows: Any,
        *,
        position: int = 0,
        length: int = 0,
        state: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """``state``: position, length and CRC-32 of the state."""
        self.topics = topics
        self.rows = rows
        self.position = position
        self.length = length
        self.state_position, self.state_length, self.state_crc = state

    def __len__(self) -> int:
        return len(self.rows)

    def block(self, number: int) -> Block:
        """The block of a row."""
        topic, *numbers, _ = self.rows[number].tolist()
        return Block(self.topics[topic], *numbers)

    def blocks(self) -> Iterator[Block]:
        """All blocks in the order of their rows."""
        return map(self.block, range(len(self.rows)))

    def checked_state(self, data: bytes) -> bytes:
        """``data``, the bytes of the state. Raises BucketFormatError if they are damaged."""
        if len(data) != self.state_length or checksum(data) != self.state_crc:
            raise BucketFormatError("the state in the object is damaged")
        return data


def encode_topics(topics: Sequence[str]) -> bytes:
    """A table of topics: their number (4 bytes), then the length (2 bytes) and name (UTF-8) of each."""
    names = [name.encode() for name in topics]
    return _COUNT.pack(len(names)) + b"".join(_SHORT.pack(len(name)) + name for name in names)


def decode_topics(data: bytes, at: int = 0) -> tuple[list[str], int]:
    """The table of topics at a position, and the position behind it. Raises BucketFormatError."""
    topics: list[str] = []
    try:
        (count,) = _COUNT.unpack_from(data, at)
        at += 4
        # A damaged number must not become a long loop: each topic takes three bytes at least.
        if count > min(MOST_TOPICS, (len(data) - at) // 3):
            raise BucketFormatError(f"a table of topics is cut off or damaged: {count} topics")
        for _ in range(count):
            (length,) = _SHORT.unpack_from(data, at)
            name = data[at + 2 : at + 2 + length]
            if not length or len(name) != length:
                raise BucketFormatError("a table of topics is cut off or damaged")
            topics.append(name.decode())
            at += 2 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise BucketFormatError("a table of topics is damaged") from error
    return topics, at


def encode_end(blocks: Sequence[Block], at: int, state: bytes = b"") -> bytes:
    """What follows the blocks of an object: state, directory and footer. ``at``: where the last block ends."""
    ordered = sorted(blocks)
    topics = list(dict.fromkeys(block.topic for block in ordered))
    numbers = {topic: number for number, topic in enumerate(topics)}
    rows = np.array([(numbers[block.topic], *block[1:], 0) for block in ordered], ROW)
    directory = encode_topics(topics) + _COUNT.pack(len(rows)) + rows.tobytes()
    position = at + len(state)
    length = position + len(directory) + FOOTER_SIZE
    footer = _FOOTER.pack(position, len(directory), at, len(state), checksum(state), length, 0, _END)[:_FOOTER_CRC]
    crc = checksum(footer, checksum(directory))
    return b"".join((state, directory, footer, _COUNT.pack(crc), _END))


def directory_place(footer: Any, length: int) -> tuple[int, int]:
    """Position and length of the directory, by the last 48 bytes of an object. Raises BucketFormatError."""
    footer = bytes(footer)
    if len(footer) != FOOTER_SIZE or footer[-8:] != _END:
        raise BucketFormatError("the object has no end: it is cut off or damaged")
    position, size, state_position, state_length, _, whole, _, _ = _FOOTER.unpack(footer)
    if (
        whole != length
        or position + size + FOOTER_SIZE != length
        or state_position + state_length != position
        or state_position < HEADER_SIZE
    ):
        raise BucketFormatError("the footer of the object is damaged")
    return position, size


def decode_end(data: Any, length: int) -> Directory:
    """The directory of an object of ``length`` bytes, of which ``data`` is the end, with the whole directory at least.

    ``directory_place`` says how much that is. Raises BucketFormatError.
    """
    data = bytes(data)
    footer = data[-FOOTER_SIZE:]
    position, size = directory_place(footer, length)
    _, _, state_position, state_length, state_crc, _, crc, _ = _FOOTER.unpack(footer)
    at = position - (length - len(data))
    if at < 0:
        raise BucketFormatError("the directory is not complete")
    directory = data[at : at + size]
    if checksum(footer[:_FOOTER_CRC], checksum(directory)) != crc:
        raise BucketFormatError("the directory of the object is damaged")
    topics, at = decode_topics(directory)
    if len(directory) < at + 4:
        raise BucketFormatError("the directory of the object is cut off")
    (count,) = _COUNT.unpack_from(directory, at)
    if len(directory) != at + 4 + count * ROW.itemsize:
        raise BucketFormatError("the directory of the object has another length than its rows")
    rows = np.frombuffer(directory, ROW, count, at + 4) if count else np.empty(0, ROW)
    if count:
        if int(rows["topic"].max()) >= len(topics):
            raise BucketFormatError("the directory of the object names a topic that it does not have")
        begins = rows["position"]
        lengths = rows["messages"].astype("u8") * UNIT_SIZE + rows["size"]
        if (
            int(begins.min()) < HEADER_SIZE
            or int(begins.max()) > state_position
            or int((begins + lengths).max()) > state_position
        ):
            raise BucketFormatError("the directory of the object names a block outside of it")
    return Directory(topics, rows, position=position, length=length, state=(state_position, state_length, state_crc))


def block_crc(units: Any, records: Sequence[Any]) -> int:
    """The checksum of a block: of its units and the pieces of its records."""
    crc = checksum(units)
    for piece in records:
        crc = checksum(piece, crc)
    return crc
