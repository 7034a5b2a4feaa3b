"""Files of the consume queues: read through a bounded set of open descriptors, written by short jobs in a thread.

A file has its full size from the start, so that RocketMQ can map it, but blocks only where it holds units.
"""

import errno
from collections import OrderedDict
from contextlib import suppress
from typing import Final, NamedTuple

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.queue.queue_sizes import file_lengths, wrong_file
from trimq.protocol.file_names import offset_name
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE

_PAGE: Final = 4096
_UNNAMED: Final = "consumequeue.unnamed"
_DEPTH: Final = 3  # the directory of a queue is <store>/consumequeue/<topic>/<queue id>
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class DescriptorCache:
    """Descriptors of queue files that are open for reading. The least recently used one is closed for a new one.

    Belongs to the event loop: a descriptor is only used in the turn that got it, since a later one may close it.
    """

    def __init__(self, disk: Disk, capacity: int) -> None:
        self._disk = disk
        self._capacity = capacity
        self._open: OrderedDict[str, int] = OrderedDict()

    def get(self, path: str) -> int | None:
        """The descriptor of ``path``; None if it is not open."""
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
        return fd

    def put(self, path: str, fd: int) -> None:
        """Store a descriptor; the cache closes it."""
        if path in self._open:
            self._disk.close(fd)
            return
        self._open[path] = fd
        while len(self._open) > self._capacity:
            self._disk.close(self._open.popitem(last=False)[1])

    def drop(self, path: str) -> None:
        """Close the descriptor of a file that will be deleted."""
        fd = self._open.pop(path, None)
        if fd is not None:
            self._disk.close(fd)

    def drop_in(self, directory: str) -> None:
        """Close the descriptors of a queue's files: some will be deleted, and new files may get their names."""
        for path in [path for path in self._open if path.startswith(f"{directory}/")]:
            self.drop(path)

    def close(self) -> None:
        """Close all descriptors."""
        while self._open:
            self._disk.close(self._open.popitem()[1])

    def __len__(self) -> int:
        return len(self._open)


class WriteJob(NamedTuple):
    """Bytes to write into one file; without bytes the file is only synced. ``make``: create the file."""

    queue: ConsumeQueue
    file_offset: int
    at: int
    data: bytes
    make: bool


def run_jobs(disk: Disk, file_size: int, jobs: list[WriteJob], sync: bool) -> list[OSError | None]:
    """Run the jobs independently; returns each job's error in its place. Blocks: called through ``disk.run``."""
    outcome: list[OSError | None] = []
    for job in jobs:
        try:
            _run_job(disk, file_size, job, sync=sync)
            outcome.append(None)
        except OSError as error:
            outcome.append(error)
    return outcome


def _run_job(disk: Disk, file_size: int, job: WriteJob, *, sync: bool) -> None:
    path = job.queue.path_of(job.file_offset)
    fd = make_file(disk, job, path, file_size) if job.make else disk.open(path)
    try:
        if job.data and not job.make:
            disk.pwrite(fd, job.data, job.at)
        if sync:
            disk.data_sync(fd)
    finally:
        disk.close(fd)


def make_file(disk: Disk, job: WriteJob, path: str, file_size: int) -> int:
    """Create and open a queue file of full size with the job's units. An existing file is a leftover; it is replaced.

    The file gets its name after its first units are in it: in an empty file that a kill left behind RocketMQ would find
    a unit. Until then it is in the store's directory, where it is not taken for a queue's file.
    """
    directory = job.queue.directory
    unnamed = f"{directory.rsplit('/', _DEPTH)[0]}/{_UNNAMED}"
    disk.make_directory(directory)
    try:
        fd = disk.create(unnamed, file_size)
    except FileExistsError:  # left by a killed process, or by a failed write
        disk.delete(unnamed)
        fd = disk.create(unnamed, file_size)
    try:
        disk.pwrite(fd, job.data, job.at)
        disk.rename(unnamed, path)
    except BaseException:
        disk.close(fd)
        raise
    return fd


def sync_directories(disk: Disk, directories: list[str]) -> None:
    """Make the names in each directory durable; a deleted directory is skipped. Blocks."""
    for directory in directories:
        with suppress(FileNotFoundError):
            disk.sync_directory(directory)


def delete_queue_files(disk: Disk, directory: str, starts: list[int] | None = None) -> None:
    """Delete a queue's files by their start offsets in bytes; None: all files and the directory. Blocks."""
    names = disk.list(directory) if starts is None else [offset_name(start) for start in starts]
    for name in names:
        with suppress(FileNotFoundError):
            disk.delete(f"{directory}/{name}")
    if starts is None:
        with suppress(OSError):  # not empty: files that do not belong to the queue
            disk.remove_directory(directory)


def remove_directories(disk: Disk, directories: list[str]) -> None:
    """Remove the directories that are empty. Blocks."""
    for directory in directories:
        with suppress(OSError):
            disk.remove_directory(directory)


def is_full_disk(error: OSError) -> bool:
    """True if an error means that there is no space, which may pass."""
    return error.errno in _NO_SPACE


def read_units(disk: Disk, path: str, at: int, count: int) -> bytes:
    """Up to ``count`` units of a file from unit ``at`` on; may wait for the device."""
    try:
        fd = disk.open(path, writable=False)
    except FileNotFoundError:
        return b""
    try:
        return disk.pread(fd, count * UNIT_SIZE, at * UNIT_SIZE)
    finally:
        disk.close(fd)


