"""Automatic batching: sends of the same topic that come within ``linger`` seconds travel as one batch.

Each send still gets its own receipt. Sends to a chosen queue have batches of their own.

A batch leaves when it is full or its time is up. Batches for a chosen queue leave one after the other, so that their
order is the order of the sends; while one is out, the next one grows.

No task belongs to a batch as long as all goes well: the send that makes it full, or the one task that looks at the
clock, sends it, and the task that reads the answer wakes the senders.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import anyio

from trimq.client.attempts import AttemptResult, Failure, OnResult
from trimq.client.errors import ClosedError, NotStoredError, PerhapsStoredError, RocketMQError, again
from trimq.client.message import Message, MessageQueue, SendOutcome, SendReceipt
from trimq.client.sending import BATCH_OVERHEAD, Prepared, whole_batch
from trimq.remoting.client.call import Crowd, Loop, running_loop

Spawn: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]
"""Starts a background task."""

Key: TypeAlias = tuple[str, MessageQueue | None, bool, int]
"""What the messages of a batch have in common: topic, chosen queue, whether to wait for the disk, and a number: batches
that grow side by side, so that a burst is spread over the topic's queues, differ in it."""

_FIELDS: Final = 5
_FEW: Final = 16
"""Messages that are worth a batch of their own while the broker has nothing to do."""


class Sender(Protocol):
    """How batches travel."""

    def begin(
        self, prepared: Prepared, queue: MessageQueue | None, messages: Sequence[Message], on_result: OnResult, /
    ) -> bool:
        """The first attempt, if it can be made at once."""

    async def deliver(
        self,
        prepared: Prepared,
        queue: MessageQueue | None,
        messages: Sequence[Message],
        context: None = None,
        failure: Failure | None = None,
        /,
    ) -> list[SendReceipt]:
        """All attempts; all but the first where that has failed."""

    def spread(self, topic: str, /) -> int:
        """Over how many queues a burst of messages for the topic is spread."""


class Batch:
    """Messages that travel together. ``crowd`` is woken when it ``is_over``: there are receipts, or an error."""

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
        """Of each message: itself, its id, flag, body and properties. Tuples would burden the garbage collector."""
        self._cancelled: set[int] = set()

    def add(self, message: Message, text: bytes, size: int) -> None:
        """A message whose properties are ``text``, that takes ``size`` bytes."""
        self._fields += (message, message.message_id, message.flag, message.body, text)
        self.count += 1
        self.size += size

    def take_back(self, number: int) -> None:
        """A cancelled send leaves it while it has not been sent."""
        if not self.is_sent:
            body, text = self._fields[_FIELDS * number + 3 : _FIELDS * number + 5]
            self.size -= BATCH_OVERHEAD + len(body) + len(text)
            self._cancelled.add(number)

    def receipt(self, number: int) -> SendReceipt:
        """That of a message, once it is over. Raises its error."""
        if self.error is not None:
            raise self._own_error(self.error)
        return self.receipts[number]

    def _own_error(self, error: BaseException) -> RocketMQError:
        """Each sender raises its own. For what is none of ours (a cancelled task) it says what is known."""
        if isinstance(error, RocketMQError):
            return again(error)
        unknown = any(message.outcome is not SendOutcome.NOT_STORED for message in self._fields[::_FIELDS])
        kind = PerhapsStoredError if unknown else NotStoredError
        return kind(f"the batch was not finished: {type(error).__name__}: {error}")

    def prepared(self) -> tuple[Prepared, list[Message]]:
        """What is to be sent."""
        topic, _, wait_stored, _ = self.key
        fields = self._fields
        if self._cancelled:
            fields = [field for number in self._kept() for field in fields[_FIELDS * number : _FIELDS * (number + 1)]]
        messages, ids = fields[::_FIELDS], tuple(fields[1::_FIELDS])
        content = zip(fields[2::_FIELDS], fields[3::_FIELDS], fields[4::_FIELDS], strict=True)
        return whole_batch(topic, ids, content, wait_stored=wait_stored), messages

    def is_stored(self, receipts: Sequence[SendReceipt]) -> None:
        """There is a receipt for each message that was sent."""
        self.receipts = dict(zip(self._kept(), receipts, strict=True)) if self._cancelled else receipts

    @property
    def is_empty(self) -> bool:
        """Whether all were taken back."""
        return len(self._cancelled) == self.count

    def _kept(self) -> list[int]:
        return [number for number in range(self.count) if number not in self._cancelled]


