"""Finds messages by key, by log offset and by time, and reads the units of a queue.

Unlike RocketMQ, a query only returns records that have the key: an equal hash alone is not a match.
Source: RocketMQ's DefaultMessageStore (queryMessage, lookMessageByOffset, getOffsetInQueueByTime).
"""

import struct
from collections.abc import Generator
from enum import Enum
from operator import itemgetter
from typing import Any, Final

from trimq.broker.store.disk.mapped_file import Hold, MappedFile
from trimq.broker.store.index.index_file import Cold
from trimq.broker.store.index.index_service import IndexService
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.read.key_match import matches
from trimq.broker.store.read.record_look import is_message, place_of
from trimq.broker.store.types import QueryMessageResult
from trimq.protocol import record
from trimq.protocol.dispatch_rules import IN_QUEUE, KIND
from trimq.protocol.hashing import crc32
from trimq.protocol.message_keys import has_key
from trimq.protocol.property_text import decode_properties
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE

_FRONT: Final = struct.Struct(">II20xQ").unpack_from
_MAGICS: Final = frozenset({record.MAGIC_V1, record.MAGIC_V2})
_FIRST_READ: Final = 4096
_TIME_READ: Final = 80
_place: Final = itemgetter(0)

Reads = Generator[tuple[int, int] | tuple[ConsumeQueue, int], bytes, Any]
"""Steps of a read. They yield each read that has to wait: (offset, length) of the log, or (queue, offset) of a unit."""

_COPIED: Final = 1 << 20
"""Answers up to this size are copied out of the log; larger ones are sent as views of it."""
InMemoryQuery = tuple[list[bytes], int, int, int]
"""Records, oldest first, their bytes, and store time and log offset of the newest index entry."""


class BoundaryType(Enum):
    """Which message a search by time returns if several messages, or none, have that time."""

    LOWER = "lower"
    UPPER = "upper"


