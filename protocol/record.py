"""The record: a message in the commit log, and in the bodies of pull, query and view replies.

Big-endian. h is 4 or 16 address bytes and a 4-byte port, chosen for each host by sysFlag::

    TOTALSIZE 4 | MAGIC 4 | BODYCRC 4 | QUEUEID 4 | FLAG 4 | QUEUEOFFSET 8 | PHYSICALOFFSET 8 | SYSFLAG 4
    BORNTIMESTAMP 8 | BORNHOST h | STORETIMESTAMP 8 | STOREHOST h | RECONSUMETIMES 4 | PREPAREDTRANSACTIONOFFSET 8
    BODYLEN 4, body | TOPICLEN 1 (V1) or 2 (V2), topic | PROPLEN 2, properties

The end of a file is filled by a BLANK: the remaining size of the file (4), its magic (4), the rest untouched.
Source: RocketMQ's MessageExtEncoder, CommitLog.checkMessageAndReturnSize.
"""

import ipaddress
import struct
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from trimq.protocol import sysflag
from trimq.protocol.hashing import crc32

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB
MAGIC_BLANK: Final = 0xCBD43194
BLANK_SIZE: Final = 8
"""Bytes that stay free after every record, so that a BLANK always fits."""
MAX_PROPERTIES: Final = 32_767
OVERHEAD_V1: Final = 91
"""Bytes of a V1 record with IPv4 hosts without body, topic and properties. V2 has 1 more, each IPv6 host 12 more."""

AT_MAGIC: Final = 4
AT_BODY_CRC: Final = 8
AT_QUEUE_ID: Final = 12
AT_FLAG: Final = 16
AT_QUEUE_OFFSET: Final = 20
AT_PHYSICAL_OFFSET: Final = 28
AT_SYS_FLAG: Final = 36

BLANK = struct.Struct(">II")
SIZE_MAGIC = struct.Struct(">II")
_INT = struct.Struct(">i")
_PORT = struct.Struct(">i")
_LAYOUTS: Final = {
    (born, store): struct.Struct(f">iIIiiqqiq{born}sq{store}siqi") for born in (8, 20) for store in (8, 20)
}
_SHARED: Final = {(born, store): struct.Struct(f">iq{born}sq{store}siq") for born in (8, 20) for store in (8, 20)}
_AROUND: Final = {shared.size: struct.Struct(f">iIIiiqq{shared.size}si") for shared in _SHARED.values()}


class RecordError(ValueError):
    """Bytes that are not a complete, consistent record."""


class RecordHead(NamedTuple):
    """A record's fixed fields, and the positions of its variable parts in the buffer that it was read from."""

    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_timestamp: int
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body_at: int
    body_end: int
    topic_at: int
    topic_end: int
    properties_at: int
    properties_end: int


class RecordState(Enum):
    """The content at a position of a commit log."""

    RECORD = "record"
    BLANK = "blank"
    EMPTY = "empty"
    DAMAGED = "damaged"


class RecordCheck(NamedTuple):
    """The result of check_record. ``size`` is that of the record or BLANK; ``why`` is the reason if DAMAGED."""

    state: RecordState
    size: int
    head: RecordHead | None
    why: str


def layout(sys_flag: int) -> struct.Struct:
    """The packer of all fields up to and including BODYLEN, for host lengths by ``sys_flag``."""
    return _LAYOUTS[
        20 if sys_flag & sysflag.BORN_HOST_V6 else 8,
        20 if sys_flag & sysflag.STORE_HOST_V6 else 8,
    ]


def pack_shared(
    sys_flag: int,
    born_timestamp: int,
    born_host: bytes,
    store_timestamp: int,
    store_host: bytes,
    reconsume_times: int,
) -> bytes:
    """SYSFLAG to PREPAREDTRANSACTIONOFFSET, the fields that all records of a batch share. Raises struct.error."""
    hosts = len(born_host), len(store_host)
    return _SHARED[hosts].pack(sys_flag, born_timestamp, born_host, store_timestamp, store_host, reconsume_times, 0)


def around_shared(length: int) -> struct.Struct:
    """The packer of a record up to and including BODYLEN, with the ``length`` bytes of ``pack_shared`` as one field."""
    return _AROUND[length]


def record_size(sys_flag: int, body: int, topic: int, properties: int) -> int:
    """Size in bytes of a record whose body, topic and properties have these lengths; V2 if the topic needs it."""
    return layout(sys_flag).size + body + (1 if topic <= 127 else 2) + topic + 2 + properties


def store_time_at(sys_flag: int) -> int:
    """Offset of STORETIMESTAMP in a record."""
    return 68 if sys_flag & sysflag.BORN_HOST_V6 else 56


