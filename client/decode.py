"""Splitting the body of a pull or query reply into messages, without decoding them."""

import struct
from typing import Any, TypeVar

from client.message import ReceivedMessage
from protocol.record import MAGIC_V1, MAGIC_V2, RecordError

M = TypeVar("M", bound=ReceivedMessage)

_START = struct.Struct(">II12xQ")
"""Size, magic and queue offset: what a consumer needs of a message to keep it."""


def split_messages(data: bytes | memoryview, broker_name: str, kind: type[M], receiver: Any = None) -> list[M]:
    """The messages in ``data``, as ``kind``; their fields are decoded when they are looked at.

    ``receiver`` is who takes their acknowledgement.

    Raises RecordError where the sizes do not add up.

    >>> split_messages(b"", "broker-a", ReceivedMessage)
    []
    """
    view = memoryview(data)
    messages: list[M] = []
    add, unpack = messages.append, _START.unpack_from
    at, end = 0, len(view)
    try:
        while at < end:
            size, magic, queue_offset = unpack(view, at)
            if (magic != MAGIC_V1 and magic != MAGIC_V2) or not 0 < size <= end - at:  # noqa: PLR1714 - the hot path
                raise RecordError(f"no message at {at} of the reply's body")
            add(kind(view, at, size, queue_offset, broker_name, receiver))
            at += size
    except struct.error:
        raise RecordError(f"a message is cut off at {at} of the reply's body") from None
    return messages