class MessageFinder:
    """Finds single messages. Methods without ``_cold`` answer from memory in the same turn, or return None."""

    def __init__(
        self, log: CommitLog, queues: ConsumeQueueStore, index: IndexService | None, *, max_query: int = 64
    ) -> None:
        self._log = log
        self._page_cache = log.files.page_cache
        self._queues = queues
        self._index = index
        self.max_query = max_query

    # -- by log offset

    def look(self, phy: int) -> Any | None:
        """The record that starts at a log offset: a view (valid until the next await) or a copy.

        b"" if there is none or it is damaged; None if it has to come from the device.
        """
        return _without_waiting(self._message(phy))

    async def look_cold(self, phy: int) -> Any:
        """As ``look``, waiting for the device."""
        return await self._drive(self._message(phy))

    def look_own(self, phy: int) -> memoryview | None:
        """The record at a log offset, if this process has put it and it is in memory: a view, valid until an await."""
        return self._in_memory_record(phy) if phy >= self._log.files.own_from else None

    def own_log(self, readable: int) -> tuple[int, memoryview]:
        """The part of the last file that this process has put, below ``readable``: its start and its bytes."""
        files = self._log.files
        file = files.last
        if file is None:
            return 0, memoryview(b"")
        begin = max(file.in_memory_from, files.own_from - file.start)
        end = max(begin, min(file.wrote, readable - file.start))
        return file.start + begin, file.view[begin:end]

    def _message(self, phy: int) -> Reads:
        data = _if_whole((yield from self._record(phy)))
        return data if data and (yield from self._is_placed(data, phy)) else b""

    def _is_placed(self, data: Any, phy: int) -> Reads:
        """False if a whole record of an earlier process names a queue or an offset that is not its own.

        That is so if the queue has no such offset, or has another valid record at it. A unit that leads to no record is
        no evidence against this one, and records that this process has put are right.
        """
        if phy >= self._log.files.own_from:
            return True
        head = record.decode_head(data)
        if not IN_QUEUE[head.sys_flag & KIND]:
            return True
        topic, offset = str(data[head.topic_at : head.topic_end], "utf-8", "replace"), head.queue_offset
        queue = self._queues.find(topic, head.queue_id)
        if queue is None:
            return not self._queues.has_topic(topic)  # nothing is known any more of a deleted topic
        if offset >= queue.next_offset and phy >= queue.max_phy:
            return True  # not dispatched yet
        if not queue.min_offset <= offset < queue.next_offset:
            return False
        unit = self._queues.read(queue, offset, 1)
        if unit is None:
            unit = yield queue, offset
        if len(unit) < UNIT_SIZE:
            return True
        other, size, _ = UNIT.unpack(unit)
        if other == phy:
            return True
        found = yield from self._record(other)
        place = place_of(topic, head.queue_id)
        return len(found) != size or not is_message(found, 0, other, size, offset, place)

    def _are_placed(self, records: list[bytes]) -> bool:
        """As ``_is_placed`` for all records of an answer from memory; False also if that cannot be decided now."""
        at = record.AT_PHYSICAL_OFFSET
        return all(
            _without_waiting(self._is_placed(data, int.from_bytes(data[at : at + 8], "big"))) for data in records
        )

    def _record(self, phy: int) -> Reads:
        if phy < self._log.min_offset or phy >= self._log.max_offset:
            return b""
        data = self._log.read(phy, _FIRST_READ)
        if data is None:
            data = yield phy, _FIRST_READ
        if len(data) < record.OVERHEAD_V1:
            return b""
        size, magic = record.SIZE_MAGIC.unpack_from(data)
        if magic not in (record.MAGIC_V1, record.MAGIC_V2) or not record.OVERHEAD_V1 <= size <= self._log.files.size:
            return b""
        at = record.AT_PHYSICAL_OFFSET
        if int.from_bytes(data[at : at + 8], "big") != phy:
            return b""
        # The length is only used after the record has named its own offset: other bytes could request any length.
        if size > len(data):
            data = self._log.read(phy, size)
            if data is None:
                data = yield phy, size
        return data[:size] if len(data) >= size else b""

    def _in_memory_record(self, phy: int) -> memoryview | None:
        """The record at a log offset if it can be read through the map; None otherwise."""
        file = self._log.files.find(phy)
        if file is None:
            return None
        at = phy - file.start
        end = at + record.OVERHEAD_V1
        if end > file.wrote or (at < file.in_memory_from and not self._page_cache.covers(file, at, end)):
            return None
        size, magic, place = _FRONT(file.view, at)
        if place != phy or magic not in _MAGICS or not record.OVERHEAD_V1 <= size <= file.wrote - at:
            return None
        if at < file.in_memory_from and not self._page_cache.covers(file, at, at + size):
            return None
        return file.view[at : at + size]

    # -- by key

    def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> QueryMessageResult | None:
        """Messages of a topic with ``key`` that were stored in [begin, end] ms: the newest ``max_num``, oldest first.

        A key is UNIQ_KEY, a word of KEYS, or ``T#`` and the tag. None if the device is needed.
        """
        if self._index is None:
            return QueryMessageResult([])
        limit = min(max_num, self.max_query)
        if limit <= 0:
            return QueryMessageResult([])
        try:
            offsets = self._index.select(topic, key, begin, end, _candidates(limit))
        except Cold:
            return None
        found = matches(self._log.files, offsets, topic, key, limit, (begin, end), _COPIED)
        if found is None or (offsets and offsets[-1] < self._log.files.own_from and not self._are_placed(found[0])):
            result: QueryMessageResult | None = _without_waiting(self._match(offsets, topic, key, limit, begin, end))
            return result
        records, size = found
        timestamp, last_phy = self._index.last_update
        return QueryMessageResult(records, len(records), size, timestamp, last_phy)

    def query_in_memory(
        self, topic: str, key: str, max_num: int, begin: int, end: int, most: int
    ) -> InMemoryQuery | None:
        """As ``query``, if records of up to ``most`` bytes are found and all candidates are usual and in memory."""
        index, limit = self._index, min(max_num, self.max_query)
        if index is None or limit <= 0:
            return None
        try:
            offsets = index.select(topic, key, begin, end, _candidates(limit))
        except Cold:
            return None
        found = matches(self._log.files, offsets, topic, key, limit, (begin, end), most)
        if not found or not found[0] or (offsets[-1] < self._log.files.own_from and not self._are_placed(found[0])):
            return None
        return (*found, *index.last_update)

    async def query_cold(self, topic: str, key: str, max_num: int, begin: int, end: int) -> QueryMessageResult:
        """As ``query``, waiting for the device."""
        index, limit = self._index, min(max_num, self.max_query)
        if index is None or limit <= 0:
            return QueryMessageResult([])
        offsets = await index.select_cold(topic, key, begin, end, _candidates(limit))
        result: QueryMessageResult = await self._drive(self._match(offsets, topic, key, limit, begin, end))
        return result

    def _match(self, offsets: list[int], topic: str, key: str, limit: int, begin: int, end: int) -> Reads:
        """Read the candidates, newest first, and select those that have the key."""
        found: list[tuple[int, Any, MappedFile | None]] = []
        complete = False
        try:
            for phy in offsets:
                data = self._in_memory_record(phy)
                if data is None:
                    data = yield from self._record(phy)
                if not data or not is_answer(data, topic, key, begin, end):
                    continue
                if not (yield from self._is_placed(data, phy)):
                    continue
                # A view is kept until the answer is sent: its file must stay mapped. Bytes are a copy and need no hold.
                file = self._log.files.find(phy) if type(data) is memoryview else None
                if file is not None:
                    file.hold()
                found.append((phy, data, file))
                if len(found) >= limit:
                    break
            complete = True
        finally:
            # An error, or the caller has closed the generator: no answer will release the files.
            if not complete:
                _release(found)
        found.sort(key=_place)
        timestamp, last_phy = self._index.last_update if self._index is not None else (0, 0)
        buffers = [data for _, data, _ in found]
        hold = Hold([file for _, _, file in found if file is not None])
        return QueryMessageResult(buffers, len(buffers), sum(map(len, buffers)), timestamp, last_phy, hold)

    # -- by time

    async def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Store timestamp (ms) of a queue's message; -1 if there is none."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.next_offset:
            return -1
        return await self._time_of(queue, offset)

    async def earliest_store_time(self, topic: str, queue_id: int) -> int:
        """Store timestamp of a queue's first message; -1 if it has none."""
        queue = self._queues.find(topic, queue_id)
        return -1 if queue is None else await self.store_time(topic, queue_id, queue.min_offset)

    async def offset_by_time(
        self, topic: str, queue_id: int, timestamp: int, boundary: BoundaryType = BoundaryType.LOWER
    ) -> int:
        """The queue offset for a time in ms.

        LOWER: the first message stored at that time or later, or the end of the queue if all are older. UPPER: the last
        message stored at that time or earlier. Always in [min, max] of the queue.
        """
        queue = self._queues.find(topic, queue_id)
        if queue is None:
            return 0
        later = timestamp if boundary is BoundaryType.LOWER else timestamp + 1
        low, high = queue.min_offset, queue.next_offset
        while low < high:
            middle = (low + high) // 2
            at, time = middle, -1
            # Fillers have no time: take the time of the next message that has one.
            while at < high and time < 0:
                time = await self._time_of(queue, at)
                at += 1
            if time < 0 or time >= later:
                high = middle
            else:
                low = at
        if boundary is BoundaryType.UPPER:
            low -= 1
        return max(queue.min_offset, min(low, queue.next_offset))

    async def _time_of(self, queue: ConsumeQueue, offset: int) -> int:
        """Store timestamp of the record that a unit points to; -1 for a filler or an expired record."""
        unit = self._queues.read(queue, offset, 1)
        if unit is None:
            unit = await self._queues.read_cold(queue, offset, 1)
        if len(unit) < UNIT_SIZE:
            return -1
        phy, size, _ = UNIT.unpack(unit)
        if size == FILLER_SIZE or phy < self._log.min_offset:
            return -1
        return await self.time_at(phy)

    async def time_at(self, phy: int) -> int:
        """Store timestamp of the record that starts at a log offset; -1 if there is none."""
        data = self._log.read(phy, _TIME_READ)
        if data is None:
            data = await self._log.read_cold(phy, _TIME_READ)
        return store_timestamp_of(data, phy)

    # -- units

    def look_units(self, topic: str, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]] | None:
        """As ``units``, at most those of one file; None if they have to come from the device."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.next_offset:
            return []
        data = self._queues.read(queue, offset, count)
        return None if data is None else list(UNIT.iter_unpack(data[: len(data) // UNIT_SIZE * UNIT_SIZE]))

    async def units(self, topic: str, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]]:
        """(log offset, size, tags code) of up to ``count`` units from ``offset`` on."""
        units: list[tuple[int, int, int]] = []
        queue = self._queues.find(topic, queue_id)
        while queue is not None and len(units) < count and queue.min_offset <= offset < queue.next_offset:
            data = await self._queues.read_cold(queue, offset, count - len(units))
            if not data:
                break
            found = list(UNIT.iter_unpack(data))
            units += found
            offset += len(found)
        return units

    async def _drive(self, steps: Reads) -> Any:
        try:
            request = next(steps)
            while True:
                request = steps.send(await self._read_cold(request))
        except StopIteration as end:
            return end.value
        finally:
            steps.close()

    async def _read_cold(self, request: tuple[int, int] | tuple[ConsumeQueue, int]) -> bytes:
        place, number = request
        if isinstance(place, ConsumeQueue):
            return await self._queues.read_cold(place, number, 1)
        return await self._log.read_cold(place, number)


def store_timestamp_of(data: Any, phy: int) -> int:
    """Store timestamp of the record whose first bytes are ``data``; -1 if they are not those of a record at ``phy``."""
    if len(data) < _TIME_READ:
        return -1
    magic = record.SIZE_MAGIC.unpack_from(data)[1]
    at = record.AT_PHYSICAL_OFFSET
    if magic not in (record.MAGIC_V1, record.MAGIC_V2) or int.from_bytes(data[at : at + 8], "big") != phy:
        return -1
    at = record.AT_SYS_FLAG
    at = record.store_time_at(int.from_bytes(data[at : at + 4], "big"))
    return int.from_bytes(data[at : at + 8], "big")


def _candidates(limit: int) -> int:
    """How many places to take from the index: some may belong to other keys with the same hash."""
    return 2 * limit + 16


def _without_waiting(steps: Reads) -> Any | None:
    """The result of the steps if they need not wait; else None."""
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    steps.close()
    return None


def is_answer(data: Any, topic: str, key: str, begin: int, end: int) -> bool:
    """True if a record is of the topic, has the key, was stored between two times (ms), and its body is whole."""
    try:
        head = record.decode_head(data)
    except record.RecordError:
        return False
    if not begin <= head.store_timestamp <= end or bytes(data[head.topic_at : head.topic_end]) != topic.encode():
        return False
    text = str(data[head.properties_at : head.properties_end], "utf-8", "replace")
    return has_key(decode_properties(text), key) and _is_whole(data, head)


def _is_whole(data: Any, head: record.RecordHead) -> bool:
    """True if the body is the one that was stored: an index entry may lead to a record that recovery skipped."""
    body = data[head.body_at : head.body_end]
    return not body or crc32(body) == head.body_crc


def _if_whole(data: Any) -> Any:
    """The bytes of a record; b"" if they are damaged."""
    try:
        return data if data and _is_whole(data, record.decode_head(data)) else b""
    except record.RecordError:
        return b""


def _release(found: list[tuple[int, Any, MappedFile | None]]) -> None:
    while found:
        file = found.pop()[2]
        if file is not None:
            file.release()
