"""The commit log: all records of all topics, one after the other.

An append is a plain function: it either puts the record into the mapping and returns, or it changes nothing and says
that it needs room (``None``); waiting for room is the put-message lock's business (put_lock.py).
Source: RocketMQ's CommitLog and DefaultAppendMessageCallback.
"""

import struct
from collections.abc import Callable
from typing import Final, Protocol

from trimq.broker.store.disk.mapped_file import BLANK_ROOM, MappedFile
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.log.puts import Put, RefusedError
from trimq.broker.store.log.topic_queue import TopicIllegalError, TopicQueue, checked_topic
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol import record

MAX_RECORD_EXTRA: Final = 65_536
"""What a record may have beyond maxMessageSize for everything but its body."""


_OK: Final = PutMessageStatus.PUT_OK
_ILLEGAL: Final = PutMessageStatus.MESSAGE_ILLEGAL


class Room(Protocol):
    """Where the log gets its space from (AllocateMappedFileService)."""

    def poke(self, wanted: int = 0) -> None:
        """Look whether the log needs more room, at once ``wanted`` bytes for a record that waits; returns at once."""
        ...

    def take_next(self) -> MappedFile | None:
        """The file after the last one if it is ready; else it is made, and None is returned."""
        ...


class _NoRoom:
    """The room of a log that does not grow yet."""

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
        """``stats`` counts what is put.

        ``first_offset`` tells the next offset of a queue that is not in the table yet (its consume queue's end).
        """
        self.files = files
        self._stats = stats
        self.wall_ms = wall_ms
        self._first_offset = first_offset
        self.queues: dict[tuple[str, int], TopicQueue] = {}
        """Those that something was put into; others are made by ``queue``."""
        self.file: MappedFile | None = None
        self.room: Room = _NoRoom()
        self.poke_at = 0
        """Position in the current file from which on an append has to call ``poke``: more room has to be made ready."""
        self._rolled: Callable[[int, int], None] = lambda _blank, _next: None
        self.last_store_timestamp = 0
        """Store time of the newest record: later ones never get an earlier one."""
        self.set_max_message_size(max_message_size)

    def set_max_message_size(self, value: int) -> None:
        """Largest body; a whole record may have 64 KiB more, and has to fit into a file with room for a BLANK."""
        self.max_message_size = value
        self.max_record = min(value + MAX_RECORD_EXTRA, self.files.size - BLANK_ROOM)
        self.small = min(value, self.max_record, record.MAX_PROPERTIES)
        """No limit is broken by a record of this size, whatever it is made of."""

    @property
    def limits(self) -> tuple[int, int]:
        """Most bytes of a body, and of a whole record."""
        return self.max_message_size, self.max_record

    def start_appending(self, room: Room, rolled: Callable[[int, int], None]) -> None:
        """After recovery: from here on the log grows.

        ``rolled`` hears that a BLANK fills the log from the first offset to the second, where the next file begins.
        """
        self.room = room
        self._rolled = rolled
        self.file = self.files.last
        self.files.own_from = self.files.max_offset

    # -- offsets

    @property
    def min_offset(self) -> int:
        """Where the oldest file begins."""
        return self.files.min_offset

    @property
    def max_offset(self) -> int:
        """Where the next record goes."""
        return self.files.max_offset

    def queue_offset(self, topic: str, queue_id: int) -> int:
        """The offset that the next message of a queue gets. Raises TopicIllegalError."""
        return self.queue(topic, queue_id).next_offset

    def forget_topic(self, topic: str) -> None:
        """A topic is gone: a new one of its name begins where its consume queues say."""
        for key in [key for key in self.queues if key[0] == topic]:
            self.queues.pop(key).gone = True

    def queue(self, topic: str, queue_id: int) -> TopicQueue:
        """What appends to a queue work with. Raises TopicIllegalError."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            queue = TopicQueue(topic, queue_id, checked_topic(topic), self._first_offset(topic, queue_id))
            self.queues[topic, queue_id] = queue
        return queue

    # -- appending

    def append(self, put: Put, *, here: bool = False) -> PutMessageResult | None:
        """Put the records at the end of the log; None if there is no room ready for them, and nothing has happened.

        ``here``: only where the current file has it. A put of several that do not belong together is not to close a
        file in which some of them have room.
        Any refusal is found before the first byte is written.
        """
        try:
            size = put.measure(self)
        except RefusedError as error:
            return error.result
        file = self.file
        if file is None or file.wrote + size > file.append_limit:
            file = None if here else self._make_room(size)
            if file is None:
                return None
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
        # the head goes in last: a process that is killed half-way leaves nothing that looks like a record
        buffer[at : at + len(head)] = head
        end = at + size
        file.wrote = end
        self.last_store_timestamp = now
        stats = self._stats
        stats.put_message_times_total += put.count
        stats.put_message_size_total += size
        if end >= self.poke_at:
            self.room.poke()
        return PutMessageResult(_OK, physical_offset, queue_offset, size, now, put.offsets)

    def queue_to_put(self, topic: str, queue_id: int) -> TopicQueue:
        """As ``queue``. Raises RefusedError where no record can carry the topic or the queue id."""
        if queue_id < 0:
            raise RefusedError(_ILLEGAL, f"there is no queue {queue_id}")
        try:
            return self.queue(topic, queue_id)
        except TopicIllegalError as error:
            raise RefusedError(_ILLEGAL, str(error)) from None

    def check(self, body_length: int, properties_length: int, size: int) -> None:
        """Raises RefusedError where a record that is larger than ``small`` breaks a limit."""
        if properties_length > record.MAX_PROPERTIES:
            raise RefusedError(
                PutMessageStatus.PROPERTIES_SIZE_EXCEEDED,
                f"the properties have {properties_length} bytes, the limit is {record.MAX_PROPERTIES}",
            )
        if body_length > self.max_message_size:
            raise RefusedError(
                _ILLEGAL, f"the body has {body_length} bytes, the limit (maxMessageSize) is {self.max_message_size}"
            )
        most = self.files.size - BLANK_ROOM
        if size > most:
            raise RefusedError(_ILLEGAL, f"the record would have {size} bytes, a commit log file holds {most}")
        if size > self.max_record:
            raise RefusedError(
                _ILLEGAL,
                f"the record would have {size} bytes, the limit (maxMessageSize + 64 KiB) is {self.max_record}",
            )

    def check_batch(self, size: int) -> None:
        """Raises RefusedError where a batch would take too much of the log."""
        limit = min(self.max_message_size, self.files.size - BLANK_ROOM)
        if size > limit:
            remark = f"the batch would have {size} bytes in the log, the limit is {limit}"
            raise RefusedError(PutMessageStatus.UNKNOWN_ERROR, remark)

    def _make_room(self, size: int) -> MappedFile | None:
        """The file that takes a record of ``size`` bytes, or None where somebody has to wait for it."""
        file = self.file
        if file is not None:
            if file.wrote + size <= file.append_limit:
                return file
            left = file.size - file.wrote
            if left:
                if size + BLANK_ROOM <= left or file.reserved - file.wrote < min(left, BLANK_ROOM):
                    self.room.poke(size + BLANK_ROOM)
                    return None
                # closed at once: the next file may have to wait until all of this one is committed
                record.BLANK.pack_into(file.buffer, file.wrote, left, record.MAGIC_BLANK)
                file.wrote = file.size
                self._rolled(file.end - left, file.end)
        following = self.room.take_next()
        if following is None:
            return None
        self.files.append(following)
        self.file = following
        if size <= following.append_limit:
            return following
        self.room.poke(size + BLANK_ROOM)
        return None

    # -- reading

    def read(self, offset: int, length: int) -> memoryview | bytes | None:
        """Up to ``length`` bytes from ``offset`` to the end of its file or of the log; b"" where nothing lies there.

        None where they would have to come from the device: then ``read_cold``. A view is only good for as long as its
        file is held (``files.find(offset).hold()``) or until the next await.
        """
        file = self.files.find(offset)
        if file is None:
            return b""
        at = offset - file.start
        length = min(length, file.wrote - at)
        return file.read(at, length) if length > 0 else b""

    async def read_cold(self, offset: int, length: int) -> bytes:
        """The same by a read that may wait for the device."""
        file = self.files.find(offset)
        if file is None:
            return b""
        at = offset - file.start
        length = min(length, file.wrote - at)
        if length <= 0:
            return b""
        file.hold()
        try:
            return await self.files.disk.run(file.read_cold, at, length)
        finally:
            file.release()

    def cool_down(self, in_memory_bytes: int) -> None:
        """Take what lies further back than ``in_memory_bytes`` from the map: its pages may have left memory."""
        border = self.max_offset - in_memory_bytes
        for file in reversed(self.files.files):
            if file.in_memory_from == file.size:
                break
            file.in_memory_from = max(file.in_memory_from, min(border - file.start, file.size))