def encode_record(  # noqa: PLR0913 - a record has that many fields
    *,
    topic: bytes,
    body: Any,
    properties: bytes,
    queue_id: int,
    queue_offset: int,
    physical_offset: int,
    born_timestamp: int,
    born_host: bytes,
    store_timestamp: int,
    store_host: bytes,
    flag: int = 0,
    sys_flag: int = 0,
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
) -> bytes:
    """A record as bytes: the reference, for tests and tools. The commit log packs directly into its file."""
    fixed = layout(sys_flag)
    version2 = len(topic) > 127
    size = record_size(sys_flag, len(body), len(topic), len(properties))
    head = fixed.pack(
        size,
        MAGIC_V2 if version2 else MAGIC_V1,
        crc32(body),
        queue_id,
        flag,
        queue_offset,
        physical_offset,
        sys_flag,
        born_timestamp,
        born_host,
        store_timestamp,
        store_host,
        reconsume_times,
        prepared_transaction_offset,
        len(body),
    )
    topic_length = len(topic).to_bytes(2 if version2 else 1, "big")
    return b"".join(
        (
            head,
            body,
            topic_length,
            topic,
            len(properties).to_bytes(2, "big"),
            properties,
        )
    )


def decode_head(view: Any, at: int = 0) -> RecordHead:
    """Decode the record at ``at``. Checks its lengths against each other and the buffer; does not check the CRC.

    Raises RecordError.
    """
    try:
        size, magic = SIZE_MAGIC.unpack_from(view, at)
        if magic not in (MAGIC_V1, MAGIC_V2):
            raise RecordError(f"magic {magic:#010x} is not that of a record")
        end = at + size
        if size < OVERHEAD_V1 or end > len(view):
            raise RecordError(f"size {size} does not fit the {len(view) - at} available bytes")
        # The host fields come before the other lengths, and their size depends on the system flag.
        sys_flag = _INT.unpack_from(view, at + AT_SYS_FLAG)[0]
        fixed = layout(sys_flag)
        *fields, body_length = fixed.unpack_from(view, at)
        body_at = at + fixed.size
        body_end = body_at + body_length
        if body_length < 0 or body_end >= end:
            raise RecordError(f"body length {body_length} does not fit a record of {size}")
        if magic == MAGIC_V1:
            topic_length, topic_at = view[body_end], body_end + 1
        else:
            topic_length, topic_at = (
                view[body_end] << 8 | view[body_end + 1],
                body_end + 2,
            )
        topic_end = topic_at + topic_length
        properties_at = topic_end + 2
        # The lengths must fill the record exactly: a flipped bit in one of them is found here.
        if properties_at > end or properties_at + (view[topic_end] << 8 | view[topic_end + 1]) != end:
            raise RecordError(f"topic and properties do not end at the record's size of {size}")
    except (struct.error, IndexError):
        raise RecordError(f"only {len(view) - at} bytes instead of a record") from None
    return RecordHead._make((*fields, body_at, body_end, topic_at, topic_end, properties_at, end))


def check_record(view: Any, at: int, *, physical_offset: int | None = None, check_crc: bool = True) -> RecordCheck:
    """The content at ``at`` of a commit-log file's bytes.

    With ``physical_offset``, a record with another offset counts as damaged: it is an old one at a matching position.
    """
    if len(view) - at < BLANK_SIZE:
        return RecordCheck(RecordState.EMPTY, 0, None, "")
    size, magic = SIZE_MAGIC.unpack_from(view, at)
    if magic == MAGIC_BLANK:
        return RecordCheck(RecordState.BLANK, size, None, "")
    if size == 0 and magic == 0:
        return RecordCheck(RecordState.EMPTY, 0, None, "")
    try:
        head = decode_head(view, at)
    except RecordError as error:
        return RecordCheck(RecordState.DAMAGED, 0, None, str(error))
    if physical_offset is not None and head.physical_offset != physical_offset:
        why = f"its offset field is {head.physical_offset}, not {physical_offset}"
        return RecordCheck(RecordState.DAMAGED, head.size, head, why)
    if check_crc and head.body_end > head.body_at:
        actual = crc32(memoryview(view)[head.body_at : head.body_end])
        if actual != head.body_crc:
            why = f"body CRC {actual:#010x}, the record has {head.body_crc:#010x}"
            return RecordCheck(RecordState.DAMAGED, head.size, head, why)
    return RecordCheck(RecordState.RECORD, head.size, head, "")


@lru_cache(maxsize=4096)
def pack_host(address: str, port: int) -> bytes:
    """Pack an address (4 or 16 bytes) and port (4). Raises ValueError for a text that is no IP address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).packed + _PORT.pack(port)


def unpack_host(host: bytes) -> tuple[str, int]:
    """Address text and port of a packed host."""
    return str(ipaddress.ip_address(host[:-4])), _PORT.unpack(host[-4:])[0]


def host_flags(born_host: bytes, store_host: bytes) -> int:
    """The sysFlag bits for the lengths of two packed hosts."""
    born = sysflag.BORN_HOST_V6 if len(born_host) == 20 else 0
    return born | (sysflag.STORE_HOST_V6 if len(store_host) == 20 else 0)
