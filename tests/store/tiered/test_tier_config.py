"""A store whose tier gets another configuration: both providers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import fill, until_dispatched
from tests.store.tiered import test_tiered_message_store as posix
from tests.store.tiered.bucket import stores
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.container.index_store_file import TieredIndexShape
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService

HOUR_MS = 3_600_000
PROVIDERS = pytest.mark.parametrize("provider", ["posix", "bucket"])


@asynccontextmanager
async def opened(provider: str, **options: Any) -> AsyncIterator[Any]:
    if provider == "posix":
        async with posix.opened(SimDisk(), posix.tier(**options)) as store:
            yield store
    else:
        small = {"tiered_store_index_file_max_hash_slot_num": 64, "tiered_store_index_file_max_index_num": 400}
        async with stores.opened(SimDisk(), stores.Objects(), stores.tier(**(small | options))) as store:
            yield store


async def filled(store: Any) -> IndexStoreService:
    """Messages are uploaded, and an index file with their keys."""
    await fill(store, 300)
    await until_dispatched(store)
    await store.flush()
    await store.uploads.upload_all()
    index: IndexStoreService = store.tier_index
    while await index.upload_next():
        pass
    return index


@PROVIDERS
async def test_the_reserved_time(provider: str) -> None:
    async with opened(provider) as store:
        index = await filled(store)
        files = len(index._flat.segments)
        assert files > 0
        store.clock.set_wall_ms(store.clock.wall_ms() + 3 * HOUR_MS)
        assert await store.expire_tier() == 0
        await index.expire()
        assert len(index._flat.segments) == files
        store.set_tier_config(
            replace(store.tier, tiered_store_file_reserved_time=2, tiered_store_delete_file_enable=False)
        )
        await index.expire()
        assert len(index._flat.segments) == files
        store.set_tier_config(replace(store.tier, tiered_store_delete_file_enable=True))
        await index.expire()
        assert len([segment for segment in index._flat.segments if segment.commit_position]) < files
        assert await store.expire_tier() > 0


@PROVIDERS
async def test_whether_files_are_deleted(autojump_clock: trio.testing.MockClock, provider: str) -> None:
    options = {"tiered_store_file_reserved_time": 1, "tiered_store_delete_file_enable": False}
    async with opened(provider, **options) as store:
        await filled(store)
        store.clock.set_wall_ms(store.clock.wall_ms() + 2 * HOUR_MS)
        (queue,) = store.tier_queues.all()
        await trio.sleep(3601)
        assert queue.min_offset == 0
        store.set_tier_config(replace(store.tier, tiered_store_delete_file_enable=True))
        await trio.sleep(3601)
        assert queue.min_offset > 0


@PROVIDERS
async def test_the_time_that_messages_wait_for_others(autojump_clock: trio.testing.MockClock, provider: str) -> None:
    async with opened(provider, tiered_store_group_commit_timeout=HOUR_MS) as store:
        await fill(store, 3)
        await until_dispatched(store)
        await store.flush()
        await trio.sleep(100)
        assert store.uploads.messages == 0
        store.set_tier_config(replace(store.tier, tiered_store_group_commit_timeout=0))
        await trio.sleep(2)
        assert store.uploads.messages == 3


async def test_index_files_of_a_bucket_keep_their_shape() -> None:
    """It is smaller than the options allow, and these do not change while the store runs."""
    config = stores.tier(tiered_store_index_file_max_hash_slot_num=2_000_000)
    async with stores.opened(SimDisk(), stores.Objects(), config) as store:
        assert isinstance(store, BucketMessageStore)
        assert store.tier_index is not None
        store.set_tier_config(replace(store.tier, tiered_store_file_reserved_time=1))
        assert store.tier_index._shape == TieredIndexShape(500_000, 2_000_000)
        assert store.tier_index.config is store.tier
