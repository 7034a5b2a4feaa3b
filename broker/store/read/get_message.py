"""Reads messages of a queue for a consumer: units, filter, and the records as views of the mapped log.

``get`` answers from memory in the same turn, or returns None: then ``get_cold`` waits for the device. Both run the same
steps, written as a generator that yields each read that has to wait. Source: RocketMQ's
DefaultMessageStore.getMessage, with its statuses, next offsets and limits.
"""

import time
from collections.abc import Generator
from typing import Final, NamedTuple

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.disk.mapped_file import Hold, MappedFile
from trimq.broker.store.disk.page_cache import is_dense
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.read.get_limits import GetLimits
from trimq.broker.store.read.in_memory_getter import InMemoryGetter
from trimq.broker.store.read.read_ahead import ReadAhead
from trimq.broker.store.read.record_look import Place, begins_record, is_message, place_of
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, MessageFilter
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT
from trimq.protocol.record import RecordError, decode_head
from trimq.protocol.sql92.cost import LEAST, SLICE, cost

_FOUND: Final = GetMessageStatus.FOUND
_ITERATE: Final = UNIT.iter_unpack

_log = structlog.get_logger(__name__)
_REPORTED: Final = 1000
"""The most messages that are reported in the broker's log; a consumer may request the same ones again and again."""

ReadRequest = tuple[int, int, int]
"""Offset and length in the log; and up to which offset most of the following bytes will be read too, 0 for none.

``_PAUSE`` reads nothing: other tasks run before the steps continue.
"""
_PAUSE: Final = (0, 0, 0)
Bytes = memoryview | bytes
Steps = Generator[ReadRequest, Bytes, GetMessageResult]


Run = list[tuple[int, int, int]]


class _Chosen(NamedTuple):
    """The units of an answer.

    ``runs`` groups those with adjacent records: log offset, size and queue offset of each.
    """

    messages: int
    scanned: int
    size: int
    runs: list[Run]
    last_phy: int
    status: GetMessageStatus


