"""Bodies of SEND_BATCH_MESSAGE (320): messages of one topic, back to back.

Each is total size 4, magic 4 (0), CRC 4 (0), flag 4, body length 4, body, properties length 2, properties.
Source: RocketMQ's MessageDecoder.encodeMessage and MessageExtEncoder.encode(MessageExtBatch).
"""

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from protocol.errors import FrameError

_HEAD = struct.Struct(">iiiii")
_SHORT = struct.Struct(">h")


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
            size, _, _, flag, body_length = _HEAD.unpack_from(view, at)
            body_at = at + 20
            properties_at = body_at + body_length + 2
            if body_length < 0:
                raise BatchError(f"message {len(items)} of the batch has a body length of {body_length}")
            properties_length = _SHORT.unpack_from(view, properties_at - 2)[0]
            following = properties_at + properties_length
            if properties_length < 0 or following != at + size or following > end:
                raise BatchError(f"message {len(items)} of the batch says it has {size} bytes; its parts end elsewhere")
            items.append(
                BatchItem(
                    flag,
                    view[body_at : properties_at - 2],
                    bytes(view[properties_at:following]),
                )
            )
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
