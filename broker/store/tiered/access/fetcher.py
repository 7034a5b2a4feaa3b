"""Reads from the tier. Source: RocketMQ's MessageStoreFetcherImpl."""

from typing import Final

import structlog
import trio

from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.flat_message_file import FlatMessageFile
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, MessageFilter
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.message_keys import has_key
from trimq.protocol.property_text import decode_properties
from trimq.protocol.record import decode_head

_log: Final = structlog.get_logger(__name__)

_SLICE: Final = 16


class MessageStoreFetcher:
    """Finds messages of the tier for consumers."""

    def __init__(
        self, config: TieredStoreConfig, flat_files: FlatFileStore, index: IndexStoreService | None = None
    ) -> None:
        self._index = index
        self._config = config
        self._flat_files = flat_files
        self.fallbacks = 0
        """Reads that failed and were served by the local store, as far as it could."""
        self.messages = 0

    async def get_cold(
        self, file: FlatMessageFile, offset: int, max_count: int, max_bytes: int, filter: MessageFilter | None
    ) -> GetMessageResult:
        """The messages at an offset in [min_offset, commit_offset) for a consumer. Raises LookupError, OSError."""
        count = max_count if filter is None else self._config.read_ahead_message_count_threshold
        most = min(max_bytes, self._config.read_ahead_message_size_threshold)
        fetched = await file.read_messages(offset, count, most)
        buffers: list[bytes] = []
        following = fetched.next_offset
        for number, message in enumerate(fetched.messages):
            if filter is not None and not await _matches(filter, message.tags_code, message.record, number):
                continue
            buffers.append(message.record)
            if len(buffers) >= max_count:
                following = message.offset + 1
                break
        status = GetMessageStatus.FOUND if buffers else GetMessageStatus.NO_MATCHED_MESSAGE
        self.messages += len(buffers)
        return GetMessageResult(status, following, 0, 0, buffers, len(buffers), sum(map(len, buffers)))

    async def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> list[bytes]:
        """The newest ``max_num`` messages of a topic with a key that were stored in [begin, end] ms; oldest first.

        What cannot be read is left out.
        """
        known = self._flat_files.metadata.topics.get(topic)
        if self._index is None or known is None or max_num <= 0:
            return []
        items = await self._index.query(topic, known.topic_id, key, begin, end)
        items.sort(key=lambda item: item.store_ms, reverse=True)
        found: list[tuple[int, int, bytes]] = []
        for item in items:
            file = self._flat_files.find(topic, item.queue_id)
            if file is None:
                continue
            try:
                record = await file.read_record(item.offset, item.size)
            except OSError as error:
                _log.error("tiered_read_failed", topic=topic, queue=item.queue_id, error=str(error))
                continue
            if record is None:
                continue
            head = decode_head(record)
            properties = decode_properties(str(record[head.properties_at : head.properties_end], "utf-8", "replace"))
            if begin <= head.store_timestamp <= end and has_key(properties, key):
                found.append((head.store_timestamp, head.queue_offset, record))
                if len(found) >= max_num:
                    break
        found.sort()
        return [record for _, _, record in found]

    async def offset_by_time(self, file: FlatMessageFile, end: int, timestamp: int, *, upper: bool) -> int:
        """The offset for a time in ms among the messages below ``end``, see MessageFinder.offset_by_time.

        Raises OSError.
        """
        later = timestamp + 1 if upper else timestamp
        first = low = file.min_offset
        high = end
        while low < high:
            middle = (low + high) // 2
            at, time = middle, -1
            while at < high and time < 0:
                time = await file.store_time(at)
                at += 1
            if time < 0 or time >= later:
                high = middle
            else:
                low = at
        return max(first, low - 1 if upper else low)


async def _matches(filter: MessageFilter, tags_code: int, record: bytes, number: int) -> bool:
    if not filter.match_tags(tags_code):
        return False
    if not filter.needs_properties:
        return True
    if number % _SLICE == _SLICE - 1:
        await trio.lowlevel.checkpoint()
    head = decode_head(record)
    return filter.match_record(record[head.properties_at : head.properties_end])
