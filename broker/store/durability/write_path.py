"""The way of a message into the log: the put-message lock, the append, and what durability does with it.

Whoever finds no room waits in the put-message lock (put_lock.py). What happens behind the append: durability.py.
"""

from collections.abc import Sequence
from functools import partial

import trio

from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.disk.memory import LogMemory
from trimq.broker.store.durability.commit import CommitRealTimeService
from trimq.broker.store.durability.durability import AsyncFlush, Durability
from trimq.broker.store.durability.flush import FlushRealTimeService, GroupCommitService
from trimq.broker.store.durability.log_sync import LogSync, SyncPlace
from trimq.broker.store.log.allocate import AllocateMappedFileService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.put_lock import PutMessageLock
from trimq.broker.store.log.puts import Dispatcher, MessageInner, PatientPut, Put
from trimq.broker.store.log.transient_store_pool import TransientStorePool, make_pool
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus
from trimq.protocol.dispatch_rules import unit_tags_code
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
        self._delay_ms = delay_ms
        pool = make_pool(config)
        self.durability = self._durability(pool, dispatcher, config)
        self.lock = PutMessageLock(
            self._append,
            self._finish,
            self._refusal,
            busy_seconds=config.os_page_cache_busy_time_out_mills / 1000,
            needs_file=self._needs_file,
        )
        self.room = AllocateMappedFileService(
            log,
            flags,
            config,
            memory=memory,
            pool=pool,
            on_room=self.lock.room,
            on_needs_commit=self.durability.commit_soon,
        )
        self._submit = self.durability.submit
        self._at_once = self.durability.at_once
        self._ended: trio.Event | None = None
        log.start_appending(self.room, self.durability.rolled)

    def _durability(
        self, pool: TransientStorePool | None, dispatcher: Dispatcher, config: MessageStoreConfig
    ) -> Durability:
        if config.flush_disk_type is FlushDiskType.SYNC_FLUSH:
            timeout = config.sync_flush_timeout / 1000
            return GroupCommitService(
                self.log, self.sync, dispatcher, timeout, partial(_waited_for_device, self._stats)
            )
        real_time = FlushRealTimeService(
            self.log,
            self.sync,
            interval=config.flush_interval_commit_log / 1000,
            least_pages=config.flush_commit_log_least_pages,
            thorough=config.flush_commit_log_thorough_interval / 1000,
            timed=config.flush_commit_log_timed,
        )
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

    # -- puts

    def put_message(self, put: PatientPut, on_done: PutCallback) -> PutMessageResult | None:
        """Store what ``put`` has: the result if it is ready at once, else None and ``on_done`` gets it later."""
        if not self._flags.writable:
            return self._finish(put, self._refused(), on_done)
        if self.lock.is_held:
            return self.lock.wait(put, on_done)
        result = self.log.append(put)
        if result is None:
            return self.lock.wait(put, on_done)
        return self._finish(put, result, on_done)

    def put_now(self, put: Put, on_done: PutCallback | None) -> PutMessageResult | None:
        """Store what can be stored without waiting: where it lies, which is the result unless durability ``waits``.

        None: nothing has happened, for whatever reason; ``put_message`` says which. Where durability ``waits``,
        ``on_done`` gets the result.
        """
        if self.lock.is_held or not self._flags.writable:
            return None
        result = self.log.append(put, here=True)
        if result is None or result.status:
            return None
        self._stored(put, result, on_done)
        return result

    def _append(self, put: PatientPut) -> PutMessageResult | None:
        result = self.log.append(put)
        if result is None and self.room.lacks_buffer and self._needs_file():
            remark = "all buffers of the transient store pool are in use (fastFailIfNoBufferInStorePool)"
            return PutMessageResult(PutMessageStatus.CREATE_MAPPED_FILE_FAILED, remark=remark)
        return result

    def _finish(self, put: Put, result: PutMessageResult, on_done: PutCallback | None) -> PutMessageResult | None:
        """What has become of a put, stored or refused: all that is refused to its sender comes here, and is counted."""
        if result.status:
            self._stats.put_message_failed_times += 1
            return result
        return self._stored(put, result, on_done)

    def _stored(self, put: Put, result: PutMessageResult, on_done: PutCallback | None) -> PutMessageResult | None:
        """All that follows an append, whichever way the put came: the result if it is ready."""
        if isinstance(put, MessageInner) and put.topic == SCHEDULE_TOPIC:
            put.tags_code = self._due(put, result)  # now: it may be dispatched much later
        if self._at_once is None:
            return self._submit(put, result, on_done)
        self._at_once(put, result)
        return result

    def _due(self, message: MessageInner, result: PutMessageResult) -> int:
        """What stands in the tag slot of a delayed message.

        Its delay begins by the wall clock: the record's store time may be one of the past that the clock was ahead in.
        Never later than that of the record, which is what a unit that is made anew from the log says.
        """
        since = min(self.log.wall_ms(), result.store_timestamp)
        return unit_tags_code(message.topic, str(message.properties, "utf-8", "replace"), since, self._delay_ms)

    # -- refusals

    def _refusal(self) -> PutMessageResult | None:
        return None if self._flags.writable else self._refused()

    def _refused(self) -> PutMessageResult:
        return PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark=self._flags.reason)

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
                nursery.start_soon(self.durability.run)
        finally:
            self._ended.set()

    async def stop(self, reason: str = "the broker is shutting down") -> bool:
        """Refuse puts, answer those that wait, make all durable, end the services; False where the device refused."""
        self._flags.set(Flag.NOT_WRITEABLE, reason)
        self.lock.stop()
        committed = await self.durability.stop()
        await self.room.stop()
        durable = await self.sync.flush() and committed
        if self._ended is not None:
            await self._ended.wait()
        return durable


def _waited_for_device(stats: StoreStats, seconds: float, messages: int) -> None:
    stats.put_took(int(seconds * 1000), messages)
    stats.flush_waits.add(seconds, messages)
