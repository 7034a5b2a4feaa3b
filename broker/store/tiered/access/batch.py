"""Builds what is uploaded together: the next messages of a queue, read from the local store.

Records are read through the map of the log's files once they are in memory: a thread brings them there. In the tier
their bytes 28 to 35 hold the position in the queue's stream.
"""

import struct
from typing import Final, NamedTuple

import trio

from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.queue_sizes import QueueFileError
from trimq.broker.store.tiered.container.flat_message_file import Batch
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT
from trimq.protocol.record import (
    AT_BODY_CRC,
    AT_PHYSICAL_OFFSET,
    AT_SYS_FLAG,
    OVERHEAD_V1,
    RecordError,
    decode_head,
    store_time_at,
)
from trimq.protocol.tiered_layout import PHYSICAL

_LONG: Final = struct.Struct(">q")
_SLICE: Final = 256
"""So many records are copied between two turns of the loop."""
_SPARSE: Final = 16
"""If less than this part of a range of the log is wanted, each record is read on its own."""


class Limits(NamedTuple):
    """Most messages and bytes of a batch; the room of the last segments; up to which log offset is uploaded.

    A first message that is larger than ``size`` is taken alone.
    """

    messages: int
    size: int
    uploadable: int


class Indexed(NamedTuple):
    """A message of a batch as the index needs it: stream position, size, store time in ms, properties as text."""

    position: int
    size: int
    store_ms: int
    properties: str


class Built(NamedTuple):
    """A batch, what the index needs of it, and the store time of its last message.

    ``skip_to``: instead of a batch, the queue goes on at this offset, because the units before lead to no message.
    """

    batch: Batch | None
    indexed: list[Indexed]
    skip_to: int = -1


class BatchBuilder:
    """Reads batches from the local store."""

    def __init__(self, log: CommitLog, queues: ConsumeQueueStore) -> None:
        self._log = log
        self._queues = queues

    async def units(self, queue: ConsumeQueue, offset: int, count: int) -> list[tuple[int, int, int]]:
        """(log offset, size, tags code) of up to ``count`` units from an offset on. Raises OSError."""
        found: list[tuple[int, int, int]] = []
        while len(found) < count and offset + len(found) < queue.next_offset and not queue.deleted:
            data = self._queues.read(queue, offset + len(found), count - len(found))
            if data is None:
                try:
                    data = await self._queues.read_cold(queue, offset + len(found), count - len(found))
                except QueueFileError as error:  # the uploads and the cleaner go on with other queues
                    raise OSError(str(error)) from error
            if not data:
                break
            found += UNIT.iter_unpack(data)
        return found

    async def build(
        self, queue: ConsumeQueue, offset: int, position: int, limits: Limits, *, keys: bool = True
    ) -> Built | None:
        """The next messages of a queue; ``position`` is where the first will stand in the stream. Raises OSError.

        None if there is none that may be uploaded. ``keys``: the index needs them.
        """
        units = await self.units(queue, offset, limits.messages)
        if units and units[0][1] == FILLER_SIZE:
            return Built(None, [], offset + next((n for n, u in enumerate(units) if u[1] != FILLER_SIZE), len(units)))
        total = taken = 0
        for phy, size, _ in units:
            if size == FILLER_SIZE or phy + size > limits.uploadable or (taken and total + size > limits.size):
                break
            total, taken = total + size, taken + 1
        if not taken:
            return None
        del units[taken:]
        if any(size < OVERHEAD_V1 or phy < self._log.min_offset for phy, size, _ in units):
            return Built(None, [], offset + 1)  # a damaged unit: no reader finds a message there either
        records = await self._records(units)
        return await _batch(offset, position, units, records, keys=keys)

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
                    reached = await self._log.files.disk.run(self._log.files.disk.read_ahead, file.fd, at, end)
                found.append(bytes(file.view[at : at + size]) if at + size <= file.wrote else b"")
                if number % _SLICE == _SLICE - 1:
                    await trio.lowlevel.checkpoint()
        finally:
            if held is not None:
                held.release()
        return found


async def _batch(
    offset: int, position: int, units: list[tuple[int, int, int]], records: list[bytes], *, keys: bool
) -> Built:
    pieces: list[bytes] = []
    tier_units, entries = bytearray(), bytearray()
    indexed: list[Indexed] = []
    begin_ms, end_ms = 1 << 62, 0
    at = position
    for number, ((phy, size, tags_code), data) in enumerate(zip(units, records, strict=True)):
        if number % _SLICE == _SLICE - 1:
            await trio.lowlevel.checkpoint()
        if len(data) != size:
            if number:
                break
            return Built(None, [], offset + 1)
        sys_flag = int.from_bytes(data[AT_SYS_FLAG : AT_SYS_FLAG + 4], "big")
        time_at = store_time_at(sys_flag)
        store_ms = int.from_bytes(data[time_at : time_at + 8], "big", signed=True)
        begin_ms, end_ms = min(begin_ms, store_ms), max(end_ms, store_ms)
        pieces += (data[:AT_PHYSICAL_OFFSET], _LONG.pack(at), data[AT_PHYSICAL_OFFSET + 8 :])
        tier_units += UNIT.pack(at, size, tags_code)
        entries += PHYSICAL.pack(phy, size, int.from_bytes(data[AT_BODY_CRC : AT_BODY_CRC + 4], "big"))
        if keys:
            try:
                head = decode_head(data)
            except RecordError:
                pass  # damaged: readers skip it
            else:
                text = str(data[head.properties_at : head.properties_end], "utf-8", "replace")
                indexed.append(Indexed(at, size, store_ms, text))
        at += size
    record_bytes = b"".join(pieces)
    batch = Batch(offset, (record_bytes,), len(record_bytes), bytes(tier_units), bytes(entries), begin_ms, end_ms)
    return Built(batch, indexed)
