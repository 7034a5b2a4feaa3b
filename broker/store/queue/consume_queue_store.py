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
"""Units that are read at once for a consumer behind the tail: it comes back for the next ones, as others do."""
_BLOCK_FROM: Final = 8
"""Fewer units than this are a look at a single place."""
_MOST_BLOCKS: Final = 256
"""Blocks of units that are kept (20 KiB each)."""


class QueueState(NamedTuple):
    """A queue whose units are all in its files, as the snapshot of an orderly stop keeps it."""

    first_offset: int
    min_offset: int
    next_offset: int
    max_phy: int


class ConsumeQueueStore:
    """The queues of one store. Belongs to the event loop.

    ``units`` and ``queues_with_units`` (sum of next offsets, number of queues that have any) are as of the last
    ``settle``.
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
        """Where the log began when the first offsets of all queues were last brought up to it."""
        self.dirty: list[ConsumeQueue] = []
        """Queues with units that are not in their files yet."""
        self.on_new_files: Callable[[], None] = lambda: None
        """Called when files of new queues are to be made soon."""
        self.units = 0
        self._asleep: dict[str, dict[int, QueueState]] = {}
        self._moved: list[ConsumeQueue] = []
        self._blocks: dict[tuple[ConsumeQueue, int], bytes] = {}
        self.queues_with_units = 0

    # -- finding

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """The queue, if there is one."""
        queues = self.queues.get(topic)
        if queues is not None:
            queue = queues.get(queue_id)
            if queue is not None:
                return queue
        return self._wake(topic, queue_id) if self._asleep else None

    def exists(self, topic: str, queue_id: int) -> bool:
        """Whether there is such a queue; one that nobody has used since the start is not loaded for that."""
        return queue_id in self.queues.get(topic, ()) or queue_id in self._asleep.get(topic, ())

    def has_topic(self, topic: str) -> bool:
        """Whether a topic has any queue."""
        return topic in self.queues or topic in self._asleep

    def find_or_create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue, made (in memory) if there is none."""
        return self.find(topic, queue_id) or self._add(topic, queue_id)

    def _add(self, topic: str, queue_id: int) -> ConsumeQueue:
        directory = f"{self.directory}/{topic}/{queue_id}"
        queue = ConsumeQueue(topic, queue_id, directory, self.shape, self._on_dirty)
        self.queues.setdefault(topic, {})[queue_id] = queue
        return queue

    def _wake(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        states = self._asleep.get(topic)
        state = states.pop(queue_id, None) if states is not None else None
        if state is None:
            return None
        if not states:
            del self._asleep[topic]
        queue = self._add(topic, queue_id)
        queue.restore(*state)
        queue.counted = queue.next_offset
        return queue

    def _wake_topic(self, topic: str) -> None:
        for queue_id in list(self._asleep.get(topic, ())):
            self._wake(topic, queue_id)

    def topics(self) -> dict[str, list[int]]:
        """All topics that have queues, with the ids of their queues."""
        found = {topic: set(queues) for topic, queues in self.queues.items()}
        for topic, states in self._asleep.items():
            found.setdefault(topic, set()).update(states)
        return {topic: sorted(ids) for topic, ids in found.items()}

    def all_queues(self) -> Iterator[ConsumeQueue]:
        """Every queue, loaded or not: walks through all of them."""
        for topic in list(self._asleep):
            self._wake_topic(topic)
        for queues in list(self.queues.values()):
            yield from list(queues.values())

    def loaded_queues(self) -> Iterator[ConsumeQueue]:
        """The queues that somebody has used since the start."""
        for queues in list(self.queues.values()):
            yield from list(queues.values())

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The offset after a queue's last message; 0 for a queue that does not exist."""
        queue = self.find(topic, queue_id)
        return queue.next_offset if queue is not None else 0

    def peek_next_offset(self, topic: str, queue_id: int) -> int:
        """The same, without loading a queue that nobody has used since the start."""
        queue = self.queues.get(topic, {}).get(queue_id)
        if queue is not None:
            return queue.next_offset
        state = self._asleep.get(topic, {}).get(queue_id)
        return state.next_offset if state is not None else 0

    def min_offset(self, topic: str, queue_id: int) -> int:
        """The offset of a queue's first message that is still in the log; 0 for a queue that does not exist."""
        queue = self.find(topic, queue_id)
        return queue.min_offset if queue is not None else 0

    # -- counting

    def _on_dirty(self, queue: ConsumeQueue) -> None:
        self.dirty.append(queue)
        self._moved.append(queue)

    def settle(self) -> int:
        """Bring ``units`` up to date and return it; costs what has moved since the last time."""
        for queue in self._moved:
            if not queue.deleted:
                self._count(queue, queue.next_offset)
        self._moved = [queue for queue in self._moved if queue.dirty]
        return self.units

    def _count(self, queue: ConsumeQueue, units: int) -> None:
        self.units += units - queue.counted
        self.queues_with_units += bool(units) - bool(queue.counted)
        queue.counted = units

    def recount(self) -> None:
        """Count all queues anew, after recovery has moved some of them back."""
        self._moved = [queue for queue in self.loaded_queues() if queue.dirty]
        asleep = [state.next_offset for states in self._asleep.values() for state in states.values()]
        self.units, self.queues_with_units = sum(asleep), sum(map(bool, asleep))
        for queue in self.loaded_queues():
            queue.counted = 0
            self._count(queue, queue.next_offset)

    # -- reading

    def read(self, queue: ConsumeQueue, offset: int, count: int) -> bytes | None:
        """Up to ``count`` units from ``offset`` on, at least one; None if they have to come from the device.

        The offset lies in [first_offset, next_offset). One call reads from one file at most.
        """
        if offset >= queue.tail_offset:
            return queue.tail_units(offset, count)
        file_offset = queue.file_of(offset)
        begin = offset - (offset - file_offset) % _BLOCK
        end = min(begin + _BLOCK, file_offset + queue.units_per_file)
        block = self._blocks.get((queue, begin))
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
        """Units that are all in a file and will be asked for in parts; None where not all of them are in memory."""
        block = self._read_file(queue, begin, end - begin)
        if block is not None:
            if len(self._blocks) >= _MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[queue, begin] = block
        return block

    def _read_file(self, queue: ConsumeQueue, offset: int, count: int) -> bytes | None:
        """Units of one file; None where they are not in memory, or not there: ``read_cold`` tells of that."""
        file_offset = queue.file_of(offset)
        fd = self.descriptors.get(queue.path_of(file_offset))
        if fd is None:
            return None
        units = self.disk.pread_cached(fd, count * UNIT_SIZE, (offset - file_offset) * UNIT_SIZE)
        return units if units is not None and len(units) == count * UNIT_SIZE else None

    async def read_cold(self, queue: ConsumeQueue, offset: int, count: int) -> bytes:
        """The same, waiting for the device where needed; no bytes if the file is gone.

        Raises QueueFileError for a file that somebody has cut since the start.
        """
        if offset >= queue.tail_offset:
            return queue.tail_units(offset, count)
        file_offset = queue.file_of(offset)
        count = min(count, file_offset + queue.units_per_file - offset, queue.tail_offset - offset)
        path = queue.path_of(file_offset)
        data = await self.disk.run(read_units, self.disk, path, offset - file_offset, count)
        if len(data) != count * UNIT_SIZE and self.disk.stat(path) is not None:
            raise QueueFileError(f"{path} has lost units since the start: restart the broker, it makes the queue anew")
        if data and not queue.deleted and self.descriptors.get(path) is None:
            self.descriptors.put(path, self.disk.open(path, writable=False))
        return data

    def read_now(self, queue: ConsumeQueue, offset: int, count: int) -> bytes:
        """The same, blocking: for recovery, when nobody is served yet."""
        if offset >= queue.tail_offset:
            return queue.tail_units(offset, count)
        file_offset = queue.file_of(offset)
        count = min(count, file_offset + queue.units_per_file - offset, queue.tail_offset - offset)
        return read_units(self.disk, queue.path_of(file_offset), offset - file_offset, count)

    # -- loading

    def load(self, limit: int) -> list[tuple[ConsumeQueue, LoadedQueue]]:
        """Make every queue that has a directory, with its units that point below ``limit``. Blocks."""
        loaded = []
        for topic, queue_id, _ in queue_directories(self.disk, self.directory):
            queue = self._add(topic, queue_id)
            state = load_queue(self.disk, queue.directory, self.file_size, limit)
            queue.restore(state.first_offset, state.first_offset, state.next_offset, state.max_phy)
            loaded.append((queue, state))
        return loaded

    def put_asleep(self, states: dict[str, dict[int, QueueState]]) -> None:
        """Take the queues of a snapshot; each is made when it is first asked for."""
        self._asleep = {topic: dict(queues) for topic, queues in states.items() if queues}
        self.recount()

    def what_changed(self, topic: str, queue_id: int, state: QueueState) -> str:
        """What is not as ``state`` has it among a queue's files; "" for nothing. Blocks.

        Reads the last unit and the one behind it, and looks at the length of each file: a call for each of them.
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
        return self._what_ends_otherwise(f"{directory}/{offset_name(last * self.file_size)}", state)

    def _what_ends_otherwise(self, path: str, state: QueueState) -> str:
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
        """Raise QueueFileError where all files tell of another size than the configured one. Blocks.

        ``known`` is the one that an orderly stop wrote down.
        """
        check_size(self.disk, self.directory, self.file_size, known)

    def states(self) -> dict[str, dict[int, QueueState]]:
        """All queues for a snapshot; everything must be in the files."""
        states = {topic: dict(queues) for topic, queues in self._asleep.items()}
        for queue in self.loaded_queues():
            states.setdefault(queue.topic, {})[queue.queue_id] = QueueState(
                queue.first_offset, queue.min_offset, queue.next_offset, queue.max_phy
            )
        return states

    def correct_min_offset(self, queue: ConsumeQueue, log_min: int) -> None:
        """Set a queue's first readable offset for a log that begins at ``log_min``. Blocks: for recovery."""
        low = max(queue.min_offset, queue.first_offset)
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

    # -- making and dropping

    def forget_all(self) -> None:
        """Forget every queue; the files stay. For recovery, to load them again."""
        self.queues.clear()
        self._asleep.clear()
        self._blocks.clear()
        self.dirty.clear()
        self.recount()

    def create_queues(self, topic: str, count: int) -> None:
        """Make the first ``count`` queues of a topic; the writer makes their first files soon."""
        for queue_id in range(count):
            queue = self.find_or_create(topic, queue_id)
            if not queue.dirty and queue.next_offset == 0 and queue.made_offset == 0:
                queue.dirty = True
                self._on_dirty(queue)
        self.on_new_files()

    def drop_queue(self, queue: ConsumeQueue) -> None:
        """Forget a queue; its files are the caller's."""
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
        """Forget a topic's queues and return them; their files are the caller's."""
        self._wake_topic(topic)
        queues = list(self.queues.get(topic, {}).values())
        for queue in queues:
            self.drop_queue(queue)
        return queues

    def close(self) -> None:
        """Close all descriptors."""
        self.descriptors.close()
