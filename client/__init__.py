"""The SDK: producers, consumers and administration for RocketMQ, on anyio, for trio and asyncio programs alike.

``trimq.client.sync`` has the same classes for blocking programs. A public name is imported when it is first used, so a
program loads only the modules that it needs::

    from trimq import Consumer, Message, Producer
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "trimq.client":  # a second copy would define its classes again: except and isinstance would miss them
    raise ImportError(f"this package is trimq.client: import it by that name, not as {__name__}")

if TYPE_CHECKING:
    from trimq.client.admin import Admin
    from trimq.client.allocation import Allocation, average, circle, consistent_hash, machine_room, sticky
    from trimq.client.consumer import Consumer
    from trimq.client.core import Client, ClientOptions
    from trimq.client.delivery import Batch, ConsumerMessage
    from trimq.client.errors import (
        ClosedError,
        CredentialsError,
        NoBrokerError,
        NoPermissionError,
        NoReplyError,
        NotDeliveredError,
        NotStoredError,
        PerhapsStoredError,
        RocketMQError,
        TopicNotFoundError,
        UnreachableError,
        UsageError,
    )
    from trimq.client.interceptors import Interceptor, ProcessContext, ReceiveContext, SendContext
    from trimq.client.message import Message, MessageQueue, ReceivedMessage, SendOutcome, SendReceipt, SendStatus
    from trimq.client.process_queue import Prefetch
    from trimq.client.producer import Producer
    from trimq.client.pull_consumer import PullConsumer
    from trimq.client.subscription import Sql
    from trimq.client.transaction import Transaction, TransactionProducer, TransactionState
    from trimq.remoting.client.credentials import Credentials
    from trimq.remoting.tls.client_contexts import Tls

__all__ = [
    "Admin",
    "Allocation",
    "Batch",
    "Client",
    "ClientOptions",
    "ClosedError",
    "Consumer",
    "ConsumerMessage",
    "Credentials",
    "CredentialsError",
    "Interceptor",
    "Message",
    "MessageQueue",
    "NoBrokerError",
    "NoPermissionError",
    "NoReplyError",
    "NotDeliveredError",
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
    "Tls",
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
    "trimq.client.admin": ("Admin",),
    "trimq.client.allocation": ("Allocation", "average", "circle", "consistent_hash", "machine_room", "sticky"),
    "trimq.client.consumer": ("Consumer",),
    "trimq.client.core": ("Client", "ClientOptions"),
    "trimq.client.delivery": ("Batch", "ConsumerMessage"),
    "trimq.client.errors": (
        "ClosedError",
        "CredentialsError",
        "NoBrokerError",
        "NoPermissionError",
        "NoReplyError",
        "NotDeliveredError",
        "NotStoredError",
        "PerhapsStoredError",
        "RocketMQError",
        "TopicNotFoundError",
        "UnreachableError",
        "UsageError",
    ),
    "trimq.client.interceptors": ("Interceptor", "ProcessContext", "ReceiveContext", "SendContext"),
    "trimq.client.message": ("Message", "MessageQueue", "ReceivedMessage", "SendOutcome", "SendReceipt", "SendStatus"),
    "trimq.client.producer": ("Producer",),
    "trimq.client.pull_consumer": ("PullConsumer",),
    "trimq.client.process_queue": ("Prefetch",),
    "trimq.client.subscription": ("Sql",),
    "trimq.client.transaction": ("Transaction", "TransactionProducer", "TransactionState"),
    "trimq.remoting.client.credentials": ("Credentials",),
    "trimq.remoting.tls.client_contexts": ("Tls",),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE.get(name)
    if module is None:
        raise AttributeError(f"module 'trimq.client' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
