"""Builds what is uploaded together: the next messages of a queue, read from the local store.

Records are read through the map of the log's files once they are in memory: a thread brings them there. In the tier
their bytes 28 to 35 hold the position in the queue's stream. The native extension copies the records of a batch in a
thread, and a batch ends where a file of the log ends. It leaves to Python what is unusual: damaged records.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import trio

from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.queue_sizes import QueueFileError
from trimq.broker.store.tiered.container.flat_message_file import Batch
from trimq.protocol.index_batch import make_batch
from trimq.protocol.message_keys import index_keys_of
from trimq.protocol.native import NATIVE, TierBatch
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE
from trimq.protocol.record import (
    AT_BODY_CRC,
    AT_PHYSICAL_OFFSET,
    AT_SYS_FLAG,
    OVERHEAD_V1,
    RecordError,
    decode_head,
    store_time_at,
)
from trimq.protocol.tiered_index_batch import KeyItems, KeysOfMessage, items_of, items_of_bytes
from trimq.protocol.tiered_layout import PHYSICAL

_BATCH: Final = make_batch()
_LONG: Final = struct.Struct(">q")
_SLICE: Final = 256
"""So many records are copied between two turns of the loop."""
AS_IN_LOG: Final = -1
"""Instead of a stream position: the records keep the offsets that they have in the log."""
_IDLE_BUFFERS: Final = 4
_LARGEST_IDLE: Final = 8 * 1024 * 1024
_SPARSE: Final = 16
"""If less than this part of a range of the log is wanted, each record is brought into memory on its own."""


class Limits(NamedTuple):
    """Most messages and bytes of a batch; the room of the last segments; up to which log offset is uploaded.

    A first message that is larger than ``size`` is taken alone.
    """

    messages: int
    size: int
    uploadable: int


class Built(NamedTuple):
    """A batch, and the keys of its messages.

    ``skip_to``: instead of a batch, the queue goes on at this offset, because the units before lead to no message.
    """

    batch: Batch | None
    keys: KeyItems
    skip_to: int = -1


class Buffers:
    """Memory for the records of batches, used again: to allocate megabytes for each takes a millisecond."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []

    @contextmanager
    def one(self) -> Iterator["Buffer"]:
        """A buffer for the block."""
        buffer = Buffer(self._idle.pop() if self._idle else None)
        try:
            yield buffer
        finally:
            if len(self._idle) < _IDLE_BUFFERS and buffer.memory is not None and len(buffer.memory) <= _LARGEST_IDLE:
                self._idle.append(buffer.memory)

    def release(self) -> None:
        """Free the memory that is not in use."""
        self._idle.clear()


