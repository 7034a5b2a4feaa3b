"""What is known to be durable of the tier's key index: tiered_index_file/durable, replaced at each flush.

RocketMQ has no such file, and its broker ignores it: it opens only names that are numbers. It lets a start keep all
items that were flushed, and the dispatcher put the keys again that were not.
Layout: magic 4, number of files 4, number of queues 4; for each file its stamp 8, slots 4, items 4, durable items 4,
first time 8; for each queue topic id 4, queue id 4, stream position 8; CRC-32 of all this 4.
"""

import struct
import zlib
from collections.abc import Iterable
from typing import Final, NamedTuple

MARKS_NAME: Final = "durable"
_HEAD: Final = struct.Struct(">4sII")
_MAGIC: Final = b"TIX1"
_FILE: Final = struct.Struct(">qiiiq")
_QUEUE: Final = struct.Struct(">iiq")


class FileMark(NamedTuple):
    """An index file: its durable items, and the time in ms before which it holds no message (for that many items)."""

    stamp: int
    slots: int
    items: int
    durable: int
    first_ms: int


class Marks(NamedTuple):
    """By stamp the files; by topic id and queue id the stream positions below which all keys are durable."""

    files: dict[int, FileMark]
    positions: dict[tuple[int, int], int]


def encode_marks(files: Iterable[FileMark], positions: dict[tuple[int, int], int]) -> bytes:
    """The bytes of the file."""
    file_bytes = b"".join(_FILE.pack(*file) for file in files)
    data = bytearray(_HEAD.pack(_MAGIC, len(file_bytes) // _FILE.size, len(positions)))
    data += file_bytes
    data += b"".join(_QUEUE.pack(*queue, position) for queue, position in positions.items())
    return bytes(data) + zlib.crc32(data).to_bytes(4, "big")


def decode_marks(data: bytes | None) -> Marks | None:
    """The content of the file; None if there is none, or if it is damaged."""
    if data is None or len(data) < _HEAD.size + 4:
        return None
    body = data[:-4]
    magic, files, queues = _HEAD.unpack_from(body)
    middle = _HEAD.size + files * _FILE.size
    if magic != _MAGIC or len(body) != middle + queues * _QUEUE.size:
        return None
    if zlib.crc32(body) != int.from_bytes(data[-4:], "big"):
        return None
    found = map(FileMark._make, _FILE.iter_unpack(body[_HEAD.size : middle]))
    positions = {(topic, queue): position for topic, queue, position in _QUEUE.iter_unpack(body[middle:])}
    return Marks({file.stamp: file for file in found}, positions)
