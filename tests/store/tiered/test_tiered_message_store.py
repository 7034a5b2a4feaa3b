"""The whole store with a tier, on a simulated disk: upload, cleaning, reads, ids, restart."""

import dataclasses
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.stores import TOPIC, fill, put, settings, until_dispatched
from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.tiered.access.batch import Buffer
from trimq.broker.store.tiered.access.dispatcher import _Pending
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.store.tiered.container.message_runs import TieredMessage
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.broker.tiered_config import PLUG_IN, POSIX_PROVIDER, TieredStorageLevel, TieredStoreConfig
from trimq.protocol.message import decode_messages
from trimq.protocol.tiered_layout import APACHE_UPLOADED, cluster_directory, segment_name
from trimq.remoting.runtime.clock import ManualClock


def tier(**options: Any) -> TieredStoreConfig:
    return TieredStoreConfig(
        message_store_plug_in=PLUG_IN,
        tiered_backend_service_provider=POSIX_PROVIDER,
        tiered_store_file_path="/tier",
        tiered_store_commit_log_max_size=4096,
        tiered_store_consume_queue_max_size=200,
        **({"tiered_store_index_file_max_hash_slot_num": 64, "tiered_store_index_file_max_index_num": 400} | options),
    )


@asynccontextmanager
async def opened(
    disk: SimDisk, config: TieredStoreConfig | None = None, local: MessageStoreConfig | None = None
) -> AsyncIterator[TieredMessageStore]:
    store = TieredMessageStore(
        local or settings(),
        config or tier(),
        cluster="C1",
        broker_name="broker-a",
        disk=disk,
        clock=ManualClock(),
        sync_place=SyncPlace.THREAD,
    )
    async with store.opened():
        yield store


async def get(
    store: MessageStore, offset: int, count: int = 32, topic: str = TOPIC, queue_id: int = 0
) -> GetMessageResult:
    arguments = topic, queue_id, offset, count, 1 << 20, None
    result = store.get_message(*arguments)
    return await store.get_message_cold(*arguments) if result is None else result


async def all_offsets(store: MessageStore, begin: int, end: int, *, queue_id: int = 0) -> list[tuple[int, int]]:
    """Queue offset and log offset of all messages, as a consumer reads them."""
    found: list[tuple[int, int]] = []
    offset = begin
    while offset < end:
        result = await get(store, offset, queue_id=queue_id)
        assert result.status is GetMessageStatus.FOUND, (offset, result)
        messages = decode_messages(b"".join(bytes(buffer) for buffer in result.buffers))
        found += [(message.queue_offset, message.commit_log_offset) for message in messages]
        result.release()
        assert result.next_begin_offset > offset
        offset = result.next_begin_offset
    return found


async def drop_local(store: MessageStore, keep: int = 1) -> None:
    """Delete log files as the cleaner does, without waiting for their age."""
    clean = store._clean
    while len(store.files.files) > keep:
        before = len(store.files.files)
        await clean._delete_log_files(immediately=True)
        await clean._follow()
        if len(store.files.files) == before:
            return


async def test_messages_that_left_the_disk_are_read_from_the_tier() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 60)
        await until_dispatched(store)
        await store.flush()
        before = await all_offsets(store, 0, 60)
        await store.uploads.upload_all()
        assert store.uploads.messages == 60
        await drop_local(store)
        local = MessageStore.min_offset(store, TOPIC, 0)
        assert 0 < local < 60
        assert store.min_offset(TOPIC, 0) == 0
        assert await all_offsets(store, 0, 60) == before
        physical = before[0][1]
        assert store.look_message(physical) is None
        record = await store.look_message_cold(physical)
        assert await store.look_queued(physical) == bytes(record)
        assert decode_messages(record)[0].queue_offset == 0
    async with opened(disk) as store:
        assert await all_offsets(store, 0, 60) == before
        assert store.uploads.messages == 0


async def test_log_files_are_kept_until_they_are_uploaded() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 60)
        await until_dispatched(store)
        await store.flush()
        with trio.fail_after(1):
            assert await store.log_holds.lowest() == 0
        await store.uploads.upload_all()
        assert await store.log_holds.lowest() is None


