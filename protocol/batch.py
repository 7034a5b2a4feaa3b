"""Bodies of SEND_BATCH_MESSAGE (320): messages of one topic, back to back.

Each is total size 4, magic 4 (0), CRC 4 (0), flag 4, body length 4, body, properties length 2, properties.
Source: RocketMQ's MessageDecoder.encodeMessage and MessageExtEncoder.encode(MessageExtBatch).
"""

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from protocol.errors import FrameError

_HEAD = struct.Struct(">iiiii")
_SIZE_FLAG_BODY = struct.Struct(">i8xii").unpack_from
_NEW = tuple.__new__
_SHORT = struct.Struct(">h")
_LENGTH = _SHORT.unpack_from


class BatchItem(NamedTuple):
    """One message of a batch: views into the body that was decoded, and the properties' text as bytes."""

    flag: int
    body: memoryview
    properties: bytes


class BatchError(FrameError):
    """A batch body whose lengths do not add up. It costs the request, not the connection."""


def decode_batch(data: Any) -> list[BatchItem]:
    """The messages of a batch body. Raises BatchError where a length does not fit."""
    view = memoryview(data)
    items: list[BatchItem] = []
    at, end = 0, len(view)
    try:
        while at < end:
            size, flag, body_length = _SIZE_FLAG_BODY(view, at)
            body_at = at + 20
            body_end = body_at + body_length
            if body_length < 0:
                raise BatchError(f"message {len(items)} of the batch has a body length of {body_length}")
            properties_length = _LENGTH(view, body_end)[0]
            following = body_end + 2 + properties_length
            if properties_length < 0 or following != at + size or following > end:
                raise BatchError(f"message {len(items)} of the batch says it has {size} bytes; its parts end elsewhere")
            # the class's own __new__ is Python code: a third of the time of all this
            items.append(_NEW(BatchItem, (flag, view[body_at:body_end], view[body_end + 2 : following].tobytes())))
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
