"""Uploads messages to the tier. Source: RocketMQ's MessageStoreDispatcherImpl.

Only queues with new messages are looked at (waiting_queues.py). A queue is uploaded when its oldest waiting message has
waited for tieredStoreGroupCommitTimeout, or when as many messages or bytes wait as one group takes. What is not on the
device yet, or not confirmed, is not uploaded. Unlike in RocketMQ the history from before the tier was switched on is
uploaded too, and a message of any size.

An upload that fails is tried again after a pause that grows to half a minute. Nothing is kept in memory meanwhile: the
messages are read again, and their log files are held (tiered_messages.py).
"""

from collections.abc import Callable, Iterator
from typing import Final

import structlog
import trio

from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.tiered.access.batch import BatchBuilder, Buffer, Buffers, Limits
from trimq.broker.store.tiered.access.tier_parts import Backlog, KeyIndex
from trimq.broker.store.tiered.access.upload_rate import UploadRate
from trimq.broker.store.tiered.access.waiting_queues import SLICE, Key, Waiting, WaitingQueues
from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.flat_message_file import FlatMessageFile
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT_SIZE

_log: Final = structlog.get_logger(__name__)

_LOOK: Final = 1.0
"""Longest time in s between two looks at the queues that wait."""
_AT_ONCE: Final = 32
"""Most uploads at the same time, whatever tieredStoreMaxPendingLimit says: each has a group in memory."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 30.0
_HOUR_MS: Final = 3_600_000
_GROUPS: Final = 16
"""So many groups of a queue are uploaded in one turn."""
_MOST_WAITING: Final = 8192
"""With more keys that wait for space in the index, no group is uploaded: they take memory."""


class _Pending(Waiting):
    """Waiting, with the turns and failures of its uploads."""

    __slots__ = ("failures", "is_running", "not_before")

    def __init__(self, queue: ConsumeQueue, since: int) -> None:
        super().__init__(queue, since)
        self.failures = 0
        self.not_before = 0.0
        self.is_running = False


class MessageStoreDispatcher:
    """The uploads of a store. ``note`` is called for each queue that gets messages."""

    def __init__(
        self,
        config: TieredStoreConfig,
        queues: ConsumeQueueStore,
        builder: BatchBuilder,
        flat_files: FlatFileStore,
        index: KeyIndex | None,
        *,
        excluded: Callable[[str], bool],
        uploadable: Callable[[], int],
        wall_ms: Callable[[], int],
    ) -> None:
        """``excluded``: whether a topic stays local. ``uploadable``: everything below this log offset is durable."""
        self.config = config
        self._queues = queues
        self._builder = builder
        self._flat_files = flat_files
        self._index = index
        self._uploadable = uploadable
        self._wall_ms = wall_ms
        self.waiting = WaitingQueues(_Pending, queues, builder, flat_files.find, excluded=excluded, wall_ms=wall_ms)
        self._wake = trio.Event()
        self._stopped = trio.Event()
        self._rate = UploadRate(self._stopped)
        self._turns = trio.CapacityLimiter(min(config.uploads_at_once, _AT_ONCE))
        self._buffers = Buffers()
        self._next_save = 0.0
        self.messages = 0
        self.bytes = 0
        self.failures = 0
        self.skipped = 0
        """Messages that were deleted before they were uploaded."""

    # -- which queues wait

    def note(self, queue: ConsumeQueue) -> None:
        """A queue has got messages. Called where they are appended."""
        if self.waiting.note(queue):
            self._wake.set()

    async def scan(self) -> None:
        """Find the queues that had messages before."""
        await self.waiting.scan(self._has_new)

    async def _has_new(self, topic: str, queue_id: int) -> bool:
        flat = self._flat_files.find(topic, queue_id)
        uploaded = flat.commit_offset if flat is not None else 0
        return self._queues.peek_next_offset(topic, queue_id) > uploaded

    @property
    def behind(self) -> int:
        """The number of messages that wait for their upload."""
        return sum(backlog.messages for backlog in self.backlogs())

    def backlogs(self) -> Iterator[Backlog]:
        """What waits in each queue that has something new."""
        return self.waiting.backlogs()

    async def lowest_waiting(self) -> int | None:
        """The lowest log offset of a message that is not uploaded; None if all are. Raises OSError."""
        if not self.config.tiered_store_protect_local:
            return None
        if not self.waiting.is_scanned:
            return 0
        found = []
        for waiting in list(self.waiting.pending.values()):
            units = await self._builder.units(waiting.queue, self.waiting.begin(waiting.queue), 1)
            found += [phy for phy, size, _ in units if size != FILLER_SIZE]
        return min(found, default=None)

    async def count_waiting(self, start: int, end: int) -> int:
        """The number of such messages between two log offsets. Raises OSError."""
        return await self.waiting.count(lambda: start, end)

    # -- the loop

    async def run(self) -> None:
        """Upload until ``stop``; then wait for the uploads under way."""
        await self.scan()
        async with trio.open_nursery() as nursery:
            while not self._stopping:
                self._wake = trio.Event()
                if not self.waiting.pending:
                    await self._wake.wait()
                    continue
                await self._start_due(nursery, force=False)
                if trio.current_time() >= self._next_save:
                    await self._save()
                if not any(waiting.is_running for waiting in self.waiting.pending.values()):
                    self._buffers.release()
                with trio.move_on_after(_LOOK):
                    await self._wake.wait()

    async def upload_all(self) -> None:
        """Upload all that may be uploaded now, due or not, and save the metadata. For a store without ``run``."""
        if not self.waiting.is_scanned:
            await self.scan()
        async with trio.open_nursery() as nursery:
            await self._start_due(nursery, force=True)
        await self._save()

    @property
    def _stopping(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Begin no further upload."""
        self._stopped.set()
        self._wake.set()

    async def _start_due(self, nursery: trio.Nursery, *, force: bool) -> None:
        """Start the uploads of the queues that are due, as far as there are turns. ``force``: of all, in turn."""
        now = self._wall_ms()
        for number, (key, waiting) in enumerate(list(self.waiting.pending.items())):
            if number % SLICE == SLICE - 1:
                await trio.lowlevel.checkpoint()
            if waiting.is_running or self.waiting.drop_done(key, waiting):
                continue
            if force or (trio.current_time() >= waiting.not_before and self._is_due(waiting, now)):
                if not force and not self._turns.available_tokens:
                    return
                waiting.is_running = True
                await self._turns.acquire_on_behalf_of(waiting)
                nursery.start_soon(self._upload, key, waiting, force)

    def _is_due(self, waiting: _Pending, now: int) -> bool:
        config, queue = self.config, waiting.queue
        # A clock that was set back must not delay an upload until it has caught up.
        waited = now - waiting.since
        if not config.tiered_store_group_commit or not 0 <= waited < config.tiered_store_group_commit_timeout:
            return True
        begin = self.waiting.begin(queue)
        if queue.next_offset - begin >= config.group_commit_count:
            return True
        data = self._queues.read(queue, begin, queue.next_offset - begin) if begin < queue.next_offset else b""
        if not data:
            return False
        # Between the first waiting message and the last one there cannot be more bytes of the queue than of the log.
        first = int.from_bytes(data[:8], "big")
        if queue.max_phy - first < config.tiered_store_group_commit_size:
            return False
        sizes = (int.from_bytes(data[at + 8 : at + 12], "big") for at in range(0, len(data), 20))
        return sum(size for size in sizes if size != FILLER_SIZE) >= config.tiered_store_group_commit_size

    async def _save(self) -> None:
        """Write the metadata, whose sizes and times have changed; not more often than its cost allows."""
        begin = trio.current_time()
        try:
            await self._flat_files.metadata.persist()
        except OSError as error:
            _log.error("tiered_metadata_not_saved", error=str(error))
        self._next_save = trio.current_time() + max(1.0, 20 * (trio.current_time() - begin))

    # -- one queue

    async def _upload(self, key: Key, waiting: _Pending, force: bool) -> None:
        """Upload a queue until less than a group waits, or all of it if ``force``; others have turns in between."""
        try:
            with self._buffers.one() as buffer:
                await self._upload_groups(waiting, buffer, force)
            if waiting.failures:
                _log.info("tiered_upload_resumed", topic=key[0], queue=key[1], failures=waiting.failures)
            waiting.failures = 0
        except OSError as error:
            self.failures += 1
            waiting.failures += 1
            waiting.not_before = trio.current_time() + min(_FIRST_PAUSE * 2 ** (waiting.failures - 1), _LONGEST_PAUSE)
            if waiting.failures == 1:
                _log.error("tiered_upload_failed", topic=key[0], queue=key[1], error=str(error))
        finally:
            waiting.is_running = False
            self._turns.release_on_behalf_of(waiting)
            # Behind all others: each queue that is due comes to its turn.
            pending = self.waiting.pending
            if pending.get(key) is waiting:
                pending[key] = pending.pop(key)

    async def _upload_groups(self, waiting: _Pending, buffer: Buffer, force: bool) -> None:
        groups = 0
        while not self._stopping and await self._upload_group(waiting, buffer):
            groups += 1
            rest = waiting.queue.next_offset - self.waiting.begin(waiting.queue)
            late = self._wall_ms() - waiting.since >= self.config.tiered_store_group_commit_timeout
            if not rest or not (force or late or rest >= self.config.group_commit_count):
                break
            if groups >= _GROUPS and not force:
                self._wake.set()
                break

    async def _upload_group(self, waiting: _Pending, buffer: Buffer) -> bool:
        """Upload the next messages of a queue. Returns False if there is none that may be uploaded. Raises OSError."""
        queue, config = waiting.queue, self.config
        if _is_gone(queue):
            return False  # it must not begin anew in the tier: a new topic of its name begins at 0
        flat = self._flat_files.find_or_create(queue.topic, queue.queue_id)
        if flat.is_destroyed:
            return False  # its files are being deleted: a new queue of its name waits for that
        if self._index is not None and self._index.waiting > _MOST_WAITING:
            await self._index.fill()
        if not flat.is_initialized:
            await flat.init_offset(queue.min_offset)
        offset = flat.commit_offset
        if offset < queue.min_offset:
            await self._skip(flat, queue.min_offset)
            offset = queue.min_offset
        if offset >= queue.next_offset or _is_gone(queue, flat):
            return False
        await self._roll(flat)
        room, units = flat.room
        built = await self._builder.build(
            queue,
            offset,
            flat.commit_log.commit_offset,
            Limits(
                min(config.group_commit_count, units),
                min(config.tiered_store_group_commit_size, room),
                self._uploadable(),
            ),
            flat.topic_id,
            buffer,
            keys=self._index is not None,
        )
        if built is not None and built.batch is not None:
            await self._rate.wait(built.batch.size, config.tiered_store_max_upload_bytes_per_second)
        if built is None or self._stopping or _is_gone(queue, flat):
            return False
        if built.batch is None:
            await self._skip(flat, built.skip_to)
            return True
        if not await flat.append(built.batch):
            return False
        count = len(built.batch.units) // UNIT_SIZE
        self.messages += count
        flat.uploaded += count
        self.bytes += built.batch.size
        waiting.since = built.batch.end_ms
        if self._index is not None:
            self._index.put_items(flat.topic_id, flat.queue_id, built.keys, flat.commit_log.commit_offset)
            await self._index.fill()
        return True

    async def _roll(self, flat: FlatMessageFile) -> None:
        """Begin new segments where the last ones are full or too old."""
        config, log = self.config, flat.commit_log
        last = log.segments[-1]
        old = last.min_timestamp + config.commit_log_rolling_interval * _HOUR_MS < self._wall_ms()
        rolls = old and last.commit_position >= config.commit_log_rolling_minimum_size
        if last.commit_position and (rolls or not log.room):
            await flat.roll(records=True, units=False)
        if flat.consume_queue.room is not None and flat.consume_queue.room < UNIT_SIZE:
            await flat.roll(records=False, units=True)

    async def _skip(self, flat: FlatMessageFile, offset: int) -> None:
        lost = offset - flat.commit_offset
        self.skipped += lost
        _log.warning(
            "messages_not_in_tier", topic=flat.topic, queue=flat.queue_id, begin=flat.commit_offset, end=offset
        )
        await flat.skip_to(offset)


def _is_gone(queue: ConsumeQueue, flat: FlatMessageFile | None = None) -> bool:
    """Whether the topic was deleted; asked again after each await."""
    return queue.deleted or (flat is not None and flat.is_destroyed)
