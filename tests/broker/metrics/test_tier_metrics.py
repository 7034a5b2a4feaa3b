"""The metrics of the tiered store, and what administration requests say of it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker.metrics.test_page import HERE, ON, Scrape, scrape
from tests.broker.test_tiered_store import COUNT, TOPIC, send_and_upload, tiered_broker
from tests.broker.wire_client import WireClient
from trimq.broker.controller import BrokerController
from trimq.broker.metrics.limit import SeriesLimit
from trimq.broker.metrics.tier import TierMetrics
from trimq.broker.store.tiered.access import fetcher
from trimq.broker.store.tiered.access.tier_parts import Backlog
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.store.tiered.driver.posix import PosixFileSegment
from trimq.protocol import lenient_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.message import decode_messages
from trimq.protocol.tiered_layout import PHYSICAL

TIER = HERE | {"storage_type": "tiered", "storage_medium": "blob"}
QUEUE = {"topic": TOPIC, "queue_id": "0"}
GROUPED: dict[str, Any] = ON | {"tieredStoreGroupCommitTimeout": 3_600_000}
"""Uploads come when a test asks for them."""
PREFIX = "rocketmq_tiered_store_"


def tier_of(broker: BrokerController) -> TieredMessageStore:
    store = broker.context.store
    assert isinstance(store, TieredMessageStore)
    return store


async def read_all(client: WireClient) -> int:
    """The number of pulls that a group needs for all messages."""
    offset = pulls = 0
    while offset < COUNT:
        reply = await client.pull(TOPIC, offset, group="G")
        assert reply.code == 0
        offset += len(decode_messages(bytes(reply.body)))
        pulls += 1
    return pulls


def folder(tmp_path: Path, kind: str) -> Iterator[Path]:
    return tmp_path.glob(f"tier/*/broker-a/{TOPIC}/0/{kind}/*")


async def test_uploads_and_reads(tmp_path: Path) -> None:
    async with tiered_broker(tmp_path, **GROUPED) as (broker, client):
        await send_and_upload(broker, client)
        before = await scrape(broker)
        assert before.value(f"{PREFIX}messages_dispatch_total", **QUEUE, **TIER, file_type="commit_log") == COUNT
        units, log = ({"file_type": kind} for kind in ("consume_queue", "commit_log"))
        assert before.value(f"{PREFIX}dispatch_behind", **QUEUE, **TIER, **units) == 0
        assert before.value(f"{PREFIX}dispatch_latency", **QUEUE, **TIER, **units) == 0
        assert before.value("trimq_tiered_store_messages_waiting") == 0
        size = sum(file.stat().st_size for file in folder(tmp_path, "COMMIT_LOG"))
        written = {**TIER, "operation": "write"}
        assert before.value("trimq_tiered_store_size_bytes", **log) == size
        assert before.value("trimq_tiered_store_size_bytes", **units) == COUNT * 20
        assert before.value(f"{PREFIX}provider_upload_bytes_sum", **written, **log) == size
        assert before.value(f"{PREFIX}provider_upload_bytes_sum", **written, **units) == COUNT * 20
        side = {"file_type": "physical_offset"}
        assert before.value(f"{PREFIX}provider_upload_bytes_sum", **written, **side) == COUNT * PHYSICAL.size
        calls = before.value(f"{PREFIX}provider_rpc_latency_count", **written, **log, success="true")
        assert calls == before.value(f"{PREFIX}provider_upload_bytes_count", **written, **log) >= 1
        assert before.count(f"{PREFIX}messages_out_total") == 0
        assert 0 <= before.value("rocketmq_storage_message_reserve_time", **QUEUE, **TIER) < 60_000

        first = tier_of(broker).fetcher.messages
        await read_all(client)
        local = tier_of(broker).fetcher.messages - first
        page = await scrape(broker)
        assert page.value(f"{PREFIX}messages_out_total", topic=TOPIC, group="G", **TIER) == local > 0
        reads = {**TIER, "operation": "read", **log}
        assert page.value(f"{PREFIX}provider_download_bytes_sum", **reads) >= 500 * local
        assert page.value(f"{PREFIX}provider_rpc_latency_count", **reads, success="true") >= 1
        assert page.value(f"{PREFIX}provider_rpc_latency_count", **reads, success="false") == 0
        pulls = page.value(f"{PREFIX}api_latency_count", **TIER, operation="get_message")
        assert pulls == sum(tier_of(broker).fetcher.latency["get_message"].counts) > 0
        assert page.value(f"{PREFIX}read_ahead_cache_count", **TIER) == tier_of(broker).fetcher.cache.count >= local
        assert page.value(f"{PREFIX}read_ahead_cache_bytes", **TIER) >= 500 * local
        accesses = page.value(f"{PREFIX}read_ahead_cache_access_total", **TIER)
        assert accesses > page.value(f"{PREFIX}read_ahead_cache_hit_total", **TIER) > 0
        assert page.value(f"{PREFIX}get_message_fallback_total", **TIER) == 0
        # RocketMQ's buckets in ms.
        ends = {s.labels["le"] for s in page.samples if s.name == f"{PREFIX}api_latency_bucket"}
        assert {"1.0", "7.0", "3000.0", "+Inf"} <= ends


async def test_what_waits_for_its_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the figures by which one sees that the tier cannot be written."""
    async with tiered_broker(tmp_path, **GROUPED) as (broker, client):
        store = tier_of(broker)
        for _ in range(5):
            await client.send(TOPIC)
        assert await store.flush()

        async def failing(*_: object) -> None:
            raise OSError(28, "no space")

        with monkeypatch.context() as patch:
            patch.setattr(PosixFileSegment, "write", failing)
            await store.uploads.upload_all()
        page = await scrape(broker)
        assert page.value(f"{PREFIX}dispatch_behind", **QUEUE, **TIER) == 5
        assert 0 <= page.value(f"{PREFIX}dispatch_latency", **QUEUE, **TIER) < 60_000
        assert page.value("trimq_tiered_store_messages_waiting") == 5
        assert page.value("trimq_tiered_store_upload_failures_total") == 1
        failed = {"file_type": "commit_log", "operation": "write", "success": "false"}
        assert page.value(f"{PREFIX}provider_rpc_latency_count", **TIER, **failed) == 1
        assert await info(client, "tieredStoreBehind", "tieredStoreUploaded") == ["5", "0"]
        assert await info(client, "tieredStoreUploadFailures", "tieredStoreSkipped") == ["1", "0"]
        await store.uploads.upload_all()
        assert (await scrape(broker)).value(f"{PREFIX}dispatch_behind", **QUEUE, **TIER) == 0
        assert await info(client, "tieredStoreBehind", "tieredStoreUploaded") == ["0", "5"]


