"""The short way into the store: an ordinary message, appended and dispatched in one function.

What ``WritePath.put_message`` does in the usual case, without the objects that carry a message from one part to the
next. Anything unusual (no room, puts refused, a limit broken) is left to it: nothing has happened then.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

from trimq.broker.store.commit_log import CommitLog
from trimq.broker.store.dispatcher import StoreDispatcher
from trimq.broker.store.flush import GroupCommitService
from trimq.broker.store.index_service import WAKE_AT
from trimq.broker.store.put_lock import PutMessageLock
from trimq.broker.store.running_flags import RunningFlags
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.topic_queue import TopicQueue
from trimq.broker.store.types import MessageInner, PutCallback, PutMessageResult, PutMessageStatus
from trimq.protocol import record
from trimq.protocol.hashing import crc32
from trimq.protocol.queue_unit import UNIT

_OK: Final = PutMessageStatus.PUT_OK
_PACK: Final = record.layout(0).pack
_FIXED: Final = record.layout(0).size
_V4_HOSTS: Final = 16
_PACK_UNIT: Final = UNIT.pack
_MAX_PROPERTIES: Final = record.MAX_PROPERTIES
_COPIED_ONCE: Final = 4096
"""Bodies up to this size are stored in one piece with what stands behind them; larger ones are not copied twice."""


class ShortWay:
    """What the short ways into the store have in common: the parts of the general one that they pass by."""

    def __init__(
        self,
        log: CommitLog,
        dispatcher: StoreDispatcher,
        lock: PutMessageLock,
        flags: RunningFlags,
        stats: StoreStats,
        group: GroupCommitService | None,
        wall_ms: Callable[[], int],
    ) -> None:
        """``group`` for SYNC_FLUSH."""
        self._group = group
        self._log = log
        self._dispatcher = dispatcher
        self._lock = lock
        self._flags = flags
        self._stats = stats
        self._wall_ms = wall_ms
        self._index = dispatcher.index


class PlainPut(ShortWay):
    """ASYNC_FLUSH: when ``put`` returns, the record can be read. SYNC_FLUSH: when ``on_done`` is called."""

    def put(  # noqa: PLR0913, PLR0915, PLR0917 - one function, and no object for the record's fields: it is the hot path
        self,
        queue: TopicQueue,
        body: Any,
        properties: bytes,
        born_timestamp: int,
        born_host: bytes,
        store_host: bytes,
        flag: int,
        sys_flag: int,
        reconsume_times: int,
        tags_code: int,
        keys: tuple[str, ...],
        on_done: PutCallback | None = None,
    ) -> int:
        """The record's physical offset; -1 where it has to go the long way.

        ``on_done`` is for SYNC_FLUSH: it gets the result, as that of ``put_message``.
        Hosts are IPv4 (8 bytes), ``sys_flag`` has no bit of a transaction or of an IPv6 host.
        """
        log = self._log
        file = log.file
        body_length = len(body)
        properties_length = len(properties)
        size = queue.overhead + _V4_HOSTS + body_length + properties_length
        if (
            file is None
            or self._lock.is_held
            or not self._flags.writable
            or queue.gone
            or (size > log.small and not log.allows(body_length, properties_length, size))
            or not body_length
            or len(born_host) != 8
        ):
            return -1
        at = file.wrote
        end = at + size
        if end > file.append_limit:
            return -1
        now = self._wall_ms()
        if now < log.last_store_timestamp:  # noqa: PLR1730 - max() takes three times as long
            now = log.last_store_timestamp
        physical_offset = file.start + at
        queue_offset = queue.next_offset
        try:
            head = _PACK(
                size,
                queue.magic,
                crc32(body),
                queue.queue_id,
                flag,
                queue_offset,
                physical_offset,
                sys_flag,
                born_timestamp,
                born_host,
                now,
                store_host,
                reconsume_times,
                0,
                body_length,
            )
        except struct.error:
            return -1
        # the head goes in last: a process that is killed half-way leaves nothing that looks like a record
        buffer = file.buffer
        body_at = at + _FIXED
        tail = queue.topic_part + properties_length.to_bytes(2, "big") + properties
        if body_length <= _COPIED_ONCE:
            buffer[body_at:end] = b"".join((body, tail))
        else:
            body_end = body_at + body_length
            buffer[body_at:body_end] = body
            buffer[body_end:end] = tail
        buffer[at:body_at] = head
        file.wrote = end
        queue.next_offset = queue_offset + 1
        queue.last_size = size
        log.last_store_timestamp = now
        if end >= log.poke_at:
            log.room.poke()
        stats = self._stats
        stats.put_message_times_total += 1
        stats.put_message_size_total += size
        if self._group is not None:
            message = MessageInner(
                queue.topic, queue.queue_id, b"", b"", 0, b"", b"", 0, sys_flag, 0, 0, tags_code, keys
            )
            result = PutMessageResult(_OK, physical_offset, queue_offset, size, now)
            self._group.submit(message, result, on_done)
            return physical_offset
        dispatcher = self._dispatcher
        units = queue.units
        if (
            units is None
            or physical_offset != dispatcher.position
            or queue_offset != units.next_offset
            or not units.dirty
            or units.deleted
        ):
            queue.units = dispatcher.units_of(queue.topic, queue.queue_id)
            dispatcher.dispatch(
                queue.topic, queue.queue_id, queue_offset, physical_offset, size, tags_code, now, keys, sys_flag
            )
            return physical_offset
        # StoreDispatcher.dispatch's usual case, without the call
        dispatcher.position = units.max_phy = physical_offset + size
        dispatcher.last_record = physical_offset
        dispatcher.last_store_timestamp = now
        units.tail += _PACK_UNIT(physical_offset, size, tags_code)
        units.next_offset = queue_offset + 1
        index = self._index
        if index is not None:
            pending = index.pending
            pending.append((queue.topic, keys, physical_offset, now))
            if len(pending) == WAKE_AT:
                index.wake()
        if dispatcher.message_arriving or queue.key in dispatcher.awaited:
            dispatcher.tell(queue.topic, queue.queue_id, queue_offset + 1, tags_code, now)
        return physical_offset
