"""The commit log: the records of all topics, one after the other, in files of equal size.

An append is a plain function of the event loop. It writes the records into the mapping and returns a result, or it
returns None because the space for them is not ready and writes no record; waiting for space is the job of the
put-message lock (put_lock.py).
Source: RocketMQ's CommitLog and DefaultAppendMessageCallback.
"""

import struct
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final, Protocol

from trimq.broker.store.disk.mapped_file import BLANK_SPACE, MappedFile
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.log.puts import Put, RefusedError
from trimq.broker.store.log.topic_queue import TopicIllegalError, TopicQueue, checked_topic
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol import record

MAX_RECORD_EXTRA: Final = 65_536
"""Bytes that a record may have on top of maxMessageSize: everything except its body."""


_OK: Final = PutMessageStatus.PUT_OK
_ILLEGAL: Final = PutMessageStatus.MESSAGE_ILLEGAL


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


class Space(Protocol):
    """Where the log gets its space from (AllocateMappedFileService)."""

    def poke(self, wanted: int = 0) -> None:
        """Check whether the log runs short of space; a waiting record needs ``wanted`` bytes now. Never blocks."""
        ...

    def take_next(self) -> MappedFile | None:
        """The file after the last one. If it is not ready, request it and return None."""
        ...


class _NoSpace:
    """The space of a log that has not been started."""

    def poke(self, wanted: int = 0) -> None:
        raise RuntimeError(f"the commit log has not been started ({wanted} bytes wanted)")

    def take_next(self) -> MappedFile | None:
        raise RuntimeError("the commit log has not been started")


