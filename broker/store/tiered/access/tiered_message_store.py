"""A store that copies its messages to a tier and reads from there what its disk no longer has.

``messageStorePlugIn`` chooses it instead of MessageStore. The local store stays what it is: every put, and each read
of a message that it has, goes the same way as without a tier. Source: RocketMQ's TieredMessageStore.
"""

import struct
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.disk.memory import memory_limit
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.tiered.access.batch import BatchBuilder
from trimq.broker.store.tiered.access.dispatcher import MessageStoreDispatcher
from trimq.broker.store.tiered.access.fetcher import MessageStoreFetcher, log_failed_read
from trimq.broker.store.tiered.access.index_completion import complete_index
from trimq.broker.store.tiered.access.tiered_messages import TieredMessages
from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.flat_message_file import FlatMessageFile
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, MessageFilter, QueryMessageResult
from trimq.broker.tiered_config import TieredStorageLevel, TieredStoreConfig
from trimq.protocol.record import AT_QUEUE_ID
from trimq.protocol.tiered_layout import APACHE_UPLOADED
from trimq.protocol.topic_rules import is_system_topic

_log: Final = structlog.get_logger(__name__)

_STOP_SECONDS: Final = 5.0
"""How long a stop waits for the uploads under way."""
_SLICE: Final = 500
"""Queues that are looked at in one turn of the event loop."""
_QUEUE: Final = struct.Struct(">i4xq").unpack_from
_LMQ: Final = "%LMQ%"
_REVIVE: Final = "rmq_sys_REVIVE_LOG_"


