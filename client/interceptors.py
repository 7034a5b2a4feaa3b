"""Hooks at send, receive and acknowledge: what tracing, metrics and audit need.

An interceptor sees what happens and may add properties to a message before it is sent. Its errors are logged and change
nothing.
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
    """One send, from its first attempt to its end.

    ``properties`` may be added to before the send; ``receipt`` or ``error`` is there after it. ``data`` is the
    interceptors' own.

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
    """Messages that a consumer got with one pull.

    >>> queue = MessageQueue(topic="T", broker_name="a", queue_id=0)
    >>> ReceiveContext("billing", queue, []).messages
    []
    """

    group: str
    queue: MessageQueue
    messages: Sequence[ReceivedMessage]


@dataclass(slots=True, eq=False)
class ProcessContext:
    """The processing of messages, from ``process()`` to its acknowledgement.

    ``acknowledged`` is None until it ends, True for success, False for "again later".

    >>> ProcessContext("billing", []).acknowledged is None
    True
    """

    group: str
    messages: Sequence[ReceivedMessage]
    acknowledged: bool | None = None
    error: BaseException | None = None
    data: dict[object, Any] = field(default_factory=dict)


class Interceptor:
    """Base of interceptors: override what you need.

    >>> class Counter(Interceptor):
    ...     sent = 0
    ...     def after_send(self, context: SendContext) -> None:
    ...         self.sent += context.receipt is not None
    """

    def before_send(self, context: SendContext) -> None:
        """Before the first attempt; ``context.properties`` may be added to."""

    def after_send(self, context: SendContext) -> None:
        """After the last attempt, also where the send was cancelled."""

    def received(self, context: ReceiveContext) -> None:
        """After a pull that brought messages."""

    def before_process(self, context: ProcessContext) -> None:
        """When a program begins with messages."""

    def after_process(self, context: ProcessContext) -> None:
        """When they are acknowledged or handed back."""


def call_all(hooks: Iterable[Callable[[C], None]], context: C) -> None:
    """Calls each hook; an error of one is logged."""
    for hook in hooks:
        try:
            hook(context)
        except Exception as error:  # noqa: BLE001 - an observer must not break what it observes
            _log.failed("an interceptor failed", error, interceptor=getattr(hook, "__qualname__", type(hook).__name__))