async def uploaded_store(store: TieredMessageStore, count: int = 60) -> list[tuple[int, int]]:
    """Fill a queue, upload it, and delete the local log but for its last file."""
    await fill(store, count)
    await until_dispatched(store)
    await store.flush()
    before = await all_offsets(store, 0, count)
    await store.uploads.upload_all()
    await drop_local(store)
    return before


async def test_keys_are_found_in_the_tier_after_a_restart() -> None:
    disk = SimDisk()
    for _ in range(2):
        async with opened(disk) as store:
            if not store.flat_files.topics():
                await uploaded_store(store)
            for number in (0, 7, 30, 59):
                key = f"u{TOPIC}0-{number}"
                found = await store.query_message_cold(TOPIC, key, 32, 0, 1 << 60)
                assert [decode_messages(bytes(record))[0].queue_offset for record in found.buffers] == [number]
                assert found.count == 1
                assert found.size == len(found.buffers[0])
                found.release()
            both = await store.query_message_cold(TOPIC, "k3", 64, 0, 1 << 60)
            offsets = [decode_messages(bytes(record))[0].queue_offset for record in both.buffers]
            assert offsets == list(range(3, 60, 7))
            both.release()


async def test_the_offset_for_a_time_is_found_in_both_parts() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        times = []
        for number in range(40):
            store.clock.advance(1.0)  # type: ignore[attr-defined]
            await fill(store, 1, first=number)
            times.append(store.clock.wall_ms())
        await until_dispatched(store)
        await store.flush()
        expected = [await store.offset_by_time(TOPIC, 0, time) for time in times]
        assert expected == list(range(40))
        await store.uploads.upload_all()
        await drop_local(store)
        assert MessageStore.min_offset(store, TOPIC, 0) > 0
        for upper in (False, True):
            found = [await store.offset_by_time(TOPIC, 0, time, upper=upper) for time in times]
            assert found == expected
        assert await store.offset_by_time(TOPIC, 0, times[0] - 5) == 0
        assert await store.offset_by_time(TOPIC, 0, times[-1] + 5) == 40
        assert await store.message_store_time(TOPIC, 0, 3) == times[3]
        assert await store.earliest_store_time(TOPIC, 0) == times[0]


async def test_a_failed_upload_is_tried_again_and_loses_nothing() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 40)
        await until_dispatched(store)
        await store.flush()
        for method in ("pwrite", "data_sync", "rename", "sync_directory"):
            disk.fail(method, errno.EIO)
            await store.uploads.upload_all()
            disk.clear_failures()
        assert store.uploads.failures >= 1
        await store.uploads.upload_all()
        assert store.uploads.behind == 0
        before = await all_offsets(store, 0, 40)
        await drop_local(store)
        assert await all_offsets(store, 0, 40) == before


async def test_what_is_not_durable_is_not_uploaded() -> None:
    disk = SimDisk()
    async with opened(disk, local=settings(flush_interval_commit_log=1 << 30)) as store:
        await fill(store, 5)
        await until_dispatched(store)
        assert store.flushed_offset == 0
        await store.uploads.upload_all()
        assert store.uploads.messages == 0
        await store.flush()
        await store.uploads.upload_all()
        assert store.uploads.messages == 5


async def test_a_message_larger_than_a_group_and_a_segment_is_uploaded() -> None:
    disk = SimDisk()
    config = tier(tiered_store_group_commit_size=500)
    async with opened(disk, dataclasses.replace(config, tiered_store_commit_log_max_size=1000)) as store:
        await put(store, b"x" * 3000)
        await fill(store, 10)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        await drop_local(store)
        assert [offset for offset, _ in await all_offsets(store, 0, 11)] == list(range(11))


