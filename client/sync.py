"""The SDK for blocking programs: scripts, notebooks, Spark executors.

The same classes and names as in ``trimq.client``, with methods that block instead of being awaited. Each open object
has an event loop in a thread of its own, started and ended by its ``with`` block. Several threads may use the object::

    from trimq.client.sync import Consumer, Message, Producer

    with Producer("orders", namesrv="127.0.0.1:9876") as producer:
        producer.send(Message("Orders", b"1 book"))
    with Consumer("billing", "Orders", namesrv="127.0.0.1:9876") as consumer:
        for message in consumer:
            with message.process():
                print(message.body)
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

import trimq.client.admin
import trimq.client.consumer
import trimq.client.producer
import trimq.client.pull_consumer
import trimq.client.transaction
from trimq.client.delivery import Batch as AsyncBatch
from trimq.client.delivery import ConsumerMessage as AsyncConsumerMessage
from trimq.client.errors import ClosedError
from trimq.client.lifecycle import Lifecycle
from trimq.client.message import Message, MessageQueue, ReceivedMessage, SendReceipt

__all__ = [
    "Admin",
    "Batch",
    "Consumer",
    "ConsumerMessage",
    "Message",
    "Producer",
    "PullConsumer",
    "TransactionProducer",
]

L = TypeVar("L", bound=Lifecycle)
T = TypeVar("T")

BACKEND: Final = "asyncio"


class _Opened(Generic[L]):
    """An asynchronous object of the SDK and the event loop in which it runs."""

    def __init__(self, make: Callable[[], L]) -> None:
        self._make = make
        self._stack: ExitStack | None = None
        self._portal: BlockingPortal
        self._target: L

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise ClosedError(f"this {type(self).__name__} is open already")
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(BACKEND))
            self._target = self._portal.call(_construct, self._make)  # in the loop: constructors make anyio objects
            stack.enter_context(self._portal.wrap_async_context_manager(self._target))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def _call(self, function: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
        if self._stack is None:
            raise ClosedError(f"this {type(self).__name__} is not open: use it inside its with block")
        result: T = self._portal.call(_invoke, function, arguments, options)
        return result

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the asynchronous object; its coroutine functions become blocking functions."""
        # _portal and _target exist only while the object is open; a closed one raises ClosedError for them below.
        if name.startswith("_") and name not in ("_portal", "_target"):
            raise AttributeError(name)
        if self._stack is None:
            raise ClosedError(f"this {type(self).__name__} is not open: use it inside its with block")
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def blocking(*arguments: Any, **options: Any) -> Any:
            return self._portal.call(_invoke, value, arguments, options)

        blocking.__name__ = name
        blocking.__doc__ = value.__doc__
        return blocking


async def _construct(make: Callable[[], L]) -> L:
    return make()


