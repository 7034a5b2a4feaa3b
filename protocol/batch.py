"""Bodies of SEND_BATCH_MESSAGE (320): messages of one topic, back to back.

Each is total size 4, magic 4 (0), CRC 4 (0), flag 4, body length 4, body, properties length 2, properties.
Source: RocketMQ's MessageDecoder.encodeMessage and MessageExtEncoder.encode(MessageExtBatch).
"""

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from trimq.protocol.errors import FrameError

_HEAD = struct.Struct(">iiiii")
_SIZE_FLAG_BODY = struct.Struct(">i8xii").unpack_from
_SHORT = struct.Struct(">h")
_LENGTH = _SHORT.unpack_from
FLAG_AT: Final = 12
BODY_LENGTH_AT: Final = 16
BODY_AT: Final = 20
AROUND: Final = 22
"""Bytes of a message in addition to its body and its properties."""
_SHORT_BODY: Final = 512
"""Bodies of up to this many bytes are copied: that costs less than creating and using a view."""


class BatchItem(NamedTuple):
    """One message of a batch: its body (a view, or bytes if it is short) and the properties' text as bytes."""

    flag: int
    body: bytes | memoryview
    properties: bytes


class BatchColumns(NamedTuple):
    """The messages of a batch as columns, one sequence for each field of BatchItem."""

    flags: Sequence[int]
    bodies: Sequence[bytes | memoryview]
    properties: Sequence[bytes]


class BatchError(FrameError):
    """A batch body whose lengths are inconsistent. It fails the request, not the connection."""


def decode_batch(data: Any) -> list[BatchItem]:
    """The messages of a batch body. Raises BatchError if a length does not fit."""
    return list(map(BatchItem, *split_batch(data)))


def split_batch(data: Any) -> BatchColumns:
    """The same as columns, for code that processes all messages together. Long bodies are views of ``data``."""
    view = memoryview(data)
    return _split_equal(view) or _split_any(view)


def first_lengths(data: Any) -> tuple[int, int, int] | None:
    """Lengths of the first message, of its body and of its properties; None if they are inconsistent."""
    if len(data) < AROUND:
        return None
    size, _, body_length = _SIZE_FLAG_BODY(data)
    properties_length = size - AROUND - body_length
    return (size, body_length, properties_length) if body_length >= 0 and properties_length >= 0 else None


@lru_cache(maxsize=1024)
def _around_bodies(body_length: int, properties_length: int) -> struct.Struct:
    return struct.Struct(f">i8xii{body_length}xh{properties_length}s")


def _split_equal(view: memoryview) -> BatchColumns | None:
    """Split messages that all have the same lengths, as those of one producer often do; None for other batches."""
    lengths = first_lengths(view)
    if lengths is None or len(view) % lengths[0]:
        return None
    end = len(view)
    size, body_length, properties_length = lengths
    count = end // size
    parts = _around_bodies(body_length, properties_length).iter_unpack(view)
    sizes, flags, body_lengths, lengths, properties = zip(*parts, strict=True)
    # All messages were unpacked with the lengths of the first one: this checks that each of them has these lengths.
    if sizes.count(size) < count or body_lengths.count(body_length) < count or lengths.count(properties_length) < count:
        return None
    bodies: list[bytes | memoryview] = [view[at : at + body_length] for at in range(BODY_AT, end, size)]
    return BatchColumns(flags, list(map(bytes, bodies)) if body_length <= _SHORT_BODY else bodies, properties)


def _split_any(view: memoryview) -> BatchColumns:
    flags: list[int] = []
    bodies: list[bytes | memoryview] = []
    properties: list[bytes] = []
    at, end = 0, len(view)
    try:
        while at < end:
            size, flag, body_length = _SIZE_FLAG_BODY(view, at)
            body_at = at + BODY_AT
            body_end = body_at + body_length
            if body_length < 0:
                raise BatchError(f"message {len(flags)} of the batch has a body length of {body_length}")
            properties_at = body_end + 2
            following = at + size
            raw = bytes(view[properties_at:following])
            if following > end or _LENGTH(view, body_end)[0] != len(raw) or following < properties_at:
                raise BatchError(f"message {len(flags)} of the batch has {size} bytes, its parts do not")
            body = view[body_at:body_end]
            flags.append(flag)
            bodies.append(bytes(body) if body_length <= _SHORT_BODY else body)
            properties.append(raw)
            at = following
    except struct.error:
        raise BatchError(f"message {len(flags)} of the batch is cut off") from None
    return BatchColumns(flags, bodies, properties)


def encode_batch(messages: Iterable[tuple[int, bytes, bytes]]) -> bytes:
    """A batch body from (flag, body, properties) of each message. Raises ValueError for properties over 32,767."""
    parts = []
    for flag, body, properties in messages:
        if len(properties) > 32_767:
            raise ValueError(f"properties of {len(properties)} bytes, the limit is 32767")
        size = AROUND + len(body) + len(properties)
        parts += [
            _HEAD.pack(size, 0, 0, flag, len(body)),
            body,
            _SHORT.pack(len(properties)),
            properties,
        ]
    return b"".join(parts)
