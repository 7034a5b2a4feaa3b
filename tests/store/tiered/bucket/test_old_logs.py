"""A bucket that is switched on for a log which is old: uploads begin where the log does, and read nothing in vain."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, settings, until_dispatched
from tests.store.stores import opened as without_tier
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from trimq.broker.store.tiered.access.batch import AS_IN_LOG, BatchBuilder, Buffer, Limits
from trimq.broker.store.tiered.bucket import object_contents
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.object_contents import ContentsReader

NO_UPLOADS = {"tiered_store_group_commit_timeout": 1 << 40}


class Calls:
    def __init__(self) -> None:
        self.fills = 0
        self.builds = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    build, fill_object = BatchBuilder.build, ContentsReader.fill

    async def counted_build(self: BatchBuilder, *arguments: Any, **more: Any) -> Any:
        found.builds += 1
        return await build(self, *arguments, **more)

    async def counted_fill(self: ContentsReader, *arguments: Any, **more: Any) -> Any:
        found.fills += 1
        return await fill_object(self, *arguments, **more)

    monkeypatch.setattr(BatchBuilder, "build", counted_build)
    monkeypatch.setattr(ContentsReader, "fill", counted_fill)
    return found


async def test_uploads_begin_where_the_log_does(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, objects = SimDisk(), Objects()
    local = settings(mapped_file_size_commit_log=8192)
    async with without_tier(disk, local) as plain:
        for queue_id in range(4):
            await fill(plain, 200, queue_id=queue_id)
        await until_dispatched(plain)
        await plain.flush()
        while len(plain.files.files) > 2:
            assert await plain._clean._delete_log_files(immediately=True)
        begin, end = plain.min_phy_offset, plain.commit_log.max_offset
    monkeypatch.setattr(object_contents, "OBJECT_BYTES", 4000)
    assert begin > 20 * 4000
    async with opened(disk, objects, tier(**NO_UPLOADS), local) as store:
        await uploaded(store)
        assert store.uploads._position == store.commit_log.max_offset
        assert store.tier_range(TOPIC, 3) == (store.queues.find(TOPIC, 3).min_offset, 200)  # type: ignore[union-attr]
    assert calls.fills <= (end - begin) // 4000 + 3


@asynccontextmanager
async def later(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BucketMessageStore]:
    """A store with 100 messages of queue 0, which are not uploaded, and then ten of queue 1; objects of 1000 bytes."""
    async with opened(SimDisk(), Objects(), tier(**NO_UPLOADS)) as store:
        await fill(store, 100)
        await fill(store, 10, queue_id=1)
        await until_dispatched(store)
        await store.flush()
        monkeypatch.setattr(object_contents, "OBJECT_BYTES", 1000)
        calls.builds = calls.fills = 0
        yield store


async def test_a_queue_is_not_read_before_an_object_reaches_its_next_message(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with later(calls, monkeypatch) as store:
        await uploaded(store)
        assert calls.fills > 20
        of_first_queue = 2 * calls.fills  # a batch, and the look behind it
        assert calls.builds <= of_first_queue + 10
        assert store.tier_range(TOPIC, 0) == (0, 100)
        assert store.tier_range(TOPIC, 1) == (0, 10)


async def test_a_lost_range_is_reported_once(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue has lost its first messages after some were uploaded; its next ones are objects away."""
    async with opened(SimDisk(), Objects(), tier(**NO_UPLOADS)) as store:
        await fill(store, 10)
        await uploaded(store)
        await fill(store, 100, first=10)
        await fill(store, 20, queue_id=1)
        await fill(store, 1, first=110)
        await until_dispatched(store)
        await store.flush()
        while len(store.files.files) > 2:  # the queues are not corrected yet
            assert await store._clean._delete_log_files(immediately=True)
        queue = store.queues.find(TOPIC, 0)
        assert queue is not None
        assert queue.min_offset == 0
        units = await store.uploads._builder.units(queue, 0, 200)
        first = sum(phy < store.min_phy_offset for phy, _, _ in units)
        assert 50 < first < 110
        # Found by a few reads, not by reading five units at a time.
        found = await store.uploads._builder.build(queue, 10, AS_IN_LOG, Limits(5, 1000, 1 << 62), 0, Buffer())
        assert found is not None
        assert found.skip_to == first
        monkeypatch.setattr(object_contents, "OBJECT_BYTES", 1000)
        calls.builds = calls.fills = 0
        with structlog.testing.capture_logs() as logs:
            await uploaded(store)
        lost = [entry for entry in logs if entry["event"] == "messages_not_in_tier"]
        assert [(entry["begin"], entry["end"]) for entry in lost] == [(10, first)]
        assert store.uploads.skipped == first - 10
        assert store.tier_range(TOPIC, 0) == (0, 111)
        assert calls.builds <= 2 * calls.fills + 10


async def test_what_is_lost_between_two_objects_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged units: the queue goes on several objects later, and is looked at for each of them."""
    async with later(Calls(), monkeypatch) as store:
        read = store.queues.read

        def damaged(queue: Any, offset: int, count: int) -> bytes | None:
            data = bytearray(read(queue, offset, count) or b"")
            if queue.queue_id == 1:
                for number in range(5):
                    if 0 <= (at := (number - offset) * 20 + 8) < len(data):
                        data[at : at + 4] = (5).to_bytes(4, "big")
            return bytes(data)

        monkeypatch.setattr(store.queues, "read", damaged)
        with structlog.testing.capture_logs() as logs:
            await uploaded(store)
        lost = [entry for entry in logs if entry["event"] == "messages_not_in_tier"]
        # An object may end between them.
        ranges = [(entry["begin"], entry["end"]) for entry in lost]
        assert ranges in ([(0, 5)], *([(0, number), (number, 5)] for number in range(1, 5)))
        assert store.uploads.skipped == 5
        assert store.tier_range(TOPIC, 1) == (5, 10)
