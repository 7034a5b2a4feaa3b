"""The store with a tier where one of its parts fails, or has nothing to do."""

import errno
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, until_dispatched
from tests.store.tiered.test_tiered_message_store import drop_local, opened, tier, uploaded_store
from trimq.broker.store.tiered.access import tiered_message_store
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.store.types import GetMessageStatus
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.protocol.message import decode_messages

ERROR = OSError(errno.EIO, "the tier does not answer")


async def failing_later(*_: object, **__: object) -> Any:
    raise ERROR


async def test_keys_that_cannot_be_completed_stop_no_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_message_store, "complete_index", failing_later)
    with capture_logs() as logs:
        async with opened(SimDisk()) as store:
            await uploaded_store(store, 5)
            assert store.uploads.messages == 5
    assert "tiered_index_not_completed" in [entry["event"] for entry in logs]


async def test_expired_segments_are_looked_for_at_intervals(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    looks: list[float] = []

    async def expire(store: TieredMessageStore) -> int:
        looks.append(trio.current_time())
        return 0

    monkeypatch.setattr(TieredMessageStore, "expire_tier", expire)
    for enabled, count in ((True, 3), (False, 0)):
        looks.clear()
        config = tier(tiered_store_delete_file_interval=60_000, tiered_store_delete_file_enable=enabled)
        async with opened(SimDisk(), config):
            await trio.sleep(200)
        assert len(looks) == count
        assert [round(after - before) for before, after in pairwise(looks)] == [60] * max(0, count - 1)


async def test_a_segment_that_cannot_be_deleted_does_not_keep_those_of_other_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(SimDisk(), tier(tiered_store_file_reserved_time=1)) as store:
        await fill(store, 5, queue_id=1)
        await uploaded_store(store, 40)
        store.clock.advance(9_000.0)  # type: ignore[attr-defined]
        stuck, other = store.flat_files.find(TOPIC, 1), store.flat_files.find(TOPIC, 0)
        assert stuck is not None
        assert other is not None
        monkeypatch.setattr(stuck, "destroy_expired", failing_later)
        with capture_logs() as logs:
            assert await store.expire_tier() > 0
        assert [entry["queue"] for entry in logs if entry["event"] == "tiered_segment_not_deleted"] == [1]
        assert other.min_offset == other.commit_offset
        assert stuck.min_offset < stuck.commit_offset


async def test_what_is_not_in_memory_comes_from_the_tier() -> None:
    async with opened(SimDisk(), tier(tiered_storage_level=TieredStorageLevel.NOT_IN_MEM)) as store:
        await fill(store, 5)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        await fill(store, 5, first=5)
        await until_dispatched(store)
        # Messages 5 and later are not in the tier yet.
        for offset, from_tier in ((0, True), (5, False), (3, True)):
            before = store.fetcher.messages
            found = await store.get_message_cold(TOPIC, 0, offset, 2, 1 << 20, None)
            assert found.status is GetMessageStatus.FOUND
            (first, *_) = decode_messages(b"".join(map(bytes, found.buffers)))
            assert first.queue_offset == offset
            found.release()
            assert (store.fetcher.messages > before) == from_tier


async def test_store_times_and_ids_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SimDisk()) as store:
        before = await uploaded_store(store)
        with monkeypatch.context() as patch:
            patch.setattr(store.fetcher, "store_time", failing_later)
            assert await store.message_store_time(TOPIC, 0, 0) == -1
            file = store.flat_files.find(TOPIC, 0)
            assert file is not None
            patch.setattr(file, "read_physical", failing_later)
            assert len(await store.look_message_cold(before[0][1])) == 0
        assert await store.message_store_time(TOPIC, 0, 0) >= 0
        assert len(await store.look_message_cold(before[0][1])) > 0
        assert "uploaded to the tier by RocketMQ" in store.why_missing(1 << 53)
        assert "uploaded to the tier by RocketMQ" not in store.why_missing(5)


async def test_the_tier_is_not_asked_for_keys_that_the_local_store_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SimDisk()) as store:
        await uploaded_store(store)
        asked: list[tuple[Any, ...]] = []
        query = store.fetcher.query

        async def noted(*arguments: Any) -> Any:
            asked.append(arguments)
            return await query(*arguments)

        monkeypatch.setattr(store.fetcher, "query", noted)
        local = await store.earliest_message_time()
        assert (await store.query_message_cold(TOPIC, "k3", 1, 0, 1 << 60)).count == 1  # enough of them are local
        assert (await store.query_message_cold(TOPIC, "k3", 32, max(local, 1), 1 << 60)).count >= 1
        assert asked == []
        assert (await store.query_message_cold(TOPIC, "k3", 32, 0, 1 << 60)).count == 9
        assert len(asked) == 1


async def test_topics_that_are_gone_are_deleted_from_the_tier_too() -> None:
    async with opened(SimDisk()) as store:
        await fill(store, 3, topic="Kept")
        await uploaded_store(store, 60)
        await fill(store, 3, topic="Both")
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        await drop_local(store)
        assert sorted(await store.clean_unused_topics({"Kept"})) == sorted({TOPIC, "Both"})
        assert store.flat_files.topics() == ["Kept"]
        assert await store.clean_unused_topics({"Kept"}) == []
