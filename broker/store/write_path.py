"""The way of a message into the log: append, dispatch, flush, and who waits for what.

ASYNC_FLUSH: a record is dispatched in the turn that brought it, and its result is ready at once. SYNC_FLUSH: both
happen once it is durable (flush.py). With the transient store pool the result is ready at once, and the record is
dispatched when it has been committed to its file (commit.py). Whoever finds no room waits in the put-message lock
(put_lock.py).
"""

from collections.abc import Sequence
from functools import partial

import trio

from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.allocate import AllocateMappedFileService
from trimq.broker.store.commit import CommitRealTimeService
from trimq.broker.store.commit_log import CommitLog
from trimq.broker.store.flush import FlushRealTimeService, GroupCommitService, Synced
from trimq.broker.store.log_sync import LogSync, SyncPlace
from trimq.broker.store.memory import LogMemory
from trimq.broker.store.put_lock import Put, PutMessageLock
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.transient_store_pool import make_pool
from trimq.broker.store.types import (
    Dispatcher,
    MessageBatch,
    MessageInner,
    MessageRows,
    PutCallback,
    PutMessageResult,
    PutMessageStatus,
)
from trimq.protocol.record_batch import NO_MESSAGES
from trimq.protocol.topic_rules import SCHEDULE_TOPIC


