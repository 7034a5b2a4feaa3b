"""Bodies of SEND_BATCH_MESSAGE (320): messages of one topic, back to back.

Each is total size 4, magic 4 (0), CRC 4 (0), flag 4, body length 4, body, properties length 2, properties.
Source: RocketMQ's MessageDecoder.encodeMessage and MessageExtEncoder.encode(MessageExtBatch).
"""

import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from protocol.errors import FrameError

_HEAD = struct.Struct(">iiiii")
_SIZE_FLAG_BODY = struct.Struct(">i8xii").unpack_from
_SHORT = struct.Struct(">h")
_LENGTH = _SHORT.unpack_from
_SHORT_BODY: Final = 4096


class BatchItem(NamedTuple):
    """One message of a batch: its body (a view, or bytes where it is short) and the properties' text as bytes."""

    flag: int
    body: bytes | memoryview
    properties: bytes


class BatchError(FrameError):
    """A batch body whose lengths do not add up. It costs the request, not the connection."""


def decode_batch(data: Any) -> list[BatchItem]:
    """The messages of a batch body. Raises BatchError where a length does not fit."""
    return [BatchItem._make(parts) for parts in split_batch(data)]


def split_batch(data: Any) -> list[tuple[int, bytes | memoryview, bytes]]:
    """The same as plain tuples of flag, body and properties: for who makes objects of its own of them.

    Out of ``bytes`` a short body comes as bytes: that costs less than a view, to make and to use.
    """
    view = memoryview(data)
    source = data if type(data) is bytes else view
    items: list[tuple[int, bytes | memoryview, bytes]] = []
    at, end = 0, len(view)
    try:
        while at < end:
            size, flag, body_length = _SIZE_FLAG_BODY(view, at)
            body_at = at + 20
            body_end = body_at + body_length
            if body_length < 0:
                raise BatchError(f"message {len(items)} of the batch has a body length of {body_length}")
            properties_at = body_end + 2
            following = at + size
            raw = bytes(source[properties_at:following])
            if following > end or _LENGTH(view, body_end)[0] != len(raw) or following < properties_at:
                raise BatchError(f"message {len(items)} of the batch says it has {size} bytes; its parts end elsewhere")
            items.append((flag, (source if body_length <= _SHORT_BODY else view)[body_at:body_end], raw))
            at = following
    except struct.error:
        raise BatchError(f"message {len(items)} of the batch is cut off") from None
    return items


def encode_batch(messages: Iterable[tuple[int, bytes, bytes]]) -> bytes:
    """A batch body from (flag, body, properties) of each message. Raises ValueError for properties over 32,767."""
    parts = []
    for flag, body, properties in messages:
        if len(properties) > 32_767:
            raise ValueError(f"properties of {len(properties)} bytes, the limit is 32767")
        size = 22 + len(body) + len(properties)
        parts += [
            _HEAD.pack(size, 0, 0, flag, len(body)),
            body,
            _SHORT.pack(len(properties)),
            properties,
        ]
    return b"".join(parts)
