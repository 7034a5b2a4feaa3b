"""Reads messages of a queue that are all in memory and in one log file: the usual case of a pull.

What these reads decline takes the full path of get_message.
"""

from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.read.get_limits import GetLimits
from trimq.broker.store.read.in_memory_records import (
    Found,
    checked_views,
    in_memory_records,
    place_unpacker,
    tagged,
    views_of,
)
from trimq.broker.store.read.match_properties import matched
from trimq.broker.store.read.record_look import is_message, place_of, properties_of
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import MessageFilter
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.sql92.cost import AT_ONCE

InMemory = tuple[MappedFile, Found, int]
"""The log file, the records found in it, and the next queue offset."""


class InMemoryGetter:
    """The reads that need neither the device nor a pause."""

    def __init__(self, log: CommitLog, queues: ConsumeQueueStore, stats: StoreStats, limits: GetLimits) -> None:
        self._log = log
        self._page_cache = log.files.page_cache
        self._queues = queues
        self._stats = stats
        self._limits = limits

    def get(
        self, queue: ConsumeQueue, offset: int, max_count: int, max_bytes: int, filter: MessageFilter | None
    ) -> InMemory | None:
        """Messages from a readable ``offset`` on that are all in memory and in one log file; else None.

        An empty answer means that the filter wants none of the units that it may check. The views are valid until the
        next await, or as long as the caller holds the file.
        """
        if filter is not None:
            if filter.needs_properties:
                return self._matched(queue, offset, max_count, max_bytes, filter)
            return self._tagged(queue, offset, max_count, max_bytes, filter)
        found = self.ahead(queue, offset, max_count, max_bytes)
        if found is not None:
            self.count(found[1][1])
        return found

    def count(self, messages: int) -> None:
        """Count messages that ``ahead`` has found and that are now sent."""
        self._stats.transferred_messages_total += messages
        self._stats.found_times_total += 1

    def ahead(self, queue: ConsumeQueue, offset: int, max_count: int, max_bytes: int) -> InMemory | None:
        """As ``get`` without a filter, for a consumer that has not pulled yet: it is not counted."""
        limit_bytes, limit_count = self._limits.in_memory(max_bytes, max_count)
        if limit_count < 1:
            return None
        if offset >= queue.tail_offset:
            at = (offset - queue.tail_offset) * UNIT_SIZE
            units: bytes | bytearray | None = queue.tail[at : at + limit_count * UNIT_SIZE]
        else:
            units = self._queues.read(queue, offset, limit_count)
        if not units:
            return None
        fields = place_unpacker(len(units) // UNIT_SIZE)(units)
        file = self._file_of(fields[0])
        if file is None:
            return None
        places, sizes = fields[::2], fields[1::2]
        # Units put by this process agree with the records it wrote. Others came from a file and are checked one by one.
        if offset >= queue.known_from:
            found = views_of(file, self._page_cache, places, sizes, limit_bytes)
        else:
            place = place_of(queue.topic, queue.queue_id)
            found = checked_views(file, self._page_cache, units, places, sizes, limit_bytes, offset, place)
            if found is None:
                found = in_memory_records(file, self._page_cache, units, limit_bytes, limit_count, offset, place)
        return None if found is None else (file, found, offset + found[1])

    def _tagged(
        self, queue: ConsumeQueue, offset: int, max_count: int, max_bytes: int, filter: MessageFilter
    ) -> InMemory | None:
        """As ``get``, for a filter that uses only tags, among units that this process has put."""
        limit_bytes, limit_count = self._limits.in_memory(max_bytes, max_count)
        codes: frozenset[int] | None = getattr(filter, "codes", None)
        if codes is None or offset < queue.known_from:
            return None
        units = self._queues.read(queue, offset, self._limits.units_to_read(limit_count, filter))
        if not units:
            return None
        file = self._file_of(int.from_bytes(units[:8], "big"))
        if file is None:
            return None
        chosen = tagged(units, codes, limit_bytes, limit_count)
        if chosen is None:
            return None
        places, sizes, scanned = chosen
        if not places:
            self._stats.missed_times_total += 1
            return file, ([], 0, 0), offset + scanned
        found = views_of(file, self._page_cache, places, sizes, limit_bytes)
        if found is None:
            return None
        self.count(found[1])
        return file, found, offset + scanned

    def _matched(
        self, queue: ConsumeQueue, offset: int, max_count: int, max_bytes: int, filter: MessageFilter
    ) -> InMemory | None:
        """As ``get``, for a filter of properties. None also if the first units have less than a pull may get."""
        limit_bytes, limit_count = self._limits.in_memory(max_bytes, max_count)
        units = self._queues.read(queue, offset, AT_ONCE)
        if not units or limit_count < 1:
            return None
        file = self._file_of(int.from_bytes(units[:8], "big"))
        if file is None:
            return None
        place = place_of(queue.topic, queue.queue_id)
        found = matched(file, self._page_cache, units, limit_bytes, limit_count, offset, place, filter)
        if found is None:
            return None
        (_, count, _), scanned = found
        following = offset + scanned
        if following < queue.next_offset and scanned == len(units) // UNIT_SIZE and count < limit_count:
            return None
        if count:
            self.count(count)
        else:
            self._stats.missed_times_total += 1
        return file, found[0], following

    def look_properties(self, topic: str, queue_id: int, offset: int) -> bytes | None:
        """The encoded properties of a queue's message; None if it is not there, or not in memory."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.next_offset:
            return None
        units = self._queues.read(queue, offset, 1)
        if not units:
            return None
        phy, size, _ = UNIT.unpack_from(units)
        data = self._log.read(phy, size)
        place = place_of(topic, queue_id)
        if data is None or len(data) != size or not is_message(data, 0, phy, size, offset, place):
            return None
        return properties_of(data, 0, size, place)

    def _file_of(self, first: int) -> MappedFile | None:
        """The log file of the message at offset ``first``; None if it has expired."""
        log = self._log.files
        files = log.files
        if not files:
            return None
        index = (first - files[0].start) // log.size
        return files[index] if 0 <= index < len(files) else None
