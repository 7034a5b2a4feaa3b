"""The SDK: producers, consumers and administration, on anyio, so that it serves trio and asyncio programs alike.

Public names are imported when they are first used, so that a program pays for what it needs::

    from client import Consumer, Message, Producer
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client.admin import Admin
    from client.allocation import Allocation, average, circle, consistent_hash, machine_room, sticky
    from client.consumer import Consumer
    from client.core import Client, ClientOptions
    from client.delivery import Batch, ConsumerMessage
    from client.errors import (
        ClosedError,
        NoBrokerError,
        NotStoredError,
        PerhapsStoredError,
        RocketMQError,
        TopicNotFoundError,
        UnreachableError,
        UsageError,
    )
    from client.interceptors import Interceptor, ProcessContext, ReceiveContext, SendContext
    from client.message import Message, MessageQueue, ReceivedMessage, SendOutcome, SendReceipt, SendStatus
    from client.producer import Producer
    from client.pull_consumer import PullConsumer
    from client.queue_reader import Prefetch
    from client.subscription import Sql
    from client.transaction import Transaction, TransactionProducer, TransactionState

__all__ = [
    "Admin",
    "Allocation",
    "Batch",
    "Client",
    "ClientOptions",
    "ClosedError",
    "Consumer",
    "ConsumerMessage",
    "Interceptor",
    "Message",
    "MessageQueue",
    "NoBrokerError",
    "NotStoredError",
    "PerhapsStoredError",
    "Prefetch",
    "ProcessContext",
    "Producer",
    "PullConsumer",
    "ReceiveContext",
    "ReceivedMessage",
    "RocketMQError",
    "SendContext",
    "SendOutcome",
    "SendReceipt",
    "SendStatus",
    "Sql",
    "TopicNotFoundError",
    "Transaction",
    "TransactionProducer",
    "TransactionState",
    "UnreachableError",
    "UsageError",
    "average",
    "circle",
    "consistent_hash",
    "machine_room",
    "sticky",
]

_WHERE = {
    "client.admin": ("Admin",),
    "client.allocation": ("Allocation", "average", "circle", "consistent_hash", "machine_room", "sticky"),
    "client.consumer": ("Consumer",),
    "client.core": ("Client", "ClientOptions"),
    "client.delivery": ("Batch", "ConsumerMessage"),
    "client.errors": (
        "ClosedError",
        "NoBrokerError",
        "NotStoredError",
        "PerhapsStoredError",
        "RocketMQError",
        "TopicNotFoundError",
        "UnreachableError",
        "UsageError",
    ),
    "client.interceptors": ("Interceptor", "ProcessContext", "ReceiveContext", "SendContext"),
    "client.message": ("Message", "MessageQueue", "ReceivedMessage", "SendOutcome", "SendReceipt", "SendStatus"),
    "client.producer": ("Producer",),
    "client.pull_consumer": ("PullConsumer",),
    "client.queue_reader": ("Prefetch",),
    "client.subscription": ("Sql",),
    "client.transaction": ("Transaction", "TransactionProducer", "TransactionState"),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE.get(name)
    if module is None:
        raise AttributeError(f"module 'client' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
