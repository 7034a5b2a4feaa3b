"""Writes the tails of the queues to their files, in batches and in a thread (RocketMQ's FlushConsumeQueueService).

Losing a tail loses no message: it is rebuilt from the log, from the checkpoint on.
"""

import errno
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Final

import structlog
import trio

from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.queue_files import WriteJob, is_full_disk, run_jobs, sync_directories
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.protocol.queue_unit import UNIT_SIZE

_log = structlog.get_logger(__name__)

_JOBS_A_CALL: Final = 64
_BYTES_A_CALL: Final = 1 << 20
_KEEP_UNITS: Final = 1 << 16
"""Written units of a queue's tail that stay in memory for its consumers."""
_KEEP_UNITS_ALL: Final = 1 << 19
"""The same for all queues together (10 MiB)."""


class FlushConsumeQueueService:
    """The only writer of queue files. ``lock`` is held while files are written or deleted."""

    def __init__(self, queues: ConsumeQueueStore, flags: RunningFlags) -> None:
        self._queues = queues
        self._disk = queues.disk
        self._flags = flags
        self.lock = trio.Lock()
        self.before_write: list[Callable[[], Awaitable[None]]] = []
        """Deletions that wait for the lock. They come before all writes; each raises OSError in its own task too."""
        self._unsynced: dict[str, tuple[ConsumeQueue, int]] = {}
        self._unsynced_directories: set[str] = set()
        self._held: OrderedDict[ConsumeQueue, int] = OrderedDict()
        self._held_units = 0

    async def write(self, least_pages: int = 0) -> bool:
        """Write the queues with at least ``least_pages`` of unwritten units. Returns False if a write failed."""
        least = max(1, least_pages * 4096 // UNIT_SIZE)
        async with self.lock:
            for delete in list(self.before_write):
                with suppress(OSError):
                    await delete()
            todo: list[ConsumeQueue] = []
            later: list[ConsumeQueue] = []
            for queue in self._queues.dirty:
                if queue.deleted:
                    continue
                # A queue without units, from ``create_queues``, has nothing to write: take it out of the list now.
                due = queue.unwritten() >= least or not queue.next_offset
                (todo if due else later).append(queue)
            self._queues.dirty = later
            complete = True
            with trio.CancelScope(shield=True):  # all that was taken out of the list
                complete &= await self._write_those(todo)
            for queue in todo:
                self._settle(queue)
            return complete

    async def _write_those(self, queues: list[ConsumeQueue]) -> bool:
        complete = True
        jobs: list[WriteJob] = []
        size = 0
        for queue in queues:
            for job in self._jobs_for(queue):
                jobs.append(job)
                size += len(job.data)
                if len(jobs) >= _JOBS_A_CALL or size >= _BYTES_A_CALL:
                    complete &= await self._run(jobs)
                    jobs, size = [], 0
        if jobs:
            complete &= await self._run(jobs)
        return complete

    def _jobs_for(self, queue: ConsumeQueue) -> Iterator[WriteJob]:
        """The write jobs of a queue. A file is created together with its first unit, never before.

        RocketMQ's recovery (ConsumeQueue.truncateDirtyLogicFiles) takes the zeros at the front of an empty last file
        for a unit: every later message of the queue would be off by one.
        """
        offset, end = queue.written, queue.next_offset
        made = queue.made_offset
        while offset < end:
            file_offset = queue.file_of(offset)
            stop = min(file_offset + queue.units_per_file, end, offset + _BYTES_A_CALL // UNIT_SIZE)
            data = queue.tail_units(offset, stop - offset)
            yield WriteJob(queue, file_offset, (offset - file_offset) * UNIT_SIZE, data, file_offset >= made)
            made = max(made, file_offset + queue.units_per_file)
            offset = stop

    async def _run(self, jobs: list[WriteJob]) -> bool:
        outcome = await self._disk.run(run_jobs, self._disk, self._queues.file_size, jobs, False)
        failed: set[ConsumeQueue] = set()
        for job, error in zip(jobs, outcome, strict=True):
            queue = job.queue
            if queue.deleted:
                continue
            if error is not None:
                failed.add(queue)
                self._report(job, error)
            # The later jobs of a failed queue do not count, even if they succeeded: ``written`` has no holes below it.
            if queue in failed:
                continue
            if job.make:
                self._note_directories(queue)
            self._unsynced[queue.path_of(job.file_offset)] = (queue, job.file_offset)
            queue.made_offset = max(queue.made_offset, job.file_offset + queue.units_per_file)
            end = job.file_offset + (job.at + len(job.data)) // UNIT_SIZE
            if job.data and end > queue.written:
                # ``next_offset``: the queue may have been truncated while the thread was writing.
                queue.written = min(end, queue.next_offset)
        if not failed:
            self._flags.clear(Flag.LOGIC_DISK_FULL)
        return not failed

    def _settle(self, queue: ConsumeQueue) -> None:
        """Put a queue with unwritten units back into the list, and shrink its tail."""
        if queue.deleted:
            self._held_units -= self._held.pop(queue, 0)
            return
        if queue.unwritten():
            self._queues.dirty.append(queue)
        else:
            queue.dirty = False
        queue.forget_written(_KEEP_UNITS)
        units = len(queue.tail) // UNIT_SIZE
        self._held_units += units - self._held.pop(queue, 0)
        self._held[queue] = units
        # The queues written longest ago give up their tails first.
        while self._held_units > _KEEP_UNITS_ALL and len(self._held) > 1:
            oldest, units = self._held.popitem(last=False)
            oldest.forget_written(0)
            self._held_units -= units

    async def sync(self) -> bool:
        """Make all written units durable. Returns False if a sync failed."""
        async with self.lock:
            todo = list(self._unsynced.items())
            complete = True
            for begin in range(0, len(todo), _JOBS_A_CALL):
                part = todo[begin : begin + _JOBS_A_CALL]
                jobs = [WriteJob(queue, file_offset, 0, b"", make=False) for _, (queue, file_offset) in part]
                outcome = await self._disk.run(run_jobs, self._disk, self._queues.file_size, jobs, True)
                for (path, (queue, _)), job, error in zip(part, jobs, outcome, strict=True):
                    if error is None or queue.deleted or error.errno == errno.ENOENT:
                        self._unsynced.pop(path, None)
                    else:
                        complete = False
                        self._report(job, error, lost=True)
            return complete and await self._sync_directories()

    def note_found(self, queue: ConsumeQueue) -> None:
        """Register a queue whose units recovery found right but cannot know to be durable: the next sync covers it.

        The process that wrote them may have been killed before it synced them, or their files' names.
        """
        if queue.next_offset <= queue.first_offset:
            return
        self._note_directories(queue)
        for file_offset in range(queue.first_offset, queue.next_offset, queue.units_per_file):
            self._unsynced[queue.path_of(file_offset)] = (queue, file_offset)

    def _note_directories(self, queue: ConsumeQueue) -> None:
        directory = queue.directory
        for _ in range(4):  # of the queue, the topic, all topics, the store
            self._unsynced_directories.add(directory)
            directory = directory.rpartition("/")[0]

    async def _sync_directories(self) -> bool:
        todo = sorted(self._unsynced_directories)
        self._unsynced_directories.clear()
        try:
            with trio.CancelScope(shield=True):  # all that was taken out of the set
                for begin in range(0, len(todo), _JOBS_A_CALL):
                    await self._disk.run(sync_directories, self._disk, todo[begin : begin + _JOBS_A_CALL])
        except OSError as error:
            _log.error("consume_queue_sync_failed", error=str(error))
            reason = f"syncing a consume queue directory failed: {error}; restart the broker to recover"
            self._flags.set(Flag.WRITE_LOGICS_QUEUE_ERROR, reason, forever=True)
            return False
        return True

    def _report(self, job: WriteJob, error: OSError, *, lost: bool = False) -> None:
        """Set the flag for a failed job. ``lost``: a sync failed, so that the kernel may have dropped the pages."""
        path = job.queue.path_of(job.file_offset)
        if is_full_disk(error) and not lost:
            if not self._flags.has(Flag.LOGIC_DISK_FULL):
                _log.error("consume_queue_disk_full", path=path, error=str(error))
            self._flags.set(Flag.LOGIC_DISK_FULL, f"no space for the consume queue file {path}: {error.strerror}")
        else:
            _log.error("consume_queue_write_failed", path=path, error=str(error))
            reason = f"writing the consume queue file {path} failed: {error}; restart the broker to recover"
            self._flags.set(Flag.WRITE_LOGICS_QUEUE_ERROR, reason, forever=True)