class MessageGetter:
    """The read path. ``in_memory`` has the reads that are tried first.

    ``memory``: bytes of RAM of this machine. Records further back than the configured part of it count as on disk for
    the limits of a pull.
    """

    def __init__(
        self, log: CommitLog, queues: ConsumeQueueStore, stats: StoreStats, config: MessageStoreConfig, memory: int
    ) -> None:
        self._log = log
        self._queues = queues
        self._stats = stats
        self.limits = GetLimits(config, memory)
        self.in_memory = InMemoryGetter(log, queues, stats, self.limits)
        self._reported: set[tuple[str, int, int]] = set()
        self.read_ahead = ReadAhead(log.files, memory)

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
        _group: str = "",
    ) -> GetMessageResult | None:
        """The messages that a consumer gets at ``offset``; None if they have to come from the device."""
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.next_offset:
            return self._refuse(queue, offset)
        found = self.in_memory.get(queue, offset, max_count, max_bytes, filter)
        if found is not None:
            file, (buffers, count, size), following = found
            low, high = queue.min_offset, queue.next_offset
            if not count:
                return GetMessageResult(GetMessageStatus.NO_MATCHED_MESSAGE, following, low, high)
            file.hold()
            return GetMessageResult(_FOUND, following, low, high, buffers, count, size, False, file.release)
        if filter is not None and filter.needs_properties:
            # The task that serves it pauses between the records. What was looked at is little, and is looked at again.
            return None
        # Not the usual case: take the full path, as far as it goes without the device.
        units = self._queues.read(queue, offset, self.limits.units_to_read(max_count, filter))
        if units is None:
            return None
        steps = self._gather(queue, offset, units, max_count, max_bytes, filter)
        try:
            next(steps)
        except StopIteration as end:
            result: GetMessageResult = end.value
            return result
        # The first read that has to wait: ``get_cold`` starts again from the beginning.
        steps.close()
        return None

    async def get_cold(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
        _group: str = "",
    ) -> GetMessageResult:
        """As ``get``, waiting for the device."""
        started = time.perf_counter()
        queue = self._queues.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.next_offset:
            return self._refuse(queue, offset)
        units = await self._queues.read_cold(queue, offset, self.limits.units_to_read(max_count, filter))
        steps = self._gather(queue, offset, units, max_count, max_bytes, filter)
        result = await self._drive(steps)
        took = int((time.perf_counter() - started) * 1000)
        self._stats.get_message_entire_time_max = max(self._stats.get_message_entire_time_max, took)
        return result

    async def _drive(self, steps: Steps) -> GetMessageResult:
        try:
            request = next(steps)
            while True:
                request = steps.send(await self._read(*request))
        except StopIteration as end:
            result: GetMessageResult = end.value
            return result
        finally:
            steps.close()

    async def _read(self, offset: int, length: int, until: int) -> memoryview | bytes:
        """Bytes of the log, waiting for the device; see ReadRequest."""
        if not length:
            await trio.lowlevel.checkpoint()
            return b""
        await self.read_ahead.bring_in(offset, until)
        data = self._log.read(offset, length)
        return await self._log.read_cold(offset, length) if data is None else data

    def _refuse(self, queue: ConsumeQueue | None, offset: int) -> GetMessageResult:
        """The answer if there is no unit at ``offset``."""
        self._stats.missed_times_total += 1
        if queue is None:
            return GetMessageResult(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE)
        low, high = queue.min_offset, queue.next_offset
        if high == 0:
            return GetMessageResult(GetMessageStatus.NO_MESSAGE_IN_QUEUE)
        if offset < low:
            return GetMessageResult(GetMessageStatus.OFFSET_TOO_SMALL, low, low, high)
        if offset == high:
            return GetMessageResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset, low, high)
        return GetMessageResult(GetMessageStatus.OFFSET_OVERFLOW_BADLY, high, low, high)

    def _gather(
        self,
        queue: ConsumeQueue,
        offset: int,
        units: bytes,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
    ) -> Steps:
        """Choose the units that fit the limits and the filter, then read their records."""
        border = self._log.max_offset - self.limits.memory
        chosen = yield from self._choose(offset, units, max_count, max_bytes, filter, border)
        low, high = queue.min_offset, queue.next_offset
        suggest = chosen.last_phy < border
        if not chosen.messages:
            self._stats.missed_times_total += 1
            # No unit at all: its file is missing. Continue at the next file, as RocketMQ does.
            scanned = chosen.scanned if units else queue.file_of(offset) + queue.units_per_file - offset
            return GetMessageResult(chosen.status, offset + scanned, low, high, suggest_slave=suggest)
        following = offset + chosen.scanned
        result = GetMessageResult(_FOUND, following, low, high, [], chosen.messages, chosen.size, suggest)
        yield from self._read_runs(result, chosen.runs, queue)
        self._stats.transferred_messages_total += result.count
        self._stats.found_times_total += 1
        return result

    def _choose(
        self, offset: int, units: bytes, max_count: int, max_bytes: int, filter: MessageFilter | None, border: int
    ) -> Generator[ReadRequest, Bytes, _Chosen]:
        """Choose among any units: expired, on disk, or unwanted ones. ``border``: in memory from this log offset on."""
        log_min = self._log.min_offset
        match = None if filter is None else filter.match_tags
        by_properties = filter if filter is not None and filter.needs_properties else None
        left = SLICE
        on_disk = True
        limit_bytes, limit_count = self.limits.on_disk(max_bytes, max_count)
        total = count = scanned = phy = 0
        runs: list[Run] = []
        run_end = -1
        status = GetMessageStatus.NO_MATCHED_MESSAGE if units else GetMessageStatus.OFFSET_FOUND_NULL
        for phy, size, tags in _ITERATE(units):
            # Units rise: from the first one in memory on, the limits for memory hold.
            if on_disk and phy >= border:
                on_disk = False
                limit_bytes, limit_count = self.limits.in_memory(max_bytes, max_count)
            if size == FILLER_SIZE or phy < log_min:
                scanned += 1
                status = GetMessageStatus.MESSAGE_WAS_REMOVING
                continue
            # The first message is always given out, even if it alone exceeds the limit.
            if count and (total + size > limit_bytes or count >= limit_count):
                break
            scanned += 1
            if match is not None and not match(tags):
                continue
            if by_properties is not None:
                if left <= 0:
                    left = SLICE
                    yield _PAUSE
                properties = yield from self._properties(phy, size)
                left -= LEAST if properties is None else cost(len(properties), by_properties.terms)
                if properties is None or not by_properties.match_record(properties):
                    continue
            if phy != run_end:
                runs.append([])
            runs[-1].append((phy, size, offset + scanned - 1))
            run_end = phy + size
            total += size
            count += 1
        return _Chosen(count, scanned, total, runs, phy, status)

    def _properties(self, phy: int, size: int) -> Generator[ReadRequest, Bytes, bytes | None]:
        """A record's properties; None for bytes that are not a record, which no filter accepts."""
        data = self._log.read(phy, size)
        if data is None:
            data = yield phy, size, phy + size
        if not begins_record(data, phy, size):
            return None
        try:
            head = decode_head(data)
        except RecordError:
            return None
        return bytes(data[head.properties_at : head.properties_end])

    def _read_runs(
        self, result: GetMessageResult, runs: list[Run], queue: ConsumeQueue
    ) -> Generator[ReadRequest, Bytes, None]:
        """Read adjacent records together; a run with a record that is not as expected is read one by one."""
        log, place = self._log, place_of(queue.topic, queue.queue_id)
        until = runs[-1][-1][0] + runs[-1][-1][1]
        # Read ahead up to the last message, unless the messages are spread so far that most bytes would be unused.
        if not is_dense(until - runs[0][0][0], result.size):
            until = 0
        held: list[MappedFile] = []
        buffers = result.buffers
        file: MappedFile | None = None
        start = end_of_file = -1
        complete = False
        try:
            for run in runs:
                begin = run[0][0]
                end = run[-1][0] + run[-1][1]
                if not start <= begin < end_of_file:
                    file = log.files.find(begin)
                    start, end_of_file = (file.start, file.end) if file is not None else (-1, -1)
                    if file is not None:
                        # Held from the first view on: this generator waits between runs, and the file may expire.
                        file.hold()
                        held.append(file)
                if file is not None and begin - start >= file.in_memory_from and end - start <= file.wrote:
                    data: Bytes = file.view[begin - start : end - start]
                else:
                    read = log.read(begin, end - begin)
                    data = (yield begin, end - begin, until) if read is None else read
                if len(data) == end - begin and _are_messages(data, run, place):
                    buffers.append(data)
                else:
                    yield from self._read_singly(result, run, queue)
            complete = True
        finally:
            # An error, or the caller has closed the generator: no answer will release the files.
            if not complete:
                Hold(held)()
        if not result.buffers:
            result.status = GetMessageStatus.MESSAGE_WAS_REMOVING
        if len(held) == 1:
            result.release = held[0].release
        elif held:
            result.release = Hold(held)

    def _read_singly(
        self, result: GetMessageResult, run: Run, queue: ConsumeQueue
    ) -> Generator[ReadRequest, Bytes, None]:
        """Read the messages of a run one by one: only a record that is the message of its unit is given out."""
        place = place_of(queue.topic, queue.queue_id)
        for phy, size, offset in run:
            data = self._log.read(phy, size)
            if data is None:
                data = yield phy, size, 0
            if len(data) == size and is_message(data, 0, phy, size, offset, place):
                result.buffers.append(bytes(data))
            else:
                result.count -= 1
                result.size -= size
                self._report(queue, offset, phy)

    def _report(self, queue: ConsumeQueue, offset: int, phy: int) -> None:
        """Report a skipped message once, unless it expired with the old end of the log."""
        key = (queue.topic, queue.queue_id, offset)
        if phy < self._log.min_offset or key in self._reported or len(self._reported) >= _REPORTED:
            return
        self._reported.add(key)
        _log.error(
            "message_skipped",
            topic=queue.topic,
            queue=queue.queue_id,
            offset=offset,
            log_offset=phy,
            reason="its unit leads to no record, or to one with another topic, queue or offset",
        )


def _are_messages(data: memoryview | bytes, run: Run, place: Place) -> bool:
    """True if the records of a run, whose bytes are all in ``data``, are the messages of their units."""
    begin = run[0][0]
    return all(is_message(data, phy - begin, phy, size, offset, place) for phy, size, offset in run)