async def info(client: WireClient, *names: str) -> list[str]:
    table = lenient_json.loads(bytes((await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).body))["table"]
    return [table[name] for name in names]


def lines(broker: BrokerController, limit: SeriesLimit) -> Scrape:
    return Scrape("".join(TierMetrics(tier_of(broker)).lines('cluster="C"', limit)))


async def test_how_long_messages_have_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tiered_broker(tmp_path, **GROUPED) as (broker, client):
        await send_and_upload(broker, client)
        store = tier_of(broker)
        newest = store.flat_files.of_topic(TOPIC)[0].commit_log.max_timestamp
        now = newest + 90_000
        monkeypatch.setattr(store.clock, "wall_ms", lambda: now)
        found: list[Backlog] = []
        monkeypatch.setattr(store.uploads, "backlogs", lambda: iter(found))
        for backlog, waited in (
            (Backlog(TOPIC, 0, 3, now - 2000), 2000),
            (Backlog(TOPIC, 0, 3, 0), 90_000),  # there at the start: behind the last one in the tier
            (Backlog(TOPIC, 0, 0, now - 2000), 0),
        ):
            found[:] = [backlog, Backlog("Other", 1, 2, 0)]
            limit = SeriesLimit(1)
            assert lines(broker, limit).value(f"{PREFIX}dispatch_behind") == backlog.messages
            assert limit.left_out[f"{PREFIX}dispatch_behind"] == 1
            page = lines(broker, SeriesLimit(10))
            assert page.value(f"{PREFIX}dispatch_latency", **QUEUE) == waited
            assert page.value(f"{PREFIX}dispatch_latency", topic="Other") == 0
            assert page.value(f"{PREFIX}dispatch_behind", topic="Other") == 2
            assert page.value("trimq_tiered_store_messages_waiting") == backlog.messages + 2


