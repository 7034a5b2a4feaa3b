"""Splitting the body of a query reply into messages, without decoding them."""

from typing import Any, TypeVar

from trimq.client.message import ReceivedMessage
from trimq.client.message_block import MessageBlock

M = TypeVar("M", bound=ReceivedMessage)


def split_messages(data: bytes | memoryview, broker_name: str, kind: type[M], receiver: Any = None) -> list[M]:
    """The messages in ``data``, as ``kind``; their fields are decoded when they are looked at.

    ``receiver`` is who takes their acknowledgement.

    Raises RecordError where the sizes do not add up.

    >>> split_messages(b"", "broker-a", ReceivedMessage)
    []
    """
    return MessageBlock.split(data, broker_name, kind, receiver).messages()
