"""Uploads messages to a bucket: one object holds a stretch of the log for all queues.

An object is closed at 16 MiB of the log, or when its first message has waited for tieredStoreGroupCommitTimeout: so the
number of requests grows with the bytes and the time, and not with the number of queues. Objects follow each other in
the order of the log: each begins where the one before ends. What is not on the device yet, or not confirmed, is not
uploaded.

An upload that fails is repeated, with the same end, after a pause that grows to a minute. Nothing is kept in memory
meanwhile: the messages are read again, and their log files are held (tiered_messages.py).
"""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Final

import structlog
import trio

from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.tiered.access.batch import BatchBuilder
from trimq.broker.store.tiered.access.tier_parts import Backlog, KeyIndex
from trimq.broker.store.tiered.access.upload_rate import UploadRate
from trimq.broker.store.tiered.access.waiting_queues import SLICE, Waiting, WaitingQueues
from trimq.broker.store.tiered.bucket import object_contents as contents
from trimq.broker.store.tiered.bucket.backoff import Backoff
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues
from trimq.broker.store.tiered.bucket.object_builder import ObjectBuilder
from trimq.broker.store.tiered.bucket.state_files import StateFiles
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.bucket_manifest import Entry, StoredObject, stretches_of
from trimq.protocol.bucket_names import ObjectName
from trimq.protocol.bucket_object import BucketFormatError, Kind, ObjectHeader

_log: Final = structlog.get_logger(__name__)

OBJECTS_A_ROOT: Final = 64
"""The root is replaced after so many objects: a start has to read the directories of no more."""
_LOOK: Final = 1.0
_MOST_WAITING: Final = 8192
"""With more keys that wait for space in the index, nothing is uploaded: they take memory."""


