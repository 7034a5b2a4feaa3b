"""Delivered messages: acknowledging them, or handing them back to be retried."""

from collections.abc import Iterator, Sequence
from logging import WARNING
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, overload

from msgspec import Struct

from trimq.client.errors import UsageError
from trimq.client.interceptors import ProcessContext, call_all
from trimq.client.message import ReceivedMessage
from trimq.client.message_block import MessageBlock
from trimq.client.process_queue import ProcessQueue
from trimq.remoting.client.client_log import StandardLog

if TYPE_CHECKING:
    from trimq.client.consumer import Consumer

_log = StandardLog("trimq.client.delivery")

_TIMED: Final = 15
"""Mask of the sample that is timed: every 16th message. Reading the clock costs as much as acknowledging."""

Receiver: TypeAlias = tuple[Any, ProcessQueue]
"""The consumer that delivered a message, or a substitute for it, and its process queue."""


class Processing(Struct, eq=False, gc=False):
    """The block of ``process()``: acknowledges the messages at its end, and hands them back after an exception.

    After a cancellation it does neither: the messages are delivered again, to this consumer or to another.
    """

    _taken: ReceivedMessage | MessageBlock[ReceivedMessage]
    _receiver: Any
    _reraise: bool
    _delay_level: int
    _context: Any = None
    _began: float = 0.0

    async def __aenter__(self) -> Self:
        owner, process_queue = self._receiver
        if owner.before_process:
            self._context = ProcessContext(owner.group, self._messages())
            call_all(owner.before_process, self._context)
        if not process_queue.counts.good & _TIMED:
            self._began = monotonic()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        owner, process_queue = self._receiver
        counts = process_queue.counts
        # Fast path for success without interceptors: no list is made, and a block is finished as a whole.
        if error is None and self._context is None:
            taken = self._taken
            if type(taken) is MessageBlock:
                process_queue.finished(taken)
                number = len(taken)
            else:
                process_queue.finished_one(taken)
                number = 1
            counts.good += number
            if self._began:
                counts.seconds += monotonic() - self._began
                counts.timed += number
            return False
        messages = self._messages()
        handed_back = False
        try:
            if error is None:
                process_queue.finished(messages)
            elif not isinstance(error, Exception):  # a cancellation: an await would be cancelled as well
                process_queue.put_back(messages)
            else:
                handed_back = True  # before the await, which may be cancelled
                _log.fault(WARNING, "processing failed; again later", error, messages=describe(messages))
                await owner.hand_back(process_queue, messages, self._delay_level)
        finally:
            context = self._context
            if context is not None:
                context.acknowledged = error is None if error is None or handed_back else None
                context.error = error
                call_all(owner.after_process, context)
            if error is None:
                counts.good += len(messages)
            else:
                counts.bad += len(messages)
            if self._began:
                counts.seconds += monotonic() - self._began
                counts.timed += len(messages)
        return handed_back and not self._reraise

    def _messages(self) -> list[ReceivedMessage]:
        taken = self._taken
        return list(taken) if isinstance(taken, MessageBlock) else [taken]


def describe(messages: Sequence[ReceivedMessage]) -> str:
    """A short description of messages for the log, without their bodies."""
    return repr(messages[0]) if len(messages) == 1 else f"{len(messages)} from {messages[0]!r} on"


