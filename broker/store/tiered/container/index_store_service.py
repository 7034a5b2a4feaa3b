"""The key index of the tier: keys go into a local file; full files are compacted and uploaded, and searched there.

Unlike in RocketMQ a query searches each file that can hold messages of its time, not only those created in it, and
items are kept over a power cut: ``flush`` makes all keys durable and writes down up to where (index_marks). After a
start ``indexed_until`` says from where on the dispatcher has to put the keys of a queue again.
Source: RocketMQ's IndexStoreService.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory, write_durably
from trimq.broker.store.tiered.container.index_files import IndexFiles
from trimq.broker.store.tiered.container.index_marks import MARKS_NAME, FileMark, Marks, encode_marks
from trimq.broker.store.tiered.container.index_recovery import COMPACTING, DIRECTORY, recover_local
from trimq.broker.store.tiered.container.index_search import IndexSearch
from trimq.broker.store.tiered.container.index_segment import IndexSegment, SlotCache
from trimq.broker.store.tiered.container.index_store_file import IndexStatus, IndexStoreFile, TieredIndexShape
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.index_batch import make_batch
from trimq.protocol.tiered_index_batch import KeyItems, KeysOfMessage, items_of
from trimq.protocol.tiered_index_layout import IndexItem, tiered_key_hash
from trimq.protocol.tiered_layout import UNSET_TIME

_log = structlog.get_logger(__name__)

BATCH_KEYS: Final = 2048
"""Keys that are put together: less than a millisecond."""
INTERVAL: Final = 10.0
_LONGEST_PAUSE: Final = 300.0
_HOUR_MS: Final = 3_600_000


class IndexStoreService:
    """Belongs to the event loop. ``recover`` comes first, then ``run`` in a nursery; ``close`` ends it."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        config: TieredStoreConfig,
        flat_append_file: IndexFiles,
        *,
        persist: Callable[[], Awaitable[None]],
        wall_ms: Callable[[], int],
        seal_after_ms: int | None = None,
        shape: TieredIndexShape | None = None,
    ) -> None:
        """``root`` is the store's directory; ``persist`` makes the metadata of the segments durable.

        ``shape``: that of new files, if it is not the one that ``config`` says.
        ``seal_after_ms``: a file with keys is uploaded when it is so old, full or not.
        """
        self._disk = disk
        self._directory = f"{root}/{DIRECTORY}"
        self.config = config
        self._shape = shape or TieredIndexShape(
            config.tiered_store_index_file_max_hash_slot_num, config.tiered_store_index_file_max_index_num
        )
        self._flat = flat_append_file
        self._persist = persist
        self._wall_ms = wall_ms
        self._seal_after_ms = seal_after_ms
        self._batch = make_batch()
        self._pending: deque[KeyItems] = deque()
        self._taken = 0
        """Keys of the first of them that are in a file."""
        self._pending_keys = 0
        self._local: dict[int, IndexStoreFile] = {}
        self._remote: dict[int, IndexSegment] = {}
        self._slots = SlotCache()
        self._positions: dict[tuple[int, int], int] = {}
        self._durable_positions: dict[tuple[int, int], int] | None = None
        self._marks_due = False
        self._space_lock = trio.Lock()
        self._flush_lock = trio.Lock()
        self._upload_lock = trio.Lock()
        self._failures = 0
        self._not_before = 0.0
        self._closed = False

    # -- start

    async def recover(self) -> None:
        """Open what is there, ours or of RocketMQ's broker. Raises OSError."""
        found = await self._disk.run(recover_local, self._disk, self._directory, self._shape)
        self._local = {file.stamp: file for file in found.files}
        known = found.marks or Marks({}, {})
        if not self._flat.segments:
            await self._flat.recover()
        for segment in self._flat.segments:
            if segment.commit_position and segment.min_timestamp != UNSET_TIME:
                await self._recover_segment(IndexSegment(segment, self._slots), known)
        if found.marks is not None:
            self._positions = dict(known.positions)
            self._durable_positions = dict(known.positions)
        elif not self._local and not self._remote:
            self._durable_positions = {}
            self._marks_due = True
        if self._current is None:
            try:
                await self._add_file()
                await self.flush()
            except OSError as error:  # the first key tries again
                _log.error("tiered_index_no_space", directory=self._directory, error=str(error))

    async def _recover_segment(self, segment: IndexSegment, known: Marks) -> None:
        mark = known.files.get(segment.stamp)
        if mark is not None and segment.has_shape(mark.slots, mark.durable):
            segment.set_known(mark.slots, mark.durable, mark.first_ms)
        local = self._local.get(segment.stamp)
        if local is None:
            if segment.stamp not in self._remote or await segment.load():
                self._remote[segment.stamp] = segment
            return
        try:
            if not await segment.load():
                return  # it was not uploaded completely
        except OSError as error:
            local.status = IndexStatus.SEALED  # decided when it is to be uploaded
            _log.warning("tiered_index_not_readable", stamp=segment.stamp, error=str(error))
            return
        self._remote[segment.stamp] = segment
        await self._delete_local(local)

    def indexed_until(self, topic_id: int, queue_id: int) -> int | None:
        """The stream position of a queue below which all keys are in the index after a crash, 0 if nothing is known.

        None: no marks are kept yet, since RocketMQ's broker wrote the index until now. Then its keys count as put, and
        the dispatcher calls ``put_items`` without keys for the end of each queue.
        """
        if self._durable_positions is None:
            return None
        return self._durable_positions.get((topic_id, queue_id), 0)

    # -- putting

    def put_items(self, topic_id: int, queue_id: int, items: KeyItems, end: int) -> None:
        """Put the keys of the messages of a queue up to a stream position; there may be none.

        Those of a queue come in order. ``fill`` or ``flush`` puts them into a file.
        """
        self._positions[topic_id, queue_id] = end
        self._marks_due = True
        if len(items):
            self._pending.append(items)
            self._pending_keys += len(items)

    def put_messages(self, messages: Sequence[KeysOfMessage]) -> None:
        """As ``put_items`` for some hundred messages of one queue, without gaps. There is at least one."""
        last = messages[-1]
        self.put_items(last.topic_id, last.queue_id, items_of(self._batch, messages), last.offset + last.size)

    @property
    def waiting(self) -> int:
        """The number of keys that are in no file yet."""
        return self._pending_keys

    @property
    def _current(self) -> IndexStoreFile | None:
        file = self._local[max(self._local)] if self._local else None
        return file if file is not None and file.status is IndexStatus.UNSEALED else None

    def _apply(self) -> bool:
        """Put waiting keys, up to BATCH_KEYS. False if they need space first."""
        file = self._current
        if file is None or not file.space:
            if file is not None and not file.free:
                file.status = IndexStatus.SEALED
            return False
        head = self._pending[0]
        taken = head.part(self._taken, self._taken + min(BATCH_KEYS, file.space))
        file.put(taken)
        self._taken += len(taken)
        self._pending_keys -= len(taken)
        if self._taken == len(head):
            self._pending.popleft()
            self._taken = 0
        return True

    async def fill(self) -> None:
        """Put all waiting keys into the file, where RocketMQ's broker finds them after a kill. Raises OSError."""
        async with self._space_lock:
            while self._pending:
                if self._apply():
                    await trio.lowlevel.checkpoint()
                    continue
                file = self._current
                if file is None:
                    await self._add_file()
                else:
                    end = file.next_ready()
                    await self._disk.run(file.make_ready, end)
                    file.mark_ready(end)

    async def _add_file(self) -> None:
        await self._disk.run(make_durable_directory, self._disk, self._directory)
        stamp = max(self._wall_ms(), 1 + max((*self._local, *self._remote), default=0))
        path = f"{self._directory}/{stamp}"
        with trio.CancelScope(shield=True):  # a file that nothing refers to would be left behind
            self._local[stamp] = await self._disk.run(IndexStoreFile.create, self._disk, path, self._shape)

    async def flush(self) -> None:
        """Return when all keys put before this call are durable, as ``indexed_until`` says then. Raises OSError."""
        await self.fill()
        async with self._flush_lock:
            while self._pending:
                await self.fill()
            positions = dict(self._positions)
            due = self._marks_due
            for file in list(self._local.values()):
                count = file.count
                if file.is_unsynced and self._local.get(file.stamp) is file:
                    file.hold()
                    try:
                        # Shielded: a sync that is cancelled would count.
                        with trio.CancelScope(shield=True):
                            await self._disk.run(file.sync, count)
                            file.durable = count
                    finally:
                        file.release()
                    due = True
            if due:
                self._marks_due = False
                try:
                    with trio.CancelScope(shield=True):
                        await self._disk.run(self._write_marks, self._file_marks(), positions)
                except BaseException:
                    self._marks_due = True
                    raise
                self._durable_positions = positions

    def _write_marks(self, files: list[FileMark], positions: dict[tuple[int, int], int]) -> None:
        make_durable_directory(self._disk, self._directory)
        write_durably(self._disk, f"{self._directory}/{MARKS_NAME}", encode_marks(files, positions))

    def _file_marks(self) -> list[FileMark]:
        marks = [
            FileMark(file.stamp, file.shape.slots, file.shape.items, file.durable, file.first_ms)
            for file in self._local.values()
        ]
        marks += [mark for segment in self._remote.values() if (mark := segment.mark()) is not None]
        return marks

    # -- queries

    async def query(
        self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int, *, topic_id: int | None = None
    ) -> list[IndexItem]:
        """Up to ``max_count`` messages that may have the key, the last put first, each once.

        ``topic_id``: only those of a topic. A store time is exact to a second, so the caller looks at the records' own.
        If some files cannot be read, those of the others are returned. Raises OSError if there are none then.
        """
        search = IndexSearch(tiered_key_hash(topic, key), begin_ms, end_ms, max_count, topic_id)
        if begin_ms > end_ms or max_count <= 0:
            return []
        try:
            await self.fill()
        except OSError:
            search.add_waiting(self._pending)
        return await search.run(self._disk, self._local, self._remote)

    # -- background

    async def run(self) -> None:
        """Upload full files, delete expired ones, and flush."""
        while True:
            try:
                await self.expire()
                await self._seal_old()
                if trio.current_time() >= self._not_before and await self.upload_next():
                    self._failures = 0
                    continue
                await self.flush()
            except OSError as error:
                self._report(error)
            await trio.sleep(INTERVAL)

    def _report(self, error: OSError) -> None:
        self._failures += 1
        pause = min(INTERVAL * 2 ** min(self._failures - 1, 10), _LONGEST_PAUSE)
        self._not_before = trio.current_time() + pause
        if self._failures == 1:
            _log.error("tiered_index_failed", directory=self._directory, error=str(error))

    async def _seal_old(self) -> None:
        """Go on with a new file if the current one is old. Raises OSError."""
        async with self._space_lock:
            file = self._current
            if self._seal_after_ms is None or file is None or not file.count:
                return
            if not 0 <= self._wall_ms() - file.stamp < self._seal_after_ms:
                await self._add_file()

    async def upload_next(self) -> bool:
        """Upload the oldest local file, if it is not the last. Returns whether it did. Raises OSError."""
        stamps = sorted(self._local)
        if len(stamps) < 2:
            return False
        await self._upload(self._local[stamps[0]])
        return True

    async def _upload(self, file: IndexStoreFile) -> None:
        """Compact and upload a file, then delete it. Raises OSError; then it is complete as it was."""
        async with self._upload_lock:
            if self._local.get(file.stamp) is not file:
                return
            file.status = IndexStatus.SEALED
            if file.count:
                segment = await self._find_uploaded(file.stamp)
                if segment is None:
                    await self._append(file)
                await self._persist()
                segment = segment or await self._find_uploaded(file.stamp)
                if segment is None:
                    raise OSError(f"the index file {file.stamp} is not complete in the tier")
                segment.set_known(file.shape.slots, file.count, file.first_ms)
                self._remote[file.stamp] = segment
                self._marks_due = True
            await self._delete_local(file)

    async def _find_uploaded(self, stamp: int) -> IndexSegment | None:
        for segment in self._flat.segments:
            if segment.min_timestamp == stamp and segment.commit_position:
                found = IndexSegment(segment, self._slots)
                if await found.load():
                    return found
        return None

    async def _append(self, file: IndexStoreFile) -> None:
        directory = f"{self._directory}/{COMPACTING}"
        await self._disk.run(make_durable_directory, self._disk, directory)
        file.hold()
        try:
            with trio.CancelScope(shield=True):
                compacted = await self._disk.run(file.compact_to, f"{directory}/{file.stamp}")
        finally:
            file.release()
        try:
            await self._flat.roll()
            last = self._flat.segments[-1]
            # An earlier try may have left the times of another file.
            last.min_timestamp = last.max_timestamp = UNSET_TIME
            view = compacted.mapping.view[: file.compacted_size]
            await self._flat.append([view], len(view), file.stamp, file.end_ms)
        finally:
            with trio.CancelScope(shield=True):
                await self._disk.run(compacted.close, self._disk)

    async def _delete_local(self, file: IndexStoreFile) -> None:
        if self._local.get(file.stamp) is file:
            del self._local[file.stamp]
        file.close()
        with trio.CancelScope(shield=True):
            await self._disk.run(self._disk.delete, file.path)

    async def expire(self) -> None:
        """Delete uploaded files whose messages are all older than the reserved time. Raises OSError."""
        if not self.config.tiered_store_delete_file_enable:
            return
        async with self._upload_lock:
            before = self._wall_ms() - self.config.tiered_store_file_reserved_time * _HOUR_MS
            try:
                deleted = await self._flat.destroy_expired(before)
            finally:
                there = set(self._flat.segments)
                for stamp, segment in list(self._remote.items()):
                    if segment.segment not in there:
                        del self._remote[stamp]
                        self._slots.forget(segment.segment.base_offset)
            if deleted:
                await self._persist()

    # -- the end

    async def close(self, *, upload: bool = True) -> None:
        """Close the files, after ``run`` was cancelled. ``upload``: first upload all keys, the last file too.

        What cannot be uploaded stays in local files, with which the next start goes on. Raises no OSError.
        """
        if self._closed:
            return
        self._closed = True
        try:
            await self.fill()
            if upload:
                for stamp in sorted(self._local):
                    await self._upload(self._local[stamp])
            await self.flush()
        except OSError as error:
            _log.error("tiered_index_not_uploaded", directory=self._directory, error=str(error))
            try:
                await self.flush()
            except OSError as failed:
                _log.error("tiered_index_not_flushed", directory=self._directory, error=str(failed))
        finally:
            for file in self._local.values():
                file.close()
            self._local.clear()
