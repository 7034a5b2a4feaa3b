"""Hooks at send, receive and acknowledge, for tracing, metrics and audit.

An interceptor observes each operation and may add properties to a message before it is sent. An exception in it is
logged and does not affect the operation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trimq.client.message import Message, ReceivedMessage, SendReceipt
from trimq.protocol.body import MessageQueue
from trimq.remoting.client.client_log import StandardLog

_log = StandardLog("trimq.client.interceptors")

C = TypeVar("C")


@dataclass(slots=True, eq=False)
class SendContext:
    """One send, from before its first attempt to its end.

    ``before_send`` may add to ``properties``, which are all properties of the message on the wire. ``queue`` and
    ``address`` are those of the last attempt, ``attempts`` counts them. After the send, ``receipt`` or ``error`` is
    set; both are None after a one-way send. ``data`` is for the interceptors' own use.

    >>> SendContext("orders", Message("Orders", b"x"), {}).receipt is None
    True
    """

    group: str
    message: Message
    properties: dict[str, str]
    queue: MessageQueue | None = None
    address: str | None = None
    attempts: int = 0
    receipt: SendReceipt | None = None
    error: BaseException | None = None
    data: dict[object, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ReceiveContext:
    """The messages that one pull of a consumer returned.

    >>> queue = MessageQueue(topic="T", broker_name="a", queue_id=0)
    >>> ReceiveContext("billing", queue, []).messages
    []
    """

    group: str
    queue: MessageQueue
    messages: Sequence[ReceivedMessage]


@dataclass(slots=True, eq=False)
class ProcessContext:
    """The processing of messages, from the start of a ``process()`` block to its end.

    ``acknowledged`` is None until the block ends and also after a cancellation, True for success, False for a message
    that was handed back to be retried later. ``error`` is the exception that ended the block.

    >>> ProcessContext("billing", []).acknowledged is None
    True
    """

    group: str
    messages: Sequence[ReceivedMessage]
    acknowledged: bool | None = None
    error: BaseException | None = None
    data: dict[object, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class EndTransactionContext:
    """The end of a transaction: the commit, rollback or "unknown" that a producer sends to the broker.

    ``state`` is RocketMQ's flag of the request (8 commit, 12 rollback, 0 unknown). ``checked`` is whether the broker
    asked for it. ``error`` is that of the request; the broker then asks later.

    >>> EndTransactionContext("orders", Message("Orders", b"x"), "7F01", 8).checked
    False
    """

    group: str
    message: Message | ReceivedMessage
    message_id: str
    state: int
    queue: MessageQueue | None = None
    address: str | None = None
    transaction_id: str | None = None
    checked: bool = False
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class RecallContext:
    """The recall of a timed message. ``error`` is None if the broker has accepted it.

    >>> RecallContext("orders", "Orders", "7F01", "broker-a").error is None
    True
    """

    group: str
    topic: str
    message_id: str
    broker_name: str
    error: BaseException | None = None


class Interceptor:
    """Base class of interceptors: override the hooks that you need.

    >>> class Counter(Interceptor):
    ...     sent = 0
    ...     def after_send(self, context: SendContext) -> None:
    ...         self.sent += context.receipt is not None
    """

    def before_send(self, context: SendContext) -> None:
        """Called before the first attempt. May add to ``context.properties``."""

    def after_send(self, context: SendContext) -> None:
        """Called after the last attempt, also if the send was cancelled."""

    def after_end_transaction(self, context: EndTransactionContext) -> None:
        """Called after a commit, rollback or "unknown" was sent to the broker, or could not be sent."""

    def after_recall(self, context: RecallContext) -> None:
        """Called after a recall was sent to the broker, or could not be sent."""

    def received(self, context: ReceiveContext) -> None:
        """Called after a pull that returned messages."""

    def before_process(self, context: ProcessContext) -> None:
        """Called when a program enters a ``process()`` block."""

    def after_process(self, context: ProcessContext) -> None:
        """Called at the end of the block, when the messages have been acknowledged or handed back."""


def call_all(hooks: Iterable[Callable[[C], None]], context: C) -> None:
    """Calls each hook. An exception in one is logged, and the others are still called."""
    for hook in hooks:
        try:
            hook(context)
        except Exception as error:  # noqa: BLE001 - an observer must not break the operation that it observes
            _log.failed("an interceptor failed", error, interceptor=getattr(hook, "__qualname__", type(hook).__name__))
