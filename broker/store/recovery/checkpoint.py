"""The checkpoint: the log offset up to which log, queues and index are all on disk (RocketMQ's StoreCheckpoint).

CheckpointService writes the queues' tails, makes everything durable at intervals, and only then records it in the file,
so that recovery may rely on all of it.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import read_whole, write_durably
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.dispatch.dispatcher import StoreDispatcher
from trimq.broker.store.index.index_service import IndexMark, IndexService
from trimq.broker.store.queue.consume_queue_flush import FlushConsumeQueueService
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.queue_files import is_full_disk
from trimq.broker.store.queue.queue_snapshot import write_snapshot
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.protocol import checkpoint_layout
from trimq.protocol.checkpoint_layout import CheckpointFields, CheckpointMark

_log = structlog.get_logger(__name__)

NO_INDEX: Final = IndexMark(-1, 0, 0)
"""In the mark of a broker that has no index."""
LOG_PROGRESS: Final = 128 << 20
"""A checkpoint is due early after so many bytes of log: a start after a kill reads the log behind the checkpoint."""
_TRIES_WITHOUT_SPACE: Final = 3
_LOG_FILES_FOR_ROCKETMQ: Final = 8
"""After a kill RocketMQ 5.5.0 searches its starting point only in the ten newest files of the log."""
_KEEP: Final = 2**63 - 1


def known_log(fields: CheckpointFields, mark: CheckpointMark | None) -> str:
    """What a checkpoint knows of a log, as text; "" if it belongs to a store without a message.

    Without a mark of this broker RocketMQ's numbers are used: they are zeros until the first message is flushed.
    """
    if mark is not None:
        return f"a log up to offset {mark.position}" if mark.position > 0 else ""
    stored = max(fields.physic_msg_timestamp, fields.logics_msg_timestamp)
    position = max(fields.confirm_phy_offset, fields.logics_physical_offset)
    if stored <= 0 and position <= 0:
        return ""
    return f"a log of another broker (offset {position}, last message stored at {stored} ms)"


class StoreCheckpoint:
    """The checkpoint file. ``mark`` is None in a new store, or if another broker has written the file last."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self.path = f"{root}/checkpoint"
        self.fields = CheckpointFields()
        self.mark: CheckpointMark | None = None

    def load(self) -> None:
        """Read the file. Blocks. A missing or short file counts as zeros: that costs time, never messages."""
        data = read_whole(self._disk, self.path)
        if data is None:
            return
        try:
            self.fields = checkpoint_layout.decode(data)
        except ValueError as error:
            _log.warning("checkpoint_unreadable", path=self.path, error=str(error))
            return
        self.mark = checkpoint_layout.decode_mark(data)

    @property
    def known_log(self) -> str:
        """See the function ``known_log``."""
        return known_log(self.fields, self.mark)

    def check_missing_log(self, directory: str, *, accept: bool) -> None:
        """Check a start without log files: normal in a new store; otherwise a volume may not be mounted.

        Changes nothing. Raises StoreLoadError if the checkpoint knows a log, unless it is accepted (``accept``).
        """
        known = self.known_log
        if not known:
            return
        if not accept:
            raise StoreLoadError(
                f"{directory} holds no log file, but {self.path} knows {known}: mount the volume of the log, correct "
                "storePathCommitLog or put the files back; to start with a new log without its messages, start once "
                "with --accept-missing-log"
            )
        _log.warning("missing_log_accepted", directory=directory, checkpoint=self.path, lost=known)

    async def forget(self) -> None:
        """Invalidate the checkpoint before rebuilding the files it vouches for. Raises OSError."""
        self.fields = CheckpointFields()
        self.mark = None
        try:
            await self.save()
        except OSError as error:
            if not is_full_disk(error):
                raise
            # A full disk must not prevent the start: a missing file costs as much time as one with zeros.
            await self._disk.run(self._disk.delete, self.path)
            await self._disk.run(self._disk.sync_directory, os.path.dirname(self.path))

    async def save(self) -> None:
        """Replace the file, durably. Raises OSError."""
        data = checkpoint_layout.encode(self.fields, self.mark)
        await self._disk.run(write_durably, self._disk, self.path, data)