async def _invoke(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    result = function(*arguments, **options)
    return await result if isinstance(result, Awaitable) else result


class Producer(_Opened[trimq.client.producer.Producer]):
    """The blocking Producer. The settings are those of ``trimq.client.Producer``.

    >>> def example(namesrv: str) -> None:
    ...     with Producer("orders", namesrv=namesrv) as producer:
    ...         print(producer.send(Message("Orders", b"1 book")).queue_offset)
    """

    def __init__(self, group: str, **settings: Any) -> None:
        super().__init__(lambda: trimq.client.producer.Producer(group, **settings))

    def send(self, message: Message, *, queue: MessageQueue | None = None) -> SendReceipt:
        """See trimq.client.Producer.send."""
        return self._call(self._target.send, message, queue=queue)

    def send_many(self, messages: Iterator[Message] | list[Message]) -> list[SendReceipt]:
        """Sends many messages at the same time, each in a send of its own, and returns a receipt for each, in order.

        If some fail, raises the first error after all sends have ended; each message's ``outcome`` says whether it is
        stored.
        """
        return self._call(self._send_many, list(messages))

    async def _send_many(self, messages: list[Message]) -> list[SendReceipt]:
        receipts: dict[int, SendReceipt] = {}
        errors: list[Exception] = []

        async def one(number: int) -> None:
            try:
                receipts[number] = await self._target.send(messages[number])
            except Exception as error:  # noqa: BLE001 - raised below, after all sends
                errors.append(error)

        async with anyio.create_task_group() as group:
            for number in range(len(messages)):
                group.start_soon(one, number)
        if errors:
            raise errors[0]
        return [receipts[number] for number in range(len(messages))]

    def send_oneway(self, message: Message, *, queue: MessageQueue | None = None) -> None:
        """See trimq.client.Producer.send_oneway."""
        self._call(self._target.send_oneway, message, queue=queue)

    def send_batch(self, messages: list[Message], *, queue: MessageQueue | None = None) -> list[SendReceipt]:
        """See trimq.client.Producer.send_batch."""
        return self._call(self._target.send_batch, messages, queue=queue)

    def recall(self, receipt: SendReceipt | str) -> str:
        """See trimq.client.Producer.recall."""
        return self._call(self._target.recall, receipt)

    def request(self, message: Message, *, ttl: float = 30.0) -> ReceivedMessage:
        """See trimq.client.Producer.request."""
        return self._call(self._target.request, message, ttl=ttl)

    def reply(
        self,
        request: "ReceivedMessage | ConsumerMessage",
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> SendReceipt:
        """See trimq.client.Producer.reply."""
        message = request.message if isinstance(request, ConsumerMessage) else request
        return self._call(self._target.reply, message, body, properties=properties)


class TransactionProducer(_Opened[trimq.client.transaction.TransactionProducer]):
    """The blocking TransactionProducer. ``check`` is called in the event loop's thread, and must not block for long.

    >>> def example(namesrv: str, check: "trimq.client.transaction.Check") -> None:
    ...     with TransactionProducer("orders", check, namesrv=namesrv) as producer:
    ...         with producer.transaction(Message("Orders", b"1 book")):
    ...             ...
    """

    def __init__(self, group: str, check: "trimq.client.transaction.Check", **settings: Any) -> None:
        super().__init__(lambda: trimq.client.transaction.TransactionProducer(group, check, **settings))

    def transaction(
        self, message: Message, *, check_immunity_time_in_seconds: int | None = None
    ) -> "AbstractContextManager[trimq.client.transaction.Transaction]":
        """See trimq.client.TransactionProducer.transaction."""
        if self._stack is None:
            raise ClosedError("this TransactionProducer is not open: use it inside its with block")
        block = self._target.transaction(message, check_immunity_time_in_seconds=check_immunity_time_in_seconds)
        return self._portal.wrap_async_context_manager(block)


class _Delivery:
    """Base class of messages and batches: acknowledges in the consumer's event loop."""

    def __init__(self, consumer: "Consumer", target: "AsyncConsumerMessage | AsyncBatch") -> None:
        self._consumer = consumer
        self._delivered = target

    @contextmanager
    def process(self, *, reraise: bool = False, delay_level: int = 0) -> Iterator[None]:
        """See trimq.client.ConsumerMessage.process."""
        processing = self._delivered.process(reraise=reraise, delay_level=delay_level)
        with self._consumer.portal.wrap_async_context_manager(processing):
            yield

    def ack(self) -> None:
        """See trimq.client.ConsumerMessage.ack."""
        self._consumer.portal.call(self._delivered.ack)

    def nack(self, *, delay_level: int = 0) -> None:
        """See trimq.client.ConsumerMessage.nack."""
        self._consumer.portal.call(_invoke, self._delivered.nack, (), {"delay_level": delay_level})


class ConsumerMessage(_Delivery):
    """A message in a blocking program, with the fields of ``trimq.client.ConsumerMessage`` and blocking methods.

    >>> def example(message: ConsumerMessage) -> None:
    ...     with message.process():
    ...         print(message.body)
    """

    def __init__(self, consumer: "Consumer", message: AsyncConsumerMessage) -> None:
        super().__init__(consumer, message)
        self.message = message

    def __getattr__(self, name: str) -> Any:
        """The fields are those of the asynchronous message."""
        if name.startswith("_") or name == "message":
            raise AttributeError(name)
        return getattr(self.message, name)

    @property
    def body(self) -> bytes:
        """The body as the producer gave it, decompressed."""
        return self.message.body


class Batch(_Delivery):
    """Messages of one queue in a blocking program, which are acknowledged together.

    >>> def example(batch: Batch) -> None:
    ...     with batch.process():
    ...         print([message.body for message in batch])
    """

    def __init__(self, consumer: "Consumer", batch: AsyncBatch) -> None:
        super().__init__(consumer, batch)
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return iter(self._batch)


class Consumer(_Opened[trimq.client.consumer.Consumer]):
    """The blocking Consumer. The settings are those of ``trimq.client.Consumer``. Iterate over it or its ``batches()``.

    >>> def example(namesrv: str) -> None:
    ...     with Consumer("billing", {"Orders": "paid"}, namesrv=namesrv) as consumer:
    ...         for message in consumer:
    ...             with message.process():
    ...                 print(message.body)
    """

    def __init__(self, group: str, topics: Any, **settings: Any) -> None:
        super().__init__(lambda: trimq.client.consumer.Consumer(group, topics, **settings))

    @property
    def portal(self) -> BlockingPortal:
        """The portal into its event loop. Raises ClosedError if the consumer is not open."""
        if self._stack is None:
            raise ClosedError("this Consumer is not open: use it inside its with block")
        return self._portal

    def __iter__(self) -> Iterator[ConsumerMessage]:
        while True:
            yield ConsumerMessage(self, self._call(self._target.__anext__))

    def take(self, timeout: float | None = None) -> ConsumerMessage | None:
        """Waits for the next message; returns None after ``timeout`` seconds. ``timeout`` None waits without limit."""
        message = self._call(self._take_within, timeout)
        return None if message is None else ConsumerMessage(self, message)

    async def _take_within(self, timeout: float | None) -> AsyncConsumerMessage | None:
        with anyio.move_on_after(timeout):
            return await anext(self._target)
        return None

    def batches(self, size: int = 32) -> Iterator[Batch]:
        """See trimq.client.Consumer.batches."""
        batches = self._target.batches(size)
        while True:
            yield Batch(self, self._call(batches.__anext__))

    def commit(self) -> None:
        """See trimq.client.Consumer.commit."""
        self._call(self._target.commit)


class PullConsumer(_Opened[trimq.client.pull_consumer.PullConsumer]):
    """The blocking PullConsumer. The settings and methods are those of ``trimq.client.PullConsumer``.

    >>> def example(namesrv: str) -> None:
    ...     with PullConsumer("audit", namesrv=namesrv, start="first") as consumer:
    ...         consumer.assign(consumer.queues("Orders"))
    ...         print(len(consumer.poll(100, timeout=5.0)))
    """

    def __init__(self, group: str, **settings: Any) -> None:
        super().__init__(lambda: trimq.client.pull_consumer.PullConsumer(group, **settings))

    def queues(self, topic: str) -> list[MessageQueue]:
        """See trimq.client.PullConsumer.queues."""
        return self._call(self._target.queues, topic)

    def assign(self, queues: "list[MessageQueue] | dict[MessageQueue, int]") -> None:
        """See trimq.client.PullConsumer.assign."""
        self._call(self._target.assign, queues)

    def poll(self, max_messages: int = 32, *, timeout: float | None = None) -> list[ReceivedMessage]:
        """See trimq.client.PullConsumer.poll."""
        return self._call(self._target.poll, max_messages, timeout=timeout)

    def commit(self, positions: dict[MessageQueue, int] | None = None) -> None:
        """See trimq.client.PullConsumer.commit."""
        self._call(self._target.commit, positions)

    def first_offset(self, queue: MessageQueue) -> int:
        """See trimq.client.PullConsumer.first_offset."""
        return self._call(self._target.first_offset, queue)

    def end_offset(self, queue: MessageQueue) -> int:
        """See trimq.client.PullConsumer.end_offset."""
        return self._call(self._target.end_offset, queue)

    def offset_by_time(self, queue: MessageQueue, when: datetime | float) -> int:
        """See trimq.client.PullConsumer.offset_by_time."""
        return self._call(self._target.offset_by_time, queue, when)


class Admin(_Opened[trimq.client.admin.Admin]):
    """The blocking Admin, with all methods of ``trimq.client.Admin``.

    >>> def example(namesrv: str) -> None:
    ...     with Admin(namesrv) as admin:
    ...         admin.create_topic("Orders", queues=8)
    """

    def __init__(self, namesrv: Any = None, **settings: Any) -> None:
        super().__init__(lambda: trimq.client.admin.Admin(namesrv, **settings))