class TieredMessageStore(MessageStore):
    """See MessageStore. ``tier`` is its configuration."""

    def __init__(
        self, config: MessageStoreConfig, tier: TieredStoreConfig, *, cluster: str, broker_name: str, **more: Any
    ) -> None:
        """``more``: the keyword arguments of MessageStore."""
        super().__init__(config, **more)
        self.tier = tier
        self._stays_local = frozenset({cluster, broker_name})
        wall_ms = self.clock.wall_ms
        metadata = DefaultMetadataStore(self.disk, self.root, broker_name, wall_ms)
        self.flat_files = FlatFileStore(
            FileSegmentFactory(tier, self.disk.with_own_threads(), cluster), metadata, broker_name
        )
        self.tier_index: IndexStoreService | None = None
        if config.message_index_enable:
            index_file = self.flat_files.index_file()
            self.tier_index = IndexStoreService(
                self.disk, self.root, tier, index_file, persist=metadata.persist, wall_ms=wall_ms
            )
        self.uploads = MessageStoreDispatcher(
            tier,
            self.queues,
            BatchBuilder(self.commit_log, self.queues),
            self.flat_files,
            self.tier_index,
            excluded=self._is_excluded,
            uploadable=self._uploadable,
            wall_ms=wall_ms,
        )
        self.fetcher = MessageStoreFetcher(
            tier,
            self.flat_files,
            self.tier_index,
            clock=self.clock,
            memory=memory_limit(),
            limits=self._getter.limits,
        )
        self.queues.on_growing = self.uploads.note
        self.hold_log(TieredMessages(self.uploads))
        self.low_offset = lambda queue: self.min_offset(queue.topic, queue.queue_id)
        self._level = tier.tiered_storage_level
        self.get_message, self._get_local = self._get, self.get_message
        self.get_message_cold, self._get_local_cold = self._get_cold, self.get_message_cold
        self.query_message = lambda *_: None
        self.query_in_memory = lambda *_: None
        self.query_message_cold, self._query_local = self._query_cold, self.query_message_cold
        if self._level is TieredStorageLevel.FORCE:
            # What is in memory may be in the tier too, which comes first then: the fast path of pulls leaves all to it.
            self.get_in_memory = lambda *_: None
            self.get_ahead = lambda *_: None

    def _is_excluded(self, topic: str) -> bool:
        """Whether a topic is never uploaded. Retry and dead letter topics are."""
        if not topic.strip() or topic in self._stays_local:
            return True
        return is_system_topic(topic) or topic.startswith((_LMQ, _REVIVE))

    def _uploadable(self) -> int:
        return min(self.flushed_offset, self.write_path.durability.readable_offset)

    # -- lifecycle

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["TieredMessageStore"]:
        """See MessageStore. The tier is loaded once the store is locked and recovered."""
        async with super().opened():
            await self.flat_files.load()
            self._continue_queues()
            if self.tier_index is not None:
                await self.tier_index.recover()
            async with trio.open_nursery() as nursery:
                finished = trio.Event()
                nursery.start_soon(self._run_uploads, finished)
                nursery.start_soon(self._run_expiry)
                nursery.start_soon(self.fetcher.run)
                indexing = trio.CancelScope()
                nursery.start_soon(self._run_index, indexing)
                try:
                    yield self
                finally:
                    with trio.CancelScope(shield=True):
                        await self._stop_tier(finished, indexing)
                    nursery.cancel_scope.cancel()

    def _continue_queues(self) -> None:
        """Queues that only the tier has go on behind its messages.

        Without this a queue whose local files were lost, and whose messages left the local log, would begin at 0.
        """
        for file in self.flat_files.all():
            if file.commit_offset and not self.queues.peek_next_offset(file.topic, file.queue_id):
                self.queues.find_or_create(file.topic, file.queue_id).start_at(file.commit_offset)
                _log.warning(
                    "queue_continues_behind_tier", topic=file.topic, queue=file.queue_id, offset=file.commit_offset
                )

    async def _run_index(self, scope: trio.CancelScope) -> None:
        if self.tier_index is not None:
            with scope:
                await self.tier_index.run()

    async def _run_uploads(self, finished: trio.Event) -> None:
        try:
            if self.tier_index is not None:
                try:
                    await complete_index(self.tier_index, self.flat_files)
                except OSError as error:  # the next start tries again
                    _log.error("tiered_index_not_completed", error=str(error))
            await self.uploads.run()
        finally:
            finished.set()

    async def _stop_tier(self, finished: trio.Event, indexing: trio.CancelScope) -> None:
        """Messages that are not uploaded stay local: the next start goes on with them."""
        self.uploads.stop()
        with trio.move_on_after(_STOP_SECONDS):
            await finished.wait()
        indexing.cancel()
        if self.tier_index is not None:
            # As RocketMQ's broker does: without local index files it can go on with any number of slots and entries.
            await self.tier_index.close()
        await self._save_metadata()

    async def _run_expiry(self) -> None:
        while True:
            await trio.sleep(self.tier.tiered_store_delete_file_interval / 1000)
            if self.tier.tiered_store_delete_file_enable:
                await self.expire_tier()

    async def expire_tier(self) -> int:
        """Delete the expired segments of all queues. Returns their number."""
        count = 0
        for file in self.flat_files.all():
            try:
                count += await file.destroy_expired(self.clock.wall_ms() - self.flat_files.reserved_ms(file.topic))
            except OSError as error:
                _log.error("tiered_segment_not_deleted", topic=file.topic, queue=file.queue_id, error=str(error))
        if count:
            _log.info("tiered_segments_deleted", count=count)
            await self._save_metadata()
        return count

    async def _save_metadata(self) -> None:
        """A failure is repaired by the next write, or at the next start."""
        try:
            await self.flat_files.metadata.persist()
        except OSError as error:
            _log.error("tiered_metadata_not_saved", error=str(error))

    # -- reads

    def _tier_of(self, topic: str, queue_id: int, offset: int) -> FlatMessageFile | None:
        """The queue in the tier if it serves the message at ``offset``; None if the local store does."""
        file = self.flat_files.find(topic, queue_id)
        if file is None or not file.min_offset <= offset < file.commit_offset:
            return None
        if self._level is TieredStorageLevel.DISABLE:
            return None
        return file if self._level is TieredStorageLevel.FORCE or not self._has_local(topic, queue_id, offset) else None

    def _has_local(self, topic: str, queue_id: int, offset: int) -> bool:
        queue = self.find_queue(topic, queue_id)
        return queue is not None and queue.min_offset <= offset < queue.next_offset

    def _get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
        group: str = "",
    ) -> GetMessageResult | None:
        file = self._tier_of(topic, queue_id, offset)
        if file is not None:
            found = self.fetcher.get(group, topic, queue_id, offset, max_count, max_bytes, filter)
            return found if found is None else self._with_range(topic, queue_id, offset, found)
        result = self._get_local(topic, queue_id, offset, max_count, max_bytes, filter)
        return result if result is None else self._with_range(topic, queue_id, offset, result)

    async def _get_cold(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
        group: str = "",
    ) -> GetMessageResult:
        arguments = topic, queue_id, offset, max_count, max_bytes, filter
        file = self._tier_of(topic, queue_id, offset)
        if file is None and self._level is TieredStorageLevel.NOT_IN_MEM:
            # The local store has it, but not in memory, or it would have been answered already.
            file = self.flat_files.find(topic, queue_id)
            file = file if file is not None and file.min_offset <= offset < file.commit_offset else None
        if file is not None:
            result = await self.fetcher.get_cold(group, *arguments)
            if result.status is not GetMessageStatus.OFFSET_FOUND_NULL or not self._has_local(topic, queue_id, offset):
                return self._with_range(topic, queue_id, offset, result)
            self.fetcher.fallbacks += 1
        return self._with_range(topic, queue_id, offset, await self._get_local_cold(*arguments))

    def _with_range(self, topic: str, queue_id: int, offset: int, result: GetMessageResult) -> GetMessageResult:
        """The result with the range of offsets of both, local store and tier."""
        file = self.flat_files.find(topic, queue_id)
        if file is None or self._level is TieredStorageLevel.DISABLE or file.min_offset >= file.commit_offset:
            return result
        result.min_offset = self.min_offset(topic, queue_id)
        result.max_offset = max(self.max_offset(topic, queue_id), file.commit_offset)
        if result.status is GetMessageStatus.OFFSET_TOO_SMALL and offset < file.min_offset:
            result.next_begin_offset = file.min_offset
        return result

    def min_offset(self, topic: str, queue_id: int) -> int:
        """See MessageStore: the first message that can be read, in the tier too."""
        local = super().min_offset(topic, queue_id)
        file = self.flat_files.find(topic, queue_id)
        if file is None or self._level is TieredStorageLevel.DISABLE or file.min_offset >= file.commit_offset:
            return local
        return min(local, file.min_offset) if self.has_queue(topic, queue_id) else file.min_offset

    def tier_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """See MessageStore: also of what level DISABLE does not read."""
        file = self.flat_files.find(topic, queue_id)
        if file is None or file.min_offset >= file.commit_offset:
            return None
        return file.min_offset, file.commit_offset

    async def tier_info(self) -> dict[str, str]:
        """See MessageStore. The names are not RocketMQ's, which has none."""
        behind = 0
        for number, backlog in enumerate(self.uploads.backlogs()):
            behind += backlog.messages
            if number % _SLICE == _SLICE - 1:
                await trio.lowlevel.checkpoint()
        return {
            "tieredStoreBehind": str(behind),
            "tieredStoreUploaded": str(self.uploads.messages),
            "tieredStoreUploadFailures": str(self.uploads.failures),
            "tieredStoreSkipped": str(self.uploads.skipped),
        }

    async def message_store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """See MessageStore."""
        file = self._tier_of(topic, queue_id, offset)
        if file is not None:
            try:
                return await self.fetcher.store_time(topic, queue_id, offset)
            except OSError as error:
                log_failed_read(error, topic, queue_id, offset)
        return await super().message_store_time(topic, queue_id, offset)

    async def earliest_store_time(self, topic: str, queue_id: int) -> int:
        """See MessageStore."""
        return await self.message_store_time(topic, queue_id, self.min_offset(topic, queue_id))

    async def offset_by_time(self, topic: str, queue_id: int, timestamp: int, *, upper: bool = False) -> int:
        """See MessageStore: over the range of local store and tier."""
        local = await super().offset_by_time(topic, queue_id, timestamp, upper=upper)
        file = self.flat_files.find(topic, queue_id)
        low = super().min_offset(topic, queue_id)
        if file is None or not self.min_offset(topic, queue_id) < min(low, file.commit_offset) or local > low:
            return local
        if upper and 0 <= await super().message_store_time(topic, queue_id, low) <= timestamp:
            return local
        end = min(low, file.commit_offset)
        return await self.fetcher.offset_by_time(topic, queue_id, timestamp, upper=upper, end=end)

    async def _query_cold(self, topic: str, key: str, max_num: int, begin: int, end: int) -> QueryMessageResult:
        """The messages with a key: those of the local store and, if they are too few, of the tier; oldest first."""
        result = await self._query_local(topic, key, max_num, begin, end)
        wanted = min(max_num, self.config.max_msgs_num_batch)
        if self._level is TieredStorageLevel.DISABLE or result.count >= wanted:
            return result
        if self._level is not TieredStorageLevel.FORCE and 0 <= await self.earliest_message_time() <= begin:
            return result  # all messages of that time are in the local store
        seen = {_identity(record) for record in result.buffers}
        older = await self.fetcher.query(topic, key, wanted, begin, end)
        older = [record for record in older if _identity(record) not in seen][-(wanted - result.count) :]
        result.buffers = [*older, *result.buffers]
        result.count += len(older)
        result.size += sum(map(len, older))
        return result

    # -- by log offset

    def look_message(self, offset: int) -> Any | None:
        """See MessageStore; None also for a message that may be in the tier."""
        found = super().look_message(offset)
        return None if found is not None and not len(found) and offset < self.min_phy_offset else found

    async def look_message_cold(self, offset: int) -> Any:
        """See MessageStore: also a message of the tier that had this log offset."""
        found = await super().look_message_cold(offset)
        if len(found) or not 0 <= offset < self.min_phy_offset:
            return found
        for file in self.flat_files.all():
            try:
                record = await self.fetcher.reads.read(file, file.read_physical, offset)
            except OSError as error:
                log_failed_read(error, file.topic, file.queue_id)
                continue
            if record is not None:
                return record
        return found

    def why_missing(self, offset: int) -> str:
        """See MessageStore: also of messages that RocketMQ's broker has uploaded."""
        if offset >= APACHE_UPLOADED:
            return "the message was uploaded to the tier by RocketMQ's broker, which does not keep its log offset"
        return super().why_missing(offset)

    # -- topics

    async def delete_topic(self, topic: str) -> None:
        """See MessageStore: also from the tier."""
        await super().delete_topic(topic)
        await self.flat_files.destroy_topic(topic)

    async def clean_unused_topics(self, known: Container[str]) -> list[str]:
        """See MessageStore: also from the tier."""
        deleted = await super().clean_unused_topics(known)
        for topic in self.flat_files.topics():
            if topic not in known and not is_system_topic(topic):
                await self.flat_files.destroy_topic(topic)
                if topic not in deleted:
                    deleted.append(topic)
        return deleted


def _identity(record: Any) -> tuple[int, int]:
    """Queue id and offset of a record: two of one topic are the same message if these are equal."""
    found: tuple[int, int] = _QUEUE(record, AT_QUEUE_ID)
    return found