class ConsumerMessage(ReceivedMessage, eq=False):
    """A message delivered to a consumer. Acknowledge it with ``process()`` or ``ack()``, or refuse it with ``nack()``.

    >>> async def handle(message: ConsumerMessage) -> None:
    ...     async with message.process():
    ...         print(message.topic, message.body)
    """

    attempts: int = 0

    @property
    def consumer(self) -> "Consumer":
        """The consumer that delivered it."""
        owner: Consumer = self._receiver[0]
        return owner

    @property
    def messages(self) -> "list[ReceivedMessage]":
        """A list of this message alone, as for a Batch."""
        return [self]

    @property
    def source(self) -> ProcessQueue:
        """The process queue that delivered it."""
        process_queue: ProcessQueue = self._receiver[1]
        return process_queue

    @property
    def delivery_attempt(self) -> int:
        """The number of this delivery, starting at 1. An orderly consumer's local retries are counted too.

        >>> ConsumerMessage.delivery_attempt.fget.__name__
        'delivery_attempt'
        """
        return self.reconsume_times + 1 + self.attempts

    def process(self, *, reraise: bool = False, delay_level: int = 0) -> Processing:
        """A block that acknowledges the message at its end, or after an exception lets it be retried later.

        The exception is logged and not raised further, unless ``reraise``. ``delay_level`` is the delay of the retry,
        as for ``nack``. A cancelled block leaves the message unacknowledged, to be delivered again.

        >>> async def handle(message: ConsumerMessage) -> None:
        ...     async with message.process(reraise=True):
        ...         raise ValueError("not now")
        """
        return Processing(self, self._receiver, reraise, delay_level)

    async def ack(self) -> None:
        """Acknowledges the message. Its offset is committed when all messages before it are acknowledged too.

        >>> async def skip(message: ConsumerMessage) -> None:
        ...     await message.ack()
        """
        process_queue: ProcessQueue = self._receiver[1]
        process_queue.finished_one(self)

    def release(self) -> None:
        """Returns the message unprocessed: it is the next one that this consumer hands out, to any task.

        >>> async def other_work(message: ConsumerMessage) -> None:
        ...     message.release()
        """
        _, process_queue = self._receiver
        process_queue.put_back([self])

    async def nack(self, *, delay_level: int = 0) -> None:
        """Lets any member of the group retry the message after a delay; after the last retry it becomes a dead letter.

        ``delay_level`` 1 to 18 is the broker's delay level; 0 lets the broker choose, longer with each retry; -1 makes
        the message a dead letter immediately. An orderly consumer instead retries the message itself after its
        ``suspend`` seconds, and the queue waits. A broadcasting consumer skips the message.

        >>> async def reject(message: ConsumerMessage) -> None:
        ...     await message.nack(delay_level=-1)
        """
        owner, process_queue = self._receiver
        await owner.hand_back(process_queue, [self], delay_level)


class Batch(Sequence[ConsumerMessage]):
    """Messages of one queue, in order, which are acknowledged together. A sequence of ConsumerMessage.

    >>> async def handle(batch: Batch) -> None:
    ...     async with batch.process():
    ...         print(len(batch), batch[0].queue, [message.body for message in batch])
    """

    __slots__ = ("_block", "_process_queue")

    def __init__(self, messages: Sequence[ConsumerMessage], process_queue: ProcessQueue) -> None:
        if not messages:
            raise UsageError("a batch has at least one message")
        self._block = messages if isinstance(messages, MessageBlock) else MessageBlock.of(list(messages))
        self._process_queue = process_queue

    def __repr__(self) -> str:
        return f"Batch(<{len(self._block)} messages from {self._block[0]!r} on>)"

    def __len__(self) -> int:
        return len(self._block)

    def __iter__(self) -> Iterator[ConsumerMessage]:
        return iter(self._block)

    @overload
    def __getitem__(self, index: int) -> ConsumerMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[ConsumerMessage]: ...
    def __getitem__(self, index: int | slice) -> ConsumerMessage | list[ConsumerMessage]:
        return self._block[index]

    @property
    def consumer(self) -> "Consumer":
        """The consumer that delivered it."""
        owner: Consumer = self._process_queue.receiver[0]
        return owner

    @property
    def messages(self) -> list[ReceivedMessage]:
        """The messages as a list."""
        return list(self._block)

    @property
    def source(self) -> ProcessQueue:
        """The process queue that delivered it."""
        return self._process_queue

    def process(self, *, reraise: bool = False, delay_level: int = 0) -> Processing:
        """A block that acknowledges all messages at its end; see ``ConsumerMessage.process``.

        >>> async def handle(batch: Batch) -> None:
        ...     async with batch.process():
        ...         ...
        """
        return Processing(self._block, self._process_queue.receiver, reraise, delay_level)

    async def ack(self) -> None:
        """Acknowledges all messages.

        >>> async def skip(batch: Batch) -> None:
        ...     await batch.ack()
        """
        self._process_queue.finished(self._block)

    def release(self) -> None:
        """Returns all messages unprocessed: they are the next ones that this consumer hands out.

        >>> async def other_work(batch: Batch) -> None:
        ...     batch.release()
        """
        self._process_queue.put_back(self._block)

    async def nack(self, *, delay_level: int = 0) -> None:
        """Lets all messages be retried after a delay; see ``ConsumerMessage.nack``.

        >>> async def reject(batch: Batch) -> None:
        ...     await batch.nack()
        """
        await self.consumer.hand_back(self._process_queue, self.messages, delay_level)
