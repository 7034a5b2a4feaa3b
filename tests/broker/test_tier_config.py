"""Options of the tier that change while the broker runs."""

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.wire_client import WireClient
from trimq.broker.store.tiered.access.tiered_store import TieredStore
from trimq.broker.testing import running_broker
from trimq.broker.tiered_config import BUCKET_PROVIDER, PLUG_IN, POSIX_PROVIDER
from trimq.protocol.codes import RequestCode


@pytest.mark.parametrize("provider", [POSIX_PROVIDER, BUCKET_PROVIDER])
async def test_a_changed_option_reaches_the_tier_at_once(tmp_path: Path, provider: str) -> None:
    keys: dict[str, Any] = {
        "messageStorePlugIn": PLUG_IN,
        "tieredBackendServiceProvider": provider,
        "tieredStoreFilePath": str(tmp_path / "tier"),
        "tieredStoreBucket": "memory://test",
        "tieredStoreIndexFileMaxHashSlotNum": 1000,
        "tieredStoreIndexFileMaxIndexNum": 4000,
        "tieredStoreGroupCommitTimeout": 3_600_000,
    }
    async with (
        running_broker(tmp_path / "store", **keys) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        store = broker.context.store
        assert isinstance(store, TieredStore)
        await client.send("Tiered")
        assert await store.flush()
        assert (store.tier_uploads.messages, store.tier_uploads.behind) == (0, 1)
        change = b"tieredStoreGroupCommitTimeout=0\ntieredStoreFileReservedTime=5\n"
        assert (await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=change)).code == 0
        with trio.fail_after(30):
            while not store.tier_uploads.messages:  # noqa: ASYNC110 - an upload has no event
                await trio.sleep(0.05)
        assert store.tier_index is not None
        for part in (store.tier_queues, store.tier_uploads, store.tier_index):
            assert part.config is store.tier
        assert store.tier.tiered_store_file_reserved_time == 5


async def test_a_broker_without_a_tier(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        change = b"tieredStoreFileReservedTime=5\n"
        assert (await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=change)).code == 0
        await client.send("Local")
