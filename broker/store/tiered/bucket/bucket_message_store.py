"""A store whose tier is a bucket of an object store (tieredBackendServiceProvider=trimq.Bucket).

A bucket that is away, slow, full or forbidden costs local disk only: messages wait there for their upload. Until its
manifest was read, a consumer of older messages is asked to come again.

A master owns the bucket by an epoch; a slave only reads. An empty disk gets the history of the bucket (restore.py).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.message_store import StoreLoadError
from trimq.broker.store.tiered.access.batch import BatchBuilder
from trimq.broker.store.tiered.access.tiered_messages import TieredMessages
from trimq.broker.store.tiered.access.tiered_store import TieredStore
from trimq.broker.store.tiered.bucket.backoff import Backoff
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues
from trimq.broker.store.tiered.bucket.index_completion import complete_index, repeated
from trimq.broker.store.tiered.bucket.index_objects import IndexObjects
from trimq.broker.store.tiered.bucket.join_sources import LogSource
from trimq.broker.store.tiered.bucket.joiner import Joiner
from trimq.broker.store.tiered.bucket.manifest import FencedError, Manifest
from trimq.broker.store.tiered.bucket.object_store import ObjectStore
from trimq.broker.store.tiered.bucket.queue_starts import QueueStarts, idle_queues, read_restored
from trimq.broker.store.tiered.bucket.restore import is_empty, restore
from trimq.broker.store.tiered.bucket.same_history import SameHistory
from trimq.broker.store.tiered.bucket.state_files import StateFiles
from trimq.broker.store.tiered.bucket.upkeep import Upkeep
from trimq.broker.store.tiered.bucket.uploader import BucketUploads
from trimq.broker.store.tiered.container.index_store_file import TieredIndexShape
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.broker.store.types import TierTrouble
from trimq.broker.tiered_config import TieredStorageLevel, TieredStoreConfig
from trimq.protocol.bucket_manifest import Entry
from trimq.protocol.bucket_names import broker_prefix
from trimq.protocol.bucket_object import BucketFormatError
from trimq.protocol.topic_rules import is_system_topic

_log: Final = structlog.get_logger(__name__)

AWAY: Final = "tier_away"
FENCED: Final = "tier_fenced"
DAMAGED: Final = "tier_damaged"

_STOP_SECONDS: Final = 10.0
"""How long a stop waits for the upload under way and for the last one."""
_START_SECONDS: Final = 5.0
"""How long a start waits for an answer of the bucket; then it goes on, and consumers of older messages wait."""
_READ_AGAIN: Final = 600.0
"""Seconds after which a slave reads the manifest again, and it is noted where queues go on."""
_MOST_SLOTS: Final = 500_000
_MOST_KEYS: Final = 2_000_000
"""Most hash slots and keys of an index file, whatever the configuration says: 60 MB, uploaded as a whole."""
_SEAL_AFTER_MS: Final = 3_600_000
"""An index file with keys is uploaded after an hour, full or not: a restore has to read the keys of no more again."""


class BucketMessageStore(TieredStore):
    """See MessageStore. ``tier`` is its configuration, ``objects`` the object store."""

    def __init__(
        self,
        config: MessageStoreConfig,
        tier: TieredStoreConfig,
        objects: ObjectStore,
        *,
        cluster: str,
        broker_name: str,
        random: Random | None = None,
        **more: Any,
    ) -> None:
        """``more``: the keyword arguments of MessageStore. ``random``: for pauses and the name of the owner."""
        super().__init__(config, tier, cluster=cluster, broker_name=broker_name, **more)
        self._random = random or Random()  # noqa: S311 - no secret
        prefix = broker_prefix(tier.tiered_store_bucket_prefix, cluster, broker_name)
        threads = self.disk.with_own_threads()
        self.bucket = Bucket(objects, threads, prefix)
        self.manifest = Manifest(self.bucket, cluster, broker_name)
        self.bucket_queues = BucketQueues(self.bucket, self.manifest, tier, threads, self.clock.monotonic)
        builder = BatchBuilder(self.commit_log, self.queues)
        self._history = SameHistory(self.commit_log, self.queues, builder)
        self.bucket_queues.notes = lambda: self._history.deleted
        self._starts = QueueStarts(self.disk, self.root, {})
        self._has_claimed = False

        async def local(entries: Sequence[Entry]) -> LogSource:
            return await LogSource.of(entries, builder, self.queues, threads, lambda: self.min_phy_offset)

        self.joiner = Joiner(self.bucket, self.bucket_queues, threads, self.root, local)
        self._trouble: TierTrouble | None = None
        self.is_loaded = trio.Event()
        """Set once the history in the bucket is known."""
        self._has_looked = trio.Event()
        """Set once the bucket has answered, or has failed to."""
        if config.message_index_enable:
            self._index_objects = IndexObjects(
                self.bucket,
                lambda: self.manifest.indexes,
                lambda: self.bucket_queues.epoch,
                self.bucket_queues.begin_of,
            )
            self.bucket_queues.name_indexes(lambda: self._index_objects.names)
            self.tier_index = IndexStoreService(
                self.disk,
                self.root,
                tier,
                self._index_objects,
                persist=self._save_indexes,
                wall_ms=self.clock.wall_ms,
                seal_after_ms=_SEAL_AFTER_MS,
                shape=TieredIndexShape(
                    min(tier.tiered_store_index_file_max_hash_slot_num, _MOST_SLOTS),
                    min(tier.tiered_store_index_file_max_index_num, _MOST_KEYS),
                ),
            )
        self.uploads = BucketUploads(
            tier,
            self.queues,
            builder,
            self.bucket_queues,
            self.tier_index,
            StateFiles(self.disk, self.root, self.clock.monotonic),
            excluded=self.is_excluded,
            # An object covers all queues of its part of the log: so their units have to be there.
            uploadable=lambda: min(self._uploadable(), self.dispatched_offset),
            wall_ms=self.clock.wall_ms,
            random=self._random,
        )
        self.upkeep = Upkeep(
            self.bucket_queues,
            self.uploads,
            self.joiner,
            self.clock,
            self._random,
            own_indexes=lambda: self._index_objects.own if self.tier_index is not None else (),
            fenced=self._fenced,
        )
        if not self.replication.is_slave:
            self.queues.on_growing = self.uploads.note
            self.hold_log(TieredMessages(self.uploads))
        self._read_tier(self.tier_index)

    async def _save_indexes(self) -> None:
        """Let the root name the uploaded index files. Raises OSError."""
        before, names = set(self.manifest.indexes), self._index_objects.names
        if names is None or set(names) == before:
            return
        try:
            await self.uploads.save()
        except FencedError as error:
            self._fenced(error)
            raise OSError(str(error)) from error
        self.bucket_queues.discard(sorted(before - set(names)))

    @property
    def tier_queues(self) -> BucketQueues:
        """See TieredStore."""
        return self.bucket_queues

    @property
    def tier_uploads(self) -> BucketUploads:
        """See TieredStore."""
        return self.uploads

    def tier_trouble(self) -> TierTrouble | None:
        """See MessageStore. The codes are tier_away, tier_fenced and tier_damaged."""
        if self._trouble is not None or not self.uploads.problem:
            return self._trouble
        return TierTrouble(AWAY, self._away(self.uploads.problem))

    def _away(self, error: str) -> str:
        bucket = self.tier.tiered_store_bucket
        return f"the bucket {bucket} cannot be used, messages wait on the local disk and uploads are repeated: {error}"

    # -- lifecycle

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["BucketMessageStore"]:
        """See MessageStore. Raises StoreLoadError also if the disk is empty and the bucket cannot be read."""
        if not self.replication.is_slave and await self.disk.run(is_empty, self.disk, self.config):
            await self._restore()
        self._starts = await self.disk.run(read_restored, self.disk, self.root)
        async with super().opened():
            await self._begin_queues()
            async with trio.open_nursery() as nursery:
                finished = trio.Event()
                nursery.start_soon(self._run_tier, finished)
                nursery.start_soon(self._run_expiry)
                nursery.start_soon(self.fetcher.run)
                with trio.move_on_after(_START_SECONDS):
                    await self._has_looked.wait()
                try:
                    yield self
                finally:
                    with trio.CancelScope(shield=True):
                        await self._stop_tier(finished)
                    nursery.cancel_scope.cancel()

    async def _restore(self) -> None:
        try:
            await self.bucket_queues.load()
            if self.manifest.root is None:
                return
            # First: what another broker uploads from now on does not belong to the history, and cannot be missing here.
            await self._own()
            found = await restore(self.disk, self.config, self.bucket, self.manifest)
        except (OSError, BucketFormatError, FencedError) as error:
            raise StoreLoadError(
                f"the directory {self.root} is empty, and the history of the broker cannot be read from the bucket "
                f"{self.tier.tiered_store_bucket}: {error}. Start again when it can be read, or configure the broker "
                "without a tier to start with nothing"
            ) from error
        _log.warning("store_restored_from_bucket", log_start=found.log_start, queues=len(found.queues))
        for queue in found.queues:
            if queue.missing > 0:
                _log.warning(
                    "messages_not_in_tier", topic=queue.topic, queue=queue.queue_id, begin=queue.end, end=queue.start
                )

    async def _begin_queues(self) -> None:
        """Let the queues that have no message here begin where they should: before the bucket has answered."""
        # A deletion is noted first, so a power cut may have come before the topic was forgotten.
        await self._starts.forget(self._history.deleted.__contains__)
        if self.replication.is_slave:
            return  # their offsets come from the master
        for (topic, queue_id), start in self._starts.starts.items():
            # One that has messages, and ends before, is that of a new topic of the name.
            if start and not self.queues.peek_next_offset(topic, queue_id):
                self.queues.find_or_create(topic, queue_id).start_at(start)

    async def _run_tier(self, finished: trio.Event) -> None:
        try:
            if self.replication.is_slave:
                await self._follow()
            elif await self._open_tier(self._claim):
                await self._continue_queues()
                await self._open_index()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._run_notes)
                    if self.tier_index is not None:
                        nursery.start_soon(self.tier_index.run)
                    nursery.start_soon(self.upkeep.run)
                    try:
                        await self.uploads.run()
                    except FencedError as error:  # here: a nursery would put it into a group
                        self._fenced(error)
                    nursery.cancel_scope.cancel()
        except FencedError as error:
            self._fenced(error)
        finally:
            finished.set()

    async def _open_index(self) -> None:
        """Open the key index, and put the keys that it has not: before uploads put those of later messages."""
        index = self.tier_index
        if index is None:
            return
        objects = self._index_objects

        async def complete() -> None:
            await complete_index(index, objects.upto, self.bucket, self.manifest, self.bucket_queues)

        await repeated([index.recover, complete], self.uploads, Backoff(self._random))

    def _fenced(self, error: FencedError) -> None:
        self._trouble = TierTrouble(FENCED, f"nothing is uploaded until the next start: {error}")
        if self.uploads.fenced:
            return
        self.uploads.fence()
        _log.error("tier_fenced", bucket=self.tier.tiered_store_bucket, reason=str(error))

    async def _open_tier(self, read: Callable[[], Awaitable[None]]) -> bool:
        """Read the manifest, again and again until it succeeds. Returns False if it never will. Raises FencedError."""
        pauses = Backoff(self._random)
        while not self.uploads.is_stopping:
            try:
                await read()
            except OSError as error:
                self._has_looked.set()
                if self._trouble is None:
                    _log.error("tier_not_readable", bucket=self.tier.tiered_store_bucket, error=str(error))
                self._trouble = TierTrouble(AWAY, self._away(str(error)))
            except FencedError:
                self.bucket_queues.hide()
                self._loaded()  # what was read is served
                raise
            except BucketFormatError as error:
                self._trouble = TierTrouble(DAMAGED, f"nothing is uploaded, and older messages cannot be read: {error}")
                _log.error("tier_damaged", bucket=self.tier.tiered_store_bucket, error=str(error))
                self._has_looked.set()
                return False
            else:
                if self._trouble is not None:
                    _log.info("tier_readable", bucket=self.tier.tiered_store_bucket)
                self._trouble = None
                self._loaded()
                return True
            await self.uploads.wait_until_stop(pauses.next())
        return False

    def _loaded(self) -> None:
        self.is_loaded.set()
        self._has_looked.set()

    async def _claim(self) -> None:
        if not self.manifest.is_owner:  # otherwise a claim that was not completed goes on
            await self.bucket_queues.load()
        await self._check_history()
        await self._own()
        # Again: the owner before may have uploaded more.
        await self._check_history()
        await self.bucket_queues.remove_deleted(self._history.deleted)

    async def _own(self) -> None:
        leadership = self.replication.leadership
        epoch = leadership.epoch if leadership is not None else 0
        if not self._has_claimed or self.bucket_queues.epoch < epoch:  # otherwise a restore has claimed it
            await self.bucket_queues.claim(epoch)
            self._has_claimed = True

    async def _check_history(self) -> None:
        """Raise FencedError if log offsets would be given twice. Reads go on: each store serves what it has."""
        why_not = await self._history.why_not(self.manifest.entries, self.manifest.end, self._starts.origin)
        if why_not:
            self.manifest.fenced = why_not
            raise FencedError(why_not)

    async def _follow(self) -> None:
        """A slave: read the manifest, and read it again from time to time."""
        while not self.uploads.is_stopping:
            if await self._open_tier(self.bucket_queues.load):
                await self._note_starts()
            await self.uploads.wait_until_stop(_READ_AGAIN)

    async def _run_notes(self) -> None:
        """An owner: note from time to time where queues go on, for a start while the bucket is away."""
        while True:
            await self._note_starts()
            await trio.sleep(_READ_AGAIN)

    async def _note_starts(self) -> None:
        await self._starts.note(lambda: idle_queues(self.bucket_queues, self.min_phy_offset))

    async def _stop_tier(self, finished: trio.Event) -> None:
        """Upload what waits; what remains stays local, and the next start goes on with it."""
        self.uploads.stop()
        with trio.move_on_after(_STOP_SECONDS):
            await finished.wait()
            if self.manifest.is_owner and self.tier_trouble() is None:
                try:
                    await self.uploads.upload_all()
                except (OSError, FencedError, BucketFormatError) as error:
                    _log.error("tier_not_complete", bucket=self.tier.tiered_store_bucket, error=str(error))
        if self.tier_index is not None:
            await self.tier_index.close(upload=False)  # the next start goes on with the local files

    async def expire_tier(self) -> int:
        """See TieredStore: objects of which all messages are too old."""
        return await self.upkeep.expire()

    # -- reads

    @property
    def _reads_tier(self) -> bool:
        # A manifest that was read and not claimed yet may have messages of topics that were deleted.
        return super()._reads_tier and self.is_loaded.is_set()

    def _tier_may_have(self, topic: str, queue_id: int, offset: int) -> bool:
        """See TieredStore: a message that only a bucket can have whose manifest was not read yet."""
        if self.is_loaded.is_set() or self._level is TieredStorageLevel.DISABLE:
            return False
        queue = self.find_queue(topic, queue_id)
        return queue is None or offset < queue.min_offset

    def range_problem(self, topic: str, queue_id: int) -> str:
        """See MessageStore: a group that begins with the first message must not begin behind those in the bucket."""
        if self.is_excluded(topic) or not self._tier_may_have(topic, queue_id, 0):
            return ""
        return (
            f"queue {queue_id} of {topic} may have older messages in the bucket {self.tier.tiered_store_bucket}, which "
            "cannot be read at the moment: try again"
        )

    # -- topics

    async def delete_topic(self, topic: str) -> None:
        """See MessageStore: also from the bucket, if this broker owns it."""
        try:
            await super().delete_topic(topic)
        except FencedError as error:
            self._fenced(error)
        finally:  # the local queues are gone, whatever the bucket says
            await self._starts.forget(lambda name: name == topic)

    async def clean_expired_consume_queues(self) -> int:
        """See MessageStore. Deletes none: while the bucket is away, only they say where a queue goes on."""
        await trio.lowlevel.checkpoint()
        return 0

    async def clean_unused_topics(self, known: Container[str]) -> list[str]:
        """See MessageStore: also from the bucket, if this broker owns it."""
        try:
            return await super().clean_unused_topics(known)
        except FencedError as error:
            self._fenced(error)
            return []
        finally:
            await self._starts.forget(lambda topic: topic not in known and not is_system_topic(topic))

    async def follow_deletions(self, deleted: dict[str, int]) -> list[str]:
        """See MessageStore: a slave serves nothing of them from the bucket either, whatever it has."""
        gone = await super().follow_deletions(deleted)
        if gone:
            self.bucket_queues.hide()
            await self._starts.forget(frozenset(gone).__contains__)
        return gone
