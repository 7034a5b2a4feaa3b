"""Automatic batching: sends to the same topic within ``linger`` seconds are sent as one batch.

Each send still gets its own receipt. Sends to a chosen queue have batches of their own.

A batch is sent when it is full or its ``linger`` has passed. Batches for a chosen queue are sent one after the other,
so that messages are stored in the order of their sends; while one batch is in flight, the next one grows.

A batch needs no task of its own unless an attempt fails or has to wait: the send that fills it, or the one task that
watches the clock, sends it, and the task that reads the reply wakes the senders.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import anyio

from trimq.client.attempts import AttemptResult, Failure, OnResult
from trimq.client.errors import ClosedError, NotStoredError, PerhapsStoredError, RocketMQError, copied
from trimq.client.message import Message, MessageQueue, SendOutcome, SendReceipt
from trimq.client.sending import BATCH_OVERHEAD, Prepared, whole_batch
from trimq.remoting.client.call import Crowd, Loop, running_loop

Spawn: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]
"""Starts a background task."""

Key: TypeAlias = tuple[str, MessageQueue | None, bool, int]
"""What all messages of a batch share: the topic, the chosen queue, whether to wait for the disk, and a stripe. Batches
that differ only in the stripe grow at the same time, so that a burst is spread over the topic's queues."""

_FIELDS: Final = 5
"""Fields of each message in ``Batch._fields``."""
_FEW: Final = 16
"""Messages that are worth a batch of their own while no other batch is in flight."""


class Sender(Protocol):
    """Sends batches; implemented by Attempts."""

    def begin(
        self, prepared: Prepared, queue: MessageQueue | None, messages: Sequence[Message], on_result: OnResult, /
    ) -> bool:
        """Starts the first attempt if that is possible without waiting; see ``Attempts.begin``."""

    async def deliver(
        self,
        prepared: Prepared,
        queue: MessageQueue | None,
        messages: Sequence[Message],
        context: None = None,
        failure: Failure | None = None,
        /,
    ) -> list[SendReceipt]:
        """Makes all attempts, or all but the first if ``failure`` is its result; see ``Attempts.deliver``."""

    def spread(self, topic: str, /) -> int:
        """The number of queues over which a burst of messages for the topic is spread."""


class Batch:
    """Messages that are sent together. With ``receipts`` or an ``error`` it ``is_over``, and wakes its ``crowd``."""

    __slots__ = (
        "_cancelled",
        "_fields",
        "count",
        "crowd",
        "error",
        "is_over",
        "is_queued",
        "is_sent",
        "key",
        "receipts",
        "size",
    )

    def __init__(self, key: Key, crowd: Crowd) -> None:
        self.key: Key = key
        self.crowd: Crowd = crowd
        self.count: int = 0
        self.size: int = 0
        self.is_queued: bool = False
        self.is_sent: bool = False
        self.is_over: bool = False
        self.receipts: Sequence[SendReceipt] | dict[int, SendReceipt] = ()
        self.error: BaseException | None = None
        self._fields: list[Any] = []
        """Five fields for each message: itself, its id, flag, body and properties. One flat list, since a tuple for
        each message would cost the garbage collector more."""
        self._cancelled: set[int] = set()

    def add(self, message: Message, text: bytes, size: int) -> None:
        """Adds a message with the encoded properties ``text`` and ``size`` bytes in the batch."""
        self._fields += (message, message.message_id, message.flag, message.body, text)
        self.count += 1
        self.size += size

    def take_back(self, number: int) -> None:
        """Removes the message of a cancelled send, unless the batch has been sent."""
        if not self.is_sent:
            body, text = self._fields[_FIELDS * number + 3 : _FIELDS * number + 5]
            self.size -= BATCH_OVERHEAD + len(body) + len(text)
            self._cancelled.add(number)

    def receipt(self, number: int) -> SendReceipt:
        """The receipt of a message, once the batch is over. Raises the batch's error."""
        if self.error is not None:
            raise self._own_error(self.error)
        return self.receipts[number]

    def _own_error(self, error: BaseException) -> RocketMQError:
        """An error instance for one sender.

        For an exception that is not the SDK's, such as the cancellation of the task that sent the batch, it is the
        error that describes the messages' outcome.
        """
        if isinstance(error, RocketMQError):
            return copied(error)
        unknown = any(message.outcome is not SendOutcome.NOT_STORED for message in self._fields[::_FIELDS])
        kind = PerhapsStoredError if unknown else NotStoredError
        return kind(f"the batch was not finished: {type(error).__name__}: {error}")

    def prepared(self) -> tuple[Prepared, list[Message]]:
        """The request for the messages that were not cancelled, and these messages."""
        topic, _, wait_stored, _ = self.key
        fields = self._fields
        if self._cancelled:
            fields = [field for number in self._live() for field in fields[_FIELDS * number : _FIELDS * (number + 1)]]
        messages, ids = fields[::_FIELDS], tuple(fields[1::_FIELDS])
        content = zip(fields[2::_FIELDS], fields[3::_FIELDS], fields[4::_FIELDS], strict=True)
        return whole_batch(topic, ids, content, wait_stored=wait_stored), messages

    def set_receipts(self, receipts: Sequence[SendReceipt]) -> None:
        """Sets the receipts of the messages that were sent, in their order."""
        self.receipts = dict(zip(self._live(), receipts, strict=True)) if self._cancelled else receipts

    @property
    def is_empty(self) -> bool:
        """Whether all messages were taken back."""
        return len(self._cancelled) == self.count

    def _live(self) -> list[int]:
        """Numbers of the messages that were not taken back."""
        return [number for number in range(self.count) if number not in self._cancelled]