class WritePath:
    """Everything that an append needs. Made after recovery has set the positions of ``log``."""

    def __init__(
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
    ) -> None:
        """``delay_ms``: the delay of each level, [0] being none."""
        sync_flush = config.flush_disk_type is FlushDiskType.SYNC_FLUSH
        self.log = log
        self.sync = LogSync(log, flags, sync_place if sync_flush else SyncPlace.THREAD)  # else nobody waits for it
        self._flags = flags
        self._stats = stats
        self._dispatcher = dispatcher
        self._dispatch_record = dispatcher.dispatch
        self._delay_ms = delay_ms
        pool = make_pool(config)
        self.room = AllocateMappedFileService(
            log,
            flags,
            step=config.commit_log_reserve_step,
            memory=memory,
            durable=sync_flush,
            warm=config.warm_maped_file_enable,
            pool=pool,
            fail_fast=config.fast_fail_if_no_buffer_in_store_pool,
        )
        self.lock = PutMessageLock(
            self._append,
            self._finish,
            self._refusal,
            busy_seconds=config.os_page_cache_busy_time_out_mills / 1000,
            needs_file=self._needs_file,
        )
        self.room.on_room = self.lock.room
        self.group: GroupCommitService | None = None
        self._real_time: FlushRealTimeService | None = None
        if sync_flush:
            group = GroupCommitService(self.sync, self._dispatch, dispatcher.rolled, config.sync_flush_timeout / 1000)
            group.took = partial(_waited_for_device, stats)
            log.on_roll = group.submit_roll
            self.group = group
        else:
            self._real_time = FlushRealTimeService(
                log,
                self.sync,
                interval=config.flush_interval_commit_log / 1000,
                least_pages=config.flush_commit_log_least_pages,
                thorough=config.flush_commit_log_thorough_interval / 1000,
                timed=config.flush_commit_log_timed,
            )
            log.on_roll = dispatcher.rolled
        self.commit: CommitRealTimeService | None = None
        if pool is not None:
            self.commit = CommitRealTimeService(
                log,
                flags,
                pool,
                self._dispatch,
                dispatcher.rolled,
                interval=config.commit_interval_commit_log / 1000,
                least_pages=config.commit_commit_log_least_pages,
                thorough=config.commit_commit_log_thorough_interval / 1000,
            )
            log.on_roll = self.commit.submit_roll
            self.room.on_needs_commit = self.commit.wake
        self._dispatches_at_once = self.group is None and self.commit is None
        self._needs_only_dispatch = self._dispatches_at_once and config.flush_commit_log_timed
        """Nobody else has to hear of an append."""
        self.takes_plain_puts = self._needs_only_dispatch or self.group is not None
        """Whether PlainPut may be used: it dispatches at once, or waits for the group commit, and tells nobody else."""
        self._ended: trio.Event | None = None
        log.start_appending(self.room)

    @property
    def readable_offset(self) -> int:
        """Records below may be read and dispatched: all under ASYNC_FLUSH, the durable ones under SYNC_FLUSH.

        With the transient store pool those that are in their file.
        """
        if self._dispatches_at_once:
            return self.log.max_offset
        return self.commit.committed_offset if self.commit is not None else self.sync.flushed_offset

    # -- puts

    def put_message(self, message: MessageInner, on_done: PutCallback) -> PutMessageResult | None:
        """Store one message: the result if it is ready at once, else None and ``on_done`` gets it later."""
        if not self._flags.writable:
            return self._failed(self._refusal())
        if self.lock.is_held:
            return self.lock.wait(message, on_done)
        result = self.log.append(message)
        if result is None:
            return self.lock.wait(message, on_done)
        if result.status or not self._needs_only_dispatch:
            return self._finish(message, result, on_done)
        stats = self._stats
        stats.put_message_times_total += 1
        stats.put_message_size_total += result.size
        topic = message.topic
        if topic == SCHEDULE_TOPIC:
            message.tags_code = self._due(message, result)
        self._dispatch_record(
            topic,
            message.queue_id,
            result.queue_offset,
            result.physical_offset,
            result.size,
            message.tags_code,
            result.store_timestamp,
            message.keys,
            message.sys_flag,
        )
        return result

    def put_messages(self, batch: MessageBatch, on_done: PutCallback) -> PutMessageResult | None:
        """Store a batch in one piece; answers as ``put_message`` does."""
        if not self._flags.writable:
            return self._failed(self._refusal())
        if self.lock.is_held:
            return self.lock.wait(batch, on_done)
        result = self.log.append_batch(batch)
        if result is None:
            return self.lock.wait(batch, on_done)
        return self._finish(batch, result, on_done)

    def _append(self, put: Put) -> PutMessageResult | None:
        result = self.log.append(put) if isinstance(put, MessageInner) else self.log.append_batch(put)
        if result is None and self.room.lacks_buffer and self._needs_file():
            remark = "all buffers of the transient store pool are in use (fastFailIfNoBufferInStorePool)"
            return PutMessageResult(PutMessageStatus.CREATE_MAPPED_FILE_FAILED, remark=remark)
        return result

    def _finish(self, put: Put, result: PutMessageResult, on_done: PutCallback) -> PutMessageResult | None:
        """After the append: count, then dispatch or wait for the device."""
        if result.status:
            return self._failed(result)
        self._stats.put_message_times_total += 1 if isinstance(put, MessageInner) else len(put.keys)
        self._stats.put_message_size_total += result.size
        if isinstance(put, MessageInner) and put.topic == SCHEDULE_TOPIC:
            put.tags_code = self._due(put, result)  # now: it may be dispatched much later
        group = self.group
        if self._real_time is not None:
            self._real_time.poke()
        if self._dispatches_at_once:
            self._dispatch(put, result)
            return result
        if isinstance(put, MessageInner):
            put.body = b""  # it may be a view of the receive buffer
        else:
            put.messages = NO_MESSAGES
        if self.commit is not None:
            self.commit.submit(put, result)
        if group is None:
            return result
        group.submit(put, result, on_done if put.wait else None)
        return None if put.wait else result

    def _dispatch(self, put: Synced, result: PutMessageResult) -> None:
        if isinstance(put, MessageInner):
            self._dispatch_record(
                put.topic,
                put.queue_id,
                result.queue_offset,
                result.physical_offset,
                result.size,
                put.tags_code,
                result.store_timestamp,
                put.keys,
                put.sys_flag,
            )
        elif isinstance(put, MessageRows):
            self._dispatcher.dispatch_rows(put, result)
        else:
            self._dispatcher.dispatch_batch(put, result)

    def _due(self, message: MessageInner, result: PutMessageResult) -> int:
        """What stands in the tag slot of a delayed message: the time it is due. Its queue id is its level - 1.

        By the wall clock: the record's store time may be one of the past that the clock was ahead in. Never later than
        that of the record, which is what a unit that is made anew from the log says.
        """
        levels = self._delay_ms
        level = min(message.queue_id + 1, len(levels) - 1)
        return min(self.log.wall_ms(), result.store_timestamp) + levels[level]

    # -- refusals

    def _refusal(self) -> PutMessageResult | None:
        if self._flags.writable:
            return None
        return PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark=self._flags.reason)

    def _failed(self, result: PutMessageResult | None) -> PutMessageResult | None:
        self._stats.put_message_failed_times += 1
        return result

    def _needs_file(self) -> bool:
        """True where the head of the lock's queue waits for a file rather than for the next step of this one."""
        file = self.log.files.last
        return self.room.next_file is None and (file is None or file.is_full or file.reserved == file.size)

    # -- life

    async def run(self) -> None:
        """The services, until ``stop``."""
        self._ended = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.room.run)
                nursery.start_soon(self.lock.run)
                if self.group is not None:
                    nursery.start_soon(self.group.run)
                if self._real_time is not None:
                    nursery.start_soon(self._real_time.run)
                if self.commit is not None:
                    nursery.start_soon(self.commit.run)
        finally:
            self._ended.set()

    async def stop(self, reason: str = "the broker is shutting down") -> bool:
        """Refuse puts, answer those that wait, make all durable, end the services; False where the device refused."""
        self._flags.set(Flag.NOT_WRITEABLE, reason)
        self.lock.stop()
        if self.group is not None:
            self.group.stop()
        if self._real_time is not None:
            self._real_time.stop()
        committed = self.commit is None or await self.commit.stop()
        await self.room.stop()
        durable = await self.sync.flush() and committed
        if self._ended is not None:
            await self._ended.wait()
        return durable


def _waited_for_device(stats: StoreStats, seconds: float, messages: int) -> None:
    stats.put_took(int(seconds * 1000), messages)
    stats.flush_waits.add(seconds, messages)
