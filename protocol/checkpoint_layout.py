"""The checkpoint file: 4,096 bytes, six 8-byte numbers at its head (RocketMQ's StoreCheckpoint).

Times are store timestamps in ms, offsets are commit-log offsets. Too small a value only costs time at the next start.

RocketMQ writes the six numbers and never touches the rest of the 4,096 bytes. From byte 512 on, this broker stores its
own mark: the offset up to which log, queues and index are on disk together. The mark has a checksum over itself and the
six numbers, so it becomes invalid when another broker changes them.
"""

import struct
import zlib
from typing import Final

from msgspec import Struct

SIZE: Final = 4096
FIELDS = struct.Struct(">qqqqqq")
MARK_AT: Final = 512
MARK = struct.Struct(">8sqqqqqqqqi")
MARK_MAGIC: Final = b"TRIMQ\0\0\1"
_CRC = struct.Struct(">I")


class CheckpointFields(Struct):
    """The six numbers in their order in the file."""

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_phy_offset: int = 0
    logics_physical_offset: int = 0


class CheckpointMark(Struct, frozen=True):
    """The state that was durable, log, queues and index together, when the checkpoint was written.

    ``position``: every record before this commit-log offset is synced, and so are its queue unit and index entries.
    ``last_record`` and ``store_timestamp`` are the offset and time of the last record before it (-1 and 0 for none).
    ``queues`` and ``units``: how many queues there were and the sum of their next offsets.
    ``index_file`` and ``index_count``: name (as a number) and entry count of the newest index file, 0 and 0 for none,
    -1 and 0 without an index. ``index_files``: the number of index files.
    ``clean``: written as the last step of a graceful shutdown.
    """

    position: int = 0
    last_record: int = -1
    store_timestamp: int = 0
    queues: int = 0
    units: int = 0
    index_file: int = 0
    index_count: int = 0
    index_files: int = 0
    clean: bool = False


def decode(data: bytes) -> CheckpointFields:
    """The fields at the head of a checkpoint file. Raises ValueError if the file is too short for them."""
    if len(data) < FIELDS.size:
        raise ValueError(f"a checkpoint has {SIZE} bytes, this file has {len(data)}")
    return CheckpointFields(*FIELDS.unpack_from(data))


def decode_mark(data: bytes) -> CheckpointMark | None:
    """This broker's mark; None if there is none, or if another writer has changed the fields since."""
    end = MARK_AT + MARK.size
    if len(data) < end + _CRC.size or not data.startswith(MARK_MAGIC, MARK_AT):
        return None
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[MARK_AT:end], zlib.crc32(data[: FIELDS.size])):
        return None
    values = dict(zip(CheckpointMark.__struct_fields__, MARK.unpack_from(data, MARK_AT)[1:], strict=True))
    return CheckpointMark(**{**values, "clean": bool(values["clean"])})


def encode(fields: CheckpointFields, mark: CheckpointMark | None = None) -> bytes:
    """The content of the file."""
    packed = FIELDS.pack(
        fields.physic_msg_timestamp,
        fields.logics_msg_timestamp,
        fields.index_msg_timestamp,
        fields.master_flushed_offset,
        fields.confirm_phy_offset,
        fields.logics_physical_offset,
    )
    if mark is None:
        return packed.ljust(SIZE, b"\0")
    own = MARK.pack(
        MARK_MAGIC,
        mark.position,
        mark.last_record,
        mark.store_timestamp,
        mark.queues,
        mark.units,
        mark.index_file,
        mark.index_count,
        mark.index_files,
        mark.clean,
    )
    crc = _CRC.pack(zlib.crc32(own, zlib.crc32(packed)))
    return (packed.ljust(MARK_AT, b"\0") + own + crc).ljust(SIZE, b"\0")
