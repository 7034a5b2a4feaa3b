"""The checkpoint file: 4,096 bytes, six 8-byte numbers at its head (RocketMQ's StoreCheckpoint).

Times are ms of store timestamps, offsets are commit-log offsets. Too small a value only costs time at the next start.
"""

import struct
from typing import Final

from msgspec import Struct

SIZE: Final = 4096
FIELDS = struct.Struct(">qqqqqq")


class CheckpointFields(Struct):
    """The six numbers in their order in the file."""

    physic_msg_timestamp: int = 0
    logics_msg_timestamp: int = 0
    index_msg_timestamp: int = 0
    master_flushed_offset: int = 0
    confirm_phy_offset: int = 0
    logics_physical_offset: int = 0


def decode(data: bytes) -> CheckpointFields:
    """The fields at the head of a checkpoint file. Raises ValueError for a file too short to hold them."""
    if len(data) < FIELDS.size:
        raise ValueError(f"a checkpoint has {SIZE} bytes, this file has {len(data)}")
    return CheckpointFields(*FIELDS.unpack_from(data))


def encode(fields: CheckpointFields) -> bytes:
    """The whole file."""
    packed = FIELDS.pack(
        fields.physic_msg_timestamp,
        fields.logics_msg_timestamp,
        fields.index_msg_timestamp,
        fields.master_flushed_offset,
        fields.confirm_phy_offset,
        fields.logics_physical_offset,
    )
    return packed.ljust(SIZE, b"\0")