# -- loading


class LoadedQueue(NamedTuple):
    """The content of a queue's files: units ``first_offset`` to ``next_offset``; the last one ends at ``max_phy``.

    ``last_phy`` and ``last_size`` are those of the last unit (-1 without one). ``why`` says what is wrong with the
    files if the queue has to be rebuilt from the log.
    """

    first_offset: int
    next_offset: int
    max_phy: int
    last_phy: int
    last_size: int
    why: str = ""


def load_queue(disk: Disk, directory: str, file_size: int, limit: int) -> LoadedQueue:
    """Find the units of a queue that point below ``limit``, and erase everything behind them in its files.

    A last file that is too short (cut by a crash) keeps its whole units and gets its full size back; the caller must
    find out whether units are missing. If any other file is not full, nothing is changed and ``why`` says so.
    """
    lengths = file_lengths(disk, directory)
    if not lengths:
        return LoadedQueue(0, 0, 0, -1, -1)
    if why := wrong_file(directory, lengths, file_size):
        return LoadedQueue(0, 0, 0, -1, -1, why)
    names = list(lengths)
    if lengths[names[-1]] < file_size:
        whole = lengths[names[-1]] // UNIT_SIZE * UNIT_SIZE
        _resize(disk, f"{directory}/{offset_name(names[-1])}", whole, file_size)
    first_offset = names[0] // UNIT_SIZE
    # From the newest file backwards to the first one that holds a unit below ``limit``.
    for position in range(len(names) - 1, -1, -1):
        start = names[position]
        count, phy, size = _end_of_file(disk, f"{directory}/{offset_name(start)}", file_size, limit)
        if not count and position:
            continue
        # Empty files are deleted too, because RocketMQ would find a unit in one. The exception is the first file if it
        # does not start at 0: it alone holds the queue's offset.
        for later in names[position + (1 if count or start else 0) :]:
            disk.delete(f"{directory}/{offset_name(later)}")
        if position and count and not _is_full(disk, f"{directory}/{offset_name(names[position - 1])}", file_size):
            return LoadedQueue(0, 0, 0, -1, -1, f"the file at offset {names[position - 1]} has units missing")
        if not count:
            break
        return LoadedQueue(first_offset, start // UNIT_SIZE + count, phy + size, phy, size)
    return LoadedQueue(first_offset, first_offset, 0, -1, -1)


def _resize(disk: Disk, path: str, *sizes: int) -> None:
    fd = disk.open(path)
    try:
        for size in sizes:
            disk.truncate(fd, size)
    finally:
        disk.close(fd)


def _unit_at(disk: Disk, fd: int, at: int) -> tuple[int, int]:
    phy, size, _ = UNIT.unpack(disk.pread(fd, UNIT_SIZE, at * UNIT_SIZE))
    return phy, size


def _end_of_file(disk: Disk, path: str, file_size: int, limit: int) -> tuple[int, int, int]:
    """The number of units from the front that point below ``limit``, and the last one's place; erases the rest."""
    fd = disk.open(path)
    try:
        # Units rise along the file, so a binary search finds the end.
        low, high = 0, file_size // UNIT_SIZE
        while low < high:
            middle = (low + high) // 2
            phy, size = _unit_at(disk, fd, middle)
            if size > 0 and 0 <= phy < limit:
                low = middle + 1
            else:
                high = middle
        # Fillers at the end stand for no message: the next put writes what belongs there.
        while low and _unit_at(disk, fd, low - 1)[1] == FILLER_SIZE:
            low -= 1
        end = low * UNIT_SIZE
        if _has_data(disk, fd, end, file_size):
            disk.truncate(fd, end)
            disk.truncate(fd, file_size)
        phy, size = _unit_at(disk, fd, low - 1) if low else (-1, -1)
        return low, phy, size
    finally:
        disk.close(fd)


def _has_data(disk: Disk, fd: int, begin: int, end: int) -> bool:
    """True if a file may hold anything but zeros in [begin, end)."""
    page_end = min(-(-begin // _PAGE) * _PAGE, end)
    if any(disk.pread(fd, page_end - begin, begin)):
        return True
    return page_end < end and disk.next_data(fd, page_end) < end


def erase_units(disk: Disk, queue: ConsumeQueue, end: int, file_size: int) -> None:
    """Erase the units between a queue's next offset and unit ``end`` from its files. Blocks: for recovery."""
    offset = queue.next_offset
    while offset < end:
        file_offset = queue.file_of(offset)
        path = queue.path_of(file_offset)
        if disk.stat(path) is not None:
            if offset > file_offset or 0 < offset == queue.first_offset:
                _resize(disk, path, (offset - file_offset) * UNIT_SIZE, file_size)
            else:  # RocketMQ would find a unit in an empty file: delete it
                disk.delete(path)
        offset = file_offset + queue.units_per_file


def _is_full(disk: Disk, path: str, file_size: int) -> bool:
    fd = disk.open(path, writable=False)
    try:
        return _unit_at(disk, fd, file_size // UNIT_SIZE - 1)[1] > 0
    finally:
        disk.close(fd)