async def test_each_count_has_its_name(tmp_path: Path) -> None:
    async with tiered_broker(tmp_path, **GROUPED) as (broker, _):
        store = tier_of(broker)
        store.fetcher.fallbacks, store.uploads.skipped, store.uploads.failures = 1, 2, 3
        reads, cache = store.fetcher.reads, store.fetcher.cache
        reads.hanging, reads.timeouts, reads.refused = 4, 5, 6
        cache.count, cache.bytes, cache.accesses, cache.hits = 7, 8, 10, 9
        page = await scrape(broker)
        reads.hanging = 0
        assert page.value(f"{PREFIX}get_message_fallback_total", **TIER) == 1
        names = ["messages_skipped_total", "upload_failures_total", "reads_hanging", "read_timeouts_total"]
        names += ["reads_refused_total", "keys_waiting"]
        assert [page.value(f"trimq_tiered_store_{name}") for name in names] == [2, 3, 4, 5, 6, 0]
        names = ["count", "bytes", "hit_total", "access_total"]
        assert [page.value(f"{PREFIX}read_ahead_cache_{name}", **TIER) for name in names] == [7, 8, 9, 10]


async def test_readers_beyond_a_limit_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group names come from clients: they must not fill the memory."""
    monkeypatch.setattr(fetcher, "_READERS", 1)
    async with tiered_broker(tmp_path, **GROUPED) as (broker, client):
        await send_and_upload(broker, client)
        for group in ("A", "B", "C", "A"):
            await client.pull(TOPIC, 0, group=group)
        counted = tier_of(broker).fetcher.delivered
        assert set(counted) == {(TOPIC, "A"), ("", "")}
        assert counted.total() == tier_of(broker).fetcher.messages
        assert min(counted.values()) > 0


async def test_series_of_the_tier_are_limited(tmp_path: Path) -> None:
    async with tiered_broker(tmp_path, **GROUPED) as (broker, client):
        for number in range(4):
            await client.send(f"T{number}")
            tier_of(broker).fetcher.delivered[f"T{number}", "G"] = 1
        store = tier_of(broker)
        assert await store.flush()
        await store.uploads.upload_all()
        store.flat_files.find_or_create("Empty", 0)
        limit = SeriesLimit(3)
        page = lines(broker, limit)
        large = [f"{PREFIX}{name}" for name in ("dispatch_behind", "dispatch_latency", "messages_dispatch_total")]
        large += ["rocketmq_storage_message_reserve_time", f"{PREFIX}messages_out_total"]
        in_files = dict.fromkeys(large[:3], 2)
        assert limit.left_out == dict.fromkeys(large, 1) | in_files
        assert [page.count(name) for name in large] == [3] * 5
        # A queue without messages in the tier has no age.
        assert lines(broker, SeriesLimit(10)).count("rocketmq_storage_message_reserve_time") == 4


async def test_a_topics_range_shows_local_store_and_tier(tmp_path: Path) -> None:
    async with tiered_broker(tmp_path, **GROUPED) as (broker, client):
        await client.send("Local")
        await send_and_upload(broker, client)
        store = tier_of(broker)
        low = store.local_min_offset(TOPIC, 0)
        assert 0 < low < COUNT

        async def table(topic: str) -> Any:
            reply = await client.ask(RequestCode.GET_TOPIC_STATS_INFO, {"topic": topic})
            found = lenient_json.loads(bytes(reply.body))["offsetTable"]
            return {json.loads(key)["queueId"]: value for key, value in found.items()}

        ours = (await table(TOPIC))[0]
        assert ours.pop("lastUpdateTimestamp") > 0
        tier = {"tierMinOffset": 0, "tierMaxOffset": COUNT}
        assert ours == {"minOffset": 0, "maxOffset": COUNT, "localMinOffset": low, **tier}
        assert set((await table(TOPIC))[1]) == {"minOffset", "maxOffset", "lastUpdateTimestamp"}
        # Units are those of local files, with their range.
        ext = {"topic": TOPIC, "queueId": 0, "index": low, "count": 1000, "consumerGroup": ""}
        units = lenient_json.loads(bytes((await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext)).body))
        assert (units["minQueueIndex"], units["maxQueueIndex"]) == (low, COUNT)
        assert len(units["queueData"]) == COUNT - low


def test_without_a_tier_nothing_of_it_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys, trio\nfrom trimq.broker.testing import running_broker\n"
        "async def main():\n"
        "    async with running_broker(metricsExporterType='PROM', metricsPromExporterPort=0) as broker:\n"
        "        assert not await broker.context.store.tier_info()\n"
        "trio.run(main)\nprint([m for m in sys.modules if '.tiered.' in m or m.endswith('metrics.tier')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
