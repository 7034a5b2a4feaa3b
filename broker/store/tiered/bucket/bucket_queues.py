"""The queues of a broker in a bucket, by what its manifest says: the counterpart of FlatFileStore."""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.queue.deleted_topics import DeletedTopic
from trimq.broker.store.tiered.bucket.block_reader import BlockReader
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.broker.store.tiered.bucket.garbage import Garbage
from trimq.broker.store.tiered.bucket.loaded_block import DamagedObjectError
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.stretch_groups import StretchGroups
from trimq.broker.store.tiered.driver.provider_stats import CallStats
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.bucket_manifest import Entry, StoredObject, Stretch, StretchRows
from trimq.protocol.bucket_names import ObjectName
from trimq.protocol.bucket_object import BucketFormatError
from trimq.protocol.hashing import checksum

_log: Final = structlog.get_logger(__name__)
_HOUR_MS: Final = 3_600_000
_SLICE: Final = 64
"""So many queues get stretches between two turns of the loop."""
_REPLACED: Final = 8
"""The same where stretches are removed: each has a stretch of every object that is joined."""


class BucketQueues:
    """All queues of one broker. Belongs to the event loop; ``load`` or ``claim`` comes first."""

    def __init__(
        self,
        bucket: Bucket,
        manifest: Manifest,
        config: TieredStoreConfig,
        disk: Disk,
        monotonic: Callable[[], float],
    ) -> None:
        """``disk``: has threads for checks, and to group stretches by queue."""
        self._disk = disk
        self.bucket = bucket
        self.manifest = manifest
        self.config = config
        self.blocks = BlockReader(bucket, disk, self._refresh)
        self._queues: dict[str, dict[int, BucketQueue]] = {}
        self._gone: set[str] = set()
        """Topics that were deleted while this broker did not own the bucket."""
        self._expired: list[str] = []
        """Objects that the root in the bucket still names, and the next one does not."""
        self.notes: Callable[[], Mapping[str, DeletedTopic]] = dict
        """Returns the topics that were deleted while the log has records of them; there may be new ones."""
        self._changes = trio.Lock()
        """Held while the manifest in memory and the queues change; not during requests."""
        self._indexes: Callable[[], Sequence[str] | None] = lambda: None
        self.garbage = Garbage(bucket, monotonic, config.tiered_store_bucket_grace_time)

    def name_indexes(self, indexes: Callable[[], Sequence[str] | None]) -> None:
        """Let the root name these index files."""
        self._indexes = indexes

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Change manifest and queues, with turns for other tasks. It is not left half done: queues would miss messages.

        What is read meanwhile is in the bucket as before: objects are deleted after the grace.
        """
        with trio.CancelScope(shield=True):
            async with self._changes:
                yield

    # -- start

    async def load(self) -> None:
        """Read the manifest, without taking ownership. Raises OSError, BucketFormatError."""
        said = self.manifest.lost_list
        await self.manifest.load()
        if self.manifest.lost_list not in {"", said}:
            files = len(self.manifest.indexes)
            _log.warning("tiered_index_list_lost", error=self.manifest.lost_list, files=files)
        async with self._changing():
            await self._take()

    async def claim(self, least_epoch: int = 0) -> None:
        """Read the manifest and take ownership. Raises OSError, BucketFormatError, FencedError."""
        await self.manifest.claim(least_epoch)
        async with self._changing():
            await self._take()

    async def remove_deleted(self, deleted: Mapping[str, DeletedTopic]) -> None:
        """Remove what the bucket has of topics that were deleted before the claim. Raises OSError, FencedError.

        ``deleted``: those that were deleted before the start, by name; there may be new ones of their names.
        """
        # A copy: more may be deleted meanwhile.
        noted = {topic: note for topic, note in deleted.items() if self.of_topic(topic)}
        topics = self._gone.union(noted)
        before = {
            (queue.topic, queue.queue_id): queue.commit_offset for topic in topics for queue in self.of_topic(topic)
        }
        if before:
            async with self._changing():
                changed = bool(self._gone) and await self._without(self._gone)
                for topic, note in noted.items():
                    changed |= await self._without({topic}, partial(_is_before, note))
                if changed:
                    await self._take()
            if changed:
                for (topic, queue_id), end in before.items():
                    queue = self.find(topic, queue_id)
                    if queue is None or queue.commit_offset != end:
                        _log.warning("queue_removed_from_tier", topic=topic, queue=queue_id, begin=0, end=end)
                await self.save(None)
        self._gone.clear()

    async def _refresh(self) -> None:
        """Read the manifest again, which another process has changed: a slave's copy gets old. Raises OSError."""
        if not self.manifest.is_owner:
            try:
                await self.load()
            except BucketFormatError as error:  # as a damaged object: it ends one read, and not the broker
                raise DamagedObjectError(str(error)) from error

    async def _take(self) -> None:
        """Make the queues those of the manifest. Each gets its stretches in one step."""
        groups = await self._disk.run(StretchGroups, list(self.manifest.entries))
        found = set(groups.queues)
        for queue in self.all():
            if (queue.topic, queue.queue_id) not in found:
                self._drop(queue)
        for number, (topic, queue_id) in enumerate(groups.queues):
            table, end = groups.table(number), groups.ends[number]
            queue = self.find_or_create(topic, queue_id)
            if queue.is_other(table, end):
                self._drop(queue)
                queue = self.find_or_create(topic, queue_id)
            queue.take(table, end)
            if number % _SLICE == _SLICE - 1:
                await trio.lowlevel.checkpoint()
        if not self.manifest.is_owner:
            self.hide()

    def _drop(self, queue: BucketQueue) -> None:
        """Forget a queue: one of the same name is another object, because of what was read ahead of this one."""
        queues = self._queues[queue.topic]
        del queues[queue.queue_id]
        if not queues:
            del self._queues[queue.topic]
        queue.destroy()

    def hide(self) -> None:
        """Serve nothing of deleted topics although the bucket, which this broker does not own, has it.

        A slave knows them by the notes: what it has deleted itself, its master may have created anew.
        """
        notes = self.notes()
        gone = self._gone if self.manifest.fenced else ()
        for topic in self._queues.keys() & {*notes, *gone}:
            note = None if topic in gone else notes[topic]
            for queue in self.of_topic(topic):
                self._keep(
                    queue, [one for one in queue.stretches if note is not None and not _was_before(note, one[1])]
                )

    # -- what the manifest knows

    @property
    def gone(self) -> Collection[str]:
        """Topics that were deleted here, and that the owner of the bucket may still have."""
        return self._gone

    @property
    def end(self) -> int:
        """The log offset behind all that is in the bucket."""
        return self.manifest.end

    @property
    def saved_end(self) -> int:
        """The log offset behind all that the root names."""
        return self.manifest.root.end if self.manifest.root is not None else 0

    @property
    def epoch(self) -> int:
        """The epoch of this owner."""
        return self.manifest.root.epoch if self.manifest.root is not None else 0

    @property
    def unsaved(self) -> int:
        """Objects that were uploaded since the root was replaced."""
        return self.manifest.unsaved

    @property
    def lost_from(self) -> int | None:
        """See Manifest."""
        return self.manifest.lost_from

    @property
    def is_saved(self) -> bool:
        """Whether the root names all that this owner has uploaded, and nothing that it has deleted or replaced."""
        return not self.manifest.unsaved and not self.manifest.unsaved_changes

    async def save(self, state: bytes | None) -> None:
        """Replace the root. Raises OSError, FencedError."""
        expired = set(self._expired)
        await self.manifest.save(state, self._indexes())
        gone = [name for name in self._expired if name in expired]
        if gone:
            self._expired = [name for name in self._expired if name not in expired]
            self.discard(gone)

    async def find_upload(self) -> Entry:
        """The upload object that follows the last one, which is in the bucket. Raises OSError, BucketFormatError."""
        return await self.manifest.read_entry(ObjectName(self.end, 0, 0, self.epoch, 0))

    def begin_of(self, physical: int) -> int:
        """Where the object that has a log offset begins; the offset itself if there is none."""
        for entry in reversed(self.manifest.entries):
            if entry.object.begin <= physical:
                return entry.object.begin
        return physical

    async def add(
        self,
        entry: Entry,
        state: bytes = b"",
        deleted: Callable[[], Collection[tuple[str, int]]] = tuple,
    ) -> Collection[tuple[str, int]]:
        """An upload object, with this state in it, is in the bucket: its messages can be read.

        What it has of the queues ``deleted`` is left out. Returns these queues.
        """
        async with self._changing():
            gone = deleted()
            if gone:
                kept = [stretch for stretch in entry.stretches if (stretch.topic, stretch.queue_id) not in gone]
                entry = Entry(entry.object, kept)
            self.manifest.add(entry, state)
            async for stretch in _slowly(entry):
                note = self.notes().get(stretch.topic)
                if note is None or not _was_before(note, stretch):  # else it was deleted just now
                    self.find_or_create(stretch.topic, stretch.queue_id).add(entry.object, stretch)
        return gone

    # -- queues

    def find(self, topic: str, queue_id: int) -> BucketQueue | None:
        """The queue; None if nothing of it is known."""
        return self._queues.get(topic, {}).get(queue_id)

    def find_or_create(self, topic: str, queue_id: int) -> BucketQueue:
        """The queue, created (in memory) if it is new."""
        found = self.find(topic, queue_id)
        if found is None:
            found = BucketQueue(topic, queue_id, self.topic_id(topic), self.blocks)
            self._queues.setdefault(topic, {})[queue_id] = found
        return found

    def topic_id(self, topic: str) -> int:
        """The number of a topic in the key index. Two topics may have the same: records tell them apart."""
        return checksum(topic.encode()) & 0x7FFFFFFF

    def of_topic(self, topic: str) -> list[BucketQueue]:
        """The queues of a topic."""
        return list(self._queues.get(topic, {}).values())

    def all(self) -> Iterator[BucketQueue]:
        """Every queue."""
        for queues in list(self._queues.values()):
            yield from list(queues.values())

    @property
    def queues(self) -> int:
        """The number of queues."""
        return sum(map(len, self._queues.values()))

    def calls(self) -> Iterator[tuple[str, str, CallStats]]:
        """See TieredQueues."""
        for operation, stats in self.bucket.calls.items():
            yield "object", operation, stats

    def topics(self) -> list[str]:
        """The topics with queues in the bucket."""
        return list(self._queues)

    # -- deletion

    def reserved_ms(self, topic: str) -> int:  # noqa: ARG002 - as FlatFileStore, where topics have times of their own
        """How long messages of a topic stay in the bucket, in ms."""
        return self.config.tiered_store_file_reserved_time * _HOUR_MS

    async def destroy_topic(self, topic: str) -> None:
        """Remove a topic from the manifest. Raises FencedError.

        While the bucket is away the next root waits; the note of the deletion stands for it after a kill. Objects that
        hold only messages of deleted topics are deleted as garbage; of the others the messages are left out when they
        are joined. Of a bucket that this broker does not own nothing is changed: a slave's
        master does that, and a master does it when it becomes the owner.
        """
        # A new topic of the name may have messages already, and they may have been uploaded.
        note = self.notes().get(topic)
        position = 1 << 62 if note is None else note.position
        self._drop_before(topic, position)
        async with self._changing():
            self._drop_before(topic, position)
            is_owner = self.manifest.is_owner
            if not is_owner:
                self._gone.add(topic)
            changed = is_owner and await self._without({topic}, lambda rows: rows["last_physical"] < position)
        if changed:
            try:
                await self.save(None)
            except OSError as error:
                _log.warning("topic_deletion_waits_for_bucket", topic=topic, error=str(error))

    def _drop_before(self, topic: str, position: int) -> None:
        """Forget the messages of a topic that stand below a log offset."""
        for queue in self.of_topic(topic):
            self._keep(queue, [one for one in queue.stretches if one[1].last_physical >= position])

    def _keep(self, queue: BucketQueue, kept: Sequence[tuple[StoredObject, Stretch]]) -> None:
        """Forget all but these stretches of a queue."""
        if len(kept) < len(list(queue.stretches)) or not kept:
            self._drop(queue)
            if kept:
                self.find_or_create(queue.topic, queue.queue_id).reset(kept)

    def drop_topic(self, topic: str) -> None:
        """Serve nothing of a topic any more, which is about to be deleted."""
        for queue in self._queues.pop(topic, {}).values():
            queue.destroy()

    async def forget(self, topic: str, queue_id: int, next_offset: int) -> None:
        """Remove the messages of a topic that was deleted and created anew, whose queue goes on at ``next_offset``.

        Those with greater offsets are of the old one, and so are all that stand before them in the log. The next save
        makes it durable.
        """
        async with self._changing():
            old = self._queues.get(topic, {}).pop(queue_id, None)
            if old is None:
                return
            stretches = list(old.stretches)
            last = max((stretch.last_physical for _, stretch in stretches if stretch.end > next_offset), default=-1)
            old.destroy()
            kept = [(stored, stretch) for stored, stretch in stretches if stretch.first_physical > last]
            if kept:
                self.find_or_create(topic, queue_id).reset(kept)
            await self._without(
                {topic},
                lambda rows: (
                    (rows["queue_id"] == queue_id) & ((rows["first_physical"] <= last) | (rows["messages"] == 0))
                ),
            )

    async def expire(self, before_ms: int) -> int:
        """Remove the objects whose messages were all stored before a time. Returns their number.

        The objects themselves are deleted after the grace. Raises OSError, FencedError.
        """
        async with self._changing():
            gone = []
            for entry in list(self.manifest.entries):
                if _is_expired(entry, before_ms):
                    gone.append(entry)
                await trio.lowlevel.checkpoint()
            if not any(entry.object.length for entry in gone):
                return 0
            # Where a queue ends is kept when its last messages expire: its next ones must not begin before.
            ends: dict[tuple[str, int], Stretch] = {}
            for entry in gone:
                async for stretch in _slowly(entry):
                    queue = self.find(stretch.topic, stretch.queue_id)
                    if queue is not None and stretch.end == queue.commit_offset:
                        key = stretch.topic, stretch.queue_id
                        ends[key] = stretch._replace(offset=stretch.end, messages=0, size=0, blocks=0, position=0)
            kept = gone[-1].object._replace(length=0, directory=0)
            # By the root that names them no more, be it a later one.
            self._expired += [entry.object.name for entry in gone if entry.object.length]
            await self._replace(gone, [Entry(kept, [ends[key] for key in sorted(ends)])] if ends else [])
        await self.save(None)
        return sum(entry.object.length > 0 for entry in gone)

    def discard(self, names: Sequence[str]) -> None:
        """Delete objects, which the root does not name any more, after the grace; its old pages too."""
        self.garbage.add([*names, *self.manifest.garbage_pages()])

    @property
    def replaced(self) -> set[str]:
        """What waits for its deletion: for the grace, or for a root that does not name it any more."""
        return self.garbage.names.union(self._expired)

    async def replace(self, gone: Sequence[Entry], new: Sequence[Entry]) -> bool:
        """Replace objects in the manifest and in the queues.

        Returns False, with nothing changed, if some have expired meanwhile, or have lost a topic that was deleted.
        """
        async with self._changing():
            now = {entry.object: entry for entry in self.manifest.entries}
            for entry in gone:
                if entry.object not in now or len(now[entry.object].stretches) != len(entry.stretches):
                    return False
            await self._replace(gone, new)
        return True

    async def _replace(self, gone: Sequence[Entry], new: Sequence[Entry]) -> None:
        self.manifest.change([entry.object for entry in gone], new)
        groups = await self._disk.run(StretchGroups, gone)
        changed: dict[tuple[str, int], list[tuple[StoredObject, Stretch]]] = {key: [] for key in groups.queues}
        for entry in new:
            async for stretch in _slowly(entry):
                changed.setdefault((stretch.topic, stretch.queue_id), []).append((entry.object, stretch))
        removed = {entry.object for entry in gone}
        for number, ((topic, queue_id), its) in enumerate(changed.items()):
            queue = self.find(topic, queue_id)
            if queue is not None:
                queue.replace(removed, its)
            if number % _REPLACED == _REPLACED - 1:
                await trio.lowlevel.checkpoint()

    async def _without(self, topics: Collection[str], is_gone: Callable[[Any], Any] | None = None) -> bool:
        """Remove stretches of some topics from the manifest. Returns whether there were any.

        ``is_gone``: only those; it gets rows of type STRETCH and returns flags.
        """
        gone, new = [], []
        for entry in list(self.manifest.entries):
            stretches = StretchRows.of(entry.stretches)
            numbers = [number for number, topic in enumerate(stretches.topics) if topic in topics]
            flags = np.isin(stretches.rows["topic"], numbers)
            if is_gone is not None:
                flags &= is_gone(stretches.rows)
            if flags.any():
                gone.append(entry.object)
                if not flags.all():
                    new.append(Entry(entry.object, StretchRows(stretches.topics, stretches.rows[~flags])))
            await trio.lowlevel.checkpoint()
        if gone:
            self.manifest.change(gone, new)
        return bool(gone)


async def _slowly(entry: Entry) -> AsyncIterator[Stretch]:
    """The stretches of an object, with turns for other tasks."""
    for at in range(0, len(entry.stretches), _SLICE):
        for stretch in entry.stretches[at : at + _SLICE]:
            yield stretch
        await trio.lowlevel.checkpoint()


def _is_expired(entry: Entry, before_ms: int) -> bool:
    return bool((StretchRows.of(entry.stretches).rows["end_ms"] < before_ms).all())


def _is_before(note: DeletedTopic, rows: Any) -> Any:
    """Which rows of type STRETCH are of the topic that was deleted."""
    return (rows["last_physical"] < note.position) & (rows["end_ms"] <= note.wall_ms)


def _was_before(note: DeletedTopic, stretch: Stretch) -> bool:
    return stretch.last_physical < note.position and stretch.end_ms <= note.wall_ms
