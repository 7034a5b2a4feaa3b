"""The write path of a message: the put-message lock, the append, and the steps after it.

A put that finds no space waits in the put-message lock (put_lock.py). The steps after the append are in durability.py.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import trio

from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.disk.memory import LogMemory
from trimq.broker.store.durability.commit import CommitRealTimeService
from trimq.broker.store.durability.durability import AsyncFlush, Durability
from trimq.broker.store.durability.flush import FlushRealTimeService, GroupCommitService
from trimq.broker.store.durability.group_transfer import GroupTransferService, Replicas
from trimq.broker.store.durability.log_sync import LogSync, SyncPlace
from trimq.broker.store.log.allocate import AllocateMappedFileService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.put_lock import PutMessageLock
from trimq.broker.store.log.puts import Dispatcher, MessageInner, Put, WaitablePut
from trimq.broker.store.log.transient_store_pool import TransientStorePool, make_pool
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus
from trimq.protocol.dispatch_rules import unit_tags_code
from trimq.protocol.topic_rules import SCHEDULE_TOPIC


class WritePath:
    """All parts that an append needs. Created after recovery has set the positions of ``log``."""

    def __init__(  # noqa: PLR0913 - the parts of a store meet here
        self,
        log: CommitLog,
        dispatcher: Dispatcher,
        flags: RunningFlags,
        stats: StoreStats,
        config: MessageStoreConfig,
        *,
        memory: LogMemory,
        delay_ms: Sequence[int],
        sync_place: SyncPlace = SyncPlace.AUTO,
        replicas: Replicas | None = None,
        slave_timeout: float = 3.0,
    ) -> None:
        """``delay_ms``: the delay of each level; [0] means no delay.

        ``replicas``: puts wait for them, ``slave_timeout`` seconds at most.
        """
        sync_flush = config.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self.log = log
        # without SYNC_FLUSH no reply waits for a sync: always in a thread
        self.sync = LogSync(log, flags, sync_place if sync_flush else SyncPlace.THREAD)
        self._flags = flags
        self._stats = stats
        self._delay_ms = delay_ms
        self._slave_timeout = slave_timeout
        pool = make_pool(config)
        self.durability = self._durability(pool, dispatcher, config, replicas)
        self.lock = PutMessageLock(
            self._append,
            self._finish,
            self._refusal,
            busy_seconds=config.os_page_cache_busy_time_out_mills / 1000,
            needs_file=self._needs_file,
        )
        self.allocator = AllocateMappedFileService(
            log,
            flags,
            config,
            memory=memory,
            pool=pool,
            on_space=self._space_ready,
            on_needs_commit=self.durability.commit_soon,
        )
        self._submit = self.durability.submit
        self._dispatch_only = self.durability.dispatch_only
        self._ended: trio.Event | None = None
        self._space = trio.Event()
        log.start_appending(self.allocator, self.durability.rolled)

    def _durability(
        self,
        pool: TransientStorePool | None,
        dispatcher: Dispatcher,
        config: MessageStoreConfig,
        replicas: Replicas | None,
    ) -> Durability:
        took = partial(_waited_for_device, self._stats)
        syncs = config.flush_disk_type is FlushDiskType.SYNC_FLUSH
        if replicas is not None:
            real_time = None if syncs else self._real_time(config)
            timeout = self._slave_timeout
            return GroupTransferService(self.log, self.sync, dispatcher, replicas, real_time, timeout, took)
        if syncs:
            return GroupCommitService(self.log, self.sync, dispatcher, config.sync_flush_timeout / 1000, took)
        real_time = self._real_time(config)
        if pool is None:
            return AsyncFlush(self.log, dispatcher, real_time)
        return CommitRealTimeService(
            self.log,
            self._flags,
            pool,
            dispatcher,
            real_time,
            interval=config.commit_interval_commit_log / 1000,
            least_pages=config.commit_commit_log_least_pages,
            thorough=config.commit_commit_log_thorough_interval / 1000,
        )

    def _real_time(self, config: MessageStoreConfig) -> FlushRealTimeService:
        return FlushRealTimeService(
            self.log,
            self.sync,
            interval=config.flush_interval_commit_log / 1000,
            least_pages=config.flush_commit_log_least_pages,
            thorough=config.flush_commit_log_thorough_interval / 1000,
            timed=config.flush_commit_log_timed,
        )

    # -- puts

    def put_message(self, put: WaitablePut, on_done: PutCallback) -> PutMessageResult | None:
        """Store ``put``. Returns the result if it is ready immediately, else None, and ``on_done`` gets it later."""
        if not self._flags.writable:
            return self._finish(put, self._refused(), on_done)
        # While an earlier put waits for space no later one may overtake it: messages of one sender stay in order.
        if self.lock.is_held:
            return self.lock.wait(put, on_done)
        result = self.log.append(put)
        if result is None:
            return self.lock.wait(put, on_done)
        return self._finish(put, result, on_done)

    def put_now(self, put: Put, on_done: PutCallback | None) -> PutMessageResult | None:
        """Store ``put`` only if that needs no waiting. Returns its place: the result, unless durability ``waits``.

        None: there are no side effects, for whatever reason; ``put_message`` gives the reason. If durability ``waits``,
        ``on_done`` gets the result.
        """
        if self.lock.is_held or not self._flags.writable:
            return None
        result = self.log.append(put, current_file_only=True)
        if result is None or result.status:
            return None
        self._stored(put, result, on_done)
        return result

    def _append(self, put: WaitablePut) -> PutMessageResult | None:
        result = self.log.append(put)
        if result is None and self.allocator.lacks_buffer and self._needs_file():
            remark = "all buffers of the transient store pool are in use (fastFailIfNoBufferInStorePool)"
            return PutMessageResult(PutMessageStatus.CREATE_MAPPED_FILE_FAILED, remark=remark)
        return result

    def _finish(self, put: Put, result: PutMessageResult, on_done: PutCallback | None) -> PutMessageResult | None:
        """Complete a put, stored or refused. Every refusal that a sender gets comes through here and is counted."""
        if result.status:
            self._stats.put_message_failed_times += 1
            return result
        return self._stored(put, result, on_done)

    def _stored(self, put: Put, result: PutMessageResult, on_done: PutCallback | None) -> PutMessageResult | None:
        """The steps after an append, the same for all kinds of put. Returns the result if it is ready."""
        if isinstance(put, MessageInner) and put.topic == SCHEDULE_TOPIC:
            put.tags_code = self._due(put, result)  # now, because its dispatch may come much later
        if self._dispatch_only is None:
            return self._submit(put, result, on_done)
        self._dispatch_only(put, result)
        return result

    def _due(self, message: MessageInner, result: PutMessageResult) -> int:
        """The tag slot of a delayed message's unit: the time when it is due.

        The delay starts at the wall clock: the record's store time may be ahead of it after the clock was set back. The
        result is never later than the due time of a unit rebuilt from the log, which starts at the store time.
        """
        since = min(self.log.wall_ms(), result.store_timestamp)
        return unit_tags_code(message.topic, str(message.properties, "utf-8", "replace"), since, self._delay_ms)

    # -- a slave's log

    async def append_data(self, data: Any, store_timestamp: int) -> None:
        """See CommitLog.append_data; waits for space."""
        while not self.log.append_data(data, store_timestamp):
            await self._space.wait()

    def _space_ready(self) -> None:
        self.lock.space_ready()
        self._space.set()
        self._space = trio.Event()

    # -- refusals

    def _refusal(self) -> PutMessageResult | None:
        return None if self._flags.writable else self._refused()

    def _refused(self) -> PutMessageResult:
        status = PutMessageStatus.SERVICE_NOT_AVAILABLE
        if self._flags.is_only(Flag.REPLICAS):
            status = PutMessageStatus.IN_SYNC_REPLICAS_NOT_ENOUGH
        return PutMessageResult(status, remark=self._flags.reason)

    def _needs_file(self) -> bool:
        """True if the head of the lock's queue waits for a file, not for the next step of the current file."""
        file = self.log.files.last
        return self.allocator.next_file is None and (file is None or file.is_full or file.reserved == file.size)

    # -- lifecycle

    async def run(self) -> None:
        """Run the services until ``stop``."""
        self._ended = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.allocator.run)
                nursery.start_soon(self.lock.run)
                nursery.start_soon(self.durability.run)
        finally:
            self._ended.set()

    async def stop(self, reason: str = "the broker is shutting down") -> bool:
        """Refuse puts, answer the waiting ones, make all durable, end the services. False if the device refused."""
        # The flag first: from now on the lock answers every waiting put with the refusal instead of appending it.
        self._flags.set(Flag.NOT_WRITEABLE, reason)
        self.lock.stop()
        committed = await self.durability.stop()
        await self.allocator.stop()
        # After the commit: only then are the records of write buffers in a file that can be synced.
        durable = await self.sync.flush() and committed
        if self._ended is not None:
            await self._ended.wait()
        return durable


def _waited_for_device(stats: StoreStats, seconds: float, messages: int) -> None:
    stats.put_took(int(seconds * 1000), messages)
    stats.flush_waits.add(seconds, messages)
