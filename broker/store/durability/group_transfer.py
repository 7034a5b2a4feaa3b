"""GroupTransferService: SYNC_MASTER. A message is readable and acknowledged once enough slaves have it.

Source: RocketMQ's GroupTransferService. There the message is readable at once, whatever becomes of its copies.
"""

from collections.abc import Callable
from typing import Protocol

import trio

from trimq.broker.store.durability.flush import FlushRealTimeService
from trimq.broker.store.durability.log_sync import LogSync
from trimq.broker.store.durability.pending_puts import PendingPuts
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.puts import Dispatcher
from trimq.broker.store.types import PutMessageStatus


class Replicas(Protocol):
    """The part of HAService that this service uses."""

    on_replicated: Callable[[], None]

    @property
    def confirmed_offset(self) -> int:
        """Enough replicas have everything below."""
        ...

    def notify(self) -> None:
        """There may be more to send."""
        ...


class GroupTransferService:
    """Waits for slaves and, with ``flushes`` (SYNC_FLUSH), for the device too.

    ``real_time`` flushes at intervals (ASYNC_FLUSH). A message that waits longer than ``timeout`` seconds is answered
    FLUSH_SLAVE_TIMEOUT, or FLUSH_DISK_TIMEOUT if only the device is late. It stays, and is readable once it is covered.
    """

    waits = True
    dispatch_only = None

    def __init__(
        self,
        log: CommitLog,
        sync: LogSync,
        dispatcher: Dispatcher,
        replicas: Replicas,
        real_time: FlushRealTimeService | None,
        timeout: float,
        took: Callable[[float, int], None],
    ) -> None:
        """``took`` is called with the seconds that replies have waited, and their number of messages."""
        self._log = log
        self._sync = sync
        self._replicas = replicas
        self._real_time = real_time
        self._timeout = timeout
        self._pending = PendingPuts(dispatcher, timeout, took, self._late)
        self._pending.wake = self._wake_task
        self.submit = self._pending.submit
        """See Durability."""
        self.rolled = self._pending.rolled
        """See Durability."""
        self._wake = trio.Event()
        self._stopping = False
        self.on_readable: Callable[[], None] = lambda: None
        """Called when more may be read: records of before the start are not among the puts that wait."""
        replicas.on_replicated = self._replicated

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def readable_offset(self) -> int:
        """Records below this offset are on enough replicas, and durable under SYNC_FLUSH."""
        return min(self._stored_offset, self._replicas.confirmed_offset)

    @property
    def _stored_offset(self) -> int:
        """How far this store itself has the log as the flush mode promises."""
        return self._log.max_offset if self._real_time is not None else self._sync.flushed_offset

    @property
    def end_offset(self) -> int:
        """See Durability."""
        return self._log.max_offset

    def join_rounds(self, rounds: list[Callable[[], None]], in_round: Callable[[], bool]) -> None:
        """Sync, and send to the slaves, once at the end of each round."""
        self._pending.join_rounds(in_round)
        rounds.append(self.commit)

    def commit(self) -> None:
        """End of a round of requests: sync if the device is quick, and pass the messages on to the slaves."""
        pending = self._pending
        pending.round_ended()
        if not pending:
            return
        if self._real_time is None and self._sync.flushed_offset < self._log.max_offset:
            done = self._sync.flush_inline()
            if done is False:
                pending.fail(self._sync.failed)
                return
            if done is None:
                self._wake.set()
        self._replicas.notify()
        self._complete()

    def commit_soon(self) -> None:
        """See Durability: there are no write buffers."""

    async def commit_buffers(self) -> bool:
        """See Durability: there are no write buffers."""
        return True

    async def run(self) -> None:
        """Sync and answer until ``stop``."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pending.watch_deadlines)
            if self._real_time is not None:
                nursery.start_soon(self._real_time.run)
            while not self._stopping:
                await self._wake.wait()
                # A new event before the work: a put during the sync sets it, so no wake-up is lost.
                self._wake = trio.Event()
                await self._work()
            # The slaves are gone by now: what they have is answered, and for the rest it is not known.
            await self._work()
            self._pending.leave()
            nursery.cancel_scope.cancel()

    async def stop(self) -> bool:
        """End the task. Puts that wait are answered as far as it is known."""
        self._stopping = True
        if self._real_time is not None:
            self._real_time.stop()
        self._wake.set()
        return True

    async def _work(self) -> None:
        """Sync what is not durable yet, send it, and answer what is covered."""
        pending, sync = self._pending, self._sync
        while self._real_time is None and pending and sync.flushed_offset < self._log.max_offset:
            if not await sync.advance():
                pending.fail(sync.failed)
                return
            self._replicas.notify()
        self._replicas.notify()
        while pending.complete(self.readable_offset):
            await trio.lowlevel.checkpoint()

    def _replicated(self) -> None:
        """Slaves have acknowledged more."""
        self.on_readable()
        self._complete()

    def _complete(self) -> None:
        """Answer one turn's worth now, and leave the rest to the task."""
        if self._pending.complete(self.readable_offset) or self._stopping:
            self._wake.set()

    def abandon(self) -> None:
        """Answer the puts that wait now: the slaves do not follow this master any more."""
        self._pending.complete(self.readable_offset)
        self._pending.leave()

    def _wake_task(self) -> None:
        self._wake.set()

    def _late(self, end: int) -> tuple[PutMessageStatus, str]:
        seconds = f"{self._timeout:g} s"
        if self._replicas.confirmed_offset < end:
            return PutMessageStatus.FLUSH_SLAVE_TIMEOUT, f"stored here, replication unknown: no slave after {seconds}"
        return PutMessageStatus.FLUSH_DISK_TIMEOUT, f"not on disk after {seconds}"