class CommitLog:
    """Appends and reads. Belongs to the event loop; nothing in it waits."""

    def __init__(
        self,
        files: MappedFileQueue,
        *,
        wall_ms: Callable[[], int],
        max_message_size: int,
        stats: StoreStats,
        first_offset: Callable[[str, int], int] = lambda _topic, _queue_id: 0,
    ) -> None:
        """``stats`` counts the stored messages.

        ``first_offset`` returns the next offset of a queue that is not in the table yet (the end of its consume queue).
        """
        self.files = files
        self._stats = stats
        self.wall_ms = wall_ms
        self._first_offset = first_offset
        self.queues: dict[tuple[str, int], TopicQueue] = {}
        """The queues that messages have been put into since the start; ``queue`` adds the others on demand."""
        self.file: MappedFile | None = None
        self.space: Space = _NoSpace()
        self.poke_at = 0
        """Position in the current file from which on an append calls ``poke``: more space has to be allocated."""
        self._rolled: Callable[[int, int], None] = lambda _blank, _next: None
        self.last_store_timestamp = 0
        """Store time of the newest record. It never decreases, even if the clock is set back."""
        self.set_max_message_size(max_message_size)

    def set_max_message_size(self, value: int) -> None:
        """Set the largest body. A whole record may have 64 KiB more, and must fit into a file together with a BLANK."""
        self.max_message_size = value
        self.max_record = min(value + MAX_RECORD_EXTRA, self.files.size - BLANK_SPACE)
        self.small = min(value, self.max_record, record.MAX_PROPERTIES)
        """A record of up to this size breaks no limit, however it is divided into body and properties."""

    @property
    def limits(self) -> tuple[int, int]:
        """The largest body and the largest record, in bytes."""
        return self.max_message_size, self.max_record

    def start_appending(self, space: Space, rolled: Callable[[int, int], None]) -> None:
        """Called after recovery: from now on the log grows.

        ``rolled(blank_offset, next_offset)`` is called when a BLANK fills the log from the first offset to the second,
        which is the start of the next file.
        """
        self.space = space
        self._rolled = rolled
        self.file = self.files.last
        # Readers need not check records from here on: this process writes them.
        self.files.own_from = self.files.max_offset

    # -- offsets

    @property
    def min_offset(self) -> int:
        """Log offset of the oldest file."""
        return self.files.min_offset

    @property
    def max_offset(self) -> int:
        """Log offset of the next record."""
        return self.files.max_offset

    def queue_offset(self, topic: str, queue_id: int) -> int:
        """The offset that the next message of a queue gets. Raises TopicIllegalError as ``queue`` does."""
        return self.queue(topic, queue_id).next_offset

    def forget_topic(self, topic: str) -> None:
        """Forget a deleted topic: a new topic of the same name starts where its consume queues say."""
        # Callers cache TopicQueue objects; the flag makes them look up the queue again before their next put.
        for key in [key for key in self.queues if key[0] == topic]:
            self.queues.pop(key).deleted = True

    def queue(self, topic: str, queue_id: int) -> TopicQueue:
        """The state that appends to a queue share. Raises TopicIllegalError if no record can carry the topic."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            queue = TopicQueue(topic, queue_id, checked_topic(topic), self._first_offset(topic, queue_id))
            self.queues[topic, queue_id] = queue
        return queue

    # -- appending

    def append(self, put: Put, *, current_file_only: bool = False) -> PutMessageResult | None:
        """Write the records of ``put`` at the end of the log. None if their space is not ready: no record was written.

        ``current_file_only``: never roll over to the next file. A put of messages that do not belong together must not
        close a file in which some of them would still fit.
        Every refusal is decided before the first byte is written.
        """
        # Nothing in here waits, so no other append can come between ``measure`` and the new ``wrote``.
        try:
            size = put.measure(self)
        except RefusedError as error:
            return error.result
        file = self.file
        # One comparison covers two rules. ``append_limit`` is below the end of the reserved pages, so no store hits a
        # page without a block, and it leaves space for the BLANK that closes the file.
        if file is None or file.wrote + size > file.append_limit:
            file = None if current_file_only else self._file_with_space(size)
            if file is None:
                return None
        # Store times in the log never decrease: recovery takes an older record for bytes of an earlier use of the file.
        now = self.wall_ms()
        if now < self.last_store_timestamp:  # noqa: PLR1730 - max() takes three times as long
            now = self.last_store_timestamp
        at = file.wrote
        physical_offset = file.start + at
        buffer = file.buffer
        try:
            head, queue_offset = put.fill(buffer, at, physical_offset, now)
        except struct.error as error:
            return PutMessageResult(_ILLEGAL, remark=f"a number of the message does not fit its field: {error}")
        # From here to the new ``wrote`` nothing may fail: ``fill`` has moved the next offsets of the queues, and an
        # offset without a record would be a gap in its queue.
        # The head, with size and magic, is written last: a process killed midway leaves no valid-looking record.
        buffer[at : at + len(head)] = head
        end = at + size
        # Readers and syncs go up to ``wrote``, so it moves only after all bytes of the records are in the mapping.
        file.wrote = end
        self.last_store_timestamp = now
        stats = self._stats
        stats.put_message_times_total += put.count
        stats.put_message_size_total += size
        if end >= self.poke_at:
            self.space.poke()
        return PutMessageResult(_OK, physical_offset, queue_offset, size, now, put.offsets)

    def append_data(self, data: Any, store_timestamp: int) -> bool:
        """Append bytes of a master's log: whole records, the last of which was stored at ``store_timestamp``.

        They must not go beyond the end of the file that they begin in. False: their space is not ready, and nothing was
        written. The caller has checked the records.
        """
        size = len(data)
        file = self.file
        if file is None or file.is_full:
            file = self.space.take_next()
            if file is None:
                return False
            self.files.append(file)
            self.file = file
        at = file.wrote
        end = at + size
        if end > file.reserved:
            self.space.poke(size)
            return False
        file.buffer[at:end] = data
        file.wrote = end
        self.last_store_timestamp = max(self.last_store_timestamp, store_timestamp)
        if end >= self.poke_at:
            self.space.poke()
        return True

    def queue_to_put(self, topic: str, queue_id: int) -> TopicQueue:
        """As ``queue``, but raises RefusedError if no record can carry the topic or the queue id."""
        if queue_id < 0:
            raise RefusedError(_ILLEGAL, f"there is no queue {queue_id}")
        try:
            return self.queue(topic, queue_id)
        except TopicIllegalError as error:
            raise RefusedError(_ILLEGAL, str(error)) from None

    def check(self, body_length: int, properties_length: int, size: int) -> None:
        """Raise RefusedError if a record breaks a limit. Only needed for records larger than ``small``."""
        if properties_length > record.MAX_PROPERTIES:
            raise RefusedError(
                PutMessageStatus.PROPERTIES_SIZE_EXCEEDED,
                f"the properties have {properties_length} bytes, the limit is {record.MAX_PROPERTIES}",
            )
        if body_length > self.max_message_size:
            raise RefusedError(
                _ILLEGAL, f"the body has {body_length} bytes, the limit (maxMessageSize) is {self.max_message_size}"
            )
        most = self.files.size - BLANK_SPACE
        if size > most:
            raise RefusedError(_ILLEGAL, f"the record would have {size} bytes, a commit log file holds {most}")
        if size > self.max_record:
            raise RefusedError(
                _ILLEGAL,
                f"the record would have {size} bytes, the limit (maxMessageSize + 64 KiB) is {self.max_record}",
            )

    def check_batch(self, size: int) -> None:
        """Raise RefusedError if a batch would take too many bytes of the log."""
        limit = min(self.max_message_size, self.files.size - BLANK_SPACE)
        if size > limit:
            remark = f"the batch would have {size} bytes in the log, the limit is {limit}"
            raise RefusedError(PutMessageStatus.UNKNOWN_ERROR, remark)

    def _file_with_space(self, size: int) -> MappedFile | None:
        """The file that takes ``size`` bytes, after a roll-over if needed; None if the put has to wait for it."""
        file = self.file
        if file is not None:
            if file.wrote + size <= file.append_limit:
                return file
            left = file.size - file.wrote
            if left:
                # Either the record fits and only the reserved part is too short, or even the page of the BLANK is not
                # reserved yet. Both are a matter of the next allocation step.
                if size + BLANK_SPACE <= left or file.reserved - file.wrote < min(left, BLANK_SPACE):
                    self.space.poke(size + BLANK_SPACE)
                    return None
                # Close the file now, even if no next file is ready: a next file without a write buffer may only be used
                # once all of this one is committed, which includes the BLANK.
                record.BLANK.pack_into(file.buffer, file.wrote, left, record.MAGIC_BLANK)
                file.wrote = file.size
                self._rolled(file.end - left, file.end)
        following = self.space.take_next()
        if following is None:
            return None
        self.files.append(following)
        self.file = following
        if size <= following.append_limit:
            return following
        self.space.poke(size + BLANK_SPACE)
        return None

    # -- reading

    def read(self, offset: int, length: int) -> memoryview | bytes | None:
        """Up to ``length`` bytes from ``offset``, at most to the end of its file or of the log; b"" if there are none.

        None if they would have to come from the device: then use ``read_cold``. A view is valid until the next await,
        or for as long as its file is held (``files.find(offset).hold()``).
        """
        file = self.files.find(offset)
        if file is None:
            return b""
        at = offset - file.start
        length = min(length, file.wrote - at)
        return file.read(at, length) if length > 0 else b""

    async def read_cold(self, offset: int, length: int) -> bytes:
        """As ``read``, with a read that may wait for the device."""
        file = self.files.find(offset)
        if file is None:
            return b""
        at = offset - file.start
        length = min(length, file.wrote - at)
        if length <= 0:
            return b""
        # The file may expire during the read; while it is held, its descriptor stays open.
        file.hold()
        try:
            return await self.files.disk.run(file.read_cold, at, length)
        finally:
            file.release()

    async def sha256_of(self, offset: int) -> bytes | None:
        """The hash of the record at a log offset, readable or not; b"" for none, None if the log begins behind it."""
        if offset < self.min_offset:
            return None
        head = await self.read_cold(offset, record.BLANK_SIZE)
        if len(head) < record.BLANK_SIZE:
            return b""
        size, magic = record.SIZE_MAGIC.unpack(head)
        if magic == record.MAGIC_BLANK or not record.OVERHEAD_V1 <= size <= self.max_offset - offset:
            return b""
        return await self.files.disk.run(_sha256, await self.read_cold(offset, size))

    def cool_down(self, in_memory_bytes: int) -> None:
        """Stop reading the log older than ``in_memory_bytes`` through the map: its pages may have been evicted."""
        border = self.max_offset - in_memory_bytes
        for file in reversed(self.files.files):
            if file.in_memory_from == file.size:
                break
            file.in_memory_from = max(file.in_memory_from, min(border - file.start, file.size))