async def test_expired_segments_are_deleted_and_the_rest_stays_readable() -> None:
    disk = SimDisk()
    config = tier(tiered_store_file_reserved_time=1)
    async with opened(disk, config) as store:
        await uploaded_store(store, 40)
        store.clock.advance(3_000.0)  # type: ignore[attr-defined]
        await fill(store, 30, first=40)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        await drop_local(store)
        assert await store.expire_tier() == 0
        store.clock.advance(1_000.0)  # type: ignore[attr-defined]
        assert await store.expire_tier() > 0
        low = store.min_offset(TOPIC, 0)
        assert 0 < low <= 40
        assert [offset for offset, _ in await all_offsets(store, low, 70)] == list(range(low, 70))
        result = await get(store, 0)
        assert (result.status, result.next_begin_offset) == (GetMessageStatus.OFFSET_TOO_SMALL, low)
    folder = f"/tier/{cluster_directory('C1')}/broker-a/{TOPIC}/0"
    async with opened(disk, config) as store:
        assert store.min_offset(TOPIC, 0) == low
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None
        assert disk.list(f"{folder}/COMMIT_LOG") == sorted(
            segment_name(segment.base_offset) for segment in file.commit_log.segments if segment.commit_position
        )
        store.clock.advance(9_000.0)  # type: ignore[attr-defined]
        assert await store.expire_tier() > 0
        assert file.min_offset == file.commit_offset
        await fill(store, 3, first=70)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        assert file.commit_offset == 73


async def test_a_deleted_topic_is_deleted_from_the_tier() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await uploaded_store(store)
        await store.delete_topic(TOPIC)
        folder = f"/tier/{cluster_directory('C1')}/broker-a/{TOPIC}/0"
        assert disk.list(f"{folder}/COMMIT_LOG") == disk.list(f"{folder}/CONSUME_QUEUE") == []
        await fill(store, 5)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        assert [offset for offset, _ in await all_offsets(store, 0, 5)] == list(range(5))
        assert store.min_offset(TOPIC, 0) == 0


async def test_messages_deleted_before_their_upload_leave_a_gap_that_consumers_pass() -> None:
    disk = SimDisk()
    async with opened(disk, tier(tiered_store_protect_local=False)) as store:
        await uploaded_store(store, 30)
        await fill(store, 60, first=30)
        await until_dispatched(store)
        await store.flush()
        await drop_local(store)
        local = MessageStore.min_offset(store, TOPIC, 0)
        assert local > 31
        result = await get(store, 30)
        assert (result.status, result.next_begin_offset) == (GetMessageStatus.OFFSET_TOO_SMALL, local)
        await store.uploads.upload_all()
        assert store.uploads.skipped == local - 30
        result = await get(store, 30)
        assert (result.status, result.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, local)
        assert [offset for offset, _ in await all_offsets(store, 0, 30)] == list(range(30))
        assert [offset for offset, _ in await all_offsets(store, local, 90)] == list(range(local, 90))


async def test_a_message_uploaded_by_the_original_has_no_offset_in_the_log() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        before = await uploaded_store(store)
    folder = f"/tier/{cluster_directory('C1')}/broker-a/{TOPIC}/0/CONSUME_QUEUE"
    for name in disk.list(folder):
        if name.endswith(".phy"):
            disk.delete(f"{folder}/{name}")
    async with opened(disk) as store:
        local = MessageStore.min_offset(store, TOPIC, 0)
        found = await all_offsets(store, 0, 60)
        assert all(physical >= APACHE_UPLOADED for _, physical in found[:local])
        assert await all_offsets(store, local, 60) == before[local:]
        marked = found[0][1]
        assert len(await store.look_message_cold(marked)) == 0
        assert "uploaded to the tier by RocketMQ's broker" in store.why_missing(marked)
        assert len(await store.look_message_cold(before[0][1])) == 0


@pytest.mark.parametrize("level", list(TieredStorageLevel))
async def test_each_level_reads_the_same_messages(level: TieredStorageLevel) -> None:
    disk = SimDisk()
    async with opened(disk, tier(tiered_storage_level=level)) as store:
        before = await uploaded_store(store)
        low = MessageStore.min_offset(store, TOPIC, 0) if level is TieredStorageLevel.DISABLE else 0
        assert await all_offsets(store, low, 60) == before[low:]
        reads = store.fetcher.messages
        assert bool(reads) is (level is not TieredStorageLevel.DISABLE)
        await all_offsets(store, 58, 60)
        assert (store.fetcher.messages > reads) is (level is TieredStorageLevel.FORCE)


async def test_a_tier_that_cannot_be_read_is_replaced_by_the_local_store() -> None:
    disk = SimDisk()
    async with opened(disk, tier(tiered_storage_level=TieredStorageLevel.FORCE)) as store:
        await fill(store, 20)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        disk.fail("pread", errno.EIO)
        result = await get(store, 3)
        assert result.status is GetMessageStatus.FOUND
        assert store.fetcher.fallbacks == 1
        result.release()


