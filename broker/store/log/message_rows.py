"""MessageRows: a put of messages that the native extension has read and lays out, from one batch or many requests.

Source: as puts.py; the extension's part is native/core/src/rows.rs.
"""

from collections.abc import Collection, Container, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct

from trimq.broker.store.log.puts import Arrivals, RefusedError
from trimq.broker.store.log.topic_queue import TopicQueue
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.native import Messages
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE

if TYPE_CHECKING:
    from trimq.broker.store.index.index_service import IndexService
    from trimq.broker.store.log.commit_log import CommitLog
    from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore


class MessageRows(Struct, gc=False):
    """Ordinary messages, possibly of many requests, that are laid out together in one file.

    ``queues``: the queues of the messages, in the order in which ``messages`` numbers them; ``counts``: messages for
    each of them. ``source``: the buffer that bodies are copied from. ``is_batch``: the messages came as one batch,
    which has a limit of its own. ``fill`` sets ``starts``, the offset of each queue's first message, and ``replies``,
    the replies to each span of the source.
    """

    messages: Messages
    source: Any
    queues: Sequence[TopicQueue]
    counts: Sequence[int]
    is_batch: bool = False
    starts: Sequence[int] = ()
    offsets: Sequence[int] = ()
    units: bytes = b""
    keys: Any = ()
    replies: Sequence[bytes] = ()
    deleted: Collection[str] = ()

    sys_flag: ClassVar[int] = 0
    wait: ClassVar[bool] = True

    @property
    def topics(self) -> set[str]:
        """See Put."""
        return {queue.topic for queue in self.queues}

    @property
    def count(self) -> int:
        """Number of messages."""
        return sum(self.counts)

    def measure(self, log: "CommitLog") -> int:
        """See Put. The limits of each single message were checked when it was read."""
        for queue in self.queues:
            if queue.deleted:
                remark = f"the topic {queue.topic} has been deleted"
                raise RefusedError(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark)
        total = self.messages.total
        if self.is_batch:
            log.check_batch(total)
        return total

    def fill(self, buffer: memoryview, at: int, physical_offset: int, store_timestamp: int) -> tuple[bytes, int]:
        """See Put. Also raises what ``messages`` raises; then there are no side effects."""
        starts = [queue.next_offset for queue in self.queues]
        messages = self.messages
        total = messages.total
        try:
            head = messages.write(self.source, buffer, at, physical_offset, store_timestamp, starts)
            # Ask the extension for everything that could fail before the messages are stored, and for nothing later:
            # a fault after the append would make the caller store the messages twice.
            self.units, self.keys = messages.units(), messages.keys(store_timestamp)
            self.offsets = messages.physical_offsets()
            if not self.is_batch:
                self.replies = messages.replies()
        except BaseException:
            # The extension may have written a part. Zeros again, so that recovery finds no record here.
            buffer[at : at + total] = bytes(total)
            raise
        self.starts = starts
        # Only now: a fault above must leave the offsets of the queues as they were.
        for queue, added in zip(self.queues, self.counts, strict=True):
            queue.next_offset += added
        return head, starts[0]

    def release_buffers(self) -> None:
        """See Put."""
        self.source = b""

    def is_in(self, topics: Container[str]) -> bool:
        """See Put."""
        for queue in self.queues:  # noqa: SIM110 - any() takes twice as long
            if queue.topic in topics:
                return True
        return False

    def leave_out(self, topics: Collection[str]) -> None:
        """See Put."""
        self.deleted = topics

    def dispatch_into(
        self, index: "IndexService | None", queues: "ConsumeQueueStore | None", _result: PutMessageResult, /
    ) -> None:
        """See Put."""
        if index is not None:
            index.put_run(self.keys)
        if queues is None:
            return
        units, deleted = self.units, self.deleted
        end = 0
        for queue, count, start in zip(self.queues, self.counts, self.starts, strict=True):
            begin, end = end, end + count * UNIT_SIZE
            if deleted and queue.topic in deleted:
                continue
            # ``units`` caches the consume queue of the topic's current life
            to = queue.units
            if to is None or to.deleted:
                to = queue.units = queues.find_or_create(queue.topic, queue.queue_id)
            to.put_units(units[begin:end], start)

    def arrivals(self, _result: PutMessageResult) -> Arrivals:
        """See Put."""
        # One iterator for all queues: each takes its share, also of a deleted topic, so that the shares stay aligned.
        codes = (tags_code for _, _, tags_code in UNIT.iter_unpack(self.units))
        found = []
        for queue, count, start in zip(self.queues, self.counts, self.starts, strict=True):
            tags_codes = list(islice(codes, count))
            if queue.topic not in self.deleted:
                found.append((queue.topic, queue.queue_id, start + 1, tags_codes))
        return found
