"""All consume queues of a store: found by topic and queue id, read from memory or from their files."""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.queue.consume_queue import ConsumeQueue, QueueShape, first_at_or_above
from trimq.broker.store.queue.deleted_topics import DeletedTopics
from trimq.broker.store.queue.queue_files import DescriptorCache, LoadedQueue, load_queue, read_units
from trimq.broker.store.queue.queue_sizes import QueueFileError, check_size, queue_directories
from trimq.protocol.file_names import offset_name
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE

DIRECTORY: Final = "consumequeue"
_SCAN: Final = 512
_BLOCK: Final = 1024
"""Units that are read together for a consumer behind the tail: it will want the next ones, and so will others."""
_BLOCK_FROM: Final = 8
"""A read of fewer units than this is a look-up of a single place, without a block."""
_MOST_BLOCKS: Final = 256
"""Blocks of units that are cached (20 KiB each)."""


class QueueState(NamedTuple):
    """A queue whose units are all in its files, as stored in the snapshot of an orderly stop."""

    first_offset: int
    min_offset: int
    next_offset: int
    max_phy: int


class ConsumeQueueStore:
    """The queues of one store. Belongs to the event loop.

    ``units`` and ``queues_with_units`` (the sum of next offsets, and the number of queues that have units) are as of
    the last ``settle``.
    """

    def __init__(self, disk: Disk, root: str, shape: QueueShape, *, max_open_files: int = 256) -> None:
        self.disk = disk
        self.directory = f"{root}/{DIRECTORY}"
        self.shape = shape
        self.file_size = shape.units_per_file * UNIT_SIZE
        self.queues: dict[str, dict[int, ConsumeQueue]] = {}
        self.descriptors = DescriptorCache(disk, max_open_files)
        self.deleted_topics = DeletedTopics(disk, root)
        self.log_min = 0
        """Start of the log when the first offsets of all queues were last updated for it."""
        self.dirty: list[ConsumeQueue] = []
        """Queues with units that are not in their files yet."""
        self.on_new_files: Callable[[], None] = lambda: None
        self.on_growing: Callable[[ConsumeQueue], None] | None = None
        """Called with a queue at its first unit since its last flush."""
        """Called when ``create_queues`` has put queues into the writer's list."""
        self.units = 0
        self._unloaded: dict[str, dict[int, QueueState]] = {}
        """Queues of the snapshot that have not been used since the start."""
        self._moved: list[ConsumeQueue] = []
        self._blocks: dict[tuple[ConsumeQueue, int], bytes] = {}
        self.queues_with_units = 0

    # -- finding

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """The queue; None if it does not exist."""
        queues = self.queues.get(topic)
        if queues is not None:
            queue = queues.get(queue_id)
            if queue is not None:
                return queue
        return self._load_from_snapshot(topic, queue_id) if self._unloaded else None

    def exists(self, topic: str, queue_id: int) -> bool:
        """Whether the queue exists. Does not load a queue that has not been used since the start."""
        return queue_id in self.queues.get(topic, ()) or queue_id in self._unloaded.get(topic, ())

    def has_topic(self, topic: str) -> bool:
        """Whether a topic has any queue."""
        return topic in self.queues or topic in self._unloaded

    def find_or_create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, created (in memory) if it does not exist."""
        return self.find(topic, queue_id) or self._add(topic, queue_id)

    def _add(self, topic: str, queue_id: int) -> ConsumeQueue:
        directory = f"{self.directory}/{topic}/{queue_id}"
        queue = ConsumeQueue(topic, queue_id, directory, self.shape, self._on_dirty)
        self.queues.setdefault(topic, {})[queue_id] = queue
        return queue

    def _load_from_snapshot(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        states = self._unloaded.get(topic)
        state = states.pop(queue_id, None) if states is not None else None
        if state is None:
            return None
        if not states:
            del self._unloaded[topic]
        queue = self._add(topic, queue_id)
        queue.restore(*state)
        # ``put_unloaded`` has counted it already.
        queue.counted = queue.next_offset
        return queue

    def _load_topic(self, topic: str) -> None:
        for queue_id in list(self._unloaded.get(topic, ())):
            self._load_from_snapshot(topic, queue_id)

    def topics(self) -> dict[str, list[int]]:
        """All topics that have queues, with their queue ids."""
        found = {topic: set(queues) for topic, queues in self.queues.items()}
        for topic, states in self._unloaded.items():
            found.setdefault(topic, set()).update(states)
        return {topic: sorted(ids) for topic, ids in found.items()}

    def ids_of(self, topic: str) -> list[int]:
        """The ids of a topic's queues."""
        return [*self.queues.get(topic, ()), *self._unloaded.get(topic, ())]

    def all_queues(self) -> Iterator[ConsumeQueue]:
        """Every queue; loads the ones that have not been used since the start."""
        for topic in list(self._unloaded):
            self._load_topic(topic)
        for queues in list(self.queues.values()):
            yield from list(queues.values())

    def loaded_queues(self) -> Iterator[ConsumeQueue]:
        """The queues that have been used since the start."""
        for queues in list(self.queues.values()):
            yield from list(queues.values())

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The offset after the last message of a queue; 0 if it does not exist."""
        queue = self.find(topic, queue_id)
        return queue.next_offset if queue is not None else 0

    def peek_next_offset(self, topic: str, queue_id: int) -> int:
        """As ``next_offset``, without loading a queue that has not been used since the start."""
        queue = self.queues.get(topic, {}).get(queue_id)
        if queue is not None:
            return queue.next_offset
        state = self._unloaded.get(topic, {}).get(queue_id)
        return state.next_offset if state is not None else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The offset of the first message of a queue that is still in the log; 0 if it does not exist."""
        queue = self.find(topic, queue_id)
        return queue.min_offset if queue is not None else 0

    # -- counting

    def _on_dirty(self, queue: ConsumeQueue) -> None:
        self.dirty.append(queue)
        self._moved.append(queue)
        if self.on_growing is not None:
            self.on_growing(queue)

    def settle(self) -> int:
        """Bring ``units`` up to date and return it. Costs as much as queues have changed since the last call."""
        for queue in self._moved:
            if not queue.deleted:
                self._count(queue, queue.next_offset)
        # A dirty queue can grow without another ``_on_dirty``.
        self._moved = [queue for queue in self._moved if queue.dirty]
        return self.units

    def _count(self, queue: ConsumeQueue, units: int) -> None:
        self.units += units - queue.counted
        self.queues_with_units += bool(units) - bool(queue.counted)
        queue.counted = units

    def recount(self) -> None:
        """Count all queues again, after recovery has moved some of them back."""
        self._moved = [queue for queue in self.loaded_queues() if queue.dirty]
        unloaded = [state.next_offset for states in self._unloaded.values() for state in states.values()]
        self.units, self.queues_with_units = sum(unloaded), sum(map(bool, unloaded))
        for queue in self.loaded_queues():
            queue.counted = 0
            self._count(queue, queue.next_offset)

    # -- reading

    def read(self, queue: ConsumeQueue, offset: int, count: int) -> bytes | None:
        """Up to ``count`` units from ``offset`` on, at least one; None if they have to come from the device.

        ``offset`` must be in [first_offset, next_offset). One call reads from one file only.
        """
        if offset >= queue.tail_offset:
            return queue.tail_units(offset, count)
        file_offset = queue.file_of(offset)
        begin = offset - (offset - file_offset) % _BLOCK
        end = min(begin + _BLOCK, file_offset + queue.units_per_file)
        block = self._blocks.get((queue, begin))
        # Only a block whose units are all below the tail: those do not change any more, so the copy stays right.
        if block is None and _BLOCK_FROM <= count <= _BLOCK and end <= queue.tail_offset:
            block = self._read_block(queue, begin, end)
        if block is not None:
            found = block[(offset - begin) * UNIT_SIZE : (offset - begin + count) * UNIT_SIZE]
            rest = count - len(found) // UNIT_SIZE
            if not rest or end - file_offset == queue.units_per_file:
                return found
            return found + (self.read(queue, end, rest) or b"")
        count = min(count, file_offset + queue.units_per_file - offset, queue.tail_offset - offset)
        return self._read_file(queue, offset, count)

    def _read_block(self, queue: ConsumeQueue, begin: int, end: int) -> bytes | None:
        """Cache units that will be read in parts and are all in one file. None if not all of them are in memory."""
        block = self._read_file(queue, begin, end - begin)
        if block is not None:
            if len(self._blocks) >= _MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[queue, begin] = block
        return block

    def _read_file(self, queue: ConsumeQueue, offset: int, count: int) -> bytes | None:
        """Units of one file; None if they are not in memory or the file is not there: ``read_cold`` finds out which."""
        file_offset = queue.file_of(offset)
        fd = self.descriptors.get(queue.path_of(file_offset))
        if fd is None:
            return None
        units = self.disk.pread_cached(fd, count * UNIT_SIZE, (offset - file_offset) * UNIT_SIZE)
        return units if units is not None and len(units) == count * UNIT_SIZE else None

    async def read_cold(self, queue: ConsumeQueue, offset: int, count: int) -> bytes:
        """As ``read``, waiting for the device if needed; no bytes if the file was deleted.

        Raises QueueFileError if the file has been truncated since the start.
        """
        if offset >= queue.tail_offset:
            return queue.tail_units(offset, count)
        file_offset = queue.file_of(offset)
        count = min(count, file_offset + queue.units_per_file - offset, queue.tail_offset - offset)
        path = queue.path_of(file_offset)
        data = await self.disk.run(read_units, self.disk, path, offset - file_offset, count)
        if len(data) != count * UNIT_SIZE and self.disk.stat(path) is not None:
            raise QueueFileError(f"{path} has lost units since the start: restart the broker to rebuild the queue")
        if data and not queue.deleted and self.descriptors.get(path) is None:
            self.descriptors.put(path, self.disk.open(path, writable=False))
        return data

    def read_now(self, queue: ConsumeQueue, offset: int, count: int) -> bytes:
        """As ``read``, blocking. For recovery, when no client is served yet."""
        if offset >= queue.tail_offset:
            return queue.tail_units(offset, count)
        file_offset = queue.file_of(offset)
        count = min(count, file_offset + queue.units_per_file - offset, queue.tail_offset - offset)
        return read_units(self.disk, queue.path_of(file_offset), offset - file_offset, count)

    # -- loading

    def load(self, limit: int) -> list[tuple[ConsumeQueue, LoadedQueue]]:
        """Create every queue that has a directory, with its units that point below ``limit``. Blocks."""
        loaded = []
        for topic, queue_id, _ in queue_directories(self.disk, self.directory):
            queue = self._add(topic, queue_id)
            state = load_queue(self.disk, queue.directory, self.file_size, limit)
            queue.restore(state.first_offset, state.first_offset, state.next_offset, state.max_phy)
            loaded.append((queue, state))
        return loaded

    def put_unloaded(self, states: dict[str, dict[int, QueueState]]) -> None:
        """Take the queues of a snapshot; each is loaded when it is first used."""
        self._unloaded = {topic: dict(queues) for topic, queues in states.items() if queues}
        self.recount()

    def what_changed(self, topic: str, queue_id: int, state: QueueState) -> str:
        """The first difference between a queue's files and ``state``; "" if there is none. Blocks.

        Reads the last unit and the one behind it, and checks the length of each file, with one call per file.
        """
        if state.next_offset <= state.first_offset:
            return ""
        directory = f"{self.directory}/{topic}/{queue_id}"
        units = self.shape.units_per_file
        last = (state.next_offset - 1) // units
        for number in range(state.first_offset // units, last):
            path = f"{directory}/{offset_name(number * self.file_size)}"
            info = self.disk.stat(path)
            if info is None:
                return f"{path} is missing"
            if info.size != self.file_size:
                return f"{path} has {info.size} bytes, {self.file_size} are expected"
        return self._changed_end(f"{directory}/{offset_name(last * self.file_size)}", state)

    def _changed_end(self, path: str, state: QueueState) -> str:
        try:
            fd = self.disk.open(path, writable=False)
        except FileNotFoundError:
            return f"{path} is missing"
        try:
            size = self.disk.size(fd)
            if size != self.file_size:
                return f"{path} has {size} bytes, {self.file_size} are expected"
            units = self.disk.pread(fd, 2 * UNIT_SIZE, (state.next_offset - 1) * UNIT_SIZE % size)
        finally:
            self.disk.close(fd)
        phy, length, _ = UNIT.unpack_from(units)
        if phy + length != state.max_phy or any(units[UNIT_SIZE:]):
            return f"{path} does not end as it did at the last stop"
        return ""

    def check_size(self, known: int | None) -> None:
        """Raise QueueFileError if all files have another size than the configured one. Blocks.

        ``known`` is the size that the last orderly stop recorded.
        """
        check_size(self.disk, self.directory, self.file_size, known)

    def states(self) -> dict[str, dict[int, QueueState]]:
        """All queues for a snapshot; every unit must be in the files."""
        states = {topic: dict(queues) for topic, queues in self._unloaded.items()}
        for queue in self.loaded_queues():
            states.setdefault(queue.topic, {})[queue.queue_id] = QueueState(
                queue.first_offset, queue.min_offset, queue.next_offset, queue.max_phy
            )
        return states

    def correct_min_offset(self, queue: ConsumeQueue, log_min: int) -> None:
        """Set a queue's first readable offset for a log that starts at ``log_min``. Blocks: for recovery."""
        low = max(queue.min_offset, queue.first_offset)
        # Skip the fillers at the front. They point to the start of a file of the log, not to a message, so the binary
        # search behind them must not see them.
        while low < queue.next_offset:
            units = self.read_now(queue, low, _SCAN)
            if not units:
                break
            sizes = [size for _, size, _ in UNIT.iter_unpack(units)]
            fillers = next((at for at, size in enumerate(sizes) if size != FILLER_SIZE), len(sizes))
            low += fillers
            if fillers < len(sizes):
                break
        queue.min_offset = first_at_or_above(lambda at: self._phy_at(queue, at), low, queue.next_offset, log_min)

    def _phy_at(self, queue: ConsumeQueue, offset: int) -> int:
        unit = self.read_now(queue, offset, 1)
        return int.from_bytes(unit[:8], "big", signed=True) if unit else -1

    # -- creating and dropping

    def forget_all(self) -> None:
        """Drop every queue, so that recovery can load them again; the files stay."""
        self.queues.clear()
        self._unloaded.clear()
        self._blocks.clear()
        self.dirty.clear()
        self.recount()

    def starts_anew(self, topic: str, queue_id: int, phy: int) -> bool:
        """Whether a record with queue offset 0 begins a queue whose units here are older: those of a deleted topic.

        Offset 0 comes once in the life of a queue, and its units come in the order of the log.
        """
        queue = self.find(topic, queue_id)
        return queue is not None and queue.next_offset > 0 and phy >= queue.max_phy

    def create_queues(self, topic: str, count: int) -> None:
        """Create the first ``count`` queues of a topic. Their files are created with their first units."""
        for queue_id in range(count):
            queue = self.find_or_create(topic, queue_id)
            if not queue.dirty and queue.next_offset == 0 and queue.made_offset == 0:
                queue.dirty = True
                self._on_dirty(queue)
        self.on_new_files()

    def drop_queue(self, queue: ConsumeQueue) -> None:
        """Drop a queue; the caller deletes its files."""
        # First: code that holds this object over an await checks the flag before it uses the queue again.
        queue.deleted = True
        for key in [key for key in self._blocks if key[0] is queue]:
            del self._blocks[key]
        self._count(queue, 0)
        queues = self.queues.get(queue.topic)
        if queues is not None and queues.get(queue.queue_id) is queue:
            del queues[queue.queue_id]
            if not queues:
                del self.queues[queue.topic]
        for start in range(queue.first_offset, queue.next_offset + 1, queue.units_per_file):
            self.descriptors.drop(queue.path_of(start))

    def drop_topic(self, topic: str) -> list[ConsumeQueue]:
        """Drop the queues of a topic and return them; the caller deletes their files."""
        self._load_topic(topic)
        queues = list(self.queues.get(topic, {}).values())
        for queue in queues:
            self.drop_queue(queue)
        return queues

    def close(self) -> None:
        """Close all descriptors."""
        self.descriptors.close()