class CheckpointService:
    """Writes the queues at intervals, and the checkpoint after each thorough flush."""

    def __init__(
        self,
        checkpoint: StoreCheckpoint,
        dispatcher: StoreDispatcher,
        queues: ConsumeQueueStore,
        flush_queues: FlushConsumeQueueService,
        index: IndexService | None,
        flags: RunningFlags,
        config: MessageStoreConfig,
        sync_log: Callable[[], Awaitable[bool]],
    ) -> None:
        """``sync_log`` makes all records durable that are in the log at its call; False if that failed."""
        self.checkpoint = checkpoint
        self._dispatcher = dispatcher
        self._queues = queues
        self._flush_queues = flush_queues
        self._index = index
        self._flags = flags
        self._sync_log = sync_log
        self._interval = config.flush_interval_consume_queue / 1000
        self._least_pages = config.flush_consume_queue_least_pages
        self._thorough = config.flush_consume_queue_thorough_interval / 1000
        self._log_file_size = config.mapped_file_size_commit_log
        self._progress = min(LOG_PROGRESS, _LOG_FILES_FOR_ROCKETMQ // 2 * self._log_file_size)
        self._wake = trio.Event()
        self._lock = trio.Lock()
        self._closed = False
        queues.on_new_files = self._wake_up

    def _wake_up(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Write the due queues at every interval, and everything with the checkpoint at every thorough one."""
        await self.save()
        last = trio.current_time()
        while True:
            with trio.move_on_after(self._interval):
                await self._wake.wait()
            self._wake = trio.Event()
            await self._flush_queues.write(self._least_pages)
            progress = self._dispatcher.position - (self.checkpoint.mark.position if self.checkpoint.mark else 0)
            due = trio.current_time() - last >= self._thorough or progress >= self._progress
            if due and await self.save():
                last = trio.current_time()

    async def save(self, *, clean: bool = False) -> bool:
        """Make all dispatched records durable, then write the checkpoint. False if that is not possible now.

        ``clean``: the last checkpoint of this process; the next start may take the queues from a snapshot.
        """
        async with self._lock:
            if self._closed:
                return True
            index_mark = await self._mark_index()
            if index_mark is None or self._flags.is_broken:
                return False
            dispatcher = self._dispatcher
            # One turn of the loop: all these numbers belong to the same position of the log.
            mark = CheckpointMark(
                position=dispatcher.position,
                last_record=dispatcher.last_record,
                store_timestamp=dispatcher.last_store_timestamp,
                units=self._queues.settle(),
                queues=self._queues.queues_with_units,
                index_file=index_mark.file,
                index_count=index_mark.entries,
                index_files=index_mark.files,
                clean=clean,
            )
            if mark == self.checkpoint.mark:
                return True
            fields = self._fields(mark, clean=clean)
            # The checkpoint vouches for the mark, so it comes after the syncs of everything below the mark.
            if not await self._sync_all() or not await self._write(mark, fields, clean=clean):
                return False
            self._closed = clean
            return True

    async def _mark_index(self) -> IndexMark | None:
        if self._index is None:
            return NO_INDEX
        for _ in range(_TRIES_WITHOUT_SPACE):
            mark = self._index.mark()
            if mark is not None or not await self._index.flush_pending():
                return mark
        return None

    async def _sync_all(self) -> bool:
        if not await self._sync_log() or not await self._flush_queues.write() or not await self._flush_queues.sync():
            return False
        if self._index is None:
            return True
        try:
            await self._index.sync()
        except OSError as error:
            _log.error("index_sync_failed", error=str(error))
            reason = f"syncing the index failed: {error}; restart the broker to recover"
            self._flags.set(Flag.WRITE_INDEX_FILE_ERROR, reason, forever=True)
            return False
        return True

    def _fields(self, mark: CheckpointMark, *, clean: bool) -> CheckpointFields:
        """The six numbers, chosen so that RocketMQ loses nothing if it is the next to open the store.

        After a kill RocketMQ deletes every index file that is newer than the index time, and puts keys again from the
        log offset on (older versions: from the log time). So while an index file is still written to, offset and time
        are those at which the file starts. If that is further back than RocketMQ will read, the index time makes it
        keep the file instead.
        """
        old = self.checkpoint.fields
        fields = CheckpointFields(
            physic_msg_timestamp=mark.store_timestamp,
            logics_msg_timestamp=mark.store_timestamp,
            index_msg_timestamp=self._index.last_update[0] if self._index is not None else mark.store_timestamp,
            master_flushed_offset=old.master_flushed_offset,
            confirm_phy_offset=max(mark.last_record, 0),
            logics_physical_offset=mark.position,
        )
        newest = self._index.files[-1] if self._index is not None and self._index.files else None
        if newest is None or newest.count == 1 or clean:
            return fields
        if mark.position - newest.begin_phy > _LOG_FILES_FOR_ROCKETMQ * self._log_file_size:
            fields.index_msg_timestamp = _KEEP
        else:
            fields.logics_msg_timestamp = min(newest.begin_timestamp, mark.store_timestamp)
            fields.logics_physical_offset = max(min(newest.begin_phy, mark.position), 1)  # 0 would mean "not known"
        return fields

    async def _write(self, mark: CheckpointMark, fields: CheckpointFields, *, clean: bool) -> bool:
        checkpoint = self.checkpoint
        checkpoint.fields, checkpoint.mark = fields, mark
        written = False
        try:
            # The snapshot first: a clean mark in the checkpoint vouches for it.
            if clean:
                await write_snapshot(self._queues, mark.position)
            await checkpoint.save()
            written = True
        except OSError as error:
            _log.error("checkpoint_failed", path=checkpoint.path, error=str(error))
            return False
        finally:
            if not written:
                # Old or new mark, it is not known which one the file holds: let the next ``save`` write it again.
                checkpoint.mark = None
        return True
