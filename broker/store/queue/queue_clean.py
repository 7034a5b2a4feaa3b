"""Consume queues follow the log: units of expired messages are no longer offered, and their files are deleted."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.queue.consume_queue import ConsumeQueue, first_at_or_above
from trimq.broker.store.queue.consume_queue_flush import FlushConsumeQueueService
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.queue.deleted_topics import DeletedTopic
from trimq.broker.store.queue.queue_files import delete_queue_files, remove_directories
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.topic_rules import is_system_topic

_QUEUES_A_CALL: Final = 32


class QueueCleaner:
    """Deletes files under the writer's lock, so that the writer cannot create a deleted file again."""

    def __init__(self, queues: ConsumeQueueStore, flush_queues: FlushConsumeQueueService) -> None:
        self._queues = queues
        self._disk = queues.disk
        self._flush_queues = flush_queues

    async def follow(self, log_min: int, pause: float = 0.0) -> int:
        """Update every queue for a log that starts at ``log_min``. Returns the number of deleted files."""
        deleted = 0
        for batch in _batches(self._queues.all_queues(), _QUEUES_A_CALL):
            places = [(queue, max(queue.min_offset, queue.first_offset), queue.written) for queue in batch]
            found = await self._disk.run(_first_offsets, self._disk, places, log_min)
            for (queue, _, written), offset in zip(places, found, strict=True):
                # the thread has searched the files; the queue may have been dropped in the meantime
                if queue.deleted:
                    continue
                # No unit in the files points into the log: the first one that does is in the tail, if anywhere.
                first = self._in_tail(queue, offset, log_min) if offset == written else offset
                queue.min_offset = max(queue.min_offset, first)
                count = await self._delete_files(queue)
                deleted += count
                if count and pause:
                    await trio.sleep(pause)
        self._queues.log_min = log_min
        return deleted

    def is_behind(self, log_min: int) -> bool:
        """True if a queue may still offer messages from before ``log_min``."""
        return self._queues.log_min < log_min

    def _in_tail(self, queue: ConsumeQueue, offset: int, log_min: int) -> int:
        if offset < queue.tail_offset:
            return offset
        return first_at_or_above(
            lambda at: int.from_bytes(queue.tail_units(at, 1)[:8], "big"), offset, queue.next_offset, log_min
        )

    async def _delete_files(self, queue: ConsumeQueue) -> int:
        """Delete the files below the first readable unit; the file with the newest unit stays."""
        keep = queue.file_of(max(0, min(queue.min_offset, queue.next_offset - 1)))
        starts = list(range(queue.first_offset, keep, queue.units_per_file))
        if not starts:
            return 0
        async with self._flush_queues.lock:
            if queue.deleted:
                return 0
            # Before the files are deleted: a read must not look for units in a file that is about to vanish.
            queue.expire(keep)
            for start in starts:
                self._queues.descriptors.drop(queue.path_of(start))
            offsets = [start * UNIT_SIZE for start in starts]
            await self._disk.run(delete_queue_files, self._disk, queue.directory, offsets)
        return len(starts)

    async def drop_topics(self, topics: Iterable[str], log_end: Callable[[], int], wall_ms: Callable[[], int]) -> None:
        """Delete topics with all their queues. A topic of the same name may be created again immediately."""
        for topic in topics:
            # Dropped and noted in one turn, with the same end of the log: a put between them would count as deleted.
            queues = self._queues.drop_topic(topic)
            self._queues.deleted_topics.note(topic, log_end(), wall_ms())
            await self._delete(queues, topic, notes=True)

    @property
    def deleted_topics(self) -> dict[str, DeletedTopic]:
        """The topics that are noted as deleted."""
        return self._queues.deleted_topics.topics

    async def drop_before(self, deleted: dict[str, int], wall_ms: int) -> None:
        """Note that topics were deleted at these log offsets, and delete their queues that end before."""
        for topic, position in deleted.items():
            ids = self._queues.ids_of(topic)
            queues = [queue for queue_id in ids if (queue := self._queues.find(topic, queue_id)) is not None]
            old = [queue for queue in queues if queue.next_offset and queue.max_phy <= position]
            for queue in old:
                self._queues.drop_queue(queue)
            self._queues.deleted_topics.note(topic, position, wall_ms)
            await self._delete(old, topic, notes=True)

    async def drop_old(self, topic: str, queue_id: int) -> None:
        """Delete a queue whose topic its master has created again. Raises OSError."""
        queue = self._queues.find(topic, queue_id)
        if queue is not None:
            self._queues.drop_queue(queue)
            await self._delete([queue], topic)

    async def drop_expired(self) -> int:
        """Delete the queues of ordinary topics that have no message left in the log. Returns their number."""
        count = 0
        for queue in list(self._queues.all_queues()):
            if queue.next_offset and queue.min_offset >= queue.next_offset and not is_system_topic(queue.topic):
                self._queues.drop_queue(queue)
                await self._delete([queue], queue.topic)
                count += 1
        return count

    async def _delete(self, queues: list[ConsumeQueue], topic: str, *, notes: bool = False) -> None:
        """Delete the files of dropped queues; with ``notes`` the note of deleted topics is saved first. Raises OSError.

        A new queue may have the same names. So the files go before the next write, even of a writer that waits already.
        """
        deleted = False

        async def delete() -> None:
            nonlocal deleted
            if deleted:
                return
            if notes:
                await self._queues.deleted_topics.save()
            for queue in queues:
                await self._disk.run(delete_queue_files, self._disk, queue.directory)
            await self._disk.run(remove_directories, self._disk, [f"{self._queues.directory}/{topic}"])
            deleted = True

        self._flush_queues.before_write.append(delete)
        try:
            async with self._flush_queues.lock:
                await delete()
        finally:
            self._flush_queues.before_write.remove(delete)


def _batches(queues: Iterator[ConsumeQueue], size: int) -> Iterator[list[ConsumeQueue]]:
    batch: list[ConsumeQueue] = []
    for queue in queues:
        batch.append(queue)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _first_offsets(disk: Disk, places: list[tuple[ConsumeQueue, int, int]], log_min: int) -> list[int]:
    """For each queue the first of the units [low, high) in its files that points to ``log_min`` or behind. Blocks."""
    return [_first_offset(disk, queue, low, high, log_min) for queue, low, high in places]


def _first_offset(disk: Disk, queue: ConsumeQueue, low: int, high: int, log_min: int) -> int:
    open_files: dict[int, int] = {}

    def phy_at(offset: int) -> int:
        file_offset = queue.file_of(offset)
        fd = open_files.get(file_offset)
        if fd is None:
            fd = open_files[file_offset] = disk.open(queue.path_of(file_offset), writable=False)
        phy: int = UNIT.unpack(disk.pread(fd, UNIT_SIZE, (offset - file_offset) * UNIT_SIZE))[0]
        return phy

    try:
        if low >= high or phy_at(low) >= log_min:
            return low
        return first_at_or_above(phy_at, low, high, log_min)
    except FileNotFoundError:
        return low
    finally:
        for fd in open_files.values():
            disk.close(fd)
