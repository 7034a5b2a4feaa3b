"""The commit log: all records of all topics, one after the other.

An append is a plain function: it either puts the record into the mapping and returns, or it changes nothing and says
that it needs room (``None``); waiting for room is the put-message lock's business (put_lock.py).
Source: RocketMQ's CommitLog and DefaultAppendMessageCallback.
"""

import struct
from collections.abc import Callable
from typing import Final, Protocol

from trimq.broker.store.mapped_file import BLANK_ROOM, MappedFile
from trimq.broker.store.mapped_file_queue import MappedFileQueue
from trimq.broker.store.topic_queue import V4_HOSTS, TopicIllegalError, TopicQueue, checked_topic
from trimq.broker.store.types import MessageBatch, MessageInner, PutMessageResult, PutMessageStatus
from trimq.protocol import record, sysflag
from trimq.protocol.hashing import crc32
from trimq.protocol.record_batch import BatchHead

MAX_RECORD_EXTRA: Final = 65_536
"""What a record may have beyond maxMessageSize for everything but its body."""


_V6_FLAGS: Final = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
_NO_OFFSET: Final = (sysflag.TRANSACTION_PREPARED, sysflag.TRANSACTION_ROLLBACK)
_PACK_V4: Final = record.layout(0).pack
_FIXED_V4: Final = record.layout(0).size
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
        first_offset: Callable[[str, int], int] = lambda _topic, _queue_id: 0,
    ) -> None:
        """``first_offset`` tells the next offset of a queue that is not in the table yet (its consume queue's end)."""
        self.files = files
        self.wall_ms = wall_ms
        self._first_offset = first_offset
        self._queues: dict[tuple[str, int], TopicQueue] = {}
        self.file: MappedFile | None = None
        self.room: Room = _NoRoom()
        self.poke_at = 0
        """Position in the current file from which on an append has to call ``poke``: more room has to be made ready."""
        self.on_roll: Callable[[int, int], None] = lambda _blank, _next: None
        """Hears that a BLANK fills the log from the first offset to the second, where the next file begins."""
        self.last_store_timestamp = 0
        """Store time of the newest record: later ones never get an earlier one."""
        self.set_max_message_size(max_message_size)

    def set_max_message_size(self, value: int) -> None:
        """Largest body; a whole record may have 64 KiB more, and has to fit into a file with room for a BLANK."""
        self.max_message_size = value
        self._max_record = min(value + MAX_RECORD_EXTRA, self.files.size - BLANK_ROOM)
        self.small = min(value, self._max_record, record.MAX_PROPERTIES)
        """No limit is broken by a record of this size, whatever it is made of."""

    def start_appending(self, room: Room) -> None:
        """After recovery: from here on the log grows."""
        self.room = room
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
        for key in [key for key in self._queues if key[0] == topic]:
            self._queues.pop(key).gone = True

    def queue(self, topic: str, queue_id: int) -> TopicQueue:
        """What appends to a queue work with. Raises TopicIllegalError."""
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = TopicQueue(topic, queue_id, checked_topic(topic), self._first_offset(topic, queue_id))
            self._queues[topic, queue_id] = queue
        return queue

    # -- appending

    def append(self, message: MessageInner) -> PutMessageResult | None:
        """Put one record at the end of the log; None if there is no room ready for it, and nothing has happened.

        Any refusal is found before the first byte is written.
        """
        queue = self._queues.get((message.topic, message.queue_id))
        if queue is None:
            try:
                queue = self.queue(message.topic, message.queue_id)
            except TopicIllegalError as error:
                return PutMessageResult(_ILLEGAL, remark=str(error))
        body = message.body
        properties = message.properties
        born_host = message.born_host
        store_host = message.store_host
        sys_flag = message.sys_flag
        body_length = len(body)
        properties_length = len(properties)
        hosts = len(born_host) + len(store_host)
        size = queue.overhead + hosts + body_length + properties_length
        if (
            body_length > self.max_message_size
            or size > self._max_record
            or properties_length > record.MAX_PROPERTIES
            or message.queue_id < 0
        ):
            return self._refusal(body_length, properties_length, size, message.queue_id)
        file = self.file
        if file is None or file.wrote + size > file.append_limit:
            file = self._make_room(size)
            if file is None:
                return None
        now = self.wall_ms()
        if now < self.last_store_timestamp:  # noqa: PLR1730 - max() takes three times as long
            now = self.last_store_timestamp
        at = file.wrote
        physical_offset = file.start + at
        takes_offset = sys_flag & 0xC not in _NO_OFFSET
        queue_offset = queue.next_offset if takes_offset else 0
        if hosts == V4_HOSTS:
            sys_flag &= ~_V6_FLAGS
            pack, body_at = _PACK_V4, at + _FIXED_V4
        else:
            sys_flag = sys_flag & ~_V6_FLAGS | record.host_flags(born_host, store_host)
            layout = record.layout(sys_flag)
            pack, body_at = layout.pack, at + layout.size
        try:
            head = pack(
                size,
                queue.magic,
                crc32(body),
                message.queue_id,
                message.flag,
                queue_offset,
                physical_offset,
                sys_flag,
                message.born_timestamp,
                born_host,
                now,
                store_host,
                message.reconsume_times,
                message.prepared_transaction_offset,
                body_length,
            )
        except struct.error as error:
            return PutMessageResult(_ILLEGAL, remark=f"a number of the message does not fit its field: {error}")
        # the head goes in last: a process that is killed half-way leaves nothing that looks like a record
        buffer = file.buffer
        body_end = body_at + body_length
        end = at + size
        buffer[body_at:body_end] = body
        buffer[body_end:end] = queue.topic_part + properties_length.to_bytes(2, "big") + properties
        buffer[at:body_at] = head
        file.wrote = end
        if takes_offset:
            queue.next_offset = queue_offset + 1
        self.last_store_timestamp = now
        if end >= self.poke_at:
            self.room.poke()
        return PutMessageResult(_OK, physical_offset, queue_offset, size, now)

    def allows(self, body_length: int, properties_length: int, size: int) -> bool:
        """Whether a record that is larger than ``small`` keeps every limit."""
        return (
            body_length <= self.max_message_size
            and size <= self._max_record
            and properties_length <= record.MAX_PROPERTIES
        )

    def _refusal(self, body_length: int, properties_length: int, size: int, queue_id: int) -> PutMessageResult:
        """Which limit a message breaks."""
        if properties_length > record.MAX_PROPERTIES:
            return PutMessageResult(
                PutMessageStatus.PROPERTIES_SIZE_EXCEEDED,
                remark=f"the properties have {properties_length} bytes, the limit is {record.MAX_PROPERTIES}",
            )
        if body_length > self.max_message_size:
            remark = f"the body has {body_length} bytes, the limit (maxMessageSize) is {self.max_message_size}"
        elif queue_id < 0:
            remark = f"there is no queue {queue_id}"
        elif size > self.files.size - BLANK_ROOM:
            remark = f"the record would have {size} bytes, a commit log file holds {self.files.size - BLANK_ROOM}"
        else:
            remark = f"the record would have {size} bytes, the limit (maxMessageSize + 64 KiB) is {self._max_record}"
        return PutMessageResult(_ILLEGAL, remark=remark)

    def append_batch(self, batch: MessageBatch) -> PutMessageResult | None:
        """Put all records of a batch into one file, at consecutive queue offsets; None as in ``append``."""
        if batch.sys_flag & sysflag.TRANSACTION_MASK:
            return PutMessageResult(_ILLEGAL, remark="a batch cannot be part of a transaction")
        messages = batch.messages
        count = len(messages)
        if not count:
            return PutMessageResult(_ILLEGAL, remark="the batch holds no message")
        try:
            queue = self.queue(batch.topic, batch.queue_id)
        except TopicIllegalError as error:
            return PutMessageResult(_ILLEGAL, remark=str(error))
        fixed = queue.overhead + len(batch.born_host) + len(batch.store_host)
        if sum(messages.longest) + fixed > self.small or batch.queue_id < 0:
            for body_length, properties_length in messages.lengths():
                size = fixed + body_length + properties_length
                if batch.queue_id < 0 or not self.allows(body_length, properties_length, size):
                    return self._refusal(body_length, properties_length, size, batch.queue_id)
        total = fixed * count + messages.size
        if total > self.max_message_size or total > self.files.size - BLANK_ROOM:
            limit = min(self.max_message_size, self.files.size - BLANK_ROOM)
            remark = f"the batch would have {total} bytes in the log, the limit is {limit}"
            return PutMessageResult(PutMessageStatus.UNKNOWN_ERROR, remark=remark)
        file = self.file
        if file is None or file.wrote + total > file.append_limit:
            file = self._make_room(total)
            if file is None:
                return None
        return self._write_batch(file, queue, batch)

    def _write_batch(self, file: MappedFile, queue: TopicQueue, batch: MessageBatch) -> PutMessageResult:
        now = max(self.wall_ms(), self.last_store_timestamp)
        sys_flag = batch.sys_flag & ~_V6_FLAGS | record.host_flags(batch.born_host, batch.store_host)
        first = queue.next_offset
        at = file.wrote
        try:
            shared = record.pack_shared(
                sys_flag, batch.born_timestamp, batch.born_host, now, batch.store_host, batch.reconsume_times
            )
            head = BatchHead(queue.magic, batch.queue_id, first, file.start + at, shared, queue.topic_part)
            records, offsets = batch.messages.records(head)
        except struct.error as error:
            return PutMessageResult(_ILLEGAL, remark=f"a number of the batch does not fit its field: {error}")
        wrote = at + len(records)
        # the first one's size and magic go in last: who is killed half-way leaves nothing that looks like a record
        body_at = record.SIZE_MAGIC.size
        file.buffer[at + body_at : wrote] = memoryview(records)[body_at:]
        file.buffer[at : at + body_at] = records[:body_at]
        file.wrote = wrote
        queue.next_offset = first + len(offsets)
        self.last_store_timestamp = now
        if wrote >= self.poke_at:
            self.room.poke()
        return PutMessageResult(_OK, offsets[0], first, wrote - at, now, offsets)

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
                self.on_roll(file.end - left, file.end)
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

    def cool_down(self, hot_bytes: int) -> None:
        """Take what lies further back than ``hot_bytes`` from the map: its pages may have left memory."""
        border = self.max_offset - hot_bytes
        for file in reversed(self.files.files):
            if file.hot_from == file.size:
                break
            file.hot_from = max(file.hot_from, min(border - file.start, file.size))