class BucketUploads:
    """The uploads of a store. ``note`` is called for each queue that gets messages."""

    def __init__(  # noqa: PLR0913 - the parts of a tier meet here
        self,
        config: TieredStoreConfig,
        queues: ConsumeQueueStore,
        builder: BatchBuilder,
        tier: BucketQueues,
        index: KeyIndex | None,
        state: StateFiles,
        *,
        excluded: Callable[[str], bool],
        uploadable: Callable[[], int],
        wall_ms: Callable[[], int],
        random: Random,
    ) -> None:
        """``excluded``: whether a topic stays local. ``uploadable``: everything below this log offset is durable."""
        self.config = config
        self._queues = queues
        self._builder = builder
        self._tier = tier
        self._index = index
        self._state = state
        self._uploadable = uploadable
        self._wall_ms = wall_ms
        self.waiting = WaitingQueues(Waiting, queues, builder, tier.find, excluded=excluded, wall_ms=wall_ms)
        self._position = 0
        """All messages below this log offset are in the bucket; it may be greater than the end of the last object."""
        self._attempted: int | None = None
        """The end of an object whose upload has failed: the next attempt has the same one."""
        self._tried: set[ConsumeQueue] = set()
        """The queues of all attempts to upload the next object: one of them may be in the bucket."""
        self._one = trio.Lock()
        """Objects come one after the other."""
        self._wake = trio.Event()
        self._stopped = trio.Event()
        self._rate = UploadRate(self._stopped)
        self._reader = contents.ContentsReader(builder, tier, self._skip, keys=index is not None)
        self._backoff = Backoff(random)
        self._not_before = 0.0
        self.problem = ""
        """Why nothing is uploaded at the moment."""
        self.fenced = False
        """Whether another broker owns the bucket: nothing is uploaded until the next start."""
        self.messages = 0
        self.bytes = 0
        self.objects = 0
        self.failures = 0
        self.skipped = 0
        """Messages that were deleted before they were uploaded."""

    # -- which queues wait

    def note(self, queue: ConsumeQueue) -> None:
        """A queue has got messages. Called where they are appended."""
        had_none = not self.waiting.pending
        if self.waiting.note(queue) and had_none:
            self._wake.set()

    async def scan(self) -> None:
        """Find the queues that had messages before. Once the manifest is loaded."""
        self._position = self._tier.end
        self._skip_lost(self._uploadable())
        await self.waiting.scan(self._has_new)

    async def _has_new(self, topic: str, queue_id: int) -> bool:
        flat = self._tier.find(topic, queue_id)
        uploaded = flat.commit_offset if flat is not None else 0
        there = self._queues.peek_next_offset(topic, queue_id)
        if flat is not None and there < uploaded and self._is_anew(flat, there):
            await self._tier.forget(topic, queue_id, there)
            _log.warning("queue_removed_from_tier", topic=topic, queue=queue_id, begin=there, end=uploaded)
        return there != uploaded

    def _is_anew(self, flat: BucketQueue, there: int) -> bool:
        """Whether a local queue, which ends at ``there``, is that of a topic that was deleted and created anew.

        Log and bucket have the same history (same_history.py), and units come in the order of the log: so a queue with
        newer messages than those that it lacks is another one. Without newer messages it is not dispatched so far yet.
        """
        queue = self._queues.find(flat.topic, flat.queue_id)
        lacking = max((stretch.last_physical for _, stretch in flat.stretches if stretch.end > there), default=-1)
        return queue is not None and queue.max_phy > lacking

    @property
    def behind(self) -> int:
        """The number of messages that wait for their upload."""
        return sum(backlog.messages for backlog in self.backlogs())

    def backlogs(self) -> Iterator[Backlog]:
        """What waits in each queue that has something new."""
        return self.waiting.backlogs()

    async def lowest_waiting(self) -> int | None:
        """The lowest log offset of a message that is not uploaded, or one below it; None if all are.

        What the root does not name yet counts as not uploaded: if another broker has taken the bucket, it is garbage.
        """
        if not self.config.tiered_store_protect_local:
            return None
        if not self.waiting.is_scanned:
            return 0
        if self._tier.lost_from is not None:  # not what is unsaved: the manifest may be that of the other broker now
            return self._tier.lost_from
        if self._tier.unsaved and not self.fenced:
            return self._tier.saved_end
        return self._position if self.waiting.pending else None

    async def count_waiting(self, start: int, end: int) -> int:
        """The number of such messages between two log offsets. Raises OSError."""
        return await self.waiting.count(lambda: max(start, self._position), end)

    # -- the loop

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopped.is_set()

    async def wait_until_stop(self, seconds: float) -> None:
        """Return after ``stop``, at the latest after so many seconds."""
        with trio.move_on_after(seconds):
            await self._stopped.wait()

    def stop(self) -> None:
        """Begin no further object."""
        self._stopped.set()
        self._wake.set()

    def fence(self) -> None:
        """Another broker owns the bucket: ``run`` ends."""
        self.fenced = True
        self._wake.set()

    async def run(self) -> None:
        """Upload until ``stop`` or ``fence``. Raises FencedError when another broker has taken the bucket."""
        if not self.waiting.is_scanned:
            await self.scan()
        while not (self.is_stopping or self.fenced):
            self._wake = trio.Event()
            if trio.current_time() >= self._not_before and await self._try(force=False):
                continue
            if not self.waiting.pending and not self.problem:
                self._reader.memory.release()
                await self._wake.wait()
                continue
            with trio.move_on_after(_LOOK):
                await self._wake.wait()

    async def upload_all(self) -> None:
        """Upload all that may be uploaded now, and replace the root if there is something new.

        That may be the state alone: consumers commit offsets when there are no new messages. Raises OSError,
        FencedError.
        """
        if not self.waiting.is_scanned:
            await self.scan()
        while await self._upload_object(force=True):
            pass
        if not self._tier.is_saved or await self._state.changed_since_root() is not None:
            await self.save()

    async def save(self) -> None:
        """Replace the root. Raises OSError, FencedError."""
        state = await self._state.changed_since_root()
        await self._tier.save(None if state is None else state.data)
        if state is not None:
            self._state.named(state)
        self.succeeded()

    def succeeded(self) -> None:
        """The bucket has taken something: whatever was wrong with it is over."""
        if self.problem:
            _log.info("tiered_upload_resumed", bucket=self.config.tiered_store_bucket, failures=self.failures)
            self.problem = ""
            self._backoff.reset()
            self._not_before = 0.0

    async def _try(self, *, force: bool) -> bool:
        try:
            uploaded = await self._upload_object(force=force)
            # After a failure the root shows whether all is well again, if nothing else does.
            if self._tier.unsaved >= OBJECTS_A_ROOT or (self.problem and not uploaded):
                await self.save()
        except (OSError, BucketFormatError) as error:
            self.failures += 1
            self._not_before = trio.current_time() + self._backoff.next()
            if not self.problem:
                _log.error("tiered_upload_failed", bucket=self.config.tiered_store_bucket, error=str(error))
            self.problem = str(error)
            return False
        if uploaded:
            self.succeeded()
        return uploaded

    # -- one object

    async def _upload_object(self, *, force: bool) -> bool:
        """Upload the next object. Returns False if there is nothing to upload yet. Raises OSError."""
        async with self._one:
            return await self._upload_next(force=force)

    async def _upload_next(self, *, force: bool) -> bool:
        limit = self._uploadable()
        self._skip_lost(limit)
        if limit <= self._position:
            await self._drop_uploaded()
            return False
        if not self.waiting.pending:
            self._position = limit  # only messages that stay local
            return False
        if not force and self._attempted is None and not self._is_due(limit):
            return False
        if self._index is not None and self._index.waiting > _MOST_WAITING:
            await self._index.fill()
        end = self._attempted or min(limit, self._position + contents.OBJECT_BYTES)
        began = self._wall_ms()
        self._reader.memory.clear()
        builder = ObjectBuilder(ObjectHeader(Kind.LOG, self._tier.epoch, self._tier.end, end, began))
        queues = [waiting.queue for _, waiting in sorted(self.waiting.pending.items())]
        is_edge = end == limit or self._attempted is not None
        made = await self._reader.fill(builder, queues, self._position, end, limit, is_edge=is_edge)
        if made.messages:
            await self._put(builder, made)
        else:
            self._attempted = None  # its messages are not there any more
        self._position = made.end
        await self._drop_uploaded()
        for waiting in self.waiting.pending.values():
            waiting.since = max(waiting.since, began)
        return True

    def _skip_lost(self, limit: int) -> None:
        """Go on where the log begins, if that is behind the position: the tier may be new, and the log old."""
        self._position = max(self._position, min(self._builder.log_begin, limit))

    def _is_due(self, limit: int) -> bool:
        if limit - self._position >= contents.OBJECT_BYTES or not self.config.tiered_store_group_commit:
            return True
        first = next(iter(self.waiting.pending.values()))
        # A clock that was set back must not delay an upload until it has caught up.
        return not 0 <= self._wall_ms() - first.since < self.config.tiered_store_group_commit_timeout

    async def _put(self, builder: ObjectBuilder, made: contents.Contents) -> None:
        """Write an object and note what it has. Raises OSError; then nothing counts as uploaded."""
        state = await self._state.changed()
        data = b"" if state is None else state.data
        pieces, directory = await self._tier.bucket.run(partial(builder.finish, data, made.end))
        name = ObjectName(made.begin, 0, 0, self._tier.epoch, 0)
        self._attempted = made.end
        self._tried.update(made.queues.values())
        await self._rate.wait(made.bytes, self.config.tiered_store_max_upload_bytes_per_second)
        is_new = True
        try:
            await self._tier.bucket.create(str(name), pieces)
        except FileExistsError:
            is_new = False
        except OSError:
            self._reader.memory.release()  # for the next attempt: the library may still be sending from it
            raise
        if is_new:
            stored = StoredObject(made.begin, made.end, 0, name.epoch, 0, directory.length, directory.position)
            entry = Entry(stored, stretches_of(directory))
            deleted = made.deleted
        else:
            # Only this owner writes with its epoch: the reply to an earlier attempt was lost.
            entry = await self._tier.find_upload()
            made.end = entry.object.end
            deleted = self._deleted
        # A topic that was deleted meanwhile must not come back: a new one of its name begins at 0.
        gone = await self._tier.add(entry, data, deleted)
        self._attempted = None
        self._tried.clear()
        if is_new and state is not None:  # an earlier attempt had another one, or none
            self._state.sent(state)
        self._position = made.end
        self.objects += 1
        self.messages += made.messages
        self.bytes += made.bytes
        for tier, count in made.counts:
            tier.uploaded += count
        if self._index is not None:
            for topic_id, queue_id, items, end in made.keys:
                self._index.put_items(topic_id, queue_id, items, end)
        if gone:
            await self.save()
        if self._index is not None:
            await self._index.fill()

    def _deleted(self) -> set[tuple[str, int]]:
        return {(queue.topic, queue.queue_id) for queue in self._tried if queue.deleted}

    def _skip(self, lost: int) -> None:
        self.skipped += lost

    async def _drop_uploaded(self) -> None:
        """Forget the queues that have nothing new."""
        for number, (key, waiting) in enumerate(list(self.waiting.pending.items())):
            if number % SLICE == SLICE - 1:
                await trio.lowlevel.checkpoint()
            self.waiting.drop_done(key, waiting)
        self._reader.keep(self.waiting.pending)