def new_memory(size: int) -> mmap.mmap:
    """So many bytes of memory, at least one. The system gets them back when the last view of them is gone.

    malloc would keep them for the thread that asked for them: once it has freed a large piece, it no longer takes such
    pieces from the system one by one.
    """
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Buffer:
    """A buffer that grows as needed. What it holds is valid until the next batch is made with it."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self.memory = memory

    def view(self, size: int) -> memoryview:
        """So many bytes of it, at least one."""
        if self.memory is None or size > len(self.memory):
            self.memory = new_memory(size)
        return memoryview(self.memory)[:size]


class BatchBuilder:
    """Reads batches from the local store."""

    def __init__(self, log: CommitLog, queues: ConsumeQueueStore) -> None:
        self._log = log
        self._queues = queues

    @property
    def log_begin(self) -> int:
        """The log offset of the first message that is there."""
        return self._log.min_offset

    async def units(self, queue: ConsumeQueue, offset: int, count: int) -> list[tuple[int, int, int]]:
        """(log offset, size, tags code) of up to ``count`` units from an offset on. Raises OSError."""
        return list(UNIT.iter_unpack(await self._unit_bytes(queue, offset, count)))

    async def build(
        self,
        queue: ConsumeQueue,
        offset: int,
        position: int,
        limits: Limits,
        topic_id: int,
        buffer: Buffer,
        *,
        keys: bool = True,
    ) -> Built | None:
        """The next messages of a queue; ``position`` is where the first will stand in the stream, or AS_IN_LOG.

        Raises OSError.

        The batch is valid as long as nothing else uses ``buffer``. None if there is none that may be uploaded.
        ``keys``: the index needs them.
        """
        data = await self._unit_bytes(queue, offset, limits.messages)
        if not data:
            return None
        units = np.frombuffer(data, UNIT_TYPE)
        begins, sizes = units["phy"].astype(np.int64), units["size"].astype(np.int64)
        fillers = sizes == FILLER_SIZE
        if fillers[0]:
            return Built(None, _no_keys(), offset + _first(~fillers))
        ends = begins + sizes
        excess = np.cumsum(sizes) > limits.size
        excess[0] = False
        taken = _first(fillers | (ends > limits.uploadable) | excess)
        if not taken:
            return None
        # Damaged units: no reader finds a message there either.
        damaged = (sizes < OVERHEAD_V1) | (begins < self._log.min_offset)
        taken = _first(damaged[:taken])
        if not taken:
            lost = _first(~damaged | (ends > limits.uploadable))
            if lost == len(units) and begins[-1] < self._log.min_offset:
                return Built(None, _no_keys(), await self._first_in_log(queue, offset + lost))
            return Built(None, _no_keys(), offset + lost)
        file = self._log.files.find(int(begins[0]))
        if file is not None:
            # What lies in the next file of the log is the next batch: the extension makes a batch of one file only.
            taken = max(1, _first((ends > file.start + file.size)[:taken]))
        part = _Part(queue, offset, position, data[: taken * UNIT_SIZE], topic_id, keys=keys)
        size = int(sizes[:taken].sum())
        built = await self._built_natively(part, int(begins[:taken].min()), int(ends[:taken].max()), size, buffer)
        if built is None:
            records = await self._records(list(UNIT.iter_unpack(part.units)))
            built = await _built(part, records)
        return built

    async def _first_in_log(self, queue: ConsumeQueue, offset: int) -> int:
        """The first offset, from one on, of a message that the log still has. Raises OSError."""
        end = queue.next_offset
        while offset < end:
            middle = (offset + end) // 2
            found = await self.units(queue, middle, 1)
            if found and found[0][0] < self._log.min_offset:
                offset = middle + 1
            else:
                end = middle
        return offset

    async def _unit_bytes(self, queue: ConsumeQueue, offset: int, count: int) -> bytes:
        """Up to ``count`` units from an offset on. Raises OSError."""
        found = b""
        while len(found) < count * UNIT_SIZE and offset + len(found) // UNIT_SIZE < queue.next_offset:
            begin, wanted = offset + len(found) // UNIT_SIZE, count - len(found) // UNIT_SIZE
            if queue.deleted:
                break
            data = self._queues.read(queue, begin, wanted)
            if data is None:
                try:
                    data = await self._queues.read_cold(queue, begin, wanted)
                except QueueFileError as error:  # the uploads and the cleaner go on with other queues
                    raise OSError(str(error)) from error
            if not data:
                break
            found += data
        return found

    async def _built_natively(self, part: "_Part", begin: int, end: int, size: int, buffer: Buffer) -> Built | None:
        """The batch of records that lie between two log offsets; None if the extension does not make it."""
        extension = NATIVE.extension
        file = self._log.files.find(begin)
        if extension is None or file is None or end > file.start + file.wrote:
            return None
        disk = self._log.files.disk
        first, last = begin - file.start, end - file.start
        queue = (part.queue.topic, part.topic_id, part.queue.queue_id) if part.keys else None

        def make(file: MappedFile = file) -> tuple[memoryview, TierBatch | None]:
            if last - first <= size * _SPARSE:
                _bring_into_memory(file, first, last)
            else:
                for phy, length, _ in UNIT.iter_unpack(part.units):
                    _bring_into_memory(file, phy - file.start, phy - file.start + length)
            target = buffer.view(size)
            # Nothing writes to these records any more: so the extension may read them beside the event loop.
            log = memoryview(file.view)[first:last]
            return target, extension.tier_batch(log, begin, part.units, part.position, target, queue)

        file.hold()
        try:
            target, made = await disk.run(make)
        except extension.NativeFault as fault:
            NATIVE.turn_off(str(fault))
            return None
        finally:
            file.release()
        if made is None:
            return None
        units, entries, begin_ms, end_ms, items, times = made
        batch = Batch(part.offset, (target,), size, units, entries, begin_ms, end_ms)
        return Built(batch, items_of_bytes(items, times))

    async def _records(self, units: list[tuple[int, int, int]]) -> list[bytes]:
        """The bytes of the records, each with the length of its unit, or shorter if the log ends there."""
        first, last = units[0][0], units[-1][0] + units[-1][1]
        wanted = sum(size for _, size, _ in units)
        dense = last - first <= wanted * _SPARSE
        found: list[bytes] = []
        held: MappedFile | None = None
        reached = -1
        try:
            for number, (phy, size, _) in enumerate(units):
                file = self._log.files.find(phy)
                if file is None:
                    found.append(b"")
                    continue
                at = phy - file.start
                if file is not held:
                    if held is not None:
                        held.release()
                    file.hold()
                    held, reached = file, -1
                if at + size > reached and at < file.in_memory_from:
                    end = min(last - file.start, file.wrote) if dense else at + size
                    await self._log.files.disk.run(_bring_into_memory, file, at, end)
                    reached = end
                found.append(bytes(file.view[at : at + size]) if at + size <= file.wrote else b"")
                if number % _SLICE == _SLICE - 1:
                    await trio.lowlevel.checkpoint()
        finally:
            if held is not None:
                held.release()
        return found


class _Part(NamedTuple):
    """Messages of a queue that are uploaded together: offset of the first, its stream position, and their units."""

    queue: ConsumeQueue
    offset: int
    position: int
    units: bytes
    topic_id: int
    keys: bool


def _bring_into_memory(file: MappedFile, begin: int, end: int) -> None:
    """Bring a part of a file of the log, which is written, into memory: for a thread, file held. Raises OSError.

    The messages of several queues lie between each other: a batch of each would read the same part of the log again.
    """
    if begin < file.in_memory_from:
        there = file.in_memory(begin, end)
        if there < end:
            file.read_ahead(there, end)


def _first(flags: Any) -> int:
    """The number of the first that is set; their number if none is."""
    return int(np.argmax(flags)) if flags.any() else len(flags)


def _no_keys() -> KeyItems:
    return items_of(_BATCH, [])


async def _built(part: _Part, records: list[bytes]) -> Built:
    pieces: list[bytes] = []
    tier_units, entries = bytearray(), bytearray()
    messages: list[KeysOfMessage] = []
    keys = _no_keys()
    begin_ms, end_ms = 1 << 63, -(1 << 63)
    topic, queue_id = part.queue.topic, part.queue.queue_id
    at = part.position
    for number, ((phy, size, tags_code), data) in enumerate(zip(UNIT.iter_unpack(part.units), records, strict=True)):
        if number % _SLICE == _SLICE - 1:
            await trio.lowlevel.checkpoint()
        if part.position == AS_IN_LOG:
            at = phy
        is_whole = len(data) == size
        if is_whole and part.position == AS_IN_LOG:
            is_whole = _LONG.unpack_from(data, AT_PHYSICAL_OFFSET)[0] == phy
        if not is_whole:
            if number:
                break
            return Built(None, keys, part.offset + 1)
        sys_flag = int.from_bytes(data[AT_SYS_FLAG : AT_SYS_FLAG + 4], "big")
        time_at = store_time_at(sys_flag)
        store_ms = int.from_bytes(data[time_at : time_at + 8], "big", signed=True)
        begin_ms, end_ms = min(begin_ms, store_ms), max(end_ms, store_ms)
        pieces += (data[:AT_PHYSICAL_OFFSET], _LONG.pack(at), data[AT_PHYSICAL_OFFSET + 8 :])
        tier_units += UNIT.pack(at, size, tags_code)
        entries += PHYSICAL.pack(phy, size, int.from_bytes(data[AT_BODY_CRC : AT_BODY_CRC + 4], "big"))
        if part.keys:
            try:
                head = decode_head(data)
            except RecordError:
                pass  # damaged: readers skip it
            else:
                text = str(data[head.properties_at : head.properties_end], "utf-8", "replace")
                found = index_keys_of(text)
                messages.append(KeysOfMessage(topic, part.topic_id, queue_id, found, at, size, store_ms))
        at += size
    record_bytes = b"".join(pieces)
    size = len(record_bytes)
    batch = Batch(part.offset, (record_bytes,), size, bytes(tier_units), bytes(entries), begin_ms, end_ms)
    return Built(batch, items_of(_BATCH, messages))
