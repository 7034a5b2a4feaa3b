"""Splitting the body of a query reply into messages, without decoding them."""

from typing import Any, TypeVar

from trimq.client.message import ReceivedMessage
from trimq.client.message_block import MessageBlock

M = TypeVar("M", bound=ReceivedMessage)


def split_messages(data: bytes | memoryview, broker_name: str, kind: type[M], receiver: Any = None) -> list[M]:
    """The messages in ``data``, as instances of ``kind``; their fields are decoded on first access.

    ``receiver`` takes their acknowledgements. Raises RecordError if the records do not fill ``data`` exactly.

    >>> split_messages(b"", "broker-a", ReceivedMessage)
    []
    """
    return MessageBlock.split(data, broker_name, kind, receiver).messages()
