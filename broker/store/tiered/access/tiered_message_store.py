"""A store that copies its messages to a tier and reads from there what its disk no longer has.

``messageStorePlugIn`` chooses it instead of MessageStore. The local store stays what it is: every put, and each read
of a message that it has, goes the same way as without a tier. Source: RocketMQ's TieredMessageStore.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.tiered.access.batch import BatchBuilder
from trimq.broker.store.tiered.access.dispatcher import MessageStoreDispatcher
from trimq.broker.store.tiered.access.index_completion import complete_index
from trimq.broker.store.tiered.access.tiered_messages import TieredMessages
from trimq.broker.store.tiered.access.tiered_store import TieredStore
from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.broker.tiered_config import TieredStoreConfig

_log: Final = structlog.get_logger(__name__)

_STOP_SECONDS: Final = 5.0
"""How long a stop waits for the uploads under way."""


class TieredMessageStore(TieredStore):
    """See MessageStore. ``tier`` is its configuration."""

    def __init__(
        self, config: MessageStoreConfig, tier: TieredStoreConfig, *, cluster: str, broker_name: str, **more: Any
    ) -> None:
        """``more``: the keyword arguments of MessageStore."""
        super().__init__(config, tier, cluster=cluster, broker_name=broker_name, **more)
        wall_ms = self.clock.wall_ms
        metadata = DefaultMetadataStore(self.disk, self.root, broker_name, wall_ms)
        self.flat_files = FlatFileStore(
            FileSegmentFactory(tier, self.disk.with_own_threads(), cluster), metadata, broker_name
        )
        if config.message_index_enable:
            index_file = self.flat_files.index_file()
            self.tier_index = IndexStoreService(
                self.disk, self.root, tier, index_file, persist=metadata.persist, wall_ms=wall_ms
            )
        self.uploads = MessageStoreDispatcher(
            tier,
            self.queues,
            BatchBuilder(self.commit_log, self.queues),
            self.flat_files,
            self.tier_index,
            excluded=self.is_excluded,
            uploadable=self._uploadable,
            wall_ms=wall_ms,
        )
        self.queues.on_growing = self.uploads.note
        self.hold_log(TieredMessages(self.uploads))
        self._read_tier(self.tier_index)

    @property
    def tier_queues(self) -> FlatFileStore:
        """See TieredStore."""
        return self.flat_files

    @property
    def tier_uploads(self) -> MessageStoreDispatcher:
        """See TieredStore."""
        return self.uploads

    # -- lifecycle

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["TieredMessageStore"]:
        """See MessageStore. The tier is loaded once the store is locked and recovered."""
        async with super().opened():
            await self.flat_files.load()
            await self._continue_queues()
            if self.tier_index is not None:
                await self.tier_index.recover()
            async with trio.open_nursery() as nursery:
                finished = trio.Event()
                nursery.start_soon(self._run_uploads, finished)
                nursery.start_soon(self._run_expiry)
                nursery.start_soon(self.fetcher.run)
                indexing = trio.CancelScope()
                nursery.start_soon(self._run_index, indexing)
                try:
                    yield self
                finally:
                    with trio.CancelScope(shield=True):
                        await self._stop_tier(finished, indexing)
                    nursery.cancel_scope.cancel()

    async def _run_index(self, scope: trio.CancelScope) -> None:
        if self.tier_index is not None:
            with scope:
                await self.tier_index.run()

    async def _run_uploads(self, finished: trio.Event) -> None:
        try:
            if self.tier_index is not None:
                try:
                    await complete_index(self.tier_index, self.flat_files)
                except OSError as error:  # the next start tries again
                    _log.error("tiered_index_not_completed", error=str(error))
            await self.uploads.run()
        finally:
            finished.set()

    async def _stop_tier(self, finished: trio.Event, indexing: trio.CancelScope) -> None:
        """Messages that are not uploaded stay local: the next start goes on with them."""
        self.uploads.stop()
        with trio.move_on_after(_STOP_SECONDS):
            await finished.wait()
        indexing.cancel()
        if self.tier_index is not None:
            # As RocketMQ's broker does: without local index files it can go on with any number of slots and entries.
            await self.tier_index.close()
        await self._save_metadata()

    async def expire_tier(self) -> int:
        """See TieredStore: segments of all queues."""
        count = 0
        for file in self.flat_files.all():
            try:
                count += await file.destroy_expired(self.clock.wall_ms() - self.flat_files.reserved_ms(file.topic))
            except OSError as error:
                _log.error("tiered_segment_not_deleted", topic=file.topic, queue=file.queue_id, error=str(error))
        if count:
            _log.info("tiered_segments_deleted", count=count)
            await self._save_metadata()
        return count

    async def _save_metadata(self) -> None:
        """A failure is repaired by the next write, or at the next start."""
        try:
            await self.flat_files.metadata.persist()
        except OSError as error:
            _log.error("tiered_metadata_not_saved", error=str(error))