async def test_a_tier_that_hangs_is_replaced_by_the_local_store_or_found_null() -> None:
    disk = SimDisk()
    for level in (TieredStorageLevel.FORCE, TieredStorageLevel.NOT_IN_DISK):
        async with opened(disk, tier(tiered_storage_level=level)) as store:
            if level is TieredStorageLevel.FORCE:
                await fill(store, 60)
                await until_dispatched(store)
                await store.flush()
                await store.uploads.upload_all()
            else:
                await drop_local(store)
            file = store.flat_files.find(TOPIC, 0)
            assert file is not None
            file.read_messages = _hangs  # type: ignore[assignment, method-assign]
            await trio.testing.wait_all_tasks_blocked()
            results: list[GetMessageResult] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_get_into, results, store)
                await trio.testing.wait_all_tasks_blocked()
                store.clock.advance(12.5)  # type: ignore[attr-defined]
            if level is TieredStorageLevel.FORCE:
                assert (results[0].status, store.fetcher.fallbacks) == (GetMessageStatus.FOUND, 1)
                results[0].release()
            else:
                assert (results[0].status, results[0].next_begin_offset) == (GetMessageStatus.OFFSET_FOUND_NULL, 0)
            assert store.fetcher.reads.timeouts == 1


async def _hangs(*_: object) -> Any:
    await trio.sleep_forever()


async def _get_into(results: list[GetMessageResult], store: MessageStore) -> None:
    results.append(await get(store, 0))


async def test_groups_have_shares_of_the_memory_for_reads() -> None:
    async with opened(SimDisk()) as store:
        await uploaded_store(store)
        await trio.testing.wait_all_tasks_blocked()
        for group, offset in (("GroupA", 0), ("GroupB", 0)):
            arguments = TOPIC, 0, offset, 8, 1 << 20, None, group
            result = store.get_message(*arguments) or await store.get_message_cold(*arguments)
            assert result.status is GetMessageStatus.FOUND
            assert set(store.fetcher.cache.groups) == {group}


async def _script(store: TieredMessageStore, durable: list[int]) -> None:
    """Uploads that roll every kind of file, between more messages; expiry at the end. Notes how many are durable."""
    for step in range(3):
        await fill(store, 12, first=12 * step)
        await until_dispatched(store)
        await store.flush()
        durable.append(12 * step + 12)
        await store.uploads.upload_all()
    assert store.tier_index is not None
    await store.tier_index.flush()
    await store.tier_index.upload_next()
    store.clock.advance(4_000.0)  # type: ignore[attr-defined]
    await store.expire_tier()


CUT = dataclasses.replace(
    tier(
        tiered_store_file_reserved_time=1,
        tiered_store_index_file_max_hash_slot_num=16,
        tiered_store_index_file_max_index_num=40,
    ),
    tiered_store_commit_log_max_size=1500,
)


async def _cut_at(number: int, loss: Loss) -> tuple[SimDisk, int] | None:
    """The disk after a power cut at a call of the script, and how many messages must be on it.

    None if the script has fewer calls.
    """
    durable = [0]
    disk = SimDisk()
    disk.loss = loss
    async with opened(disk, CUT):
        pass
    disk.cut_at = disk.calls + number
    try:
        async with opened(disk, CUT) as store:
            await _script(store, durable)
    except* PowerCut:
        pass
    return (disk.power_cut(), durable[-1]) if disk.after_cut is not None else None


