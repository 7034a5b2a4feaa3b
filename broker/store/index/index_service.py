"""The index files of a store: keys wait in a queue and are put in batches; files are created ahead and roll over.

Source: RocketMQ's IndexService. Unlike there, no file is discarded after an abnormal exit: recovery cuts the newest
file back to the part that is known to be durable, and the keys behind it are put again from the log.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import itemgetter
from typing import Final, NamedTuple, cast

import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory
from trimq.broker.store.index.index_file import Cold, IndexFile, IndexShape, search
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.protocol.file_names import index_name, is_index_name
from trimq.protocol.hashing import key_hash
from trimq.protocol.index_batch import Batch, Message, Pending, Row, make_batch
from trimq.protocol.index_layout import entry_at
from trimq.protocol.native import Keys

_log = structlog.get_logger(__name__)

BATCH_KEYS: Final = 1024
WAKE_AT: Final = 1024
"""This many waiting messages wake the service; fewer wait for its next tick."""
_TICK: Final = 0.1
_IDLE_TICK: Final = 1.6
"""A service without keys doubles its tick until it is this long. Until a tick, keys wait in memory and are found."""
_RETRY: Final = 1.0
_ENTRY_STEP: Final = 1 << 20
_NEXT_FILE_AT: Final = 0.8

_keys_of: Final = itemgetter(1)


class IndexMark(NamedTuple):
    """The end of the index: the newest file's name as a number, its entry count, and the number of files."""

    file: int
    entries: int
    files: int


