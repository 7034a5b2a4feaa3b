"""Names and layouts of the tiered store's files. Source: RocketMQ's MessageStoreUtil and FileSegmentMetadata.

A queue has two streams, each a row of segments: its records (COMMIT_LOG) and its units (CONSUME_QUEUE). A segment is
named by its first position in the stream. A unit has 20 bytes: stream position of the record (8), size (4), tags code
(8).
"""

import hashlib
import struct
from enum import IntEnum
from typing import Final


class SegmentType(IntEnum):
    """What a segment holds; the number stands in the metadata, the name in the path."""

    COMMIT_LOG = 0
    CONSUME_QUEUE = 1
    INDEX = 2


UNSET_TIME: Final = 2**63 - 1
"""Begin and end timestamp of a segment without messages."""
INDEX_TOPIC: Final = "rmq_sys_INDEX"
METADATA_FILE: Final = "tieredStoreMetadata.json"

PHYSICAL_SUFFIX: Final = ".phy"
"""Added to the name of a CONSUME_QUEUE segment: the side file with the offsets that its messages have in the log."""
PHYSICAL: Final = struct.Struct(">qiI")
"""An entry of the side file, one for each unit: log offset, size and body CRC of the record it belongs to."""
UNKNOWN_PHYSICAL: Final = PHYSICAL.pack(-1, 0, 0)
"""The entry of a message whose log offset is not known: RocketMQ's broker has uploaded it."""

APACHE_UPLOADED: Final = 1 << 52
"""Added to the stream position of such a message where clients expect a log offset. No log reaches it."""


def _hash(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:8]


def cluster_directory(cluster: str) -> str:
    """The directory of a cluster below tieredStoreFilePath."""
    return f"{_hash(cluster)}_{cluster}"


def queue_path(broker: str, topic: str, queue_id: int) -> str:
    """The path of a queue, as it stands in the metadata."""
    return f"{broker}/{topic}/{queue_id}"


def segment_name(base_offset: int) -> str:
    """The name of the segment that begins at a stream position."""
    return f"{_hash(str(base_offset))}{base_offset:020d}"


def segment_file(root: str, cluster: str, path: str, type: SegmentType, base_offset: int) -> str:
    """The file of a segment below tieredStoreFilePath (``root``)."""
    return f"{root.rstrip('/')}/{cluster_directory(cluster)}/{path}/{type.name}/{segment_name(base_offset)}"