class Batcher:
    """The batches of a producer. ``spawn`` starts a task for one that cannot be sent at once, or not at once again."""

    def __init__(self, linger: float, max_bytes: int, sender: Sender, spawn: Spawn) -> None:
        self._linger = linger
        self._max_bytes = max_bytes
        self._sender = sender
        self._spawn = spawn
        self._open: dict[Key, Batch] = {}
        self._queued: dict[MessageQueue, deque[Batch]] = {}
        """By queue that a batch is out to: those that wait for it."""
        self._timed: dict[Batch, float] = {}
        """Until when batches grow, the first first."""
        self._unfinished = self._in_flight = self._placed = 0
        self._woken = self._early = 0
        self._loop: Loop | None = None
        self._wanted: Crowd
        self._idle: Crowd

    def start(self) -> None:
        """Before the first send, in the loop that it will be in; followed by ``run``, as a task."""
        self._loop = loop = running_loop()
        self._wanted = loop.crowd()
        self._idle = loop.crowd()

    async def run(self) -> None:
        """Lets batches leave whose time is up."""
        loop = self._loop
        assert loop is not None
        try:
            while True:
                while self._timed:
                    batch, until = next(iter(self._timed.items()))
                    left = until - loop.now() if self._linger else 0.0
                    if left > 0:
                        await anyio.sleep(left)
                    if batch in self._timed:
                        self._time_is_up(batch)
                await self._wanted.wait()
        finally:
            self._loop = None
            for batch in list(self._open.values()):
                if not batch.is_queued:
                    self._close(batch)
                    batch.error = ClosedError("the producer was closed before the batch was sent")
                    self._finish(batch)

    async def send(self, message: Message, text: bytes, queue: MessageQueue | None) -> SendReceipt:
        """Puts a message, its properties being ``text``, into a batch, and waits for its receipt.

        Raises the batch's error. Who is cancelled before the batch is sent takes the message back.
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
        """Its batch, whose last message it is so far."""
        stripe = self._next_stripe(message.topic) if queue is None and self._linger and not self._in_flight else 0
        key = (message.topic, queue, message.wait_stored, stripe)
        size = BATCH_OVERHEAD + len(message.body) + len(text)
        batch = self._open.get(key)
        if batch is None or batch.size + size > self._max_bytes:
            if batch is not None:
                self._leave(batch)
            batch = self._opened(key)
        batch.add(message, text, size)
        if batch.size >= self._max_bytes or (batch.count == self._early and not self._in_flight):
            self._leave(batch)
        return batch

    def _next_stripe(self, topic: str) -> int:
        """Which of the batches that grow side by side gets the next message: a few messages each, in turn.

        A batch goes to one queue. While nothing is under way, a burst would be one batch, and one queue would get all
        of it. With batches under way that is not needed: they go to the queues in turn, and large ones cost less.
        """
        self._placed += 1
        return (self._placed - 1) // _FEW % self._sender.spread(topic)

    async def flush(self) -> None:
        """Sends everything now, and waits for it."""
        for batch in list(self._open.values()):
            self._leave(batch)
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
        if queue in self._queued:  # grows on, until it is its turn
            del self._timed[batch]
            batch.is_queued = True
            self._queued[queue].append(batch)
        else:
            self._leave(batch)

    def _close(self, batch: Batch) -> None:
        """Nothing is added to it any more."""
        if self._open.get(batch.key) is batch:
            del self._open[batch.key]
        self._timed.pop(batch, None)

    def _leave(self, batch: Batch) -> None:
        """Closes it, and sends it when it is its turn."""
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
        """Sends it; where that is not needed, or not possible any more, the next of its line."""
        while batch is not None and not self._is_sent(batch):
            self._finish(batch)
            batch = self._following(batch)

    def _is_sent(self, batch: Batch) -> bool:
        if batch.is_empty:
            return False
        try:
            prepared, messages = batch.prepared()
            again = partial(self._deliver, batch, prepared, messages)
            if not self._sender.begin(prepared, batch.key[1], messages, partial(self._answered, batch, again)):
                self._spawn(partial(again, None))
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits for a receipt
            batch.error = error
            return False
        batch.is_sent = True
        self._in_flight += 1
        return True

    def _answered(self, batch: Batch, again: Callable[[Failure], Awaitable[None]], found: AttemptResult) -> None:
        if isinstance(found, list):
            self._end(batch, found)
            return
        try:
            self._spawn(partial(again, found))
        except ClosedError:
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
            if not isinstance(error, RocketMQError):
                raise
        finally:
            self._end(batch, found)

    def _end(self, batch: Batch, found: Sequence[SendReceipt] = ()) -> None:
        """It is over: with a receipt for each message, or with its error."""
        if found:
            batch.is_stored(found)
        self._in_flight -= 1
        self._woken += batch.count
        self._finish(batch)
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
        """The next of the line for its queue."""
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
