"""A store that reads from a tier what its disk no longer has.

The local store stays what it is: every put, and each read of a message that it has, goes the same way as without a
tier. How messages come into the tier is the subclasses' work.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Container
from typing import Any, Final

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.disk.memory import memory_limit
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.tiered.access.fetcher import Index, MessageStoreFetcher, log_failed_read
from trimq.broker.store.tiered.access.tier_parts import TierUploads
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.broker.store.tiered.container.tiered_queue import TieredQueue, TieredQueues
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, MessageFilter, QueryMessageResult
from trimq.broker.tiered_config import TieredStorageLevel, TieredStoreConfig
from trimq.protocol.record import AT_QUEUE_ID
from trimq.protocol.tiered_layout import APACHE_UPLOADED
from trimq.protocol.topic_rules import is_system_topic

_log: Final = structlog.get_logger(__name__)

_SLICE: Final = 500
"""Queues that are looked at in one turn of the event loop."""
_QUEUE: Final = struct.Struct(">i4xq").unpack_from
_LMQ: Final = "%LMQ%"
_REVIVE: Final = "rmq_sys_REVIVE_LOG_"


class TieredStore(MessageStore, ABC):
    """See MessageStore. ``tier`` is its configuration."""

    def __init__(
        self, config: MessageStoreConfig, tier: TieredStoreConfig, *, cluster: str, broker_name: str, **more: Any
    ) -> None:
        """``more``: the keyword arguments of MessageStore."""
        super().__init__(config, **more)
        self.tier = tier
        self.tier_index: IndexStoreService | None = None
        self._stays_local = frozenset({cluster, broker_name})
        self._level = tier.tiered_storage_level

    def _read_tier(self, index: Index | None) -> None:
        """Let the tier serve its part of the reads. ``index`` finds its messages by key."""
        self.fetcher = MessageStoreFetcher(
            self.tier,
            self.tier_queues,
            index,
            clock=self.clock,
            memory=memory_limit(),
            limits=self._getter.limits,
            disk=self.disk,
        )
        self.low_offset = lambda queue: self.min_offset(queue.topic, queue.queue_id)
        self.get_message, self._get_local = self._get, self.get_message
        self.get_message_cold, self._get_local_cold = self._get_cold, self.get_message_cold
        self.query_message = lambda *_: None
        self.query_in_memory = lambda *_: None
        self.query_message_cold, self._query_local = self._query_cold, self.query_message_cold
        if self._level is TieredStorageLevel.FORCE:
            # What is in memory may be in the tier too, which comes first then: the fast path of pulls leaves all to it.
            self.get_in_memory = lambda *_: None
            self.get_ahead = lambda *_: None

    def set_tier_config(self, tier: TieredStoreConfig) -> None:
        """See MessageStore."""
        self.tier = self.tier_queues.config = self.tier_uploads.config = tier
        if self.tier_index is not None:
            self.tier_index.config = tier

    @property
    @abstractmethod
    def tier_queues(self) -> TieredQueues:
        """The queues of the tier."""

    @property
    @abstractmethod
    def tier_uploads(self) -> TierUploads:
        """What copies messages to the tier."""

    @abstractmethod
    async def expire_tier(self) -> int:
        """Delete what has expired from the tier. Returns the number of segments or objects."""

    async def _run_expiry(self) -> None:
        """Delete what has expired from time to time."""
        while True:
            await trio.sleep(self.tier.tiered_store_delete_file_interval / 1000)
            if self.tier.tiered_store_delete_file_enable:
                await self.expire_tier()

    def is_excluded(self, topic: str) -> bool:
        """Whether a topic is never uploaded. Retry and dead letter topics are."""
        if not topic.strip() or topic in self._stays_local:
            return True
        return is_system_topic(topic) or topic.startswith((_LMQ, _REVIVE))

    def _uploadable(self) -> int:
        """The log offset behind all that is durable and confirmed."""
        return min(self.flushed_offset, self.write_path.durability.readable_offset)

    async def _continue_queues(self) -> None:
        """Queues that only the tier has go on behind its messages.

        Without this a queue whose local files were lost, and whose messages left the local log, would begin at 0.
        """
        for number, file in enumerate(self.tier_queues.all()):
            if number % _SLICE == _SLICE - 1:
                await trio.lowlevel.checkpoint()
            if self.tier_queues.find(file.topic, file.queue_id) is not file:
                continue  # its topic was deleted meanwhile: a new one of the name begins at 0
            if file.commit_offset and not self.queues.peek_next_offset(file.topic, file.queue_id):
                self.queues.find_or_create(file.topic, file.queue_id).start_at(file.commit_offset)
                _log.warning(
                    "queue_continues_behind_tier", topic=file.topic, queue=file.queue_id, offset=file.commit_offset
                )

    # -- reads

    @property
    def _reads_tier(self) -> bool:
        """Whether messages may be read from the tier."""
        return self._level is not TieredStorageLevel.DISABLE

    def _tier_of(self, topic: str, queue_id: int, offset: int) -> TieredQueue | None:
        """The queue in the tier if it serves the message at ``offset``; None if the local store does."""
        file = self.tier_queues.find(topic, queue_id)
        if file is None or not file.min_offset <= offset < file.commit_offset:
            return None
        if not self._reads_tier:
            return None
        return file if self._level is TieredStorageLevel.FORCE or not self._has_local(topic, queue_id, offset) else None

    def _has_local(self, topic: str, queue_id: int, offset: int) -> bool:
        queue = self.find_queue(topic, queue_id)
        return queue is not None and queue.min_offset <= offset < queue.next_offset

    def _tier_may_have(self, topic: str, queue_id: int, offset: int) -> bool:  # noqa: ARG002 - for tiers that read late
        """Whether it is not known yet if the tier has a message: then its consumer is asked to come again."""
        return False

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
        if self._tier_may_have(topic, queue_id, offset):
            return self._come_again(topic, queue_id, offset)
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
        if self._tier_may_have(topic, queue_id, offset):
            await trio.lowlevel.checkpoint()
            return self._come_again(topic, queue_id, offset)
        arguments = topic, queue_id, offset, max_count, max_bytes, filter
        file = self._tier_of(topic, queue_id, offset)
        if file is None and self._level is TieredStorageLevel.NOT_IN_MEM and self._reads_tier:
            # The local store has it, but not in memory, or it would have been answered already.
            file = self.tier_queues.find(topic, queue_id)
            file = file if file is not None and file.min_offset <= offset < file.commit_offset else None
        if file is not None:
            result = await self.fetcher.get_cold(group, *arguments)
            if result.status is not GetMessageStatus.OFFSET_FOUND_NULL or not self._has_local(topic, queue_id, offset):
                return self._with_range(topic, queue_id, offset, result)
            self.fetcher.fallbacks += 1
        return self._with_range(topic, queue_id, offset, await self._get_local_cold(*arguments))

    def _come_again(self, topic: str, queue_id: int, offset: int) -> GetMessageResult:
        return GetMessageResult(GetMessageStatus.OFFSET_FOUND_NULL, offset, offset, self.max_offset(topic, queue_id))

    def _with_range(self, topic: str, queue_id: int, offset: int, result: GetMessageResult) -> GetMessageResult:
        """The result with the range of offsets of both, local store and tier."""
        file = self.tier_queues.find(topic, queue_id)
        if file is None or not self._reads_tier or file.min_offset >= file.commit_offset:
            return result
        result.min_offset = self.min_offset(topic, queue_id)
        result.max_offset = max(self.max_offset(topic, queue_id), file.commit_offset)
        if result.status is GetMessageStatus.OFFSET_TOO_SMALL and offset < file.min_offset:
            result.next_begin_offset = file.min_offset
        return result

    def min_offset(self, topic: str, queue_id: int) -> int:
        """See MessageStore: the first message that can be read, in the tier too."""
        local = super().min_offset(topic, queue_id)
        file = self.tier_queues.find(topic, queue_id)
        if file is None or self._level is TieredStorageLevel.DISABLE or file.min_offset >= file.commit_offset:
            return local
        return min(local, file.min_offset) if self.has_queue(topic, queue_id) else file.min_offset

    def tier_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """See MessageStore: also of what level DISABLE does not read."""
        file = self.tier_queues.find(topic, queue_id)
        if file is None or file.min_offset >= file.commit_offset:
            return None
        return file.min_offset, file.commit_offset

    async def tier_info(self) -> dict[str, str]:
        """See MessageStore. The names are not RocketMQ's, which has none."""
        behind = 0
        for number, backlog in enumerate(self.tier_uploads.backlogs()):
            behind += backlog.messages
            if number % _SLICE == _SLICE - 1:
                await trio.lowlevel.checkpoint()
        return {
            "tieredStoreBehind": str(behind),
            "tieredStoreUploaded": str(self.tier_uploads.messages),
            "tieredStoreUploadFailures": str(self.tier_uploads.failures),
            "tieredStoreSkipped": str(self.tier_uploads.skipped),
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
        file = self.tier_queues.find(topic, queue_id)
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
        for file in self.tier_queues.all():
            if not file.has_physical(offset):
                continue
            try:
                record = await self.fetcher.reads.read(file, file.read_physical, offset)
            except OSError as error:
                log_failed_read(error, file.topic, file.queue_id)
                continue
            if record is not None:
                return record
        return found

    async def look_queued(self, offset: int) -> bytes:
        """See MessageStore; a message of the tier was found in its queue there."""
        if 0 <= offset < self.min_phy_offset:
            return bytes(await self.look_message_cold(offset))
        return await super().look_queued(offset)

    def why_missing(self, offset: int) -> str:
        """See MessageStore: also of messages that RocketMQ's broker has uploaded."""
        if offset >= APACHE_UPLOADED:
            return "the message was uploaded to the tier by RocketMQ's broker, which does not keep its log offset"
        return super().why_missing(offset)

    # -- topics

    def _forget_topic(self, topic: str) -> None:
        super()._forget_topic(topic)
        # In the same turn: a new topic of the name does not go on behind this one.
        self.tier_queues.drop_topic(topic)

    async def delete_topic(self, topic: str) -> None:
        """See MessageStore: also from the tier."""
        await super().delete_topic(topic)
        await self.tier_queues.destroy_topic(topic)

    async def clean_unused_topics(self, known: Container[str]) -> list[str]:
        """See MessageStore: also from the tier."""
        deleted = await super().clean_unused_topics(known)
        gone = frozenset(deleted)
        failed: OSError | None = None
        # Those too of which there are new ones by now.
        for topic in dict.fromkeys([*deleted, *self.tier_queues.topics()]):
            if topic in gone or (topic not in known and not is_system_topic(topic)):
                try:
                    await self.tier_queues.destroy_topic(topic)
                except OSError as error:  # no later call knows the others any more
                    failed = failed or error
                if topic not in gone:
                    deleted.append(topic)
        if failed is not None:
            raise failed
        return deleted


def _identity(record: Any) -> tuple[int, int]:
    """Queue id and offset of a record: two of one topic are the same message if these are equal."""
    found: tuple[int, int] = _QUEUE(record, AT_QUEUE_ID)
    return found