@pytest.mark.slow
@pytest.mark.parametrize("loss", list(Loss))
async def test_a_cut_at_any_call_leaves_a_tier_that_goes_on(loss: Loss) -> None:
    number = 1
    while True:
        cut = await _cut_at(number, loss)
        if cut is None:
            break
        survivor, durable = cut
        async with opened(survivor, CUT) as store:
            file = store.flat_files.find(TOPIC, 0)
            count = store.max_offset(TOPIC, 0)
            low = store.min_offset(TOPIC, 0)
            if file is not None and file.is_initialized:
                assert file.commit_offset <= count, number
            assert count >= durable
            expected = {*range(low, durable), *range(count, count + 4)}  # others may be lost, or damaged
            assert {*range(low, durable)} <= {offset for offset, _ in await all_offsets(store, low, count)}, number
            await fill(store, 4, first=count)
            await until_dispatched(store)
            await store.flush()
            await store.uploads.upload_all()
            file = store.flat_files.find(TOPIC, 0)
            assert file is not None
            assert file.commit_offset == count + 4, number
            found: list[TieredMessage] = []
            offset = file.min_offset
            while offset < file.commit_offset:
                messages, offset = await file.read_messages(offset, 100, 1 << 20)
                found += messages
            assert {offset for offset in expected if offset >= file.min_offset} <= {m.offset for m in found}, number
            physical = dict(await all_offsets(store, low, count + 4))
            for message in found:
                assert decode_messages(message.record)[0].commit_log_offset == physical[message.offset], number
            key = f"u{TOPIC}0-{count + 3}"
            items = await store.fetcher.query(TOPIC, key, 4, 0, 1 << 60)
            assert [decode_messages(record)[0].queue_offset for record in items] == [count + 3], number
        number += 7
    assert number > 100


@pytest.mark.parametrize("stop_at", range(1, 40, 3))
async def test_a_topic_deleted_during_its_upload_leaves_nothing_behind(stop_at: int) -> None:
    disk = SimDisk()
    run, calls, reached, go_on = disk.run, 0, trio.Event(), trio.Event()

    async def held(fn: object, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            reached.set()
            await go_on.wait()
        return await run(fn, *args)  # type: ignore[arg-type]

    async with opened(disk) as store:
        await fill(store, 60)
        await until_dispatched(store)
        await store.flush()
        disk.run = held  # type: ignore[assignment, method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.uploads.upload_all)
            await reached.wait()
            nursery.start_soon(store.delete_topic, TOPIC)
            await trio.testing.wait_all_tasks_blocked()
            await fill(store, 5)
            go_on.set()
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        assert [offset for offset, _ in await all_offsets(store, 0, 5)] == list(range(5))
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None
        assert (file.min_offset, file.commit_offset) == (0, 5)
        folder = f"/tier/{cluster_directory('C1')}/broker-a/{TOPIC}/0"
        for kind, stream in (("COMMIT_LOG", file.commit_log), ("CONSUME_QUEUE", file.consume_queue)):
            names = {name.removesuffix(".phy") for name in disk.list(f"{folder}/{kind}")}
            assert names == {segment_name(segment.base_offset) for segment in stream.segments}


async def test_an_expiry_that_cannot_write_the_metadata_ends_nothing() -> None:
    async with opened(SimDisk()) as store:
        await uploaded_store(store)
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None

        async def expired(_before_ms: int) -> int:
            await trio.lowlevel.checkpoint()
            return 1

        async def failing() -> None:
            await trio.lowlevel.checkpoint()
            raise OSError(errno.EIO, "no metadata")

        file.destroy_expired = expired  # type: ignore[assignment, method-assign]
        persist = store.flat_files.metadata.persist
        store.flat_files.metadata.persist = failing  # type: ignore[method-assign]
        assert await store.expire_tier() == 1
        store.flat_files.metadata.persist = persist  # type: ignore[method-assign]


async def test_a_truncated_queue_file_fails_the_upload_of_its_queue_only() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 30)
        await fill(store, 5, topic="Other")
        await until_dispatched(store)
        await store.flush()
    disk.cold = True
    async with opened(disk) as store:
        folder = f"/store/consumequeue/{TOPIC}/0"
        fd = disk.open(f"{folder}/{disk.list(folder)[0]}")
        disk.truncate(fd, 40)
        disk.close(fd)
        await store.uploads.upload_all()
        assert store.uploads.failures >= 1
        assert store.uploads.messages == 5


async def test_a_deleted_queue_does_not_begin_anew_in_the_tier() -> None:
    async with opened(SimDisk()) as store:
        await uploaded_store(store)
        queue = store.find_queue(TOPIC, 0)
        assert queue is not None
        await store.delete_topic(TOPIC)
        assert not await store.uploads._upload_group(_Pending(queue, 0), Buffer())
        assert store.flat_files.find(TOPIC, 0) is None
        assert store.flat_files.metadata.topics == {}
