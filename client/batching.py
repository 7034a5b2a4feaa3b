"""Automatic batching: sends of the same topic that come within ``linger`` seconds travel as one batch.

Each send still gets its own receipt. Sends to a chosen queue have batches of their own.

A batch leaves when it is full or its time is up. Batches for a chosen queue leave one after the other, so that their
order is the order of the sends; while one is out, the next one grows.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

import anyio

from client.errors import RocketMQError
from client.message import Message, MessageQueue, SendReceipt
from client.sending import BatchEntry, Prepared, prepare_batch

Deliver: TypeAlias = Callable[[Prepared, MessageQueue | None, Sequence[Message]], Awaitable[list[SendReceipt]]]
"""Sends a batch."""

Spawn: TypeAlias = Callable[[Callable[[], Awaitable[None]]], None]
"""Starts a background task."""

Key = tuple[str, MessageQueue | None, bool]


class _Batch:
    __slots__ = ("done", "entries", "error", "full", "messages", "receipts", "size")

    def __init__(self) -> None:
        self.entries: list[BatchEntry | None] = []
        self.messages: list[Message] = []
        self.size = 0
        self.full = anyio.Event()
        self.done = anyio.Event()
        self.receipts: dict[int, SendReceipt] = {}
        self.error: BaseException | None = None


class Batcher:
    """The open batches of a producer."""

    def __init__(self, linger: float, max_bytes: int, deliver: Deliver, spawn: Spawn) -> None:
        self._linger = linger
        self._max_bytes = max_bytes
        self._deliver_batch = deliver
        self._spawn = spawn
        self._open: dict[Key, _Batch] = {}
        self._locks: dict[MessageQueue, anyio.Lock] = {}
        self._out = 0
        self._idle = anyio.Event()

    async def send(self, message: Message, entry: BatchEntry, queue: MessageQueue | None) -> SendReceipt:
        """Puts a message into a batch and waits for its receipt. Raises the batch's error."""
        key = (message.topic, queue, message.wait_stored)
        batch = self._open.get(key)
        size = entry.size
        if batch is not None and batch.size + size > self._max_bytes:
            self._close(key, batch)
            batch = None
        if batch is None:
            batch = self._open[key] = _Batch()
            self._out += 1
            self._spawn(partial(self._run, key, batch))
        number = len(batch.entries)
        batch.entries.append(entry)
        batch.messages.append(message)
        batch.size += size
        if batch.size >= self._max_bytes:
            self._close(key, batch)
        try:
            await batch.done.wait()
        except BaseException:
            self._take_back(key, batch, number)
            raise
        if batch.error is not None:
            raise _again(batch.error)
        return batch.receipts[number]

    async def flush(self) -> None:
        """Sends everything now, and waits for it."""
        for key, batch in list(self._open.items()):
            self._close(key, batch)
        while self._out:
            self._idle = anyio.Event()
            await self._idle.wait()

    def _close(self, key: Key, batch: _Batch) -> None:
        if self._open.get(key) is batch:
            del self._open[key]
        batch.full.set()

    def _take_back(self, key: Key, batch: _Batch, number: int) -> None:
        """A cancelled send leaves the batch while that has not been sent."""
        entry = batch.entries[number]
        if entry is not None and self._open.get(key) is batch:
            batch.size -= entry.size
            batch.entries[number] = None

    async def _run(self, key: Key, batch: _Batch) -> None:
        try:
            with anyio.move_on_after(self._linger):
                await batch.full.wait()
            queue = key[1]
            if queue is None:
                await self._deliver(key, batch)
            else:
                async with self._locks.setdefault(queue, anyio.Lock()):
                    await self._deliver(key, batch)
        except BaseException as error:
            batch.error = error
            if not isinstance(error, RocketMQError):
                raise
        finally:
            self._close(key, batch)
            batch.done.set()
            self._out -= 1
            if not self._out:
                self._idle.set()

    async def _deliver(self, key: Key, batch: _Batch) -> None:
        self._close(key, batch)
        left = [(number, entry) for number, entry in enumerate(batch.entries) if entry is not None]
        if not left:
            return
        prepared = prepare_batch(key[0], [entry for _, entry in left], wait_stored=key[2])
        messages = [batch.messages[number] for number, _ in left]
        found = await self._deliver_batch(prepared, key[1], messages)
        batch.receipts = {number: receipt for (number, _), receipt in zip(left, found, strict=True)}


def _again(error: BaseException) -> BaseException:
    """The error of a batch for one of its senders: each raises an instance of its own."""
    if not isinstance(error, RocketMQError):
        return RocketMQError(f"the batch was not finished: {error!r}")
    own = type(error)(error.text, code=error.code, address=error.address)
    own.__cause__ = error
    return own
