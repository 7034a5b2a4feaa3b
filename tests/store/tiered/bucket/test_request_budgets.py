"""How many requests a tier in a bucket costs: counted, for a GiB and for an hour, on a scale of 1 to 1024.

Objects, parts, joins and index files have a 1024th of their sizes here, and the messages too: so the requests for 1 MiB
of log are those for 1 GiB.
"""

from collections import Counter

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, settings, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.test_tiered_message_store import drop_local
from trimq.broker.store.tiered.bucket import (
    bucket_message_store,
    index_objects,
    joiner,
    object_builder,
    object_contents,
)
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.remoting.runtime.clock import ManualClock

SCALE = 1024


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (object_contents, "OBJECT_BYTES"),
        (joiner, "JOIN_BYTES"),
        (joiner, "PART_SIZE"),
        (joiner, "BLOCK_BYTES"),
        (object_builder, "BLOCK_BYTES"),
        (index_objects, "PART_SIZE"),
        (bucket_message_store, "_MOST_SLOTS"),
        (bucket_message_store, "_MOST_KEYS"),
    ):
        monkeypatch.setattr(module, name, max(getattr(module, name) // SCALE, 8))


class Pages:
    """Counts the requests of a span by what they are for."""

    def __init__(self, store: BucketMessageStore) -> None:
        self._store = store
        self._before = Counter(store.bucket.requests)

    def since(self) -> Counter[str]:
        return self._store.bucket.requests - self._before


def created(objects: Objects) -> Counter[str]:
    """Objects that were written by one request, by the first part of their names: log, manifest, index, state."""
    return Counter(name.split("/")[2] for call, name in objects.calls if call in {"create", "replace"})


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("queues", [1, 8, 100])
async def test_a_gibibyte_costs_at_most_300_puts(queues: int) -> None:
    objects = Objects()
    local = settings(mapped_file_size_commit_log=1 << 20)
    async with opened(SimDisk(), objects, local=local) as store:
        objects.calls.clear()
        pages = Pages(store)
        number = 0
        while store.commit_log.max_offset < 1 << 20:
            await put(store, bytes(820), queue_id=number % queues, unique=f"u{number}", keys=f"k{number}")
            number += 1
            if store.commit_log.max_offset - store.manifest.end >= object_contents.OBJECT_BYTES:
                await until_dispatched(store)
                await store.flush()
                await store.uploads._try(force=False)
        await uploaded(store)
        while await store.upkeep.join():
            pass
        assert store.tier_index is not None
        while await store.tier_index.upload_next():
            pass
        requests, puts = pages.since(), created(objects)
        assert puts["log"] <= 66
        assert puts["manifest"] + puts["state"] + 10 <= 40  # an index file has 60 MB in parts of 8 MiB: 10 requests
        assert {"index", "segments"} <= {name.split("/")[2] for name in objects.named("")}
        assert 64 <= requests["put"] - puts.total() <= 64 + 3 * joiner.LARGE_PART + 10
        assert requests["put"] <= 300
        # Joined from the local log: nothing was read for it.
        assert requests["get"] <= 4


@pytest.mark.slow
async def test_an_idle_hour_costs_at_most_130_requests(autojump_clock: trio.testing.MockClock) -> None:
    """A message now and then in each of many queues: as many objects as there are timeouts, and no more."""
    objects, clock = Objects(), ManualClock()
    async with opened(SimDisk(), objects, clock=clock) as store:
        await fill(store, 1)
        await uploaded(store)
        pages = Pages(store)
        for number in range(120 * 3):  # three hours: the first join falls into them
            await put(store, b"x", queue_id=number % 17)
            await until_dispatched(store)
            await store.flush()
            clock.set_wall_ms(clock.wall_ms() + 30_000)
            clock.advance(30)
            await trio.sleep(30)
        requests = pages.since()
        assert store.joiner.joins >= 1
        assert store.uploads.behind <= 1
        assert 3 * 118 <= store.uploads.objects <= 3 * 120 + 1
        assert requests.total() <= 3 * 130, requests
        # Nothing new: nothing is asked.
        pages = Pages(store)
        for _ in range(60):
            clock.set_wall_ms(clock.wall_ms() + 60_000)
            clock.advance(60)
            await trio.sleep(60)
        assert pages.since().total() <= 8


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("size", [60, 820, 3900])
async def test_a_consumer_of_joined_segments_needs_a_get_for_4_mebibytes(size: int) -> None:
    objects = Objects()
    local = settings(mapped_file_size_commit_log=1 << 18)
    config = tier(
        tiered_storage_level=TieredStorageLevel.FORCE,
        read_ahead_message_size_threshold=16 * 1024 * 1024 // SCALE,
    )
    disk = SimDisk()
    async with opened(disk, objects, config, local=local) as store:
        while store.commit_log.max_offset < 1 << 20:
            await put(store, bytes(size))
        await uploaded(store)
        while await store.upkeep.join():
            pass
        await drop_local(store)
        disk_end = store.commit_log.max_offset
    async with opened(disk, objects, config, local=local) as store:  # nothing is in memory
        assert store.commit_log.max_offset == disk_end
        queue = store.tier_queues.find(TOPIC, 0)
        assert queue is not None
        joined = sum(stretch.size for stored, stretch in queue.stretches if stored.generation)
        segments = sum(1 for stored, _ in queue.stretches if stored.generation)
        end = max(stretch.end for stored, stretch in queue.stretches if stored.generation)
        assert joined > 800 * 1024
        pages = Pages(store)
        offset = read = 0
        while offset < end:
            result = await store.get_message_cold(TOPIC, 0, offset, 32, 1 << 20, None, "g")
            read += result.size
            offset = result.next_begin_offset
            result.release()
        assert read >= joined
        gets = pages.since()["get"]
        assert gets <= joined / (4 * 1024 * 1024 / SCALE) * 1.1 + 2 * segments, (gets, joined, segments)
