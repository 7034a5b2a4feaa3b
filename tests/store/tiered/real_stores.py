"""A store with a tier in real files, for tests of what reads them without a broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.store.stores import settings
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.tiered_config import PLUG_IN, POSIX_PROVIDER, TieredStoreConfig
from trimq.remoting.runtime.clock import ManualClock

CLUSTER, BROKER = "C1", "broker-a"


@asynccontextmanager
async def opened_store(root: Path, **options: Any) -> AsyncIterator[TieredMessageStore]:
    """The store in ``root/store`` with its tier in ``root/tier``; segments have some ten messages."""
    sizes = {"tiered_store_index_file_max_hash_slot_num": 64, "tiered_store_index_file_max_index_num": 4000}
    config = TieredStoreConfig(
        message_store_plug_in=PLUG_IN,
        tiered_backend_service_provider=POSIX_PROVIDER,
        tiered_store_file_path=str(root / "tier"),
        tiered_store_commit_log_max_size=4096,
        tiered_store_consume_queue_max_size=400,
        **(sizes | options),
    )
    store = TieredMessageStore(
        settings(str(root / "store")),
        config,
        cluster=CLUSTER,
        broker_name=BROKER,
        disk=RealDisk(),
        clock=ManualClock(),
        sync_place=SyncPlace.THREAD,
    )
    async with store.opened():
        yield store
