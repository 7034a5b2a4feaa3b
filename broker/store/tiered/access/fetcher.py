"""Reads from the tier: for consumers, by time, by key. Source: RocketMQ's MessageStoreFetcherImpl.

Unlike there, a range without a message that a filter takes is not read again but passed over, and a query by key
returns only records that have the key.
"""

import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Final, Protocol

import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.read.get_limits import GetLimits
from trimq.broker.store.read.query import is_answer
from trimq.broker.store.read.record_look import place_of
from trimq.broker.store.tiered.access.ranges import Range
from trimq.broker.store.tiered.access.read_ahead_cache import ReadAheadCache, cache_limit
from trimq.broker.store.tiered.access.taken import Taken
from trimq.broker.store.tiered.access.tier_time import first_stored_from
from trimq.broker.store.tiered.access.timed_reads import TierHangsError, TimedReads
from trimq.broker.store.tiered.container.message_runs import TieredMessage
from trimq.broker.store.tiered.container.tiered_queue import TieredQueue, TieredQueues
from trimq.broker.store.tiered.driver.provider_stats import LATENCIES
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, MessageFilter
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.record import AT_QUEUE_OFFSET, AT_SYS_FLAG, store_time_at
from trimq.protocol.tiered_index_layout import IndexItem
from trimq.remoting.config.malloc import give_back_memory
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.durations import Durations

_log: Final = structlog.get_logger(__name__)

FEW: Final = 32
"""Messages of a range that is read for a request of one message: such requests rarely follow each other."""
_AT_ONCE: Final = 8
"""Records that one query reads at the same time."""
_SECOND_MS: Final = 1000
_time_of_item: Final = attrgetter("store_ms")
OPERATIONS: Final = (
    *("get_message", "get_earliest_message_time", "get_time_by_offset", "get_offset_by_time"),
    "query_message",
)

Steps = Generator[None, None, GetMessageResult | None]


_READERS: Final = 50_000
"""Most pairs of topic and group whose messages are counted apart."""
_CANDIDATES: Final = 1024
"""Most entries of a key that are looked at."""


class Index(Protocol):
    """What finds records of the tier by key: IndexStoreService."""

    async def query(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int, *, topic_id: int | None = None
    ) -> list[IndexItem]:
        """See IndexStoreService."""
        ...


