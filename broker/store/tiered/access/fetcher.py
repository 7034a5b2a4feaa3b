"""Reads from the tier. Source: RocketMQ's MessageStoreFetcherImpl."""

from typing import Final

import trio

from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.flat_message_file import FlatMessageFile
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, MessageFilter
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.record import decode_head

_SLICE: Final = 16


class MessageStoreFetcher:
    """Finds messages of the tier for consumers."""

    def __init__(self, config: TieredStoreConfig, flat_files: FlatFileStore) -> None:
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