class IndexService:
    """Puts keys into index files. Belongs to the event loop. The dispatcher fills ``pending``, in log order."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        shape: IndexShape,
        flags: RunningFlags,
        *,
        wall_ms: Callable[[], int],
        batch: Batch | None = None,
        tags: bool = True,
    ) -> None:
        """``tags``: the tag of a record is among its keys (see message_keys.index_keys)."""
        self._disk = disk
        self.tags = tags
        self.directory = f"{root}/index"
        self.shape = shape
        self.files: list[IndexFile] = []
        self.pending: deque[Pending] = deque()
        self._flags = flags
        self._wall_ms = wall_ms
        self.batch = batch or make_batch()
        self._runs = 0
        """Number of runs in ``pending``."""
        self._keys_in_runs = 0
        """Keys in the runs that have come since they last woke the service."""
        self._next: IndexFile | None = None
        self._wake = trio.Event()
        self._space_lock = trio.Lock()
        self._readers = 0
        self._closing = False
        self._retired: list[IndexFile] = []

    # -- putting

    def put(self, topic: str, keys: tuple[str, ...], phy: int, store_timestamp: int) -> None:
        """Queue a message's keys."""
        self.pending.append((topic, keys, phy, store_timestamp))
        if len(self.pending) == WAKE_AT:
            self.wake()

    def put_all(self, messages: Iterable[Message]) -> None:
        """Queue the keys of many messages."""
        waiting = len(self.pending)
        self.pending.extend([message for message in messages if message[1]])
        if waiting < WAKE_AT <= len(self.pending):
            self.wake()

    def put_run(self, run: Keys) -> None:
        """Queue the hashed keys of many messages."""
        if not len(run):
            return
        self.pending.append(run)
        self._runs += 1
        self._keys_in_runs += len(run)
        if self._keys_in_runs >= WAKE_AT or len(self.pending) >= WAKE_AT:
            self._keys_in_runs = 0
            self.wake()

    def wake(self) -> None:
        """Put the waiting keys as soon as the loop has a turn for it."""
        self._wake.set()

    def apply(self, max_keys: int = BATCH_KEYS) -> bool:
        """Put up to ``max_keys`` waiting keys into files (0.4 us each). False if space has to be allocated first.

        The keys of a message stay together, so there may be a few more.
        """
        if self._runs:
            taken = self._take_with_runs(max_keys)
            hashes, phys, timestamps = self.batch.flat_mixed(taken)
        else:
            messages = self._take(max_keys)
            if not messages:
                return True
            hashes, phys, timestamps = self.batch.flat(messages)
            taken = messages
        done = self._put(hashes, phys, timestamps)
        if done == len(hashes):
            return True
        self._give_back(taken, done)
        return False

    def _take(self, max_keys: int) -> list[Message]:
        """Take waiting messages in order; there must be no run among them. Empty if none of them has a key."""
        pending = cast("deque[Message]", self.pending)
        if len(pending) <= max_keys:
            taken = list(pending)
            pending.clear()
        else:
            taken = [pending.popleft() for _ in range(max_keys)]
        counts = list(map(len, map(_keys_of, taken)))
        if sum(counts) > max_keys:
            last = bisect_left(list(accumulate(counts)), max_keys)
            pending.extendleft(reversed(taken[last + 1 :]))
            del taken[last + 1 :]
        elif not any(counts):
            return []
        return taken

    def _take_with_runs(self, most: int) -> Sequence[Pending]:
        """Take runs and single messages together: a slice of a few keys costs nearly as much as one of many."""
        pending = self.pending
        taken: list[Pending] = []
        while pending and most > 0:
            entry = pending.popleft()
            if isinstance(entry, tuple):
                most -= len(entry[1])
            else:
                if len(entry) > most:
                    entry, rest = entry.split(most)
                    pending.appendleft(rest)
                else:
                    self._runs -= 1
                most -= len(entry)
            taken.append(entry)
        return taken

    def _put(self, hashes: Row, phys: Row, timestamps: Row) -> int:
        """Put keys into the newest file and the ones after it. Returns how many were put before space ran out."""
        done = 0
        while done < len(hashes):
            file = self._writable()
            if file is None:
                break
            end = min(done + file.space(), len(hashes))
            if end == done:
                break
            file.put(self.batch, hashes[done:end], phys[done:end], timestamps[done:end])
            done = end
        return done

    def _give_back(self, taken: Iterable[Pending], done: int) -> None:
        rest: list[Pending] = []
        for entry in taken:
            keys = len(entry[1]) if isinstance(entry, tuple) else len(entry)
            if done < keys:
                if isinstance(entry, tuple):
                    topic, words, phy, timestamp = entry
                    rest.append((topic, words[done:], phy, timestamp))
                else:
                    rest.append(entry.split(done)[1])
                    self._runs += 1
            done = max(0, done - keys)
        self.pending.extendleft(reversed(rest))

    def _writable(self) -> IndexFile | None:
        """The newest file, or the next one if that is full; None if none is ready."""
        file = self.files[-1] if self.files else None
        if file is not None and not file.is_full:
            return file
        following, self._next = self._next, None
        if following is None:
            return None
        # A new file starts with the end of the one before it, like RocketMQ's.
        if file is not None:
            following.begin_timestamp = following.end_timestamp = file.end_timestamp
            following.begin_phy = following.end_phy = file.end_phy
        self.files.append(following)
        return following

    # -- space

    def _needs_space(self) -> bool:
        if self._closing:
            return False
        file = self.files[-1] if self.files else None
        if file is None:
            return self._next is None and bool(self.pending)
        if not file.is_full and file.ready < self.shape.entries and (file.ready - file.count) * 20 < _ENTRY_STEP // 2:
            return True
        return self._next is None and file.count >= self.shape.entries * _NEXT_FILE_AT

    async def _make_space(self) -> None:
        """Prepare the next entries or the next file. Raises OSError."""
        async with self._space_lock:
            file = self.files[-1] if self.files else None
            if file is not None and not file.is_full and file.ready < self.shape.entries:
                if not file.slots_in_memory:
                    await self._disk.run(file.load_slots)
                begin = entry_at(self.shape.slots, max(file.ready, file.count))
                end = min(math.ceil((begin + 1) / _ENTRY_STEP + 1) * _ENTRY_STEP, self.shape.file_size)
                if file.space() * 20 < _ENTRY_STEP // 2:
                    await self._disk.run(file.make_ready, end)
                    file.mark_ready(end)
            if self._next is None and (file is None or file.count >= self.shape.entries * _NEXT_FILE_AT):
                await self._disk.run(make_durable_directory, self._disk, self.directory)
                path = f"{self.directory}/{self._new_name():017d}"
                self._next = await self._disk.run(IndexFile.create, self._disk, path, self.shape, _ENTRY_STEP)

    def _new_name(self) -> int:
        stamp = int(index_name(self._wall_ms()))
        newest = max((file.stamp for file in self.files), default=0)
        return max(stamp, newest + 1)

    async def run(self) -> None:
        """Put waiting keys at every tick or when woken, and allocate space ahead. Ticks are longer while none come."""
        tick = _TICK
        while True:
            with trio.move_on_after(tick):
                await self._wake.wait()
            self._wake = trio.Event()
            tick = _TICK if self.pending else min(2 * tick, _IDLE_TICK)
            if not await self.flush_pending():
                await trio.sleep(_RETRY)

    async def flush_pending(self) -> bool:
        """Put all waiting keys now. False if the disk has no space for them."""
        while (self.pending or self._needs_space()) and not self._closing:
            complete = self.apply()
            if self._needs_space():
                try:
                    await self._make_space()
                except OSError as error:
                    self._report(error)
                    return False
                self._flags.clear(Flag.WRITE_INDEX_FILE_ERROR)
            elif complete:
                await trio.lowlevel.checkpoint()
        return True

    def _report(self, error: OSError) -> None:
        if not self._flags.has(Flag.WRITE_INDEX_FILE_ERROR):
            _log.error("index_file_no_space", directory=self.directory, error=str(error))
        self._flags.set(Flag.WRITE_INDEX_FILE_ERROR, f"no space for the index in {self.directory}: {error.strerror}")

    # -- queries

    def select(self, topic: str, key: str, begin: int, end: int, limit: int) -> list[int]:
        """Log offsets of messages that may have the key, newest first, without duplicates; times are ms.

        Raises Cold if the answer has to come from the device, or keys wait for a file that is not ready yet.
        """
        while self.pending:
            if not self.apply():
                raise Cold
        return search(self.files, key_hash(topic, key), begin, end, limit, False)

    async def select_cold(self, topic: str, key: str, begin: int, end: int, limit: int) -> list[int]:
        """As ``select``, waiting for the device. Keys without space in any file are searched in the queue."""
        waiting: list[int] = []
        if not await self.flush_pending():
            waiting = list(self._waiting(topic, key))
            waiting.reverse()
        files = list(self.files)
        # While this counts a reader, deleted files stay open: the thread reads them by their descriptors.
        self._readers += 1
        try:
            found = await self._disk.run(search, files, key_hash(topic, key), begin, end, limit, True)
        finally:
            self._readers -= 1
            self._close_retired()
        return list(dict.fromkeys(waiting + found))[:limit]

    def _waiting(self, topic: str, key: str) -> Iterator[int]:
        """Log offsets of messages whose keys are still queued and that may have this key."""
        asked = key_hash(topic, key)
        for entry in self.pending:
            if isinstance(entry, tuple):
                name, keys, phy, _ = entry
                if name == topic and key in keys:
                    yield phy
            else:
                yield from [phy for hashed, phy, _ in entry.rows() if hashed == asked]

    @property
    def last_update(self) -> tuple[int, int]:
        """Store time and log offset of the newest entry; zeros without one."""
        for file in reversed(self.files):
            if file.count > 1:
                return file.end_timestamp, file.end_phy
        return 0, 0

    # -- durability

    def mark(self) -> IndexMark | None:
        """The end of the index, after putting every waiting key; None if space has to be allocated for them."""
        while self.pending:
            if not self.apply():
                return None
        files = self.files
        return IndexMark(files[-1].stamp, files[-1].count, len(files)) if files else IndexMark(0, 0, 0)

    async def sync(self) -> None:
        """Make all entries durable. Raises OSError; then no entry can be trusted any more."""
        for file in list(self.files):
            if file.unsynced and not file.closed:
                # Before the sync: a put during it sets the flag again. Shielded: a sync that is cancelled would count.
                with trio.CancelScope(shield=True):
                    file.unsynced = False
                    await self._disk.run(file.sync)

    # -- deletion

    async def delete_expired(self, log_min: int) -> int:
        """Delete the files whose newest entry points below ``log_min``, except the last one. Returns their number."""
        deleted = 0
        while len(self.files) > 1 and self.files[0].end_phy < log_min and self.files[0].count > 1:
            file = self.files[0]
            await self._disk.run(self._disk.delete, file.path)
            self.files.remove(file)
            deleted += 1
            self._retired.append(file)
            self._close_retired()
        return deleted

    def _close_retired(self) -> None:
        """Close deleted files once no thread reads an index file."""
        while self._retired and not self._readers:
            self._retired.pop().close()

    # -- opening and closing

    def load(self) -> int:
        """Open the existing files. Returns how many were damaged and had to be deleted. Blocks."""
        damaged = 0
        for name in self._disk.list(self.directory):
            path = f"{self.directory}/{name}"
            info = self._disk.stat(path)
            if not is_index_name(name) or info is None or info.is_directory:
                continue
            if info.size != self.shape.file_size:
                _log.warning("index_file_wrong_size", path=path, size=info.size, expected=self.shape.file_size)
                self._disk.delete(path)
                damaged += 1
                continue
            file = IndexFile.open(self._disk, path, self.shape)
            if not file.is_plausible:
                _log.warning("index_file_damaged", path=path)
                file.destroy()
                damaged += 1
                continue
            self.files.append(file)
        self.files.sort(key=lambda file: file.stamp)
        self._drop_unused()
        return damaged

    def _drop_unused(self) -> None:
        """Delete a file that was created ahead but never used, so that the one before it is filled first."""
        while len(self.files) > 1 and self.files[-1].count == 1:
            self.files.pop().destroy()

    def cut(self, position: int, count: int, end_timestamp: int) -> None:
        """Drop the entries from ``count`` on of file number ``position``, and all files behind it. Blocks."""
        while len(self.files) > position + 1:
            self.files.pop().destroy()
        if position < len(self.files):
            file = self.files[position]
            if count < file.count:
                file.set_end(count, end_timestamp)
            file.link(self.batch)
        self._drop_unused()

    def clear(self) -> None:
        """Delete all files. Blocks."""
        while self.files:
            self.files.pop().destroy()

    async def close(self) -> None:
        """Close everything; delete a file that was created ahead but never used."""
        self._closing = True
        async with self._space_lock:
            following, self._next = self._next, None
        if following is not None:
            with suppress(OSError):
                await self._disk.run(following.destroy)
        self.close_files()

    def close_files(self) -> None:
        """Close the files; also after a start that failed."""
        for file in (*self.files, *self._retired):
            file.close()
        self.files.clear()
        self._retired.clear()
