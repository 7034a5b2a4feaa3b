"""Dispatches records that their append could not dispatch: reads the log in order until it has caught up.

Source: RocketMQ's ReputMessageService. There it does all the dispatching. Here an append dispatches its own record, and
this service only runs while the log is ahead of the dispatch position.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
import trio

from trimq.broker.store.dispatch.dispatcher import StoreDispatcher
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.log_rows import MOST, read_rows
from trimq.broker.store.log.log_scan import Blank, LogRecord, NoRecordError, RecordReader
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol import record
from trimq.protocol.dispatch_rules import IN_QUEUE, KIND, unit_tags_code
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_text import decode_properties
from trimq.protocol.real_place import WAITING_TOPICS, waiting_for

_log = structlog.get_logger(__name__)

_SLICE: Final = 0.001


class ReputMessageService:
    """``readable_offset`` returns the end of the log that may be dispatched: under SYNC_FLUSH the durable part."""

    def __init__(
        self, log: CommitLog, dispatcher: StoreDispatcher, stats: StoreStats, readable_offset: Callable[[], int]
    ) -> None:
        self._log = log
        self._dispatcher = dispatcher
        self._stats = stats
        self._readable_offset = readable_offset
        self._reader = RecordReader(log.files.size)
        self._wake = trio.Event()
        self._data: Any = b""
        self._data_at = -1
        self._is_cut = False
        """Whether the readable part ends inside the next record."""
        self.starts_anew: Callable[[str, int, int], bool] | None = None
        """Whether the record at a log offset, with queue offset 0, begins a queue that is still the one before here.

        Its topic was deleted and created again. That happens on slaves: a master has deleted its queue by then.
        """
        self.on_waiting: Callable[[str, int], None] | None = None
        """Called on a slave with the real topic and queue of each message that waits: delayed, timed, or a half."""
        self.forget_queue: Callable[[str, int], Awaitable[None]] | None = None
        """Delete the old queue (topic, queue id). Raises OSError."""
        self._old_queue: tuple[str, int] | None = None
        """The queue to be deleted before the record at the position is dispatched."""
        dispatcher.on_behind = self.wake

    def behind(self) -> int:
        """Bytes of the log that are readable but not yet dispatched."""
        return max(0, self._readable_offset() - self._dispatcher.position)

    def _goes_on(self) -> bool:
        return self.behind() > 0 and not self._is_cut

    def wake(self) -> None:
        """Catch up as soon as the loop has a turn for it."""
        self._wake.set()

    async def run(self) -> None:
        """Catch up whenever records have been left to this service."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            await self.catch_up()

    async def catch_up(self) -> None:
        """Dispatch up to the readable end of the log, in slices of about a millisecond."""
        self._is_cut = False
        while self._goes_on():
            self._stats.dispatch_max_buffer = max(self._stats.dispatch_max_buffer, self.behind())
            # Slices: the loop must not be blocked, and appends between them may dispatch themselves in the end.
            until = time.perf_counter() + _SLICE
            while self._goes_on() and time.perf_counter() < until:
                missing = self._step()
                if missing:
                    self._keep(self._dispatcher.position, await self._log.read_cold(*missing))
                if self._old_queue is not None:
                    break
            # Before the next await: a view of the map must not outlive this turn.
            self._keep(-1, b"")
            if self._old_queue is not None and self.forget_queue is not None:
                old, self._old_queue = self._old_queue, None
                await self.forget_queue(*old)
            await trio.lowlevel.checkpoint()

    def _keep(self, at: int, data: Any) -> None:
        """Remember bytes that were read together for several records. A view must not be kept over an await."""
        self._data_at, self._data = at, data

    def _step(self) -> tuple[int, int] | None:
        """Dispatch the record at the position. Returns (offset, length) if it has to be read from the device first."""
        dispatcher = self._dispatcher
        position = dispatcher.position
        # Expiry may have deleted the file in the meantime: continue at the start of the log.
        if position < self._log.min_offset:
            _log.warning("dispatch_skips_deleted", position=position, log_min=self._log.min_offset)
            dispatcher.position = self._log.min_offset
            return None
        file = self._log.files.find(position)
        if file is None:
            return None
        if self._dispatch_rows(position):
            return None
        try:
            found, missing = self._read(position, file.end - position)
        except NoRecordError as error:
            self._skip(position, file.end, str(error))
            return None
        if missing:
            return missing
        end = file.end if isinstance(found, Blank) else position + found.size if found is not None else position
        if end > self._readable_offset():
            # Slaves acknowledge bytes: the rest of this record is not readable yet.
            self._is_cut = True
        elif isinstance(found, Blank):
            dispatcher.rolled(position, file.end)
        elif (
            found is not None
            and IN_QUEUE[found.sys_flag & KIND]
            and self._starts_anew(found.topic, found.queue_id, found.queue_offset, found.phy)
        ):
            self._old_queue = found.topic, found.queue_id
        elif found is not None:
            self._dispatch(found)
        return None

    def _dispatch_rows(self, position: int) -> bool:
        """Dispatch the ordinary records that are at hand with one call of the native extension. False if it cannot."""
        dispatcher, at = self._dispatcher, position - self._data_at
        # The messages of a topic that was deleted are left out one by one.
        if self._data_at < 0 or not 0 <= at < len(self._data) or position < dispatcher.deleted_end:
            return False
        data = self._data[at : at + min(MOST, self._readable_offset() - position)]
        tags = dispatcher.index is not None and dispatcher.index.tags
        rows = read_rows(data, position, tags=tags, without=WAITING_TOPICS if self.on_waiting is not None else ())
        if rows is None or any(self._starts_anew(*first) for first in rows[0].firsts()):
            return False
        dispatcher.dispatch(*rows)
        return True

    def _read(self, position: int, left: int) -> tuple[LogRecord | Blank | None, tuple[int, int] | None]:
        """The record at the position, or (offset, length) that has to be read from the device first."""
        at = position - self._data_at
        if self._data_at < 0 or not 0 <= at <= len(self._data) - record.BLANK_SIZE:
            at = 0
            data = self._log.read(position, min(MOST, left))
            if data is None:
                return None, (position, min(MOST, left))
            self._keep(position, data)
        if len(self._data) - at < record.BLANK_SIZE:
            raise NoRecordError("the log ends inside a record")
        size, magic = record.SIZE_MAGIC.unpack_from(self._data, at)
        # The record is longer than the bytes at hand: read all of it.
        if size > len(self._data) - at and magic != record.MAGIC_BLANK and size <= left:
            data = self._log.read(position, size)
            if data is None:
                return None, (position, size)
            self._keep(position, data)
            at = 0
        return self._reader.read(self._data, at, position), None

    def _starts_anew(self, topic: str, queue_id: int, queue_offset: int, phy: int) -> bool:
        return not queue_offset and self.starts_anew is not None and self.starts_anew(topic, queue_id, phy)

    def _skip(self, position: int, file_end: int, why: str) -> None:
        """Report a damaged record, and continue behind it if its length is plausible, else in the next file."""
        at = position - self._data_at  # the bytes of the failed read, possibly from the device
        size = int.from_bytes(self._data[at : at + 4], "big") if self._data_at >= 0 and at >= 0 else 0
        following = position + size if record.OVERHEAD_V1 <= size <= file_end - position else file_end
        following = min(following, self._readable_offset())
        _log.error("commit_log_damaged", offset=position, length=following - position, why=why or "zeros")
        self._dispatcher.position = following
        self._keep(-1, b"")

    def _dispatch(self, found: LogRecord) -> None:
        # Without body and properties: dispatch needs neither, the keys and the tags code are computed here.
        properties = decode_properties(found.properties)
        if self.on_waiting is not None and (place := waiting_for(found.topic, found.properties)) is not None:
            self.on_waiting(*place)
        tags = self._dispatcher.index is not None and self._dispatcher.index.tags
        message = MessageInner(found.topic, found.queue_id, b"", b"", 0, b"", b"", sys_flag=found.sys_flag)
        delays = self._dispatcher.delay_ms
        message.tags_code = unit_tags_code(found.topic, found.properties, found.store_timestamp, delays)
        message.keys = index_keys(properties, tags=tags)
        result = PutMessageResult(
            PutMessageStatus.PUT_OK, found.phy, found.queue_offset, found.size, found.store_timestamp
        )
        self._dispatcher.dispatch(message, result)
