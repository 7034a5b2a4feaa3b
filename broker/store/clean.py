"""Deletes expired files, and frees space when the disk fills up.

Log files are deleted oldest first, never the last one; queues and index follow them. A file that is being sent keeps
its mapping until its readers are done. Source: RocketMQ's CleanCommitLogService, CleanConsumeQueueService.
"""

import math
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.index.index_service import IndexService
from trimq.broker.store.log_holds import LogHolds
from trimq.broker.store.queue.queue_clean import QueueCleaner
from trimq.broker.store.running_flags import Flag, RunningFlags

_log = structlog.get_logger(__name__)

_FIRST_LOOK: Final = 60.0
_MANUAL_ROUNDS: Final = 20
_HOUR_MS: Final = 3_600_000


class Pressure(NamedTuple):
    """The state of the disk: percent used, delete expired files at any hour, delete files that are not expired too."""

    percent: int
    delete: bool
    immediately: bool


class CleanService:
    """Checks at every cleanResourceInterval. ``config`` may be replaced at any time."""

    def __init__(
        self,
        files: MappedFileQueue,
        cleaner: QueueCleaner,
        index: IndexService | None,
        flags: RunningFlags,
        config: MessageStoreConfig,
        dispatched_offset: Callable[[], int],
        save_checkpoint: Callable[[], Awaitable[bool]],
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """``dispatched_offset`` returns the dispatch position: files with records behind it are not deleted."""
        self._files = files
        self._disk: Disk = files.disk
        self._cleaner = cleaner
        self._index = index
        self._flags = flags
        self.config = config
        self._dispatched_offset = dispatched_offset
        self._save_checkpoint = save_checkpoint
        self._wall_ms = wall_ms
        self._manual_rounds = 0
        self._wake = trio.Event()
        self._lock = trio.Lock()
        self._hanging: list[tuple[MappedFile, float]] = []
        """Deleted files with readers, and when they were deleted."""
        self.holds = LogHolds()
        """Files with their messages are not deleted, unless the disk is so full that files are deleted forcibly."""
        self.last_stored_ms: Callable[[], int] = lambda: 0
        """Returns the store time of the newest record."""
        self.follows_master = False
        """Whether the log is that of a master."""
        self.on_anew: list[Callable[[str], None]] = []
        """Called with the topic of a queue that ``forget_queue`` has deleted."""
        self.on_log_min: Callable[[int], Awaitable[None]] | None = None
        """Called with the start of the log after files of it were deleted. Raises OSError."""
        self.on_overdue: list[Callable[[MappedFile], None]] = []
        """Called with a deleted file that has been read for longer than destroyMapedFileIntervalForcibly."""

    async def run(self) -> None:
        """Check at intervals, or when an administrator requests it."""
        with trio.move_on_after(_FIRST_LOOK):
            await self._wake.wait()
        while True:
            self._wake = trio.Event()
            try:
                await self.look()
            except OSError as error:
                _log.error("cleaning_failed", error=str(error))
            with trio.move_on_after(self.config.clean_resource_interval / 1000):
                await self._wake.wait()

    def delete_expired_now(self) -> None:
        """Delete expired files at any hour, at the request of an administrator."""
        self._manual_rounds = _MANUAL_ROUNDS
        self._wake.set()

    def close(self) -> None:
        """Release the deleted files that are still read; the last reader of each unmaps it."""
        for file, _ in self._hanging:
            file.close()
        self._hanging.clear()

    async def look(self) -> int:
        """Delete the files that are due. Returns the number of log files. Raises OSError."""
        async with self._lock:
            pressure = await self._look_at_disk()
            manual = self._manual_rounds > 0
            self._manual_rounds = max(0, self._manual_rounds - 1)
            deleted = 0
            if pressure.delete or manual or self._is_hour():
                immediately = pressure.immediately and self.config.clean_file_forcibly_enable
                deleted = await self._delete_log_files(immediately=immediately)
            if deleted or self._cleaner.is_behind(self._files.min_offset):
                await self._follow()
            await self._look_at_hanging()
            return deleted

    def _is_hour(self) -> bool:
        now = time.localtime(self._wall_ms() / 1000)
        return any(hour.strip().isdigit() and int(hour) == now.tm_hour for hour in self.config.delete_when.split(";"))

    async def _look_at_disk(self) -> Pressure:
        """Measure the file system of the log; above the warning level puts are refused."""
        config = self.config
        space = await self._disk.run(self._disk.space, self._files.directory)
        percent = math.ceil(100 * (space.total - space.free) / space.total) if space.total else 0
        if percent > config.disk_space_warning_level_ratio:
            if not self._flags.has(Flag.DISK_FULL):
                _log.error("disk_full", path=self._files.directory, percent=percent)
            reason = (
                f"the disk of {self._files.directory} is {percent} % full, the limit (diskSpaceWarningLevelRatio) is "
                f"{config.disk_space_warning_level_ratio} %"
            )
            self._flags.set(Flag.DISK_FULL, reason)
            return Pressure(percent, delete=True, immediately=True)
        if self._flags.has(Flag.DISK_FULL):
            _log.info("disk_no_longer_full", path=self._files.directory, percent=percent)
            self._flags.clear(Flag.DISK_FULL)
        immediately = percent > config.disk_space_clean_forcibly_ratio
        return Pressure(percent, immediately or percent > config.disk_max_used_space_ratio, immediately)

    # -- the log

    async def _delete_log_files(self, *, immediately: bool) -> int:
        """Delete oldest first, one batch at most; stop at the first file that is not due."""
        deleted = 0
        holds = self.holds
        holds.files_held = 0
        while deleted < self.config.delete_file_batch_max and len(self._files.files) > 1:
            file = self._files.files[0]
            # A file that is not dispatched yet stays: ReputMessageService still has to read it.
            if file.end > self._dispatched_offset() or not (immediately or await self._is_expired(file)):
                break
            # Asked again for each file: messages are delivered meanwhile. New ones are never in an old file.
            needed = await holds.lowest()
            if needed is not None and needed < file.end:
                if not immediately:
                    holds.files_held = await self._count_expired()
                    break
                await holds.note_deletion(file.path, file.start, file.end)
            if deleted:
                await trio.sleep(self.config.delete_commit_log_files_interval / 1000)
            await self._disk.run(self._disk.delete, file.path)
            self._hanging.append((self._files.remove_first(), trio.current_time()))
            # Each deletion is durable before the next one: a power cut must not leave a gap between the files.
            await self._disk.run(self._disk.sync_directory, self._files.directory)
            deleted += 1
            _log.info("commit_log_file_deleted", path=file.path, immediately=immediately, held=file.is_held)
        return deleted

    async def _is_expired(self, file: MappedFile) -> bool:
        info = await self._disk.run(self._disk.stat, file.path)
        return info is None or info.modified_ms + self.config.file_reserved_time * _HOUR_MS <= self._wall_ms()

    async def _count_expired(self) -> int:
        """The number of files that are old enough to be deleted; the last file never is."""
        count = 0
        for file in self._files.files[:-1]:
            if not await self._is_expired(file):
                break
            count += 1
        return count

    async def _follow(self) -> None:
        # Index and queues follow in this order; the checkpoint comes last, because it counts units and index files.
        log_min = self._files.min_offset
        pause = self.config.delete_consume_queue_files_interval / 1000
        index_files = await self._index.delete_expired(log_min) if self._index is not None else 0
        queue_files = await self._cleaner.follow(log_min, pause)
        _log.info("log_cleaned", log_min=log_min, queue_files=queue_files, index_files=index_files)
        if self.on_log_min is not None:
            await self.on_log_min(log_min)
        await self._save_checkpoint()

    async def _look_at_hanging(self) -> None:
        """Unmap deleted files that are no longer read; after the time limit notify the listeners of those that are."""
        limit = self.config.destroy_maped_file_interval_forcibly / 1000
        now = trio.current_time()
        hanging, self._hanging = self._hanging, []
        for file, since in hanging:
            if file.is_held and now - since >= limit:
                _log.warning("deleted_file_still_read", path=file.path)
                for on_overdue in self.on_overdue:
                    on_overdue(file)
            if file.is_held:
                self._hanging.append((file, since))
            else:
                await self._disk.run(file.close)

    # -- topics

    async def delete_topics(self, topics: Iterable[str]) -> None:
        """Delete topics with all their queues; their records stay in the log until they expire.

        Each topic's queues are dropped in the turn in which ``topics`` yields it.
        """
        # What a slave has not dispatched yet may be of a new topic: its log and the list of topics come separately.
        log_end = self._dispatched_offset if self.follows_master else lambda: self._files.max_offset
        await self._cleaner.drop_topics(topics, log_end, self._latest_ms)
        await self._save_checkpoint()

    async def follow_deletions(self, deleted: dict[str, int]) -> list[str]:
        """Delete the old queues of topics that were deleted while the log ended at these offsets, if it is there.

        Returns the topics that were not known to be deleted.
        """
        known = self._cleaner.deleted_topics
        new = {
            topic: position
            for topic, position in deleted.items()
            if (topic not in known or known[topic].position < position) and position <= self._dispatched_offset()
        }
        if new:
            await self._cleaner.drop_before(new, self._latest_ms())
            await self._save_checkpoint()
        return list(new)

    async def forget_queue(self, topic: str, queue_id: int) -> None:
        """Delete a queue of a slave whose topic the master has deleted and created again."""
        _log.warning("queue_starts_anew", topic=topic, queue=queue_id)
        for listener in self.on_anew:
            listener(topic)
        try:
            await self._cleaner.drop_old(topic, queue_id)
        except OSError as error:  # the next start compares its units with the log
            _log.error("old_queue_not_deleted", topic=topic, queue=queue_id, error=str(error))
        await self._save_checkpoint()

    def _latest_ms(self) -> int:
        """A time that no record exceeds: after a clock was set back, old records must still count as deleted."""
        return max(self._wall_ms(), self.last_stored_ms())

    async def clean_expired_consume_queues(self) -> int:
        """Delete queues of ordinary topics that have no message left in the log. Returns their number."""
        count = await self._cleaner.drop_expired()
        await self._save_checkpoint()
        return count
