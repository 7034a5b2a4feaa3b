"""The queues of a broker in a bucket, by what its manifest says: the counterpart of FlatFileStore."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.tiered.bucket.block_reader import BlockReader
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.broker.store.tiered.bucket.garbage import Garbage
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.driver.provider_stats import CallStats
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.bucket_manifest import Entry, StoredObject, Stretch
from trimq.protocol.bucket_names import ObjectName
from trimq.protocol.hashing import checksum

_log: Final = structlog.get_logger(__name__)
_HOUR_MS: Final = 3_600_000


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
        """``disk``: has threads for checks."""
        self.bucket = bucket
        self.manifest = manifest
        self.config = config
        self.blocks = BlockReader(bucket, disk, self._refresh)
        self._queues: dict[str, dict[int, BucketQueue]] = {}
        self._gone: set[str] = set()
        """Topics that were deleted while this broker did not own the bucket."""
        self._indexes: Callable[[], Sequence[str] | None] = lambda: None
        self.garbage = Garbage(bucket, monotonic, config.tiered_store_bucket_grace_time)

    def name_indexes(self, indexes: Callable[[], Sequence[str] | None]) -> None:
        """Let the root name these index files."""
        self._indexes = indexes

    # -- start

    async def load(self) -> None:
        """Read the manifest, without taking ownership. Raises OSError, BucketFormatError."""
        await self.manifest.load()
        self._take()

    async def claim(self, least_epoch: int = 0) -> None:
        """Read the manifest and take ownership. Raises OSError, BucketFormatError, FencedError."""
        await self.manifest.claim(least_epoch)
        self._take()

    async def remove_deleted(self, is_deleted: Callable[[Stretch], bool] | None) -> None:
        """Remove what the bucket has of topics that were deleted before the claim. Raises OSError, FencedError.

        ``is_deleted``: whether a stretch is that of a topic which was deleted before the start.
        """
        removed: dict[tuple[str, int], int] = {}

        def is_gone(stretch: Stretch) -> bool:
            # Of the old topic, though there may be a new one of its name.
            gone = stretch.topic in self._gone or (is_deleted is not None and is_deleted(stretch))
            if gone:
                key = stretch.topic, stretch.queue_id
                removed[key] = max(stretch.end, removed.get(key, 0))
            return gone

        if (self._gone or is_deleted is not None) and self._without(is_gone):
            self._take()
            for (topic, queue_id), end in removed.items():
                _log.warning("queue_removed_from_tier", topic=topic, queue=queue_id, begin=0, end=end)
            await self.save(None)
        self._gone.clear()

    async def _refresh(self) -> None:
        """Read the manifest again, which another process has changed: a slave's copy gets old."""
        if not self.manifest.is_owner:
            await self.load()

    def _take(self) -> None:
        """Make the queues those of the manifest."""
        found: dict[tuple[str, int], list[tuple[StoredObject, Stretch]]] = {}
        for entry in self.manifest.entries:
            for stretch in entry.stretches:
                found.setdefault((stretch.topic, stretch.queue_id), []).append((entry.object, stretch))
        for queue in self.all():
            if (queue.topic, queue.queue_id) not in found:
                queue.reset(())
        for (topic, queue_id), stretches in found.items():
            self.find_or_create(topic, queue_id).reset(stretches)

    # -- what the manifest knows

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
    def is_saved(self) -> bool:
        """Whether the root names all that this owner has uploaded, and nothing that it has deleted or replaced."""
        return not self.manifest.unsaved and not self.manifest.unsaved_changes

    async def save(self, state: bytes | None) -> None:
        """Replace the root. Raises OSError, FencedError."""
        await self.manifest.save(state, self._indexes())

    async def find_upload(self) -> Entry:
        """The upload object that follows the last one, which is in the bucket. Raises OSError, BucketFormatError."""
        return await self.manifest.read_entry(ObjectName(self.end, 0, 0, self.epoch, 0))

    def begin_of(self, physical: int) -> int:
        """Where the object that has a log offset begins; the offset itself if there is none."""
        for entry in reversed(self.manifest.entries):
            if entry.object.begin <= physical:
                return entry.object.begin
        return physical

    def add(self, entry: Entry, state: bytes = b"") -> None:
        """An upload object, with this state in it, is in the bucket: its messages can be read."""
        self.manifest.add(entry, state)
        for stretch in entry.stretches:
            self.find_or_create(stretch.topic, stretch.queue_id).add(entry.object, stretch)

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
        """Remove a topic from the manifest. Raises OSError, FencedError.

        Objects that hold only messages of deleted topics are deleted by the next expiry; of the others the messages
        are left out when they are joined. Of a bucket that this broker does not own nothing is changed: a slave's
        master does that, and a master does it when it becomes the owner.
        """
        for queue in self._queues.pop(topic, {}).values():
            queue.destroy()
        if not self.manifest.is_owner:
            self._gone.add(topic)
        elif self._without(lambda stretch: stretch.topic == topic):
            await self.save(None)

    def forget(self, topic: str, queue_id: int, next_offset: int) -> None:
        """Remove the messages of a topic that was deleted and created anew, whose queue goes on at ``next_offset``.

        Those with greater offsets are of the old one, and so are all that stand before them in the log. The next save
        makes it durable.
        """
        old = self._queues.get(topic, {}).pop(queue_id, None)
        if old is None:
            return
        stretches = list(old.stretches)
        last = max((stretch.last_physical for _, stretch in stretches if stretch.end > next_offset), default=-1)
        old.destroy()
        kept = [(stored, stretch) for stored, stretch in stretches if stretch.first_physical > last]
        if kept:
            self.find_or_create(topic, queue_id).reset(kept)
        self._without(
            lambda stretch: (
                (stretch.topic, stretch.queue_id) == (topic, queue_id)
                and (stretch.first_physical <= last or not stretch.messages)
            )
        )

    async def expire(self, before_ms: int) -> int:
        """Remove the objects whose messages were all stored before a time. Returns their number.

        The objects themselves are deleted after the grace. Raises OSError, FencedError.
        """
        gone = [entry for entry in self.manifest.entries if _is_expired(entry, before_ms)]
        if not any(entry.object.length for entry in gone):
            return 0
        # Where a queue ends is kept when its last messages expire: its next ones must not begin before.
        ends: dict[tuple[str, int], Stretch] = {}
        for entry in gone:
            for stretch in entry.stretches:
                queue = self.find(stretch.topic, stretch.queue_id)
                if queue is not None and stretch.end == queue.commit_offset:
                    key = stretch.topic, stretch.queue_id
                    ends[key] = stretch._replace(offset=stretch.end, messages=0, size=0, blocks=0, position=0)
        kept = gone[-1].object._replace(length=0, directory=0)
        self.replace(gone, [Entry(kept, [ends[key] for key in sorted(ends)])] if ends else [])
        await self.save(None)
        self.discard([entry.object.name for entry in gone if entry.object.length])
        return sum(entry.object.length > 0 for entry in gone)

    def discard(self, names: Sequence[str]) -> None:
        """Delete objects, which the root does not name any more, after the grace."""
        self.garbage.add([*names, *self.manifest.garbage_pages()])

    def replace(self, gone: Sequence[Entry], new: Sequence[Entry]) -> None:
        """Replace objects in the manifest and in the queues."""
        self.manifest.change([entry.object for entry in gone], new)
        removed = {entry.object for entry in gone}
        its: dict[tuple[str, int], list[tuple[StoredObject, Stretch]]] = {
            (stretch.topic, stretch.queue_id): [] for entry in gone for stretch in entry.stretches
        }
        for entry in new:
            for stretch in entry.stretches:
                its.setdefault((stretch.topic, stretch.queue_id), []).append((entry.object, stretch))
        for (topic, queue_id), stretches in its.items():
            queue = self.find(topic, queue_id)
            if queue is not None:
                queue.replace(removed, stretches)

    def _without(self, is_gone: Callable[[Stretch], bool]) -> bool:
        """Remove stretches from the manifest. Returns whether there were any."""
        gone, new = [], []
        for entry in self.manifest.entries:
            kept = [stretch for stretch in entry.stretches if not is_gone(stretch)]
            if len(kept) < len(entry.stretches):
                gone.append(entry.object)
                if kept:
                    new.append(Entry(entry.object, kept))
        if gone:
            self.manifest.change(gone, new)
        return bool(gone)


def _is_expired(entry: Entry, before_ms: int) -> bool:
    return all(stretch.end_ms < before_ms for stretch in entry.stretches)