class MessageStoreFetcher:
    """Finds messages of the tier. ``run`` owns the tasks that read ahead."""

    def __init__(
        self,
        config: TieredStoreConfig,
        queues: TieredQueues,
        index: Index | None = None,
        *,
        clock: Clock,
        memory: int,
        limits: GetLimits,
        disk: Disk,
    ) -> None:
        """``memory``: bytes that this process may use in all. ``limits``: how much one pull may get.

        ``disk`` has threads.
        """
        self._config = config
        self._queues = queues
        self.index = index
        self._limits = limits
        self.reads = TimedReads(clock, config.tiered_store_read_timeout)
        self.cache = ReadAheadCache(
            clock,
            self.reads,
            cache_limit(memory, config.cache_rate, config.read_ahead_cache_max_bytes),
            config.read_ahead_cache_expire_duration,
            max_count=config.read_ahead_message_count_threshold,
            max_bytes=config.read_ahead_message_size_threshold,
            give_back=partial(disk.run, give_back_memory),
        )
        self._is_cached = config.read_ahead_cache_enable
        self.fallbacks = 0
        """Reads that failed and were served by the local store, as far as it could."""
        self.messages = 0
        """Messages that consumers got."""
        self.delivered: Counter[tuple[str, str]] = Counter()
        """The same by topic and group; those that are too many are together under two empty names."""
        self.latency = {operation: Durations(LATENCIES) for operation in OPERATIONS}

    async def run(self) -> None:
        """Own the reads, until it is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reads.run)
            nursery.start_soon(self.cache.run)

    @contextmanager
    def _measured(self, operation: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.latency[operation].add(time.perf_counter() - started)

    # -- for consumers

    def get(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
    ) -> GetMessageResult | None:
        """The messages that a consumer gets at ``offset``; None if they have to be read, or filtered by a task."""
        started = time.perf_counter()
        file = self._queues.find(topic, queue_id)
        refused = refusal(file, offset)
        if refused is not None or file is None:
            return refused
        if not self._is_cached:
            return None
        self.cache.accesses += 1
        item = self.cache.get(group, file, offset)
        if item is None:
            return None
        self.cache.hits += 1
        max_bytes, max_count = self._limits.in_memory(max_bytes, max_count)
        steps = self._gather(file, group, item, offset, max_count, max_bytes, filter)
        try:
            next(steps)
        except StopIteration as end:
            result: GetMessageResult = end.value
            self.latency["get_message"].add(time.perf_counter() - started)
            return result
        steps.close()
        return None

    async def get_cold(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
    ) -> GetMessageResult:
        """As ``get``, reading what is not in memory. OFFSET_FOUND_NULL: the read has failed."""
        with self._measured("get_message"):
            file = self._queues.find(topic, queue_id)
            refused = refusal(file, offset)
            if refused is not None or file is None:
                return refused or GetMessageResult(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, offset)
            count = max_count
            limit = self._limits.on_disk if self.cache.look(file, offset) is None else self._limits.in_memory
            max_bytes, max_count = limit(max_bytes, max_count)
            try:
                if self._is_cached:
                    item = await self.cache.fetch(group, file, offset, self._range_count(count))
                else:
                    item = await self._read_directly(group, file, offset, max_count, max_bytes, filter)
            except (OSError, LookupError) as error:
                refused = refusal(file, offset)
                if refused is None:  # else it was deleted meanwhile
                    log_failed_read(error, topic, queue_id, offset)
                    low, high = file.min_offset, file.commit_offset
                    refused = GetMessageResult(GetMessageStatus.OFFSET_FOUND_NULL, offset, low, high)
                return refused
            steps = self._gather(file, group, item, offset, max_count, max_bytes, filter)
            try:
                while True:
                    next(steps)
                    await trio.lowlevel.checkpoint()
            except StopIteration as end:
                result: GetMessageResult = end.value
                return result

    def _range_count(self, max_count: int) -> int:
        return FEW if max_count == 1 else self._config.read_ahead_message_count_threshold

    async def _read_directly(
        self,
        group: str,
        file: TieredQueue,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
    ) -> Range:
        count = max_count if filter is None else self._config.read_ahead_message_count_threshold
        most = min(max_bytes, self._config.read_ahead_message_size_threshold)
        return await self.cache.fetch(group, file, offset, count, most, keep=False)

    def _gather(
        self,
        file: TieredQueue,
        group: str,
        item: Range | None,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
    ) -> Steps:
        """Take messages of a range and of those behind it that are in memory. Yields where others have to run."""
        end = offset + self._config.read_ahead_message_count_threshold
        taken = Taken(max_count, max_bytes, end)
        place = place_of(file.topic, file.queue_id)
        at = offset
        is_full = False
        while item is not None and not is_full:
            following = item.next_offset
            for run, first in item.messages.behind(at):
                if filter is None:
                    last = taken.take(run, first)
                else:
                    last = yield from taken.take_matching(run, first, filter, place)
                if last < len(run.tags_codes):
                    following, is_full = run.offset + last, True
                    break
            at = following
            item = self.cache.get(group, file, at) if not is_full and at < end else None
        self.cache.advance(group, file, offset, at, self._range_count(max_count))
        self._count(file.topic, group, taken.count)
        status = GetMessageStatus.FOUND if taken.count else GetMessageStatus.NO_MATCHED_MESSAGE
        return GetMessageResult(status, at, file.min_offset, file.commit_offset, taken.buffers, taken.count, taken.size)

    def _count(self, topic: str, group: str, messages: int) -> None:
        self.messages += messages
        reader = topic, group
        if reader in self.delivered or len(self.delivered) < _READERS:
            self.delivered[reader] += messages
        else:
            self.delivered["", ""] += messages

    # -- by time

    def _in_memory(self, file: TieredQueue, offset: int) -> TieredMessage | None:
        item = self.cache.look(file, offset)
        return None if item is None else item.messages.get(offset)

    async def _time_of(self, file: TieredQueue, offset: int) -> int:
        message = self._in_memory(file, offset)
        if message is None:
            return await self.reads.read(file, file.store_time, offset)
        return store_time_of(message.record)

    async def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time in ms of a message; -1 if the tier does not have it. Raises OSError."""
        with self._measured("get_time_by_offset"):
            file = self._queues.find(topic, queue_id)
            if file is None or not file.min_offset <= offset < file.commit_offset:
                return -1
            return await self._time_of(file, offset)

    async def earliest_store_time(self, topic: str, queue_id: int) -> int:
        """Store time in ms of the first message of a queue in the tier; -1 if there is none. Raises OSError."""
        with self._measured("get_earliest_message_time"):
            file = self._queues.find(topic, queue_id)
            if file is None or file.min_offset >= file.commit_offset:
                return -1
            return await self._time_of(file, file.min_offset)

    async def offset_by_time(
        self, topic: str, queue_id: int, timestamp: int, *, upper: bool, end: int | None = None
    ) -> int:
        """The offset for a time in ms, see MessageFinder.offset_by_time: in [min_offset, commit_offset] of the tier.

        ``end``: only the messages below it count. Raises OSError.
        """
        with self._measured("get_offset_by_time"):
            file = self._queues.find(topic, queue_id)
            if file is None:
                return 0
            first = file.min_offset
            last = file.commit_offset if end is None else max(first, min(end, file.commit_offset))
            later = timestamp + 1 if upper else timestamp
            found = await first_stored_from(file, first, last, later, partial(self._time_of, file))
            return max(first, found - 1 if upper else found)

    # -- by key

    async def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> list[bytes]:
        """The newest ``max_num`` messages of a topic with a key that were stored in [begin, end] ms; oldest first.

        What cannot be read is left out.
        """
        with self._measured("query_message"):
            topic_id = self._queues.topic_id(topic)
            if self.index is None or topic_id is None or max_num <= 0:
                return []
            find = partial(self.index.query, topic_id=topic_id)
            try:
                items = await self.reads.read(self.index, find, topic, key, _CANDIDATES, begin, end)
            except TierHangsError:
                return []
            items.sort(key=_time_of_item, reverse=True)
            found: list[tuple[int, int, bytes]] = []
            for first in range(0, len(items), _AT_ONCE):
                # Times of entries are exact to a second only.
                if len(found) >= max_num and items[first].store_ms + _SECOND_MS < found[max_num - 1][0]:
                    break
                found += [
                    (store_time_of(record), _queue_offset(record), record)
                    for record in await self._records(topic, items[first : first + _AT_ONCE])
                    if is_answer(record, topic, key, begin, end)
                ]
                found.sort(reverse=True)
                del found[max_num:]
            found.reverse()
            return [record for _, _, record in found]

    async def _records(self, topic: str, items: list[IndexItem]) -> list[bytes]:
        """The records of index entries, read at the same time."""
        found: list[bytes] = []

        async def read(item: IndexItem) -> None:
            file = self._queues.find(topic, item.queue_id)
            if file is None:
                return
            try:
                record = await self.reads.read(file, file.read_record, item.offset, item.size)
            except OSError as error:
                log_failed_read(error, topic, item.queue_id)
                return
            if record is not None:
                found.append(record)

        async with trio.open_nursery() as nursery:
            for item in items:
                nursery.start_soon(read, item)
        return found


