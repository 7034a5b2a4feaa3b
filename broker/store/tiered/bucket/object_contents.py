"""What an upload object is made of: the messages of all queues that wait, up to a log offset."""

from collections.abc import Callable, Container, Sequence
from typing import Final

import structlog
import trio

from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.tiered.access.batch import AS_IN_LOG, BatchBuilder, Buffer, Limits, new_memory
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues
from trimq.broker.store.tiered.bucket.object_builder import ObjectBuilder
from trimq.protocol.bucket_object import BLOCK_MESSAGES
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE
from trimq.protocol.tiered_index_batch import KeyItems

_log: Final = structlog.get_logger(__name__)

OBJECT_BYTES: Final = 16 * 1024 * 1024
"""An object covers no more of the log than this, unless its first message alone is larger."""
_SLICE: Final = 200
"""So many queues are looked at between two turns of the loop."""


class ObjectMemory(Buffer):
    """The memory of the records of one object. What it holds is valid until ``clear``."""

    def __init__(self) -> None:
        super().__init__()
        self._used = 0

    def view(self, size: int) -> memoryview:
        """So many bytes, at least one, that no other view has."""
        if self.memory is None or self._used + size > len(self.memory):
            self.memory = new_memory(max(size, OBJECT_BYTES))
            self._used = 0
        self._used += size
        return memoryview(self.memory)[self._used - size : self._used]

    def clear(self) -> None:
        """Use the memory again."""
        self._used = 0

    def release(self) -> None:
        """Free the memory, once no view of it is left."""
        self.memory = None
        self._used = 0


class Contents:
    """The stretch [begin, end) of the log in an object, and what the uploader has to know of its messages.

    ``keys``: (topic id, queue id, items, log offset behind) of each batch; ``counts``: messages by queue; ``queues``:
    the local queues they are from.
    """

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self.messages = 0
        self.bytes = 0
        self.keys: list[tuple[int, int, KeyItems, int]] = []
        self.counts: list[tuple[BucketQueue, int]] = []
        self.queues: dict[tuple[str, int], ConsumeQueue] = {}

    def deleted(self) -> set[tuple[str, int]]:
        """Queues that were deleted meanwhile: what the object has of them does not count."""
        return {key for key, queue in self.queues.items() if queue.deleted}


class ContentsReader:
    """Reads messages from the local store into an object."""

    def __init__(
        self, builder: BatchBuilder, tier: BucketQueues, skipped: Callable[[int], None], *, keys: bool
    ) -> None:
        """``skipped`` gets the numbers of messages that are not there any more. ``keys``: the index needs them."""
        self._builder = builder
        self._tier = tier
        self._skipped = skipped
        self._keys = keys
        self.memory = ObjectMemory()
        self._lost: dict[tuple[str, int], tuple[ConsumeQueue, int, int]] = {}
        """The last range of offsets of a queue that lead to no message: it is neither read nor reported again."""
        self._next: dict[tuple[str, int], tuple[ConsumeQueue, int, int, int]] = {}
        """The next offset of a queue, and its log offsets: the queue is not read until an object reaches it."""

    def keep(self, queues: Container[tuple[str, int]]) -> None:
        """Forget all but these queues."""
        for known in (self._lost, self._next):
            for key in [key for key in known if key not in queues]:
                del known[key]

    async def fill(
        self,
        builder: ObjectBuilder,
        queues: Sequence[ConsumeQueue],
        position: int,
        end: int,
        limit: int,
        *,
        is_edge: bool,
    ) -> Contents:
        """Put the messages of queues, between two log offsets, into an object. Raises OSError.

        ``is_edge``: no record lies over ``end``. Otherwise the object ends where such a record begins. What is behind
        ``limit``, over which no record lies, may not be uploaded.
        """
        contents = Contents(self._tier.end, end)
        while True:
            first = behind = end
            for number, queue in enumerate(queues):
                if number % _SLICE == _SLICE - 1:
                    await trio.lowlevel.checkpoint()
                waiting = await self._fill_queue(builder, contents, queue, end)
                # A unit whose record would lie over the limit, or before all that is not uploaded, is damaged.
                if waiting is not None and position <= waiting[0] < first and waiting[1] <= limit:
                    first, behind = waiting
            first = end if is_edge else first
            contents.end = first
            if first > position or is_edge:
                return contents
            # A single message that is larger than an object: nothing stands before it.
            end = min(limit, max(behind, end + 1))
            is_edge = end == limit

    async def _fill_queue(
        self, builder: ObjectBuilder, contents: Contents, queue: ConsumeQueue, end: int
    ) -> tuple[int, int] | None:
        """Put the next messages of a queue into an object. Raises OSError.

        Returns the log offsets of the message behind them, and behind it; None if there is none.
        """
        if queue.deleted:
            return None
        key = queue.topic, queue.queue_id
        tier = self._tier.find_or_create(queue.topic, queue.queue_id)
        offset = max(tier.commit_offset, queue.min_offset)
        if tier.commit_offset and offset > tier.commit_offset:
            # Not a new queue: what the log had before the tier was switched on is uploaded as far as it is there.
            self._skip(queue, tier.commit_offset, offset)
        lost = self._lost.get(key)
        if lost is not None and lost[0] is queue and lost[1] <= offset < lost[2]:
            offset = lost[2]
        waiting = self._next.get(key)
        if waiting is not None and waiting[:2] == (queue, offset) and waiting[2] >= end:
            return waiting[2:]
        skipped = offset
        while offset < queue.next_offset and not queue.deleted:
            limits = Limits(BLOCK_MESSAGES, OBJECT_BYTES, end)
            built = await self._builder.build(
                queue, offset, AS_IN_LOG, limits, tier.topic_id, self.memory, keys=self._keys
            )
            if built is None:
                break
            if built.batch is None:
                offset = built.skip_to
                continue
            self._skip(queue, skipped, offset)
            batch = built.batch
            builder.add(queue.topic, queue.queue_id, offset, batch.units, batch.records, batch.begin_ms, batch.end_ms)
            count = len(batch.units) // UNIT_SIZE
            offset = skipped = offset + count
            contents.messages += count
            contents.bytes += batch.size
            contents.counts.append((tier, count))
            contents.queues[queue.topic, queue.queue_id] = queue
            if self._keys:
                phy, size, _ = UNIT.unpack_from(batch.units, len(batch.units) - UNIT_SIZE)
                contents.keys.append((tier.topic_id, queue.queue_id, built.keys, phy + size))
        self._skip(queue, skipped, offset)
        if offset < queue.next_offset and not queue.deleted:
            for phy, size, _ in await self._builder.units(queue, offset, 1):
                if size != FILLER_SIZE:
                    self._next[key] = queue, offset, phy, phy + size
                    return phy, phy + size
        return None

    def _skip(self, queue: ConsumeQueue, begin: int, end: int) -> None:
        """Note that a range of offsets, if it is not empty, leads to no message."""
        if begin >= end:
            return
        key = queue.topic, queue.queue_id
        known = self._lost.get(key)
        if known is not None and known[0] is queue and known[1] <= begin <= known[2]:
            begin, first = max(begin, known[2]), known[1]
            if begin >= end:
                return
        else:
            first = begin
        self._lost[key] = queue, first, end
        self._skipped(end - begin)
        _log.warning("messages_not_in_tier", topic=queue.topic, queue=queue.queue_id, begin=begin, end=end)