class Batcher:
    """The batches of a producer.

    ``linger`` is in seconds, ``max_bytes`` the size at which a batch is full. ``spawn`` starts a task for a batch whose
    first attempt has to wait, or which has to be retried.
    """

    def __init__(self, linger: float, max_bytes: int, sender: Sender, spawn: Spawn) -> None:
        self._linger = linger
        self._max_bytes = max_bytes
        self._sender = sender
        self._spawn = spawn
        self._open: dict[Key, Batch] = {}
        self._queued: dict[MessageQueue, deque[Batch]] = {}
        """The line for each chosen queue to which a batch is in flight: the batches that wait for it, in order."""
        self._timed: dict[Batch, float] = {}
        """When each growing batch is sent. All linger equally long, so the order of insertion is that of the times."""
        self._unfinished = self._in_flight = self._placed = 0
        # With linger=0: how many senders the last replies have woken, and the size at which the next batch is sent
        # early.
        self._woken = self._early = 0
        self._loop: Loop | None = None
        self._wanted: Crowd
        self._idle: Crowd

    def start(self) -> None:
        """Binds to the running loop. Called before the first send, and before ``run`` starts as a task."""
        self._loop = loop = running_loop()
        self._wanted = loop.crowd()
        self._idle = loop.crowd()

    async def run(self) -> None:
        """Sends batches whose time is up, until it is cancelled."""
        loop = self._loop
        assert loop is not None
        try:
            while True:
                while self._timed:
                    batch, until = next(iter(self._timed.items()))
                    left = until - loop.now() if self._linger else 0.0
                    if left > 0:
                        await anyio.sleep(left)
                    if batch in self._timed:  # not if it was filled and sent during the sleep
                        self._time_is_up(batch)
                await self._wanted.wait()
        finally:
            # No task is left to send the open batches: their senders get an error, and new sends are refused.
            self._loop = None
            for batch in list(self._open.values()):
                if not batch.is_queued:  # a queued one is sent or failed when the batch before it ends
                    self._close(batch)
                    batch.error = ClosedError("the producer was closed before the batch was sent")
                    self._finish(batch)

    async def send(self, message: Message, text: bytes, queue: MessageQueue | None) -> SendReceipt:
        """Adds a message with the encoded properties ``text`` to a batch, and waits for its receipt.

        Raises the batch's error. A cancellation before the batch is sent removes the message from it.
        """
        batch = self._put(message, text, queue)
        number = batch.count - 1
        try:
            if not batch.is_over:
                await batch.crowd.wait()
        except BaseException:
            batch.take_back(number)
            raise
        return batch.receipt(number)

    def _put(self, message: Message, text: bytes, queue: MessageQueue | None) -> Batch:
        """Adds the message to a batch and returns that, with the message as its last one so far."""
        stripe = self._next_stripe(message.topic) if queue is None and self._linger and not self._in_flight else 0
        key = (message.topic, queue, message.wait_stored, stripe)
        size = BATCH_OVERHEAD + len(message.body) + len(text)
        batch = self._open.get(key)
        if batch is None or batch.size + size > self._max_bytes:
            if batch is not None:
                self._submit(batch)  # before the new one is opened: batches of a queue go out in the order of the sends
            batch = self._opened(key)
        batch.add(message, text, size)
        # No await between add() and the return: the message must still be the last one for send() to know its number.
        if batch.size >= self._max_bytes or (batch.count == self._early and not self._in_flight):
            self._submit(batch)
        return batch

    def _next_stripe(self, topic: str) -> int:
        """The stripe of the next message. The stripes take turns, with a few messages each.

        A batch goes to one queue. While no batch is in flight, a burst would become one batch, and one queue would get
        all of it. With batches in flight, stripes are not needed: batches go to the queues in turn, and large ones cost
        less.
        """
        self._placed += 1
        return (self._placed - 1) // _FEW % self._sender.spread(topic)

    async def flush(self) -> None:
        """Sends all open batches now, and waits until every batch is over."""
        for batch in list(self._open.values()):
            self._submit(batch)
        while self._unfinished:
            await self._idle.wait()

    def _opened(self, key: Key) -> Batch:
        loop = self._loop
        if loop is None:
            raise ClosedError("the producer is not open")
        batch = self._open[key] = Batch(key, loop.crowd())
        self._unfinished += 1
        self._woken = 0
        self._timed[batch] = loop.now() + self._linger if self._linger else 0.0
        self._wanted.wake()
        return batch

    def _time_is_up(self, batch: Batch) -> None:
        queue = batch.key[1]
        if queue in self._queued:  # another batch is in flight to the queue: this one grows on until its turn
            del self._timed[batch]
            batch.is_queued = True
            self._queued[queue].append(batch)
        else:
            self._submit(batch)

    def _close(self, batch: Batch) -> None:
        """Ends the growth of a batch: no message is added to it any more."""
        if self._open.get(batch.key) is batch:
            del self._open[batch.key]
        self._timed.pop(batch, None)

    def _submit(self, batch: Batch) -> None:
        """Closes a batch, and sends it now, or in its turn if another batch is in flight to its chosen queue."""
        self._close(batch)
        queue = batch.key[1]
        if queue is None:
            self._send(batch)
        elif queue not in self._queued:
            self._queued[queue] = deque()
            self._send(batch)
        elif not batch.is_queued:
            batch.is_queued = True
            self._queued[queue].append(batch)

    def _send(self, batch: Batch | None) -> None:
        """Sends a batch. If it is empty by now or cannot be sent, finishes it and goes on with the next of its line."""
        while batch is not None and not self._try_send(batch):
            self._finish(batch)
            batch = self._following(batch)

    def _try_send(self, batch: Batch) -> bool:
        """Sends a batch; False if it is empty, or if that failed, with the error set."""
        if batch.is_empty:
            return False
        try:
            prepared, messages = batch.prepared()
            deliver = partial(self._deliver, batch, prepared, messages)
            if not self._sender.begin(prepared, batch.key[1], messages, partial(self._answered, batch, deliver)):
                self._spawn(partial(deliver, None))
        except Exception as error:  # noqa: BLE001 - raised in the tasks that wait for receipts
            batch.error = error
            return False
        # Neither begin() nor spawn() runs _answered or _deliver within the call, so _end() comes after this.
        batch.is_sent = True
        self._in_flight += 1
        return True

    def _answered(self, batch: Batch, deliver: Callable[[Failure], Awaitable[None]], found: AttemptResult) -> None:
        if isinstance(found, list):
            self._end(batch, found)
            return
        try:
            self._spawn(partial(deliver, found))
        except ClosedError:  # the producer closes: no retry, and the senders get the failure of the first attempt
            batch.error = found.error
            self._end(batch)

    async def _deliver(
        self, batch: Batch, prepared: Prepared, messages: list[Message], failure: Failure | None
    ) -> None:
        found: list[SendReceipt] = []
        try:
            found = await self._sender.deliver(prepared, batch.key[1], messages, None, failure)
        except BaseException as error:
            batch.error = error
            if not isinstance(error, RocketMQError):  # a cancellation goes on; an SDK error belongs to the senders only
                raise
        finally:
            self._end(batch, found)

    def _end(self, batch: Batch, found: Sequence[SendReceipt] = ()) -> None:
        """Ends a batch that was in flight, with a receipt for each message, or with its error."""
        if found:
            batch.set_receipts(found)
        self._in_flight -= 1
        self._woken += batch.count
        self._finish(batch)
        # With linger=0 and all senders woken at the same time, the next batch would wait for the last of them. It is
        # sent early, at half of their number, so that the broker works while the others prepare their messages.
        self._early = 0
        if not (self._in_flight or self._open or self._linger) and self._woken >= 2 * _FEW:
            self._early = self._woken // 2
        self._send(self._following(batch))

    def _finish(self, batch: Batch) -> None:
        batch.is_over = True
        batch.crowd.wake()
        self._unfinished -= 1
        if not self._unfinished:
            self._idle.wake()

    def _following(self, batch: Batch) -> Batch | None:
        """The next batch of the line for this one's queue, closed; None if there is none, which ends the line."""
        queue = batch.key[1]
        if queue is None:
            return None
        queued = self._queued[queue]
        if not queued:
            del self._queued[queue]
            return None
        following = queued.popleft()
        self._close(following)
        return following