def log_failed_read(error: Exception, topic: str, queue_id: int, offset: int | None = None) -> None:
    """Log a failed read, unless the provider hangs, which is logged once when it begins."""
    if not isinstance(error, TierHangsError):
        _log.error("tiered_read_failed", topic=topic, queue=queue_id, offset=offset, error=str(error))


def store_time_of(record: bytes) -> int:
    """Store time in ms of a whole record."""
    at = store_time_at(int.from_bytes(record[AT_SYS_FLAG : AT_SYS_FLAG + 4], "big"))
    return int.from_bytes(record[at : at + 8], "big")


def _queue_offset(record: bytes) -> int:
    return int.from_bytes(record[AT_QUEUE_OFFSET : AT_QUEUE_OFFSET + 8], "big")


def refusal(file: TieredQueue | None, offset: int) -> GetMessageResult | None:
    """The answer if the tier has no message at ``offset``; None if it has."""
    if file is None:
        return GetMessageResult(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, offset)
    low, high = file.min_offset, file.commit_offset
    if high <= 0:
        return GetMessageResult(GetMessageStatus.NO_MESSAGE_IN_QUEUE, offset, low, high)
    if offset < low:
        return GetMessageResult(GetMessageStatus.OFFSET_TOO_SMALL, low, low, high)
    if offset == high:
        return GetMessageResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, high, low, high)
    if offset > high:
        return GetMessageResult(GetMessageStatus.OFFSET_OVERFLOW_BADLY, high, low, high)
    return None
