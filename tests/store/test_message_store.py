import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.store.builders import Answers, batch, message
from tests.store.simdisk import Loss, SimDisk
from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.durability.flush import GroupCommitService
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import MessageStore, StoreInUseError, StoreLoadError
from trimq.broker.store.running_flags import Flag
from trimq.broker.store.types import GetMessageStatus, PutMessageResult, PutMessageStatus
from trimq.protocol.message import decode_messages
from trimq.protocol.topic_rules import SCHEDULE_TOPIC
from trimq.remoting.runtime.clock import ManualClock

OK = PutMessageStatus.PUT_OK


def _config(root: str = "/store", *, sync: bool = False, **more: object) -> MessageStoreConfig:
    fields: dict[str, object] = {
        "mapped_file_size_commit_log": 16384,
        "mapped_file_size_consume_queue": 400,
        "commit_log_reserve_step": 4096,
        "max_hash_slot_num": 64,
        "max_index_num": 256,
        "flush_disk_type": FlushDiskType.SYNC_FLUSH if sync else FlushDiskType.ASYNC_FLUSH,
    }
    return MessageStoreConfig(store_path_root_dir=root, **(fields | more))  # type: ignore[arg-type]


@asynccontextmanager
async def _opened(disk: Disk | None = None, config: MessageStoreConfig | None = None) -> AsyncIterator[MessageStore]:
    store = MessageStore(config or _config(), disk=disk or SimDisk(), clock=ManualClock(), sync_place=SyncPlace.THREAD)
    async with store.opened():
        await trio.testing.wait_all_tasks_blocked()
        yield store


async def _put(store: MessageStore, put: MessageInner) -> PutMessageResult:
    answers = Answers()
    result = store.put_message(put, answers.later)
    if result is not None:
        return result
    await answers.changed.wait()
    return answers.results[0]


def _bodies(store: MessageStore, topic: str = "TopicTest", queue_id: int = 0) -> list[bytes]:
    offset = 0
    found: list[bytes] = []
    while True:
        result = store.get_message(topic, queue_id, offset, 32, 1 << 20, None)
        assert result is not None
        if result.status is not GetMessageStatus.FOUND:
            return found
        found += [item.body for data in result.buffers for item in decode_messages(data)]
        offset = result.next_begin_offset
        result.release()


async def test_a_message_can_be_read_in_the_turn_that_brought_it() -> None:
    async with _opened() as store:
        heard: list[tuple[object, ...]] = []
        store.message_arriving.append(lambda *arrived: heard.append(arrived))
        result = store.put_message(
            message(b"now", tags_code=5, properties=b"KEYS\x01k\x02", keys=("k",)), lambda _: None
        )
        assert result is not None
        assert _bodies(store) == [b"now"]
        assert (store.min_offset("TopicTest", 0), store.max_offset("TopicTest", 0)) == (0, 1)
        record = store.look_message(result.physical_offset)
        assert record is not None
        assert [item.body for item in decode_messages(record)] == [b"now"]
        assert heard == [("TopicTest", 0, 1, 5, result.store_timestamp)]
        assert store.dispatch_behind_bytes == 0
        found = await store.query_message_cold("TopicTest", "k", 10, 0, 1 << 60)
        assert found.count == 1
        found.release()
        assert await store.message_store_time("TopicTest", 0, 0) == result.store_timestamp
        assert await store.earliest_message_time() == result.store_timestamp
        assert await store.queue_units("TopicTest", 0, 0, 5) == [(0, result.size, 5)]


async def test_what_is_not_durable_cannot_be_read_on_any_path() -> None:
    async with _opened(config=_config(sync=True)) as store:
        await _put(store, message(b"durable"))
        group = store.write_path.durability
        assert isinstance(group, GroupCommitService)
        group.join_rounds([], lambda: True)  # as in a reactor's round: no sync starts before its end
        answers = Answers()
        assert (
            store.put_message(message(b"not yet", properties=b"KEYS\x01key\x02", keys=("key",)), answers.later) is None
        )
        await trio.testing.wait_all_tasks_blocked()
        at = store.max_phy_offset - 116
        assert _bodies(store) == [b"durable"]
        assert store.max_offset("TopicTest", 0) == 1
        found = store.query_message("TopicTest", "key", 10, 0, 1 << 60)
        assert found is not None
        assert found.count == 0
        assert store.look_message(at) == b""
        assert await store.look_message_cold(at) == b""
        group.commit()
        await answers.changed.wait()
        assert _bodies(store) == [b"durable", b"not yet"]
        assert len(store.look_message(answers.results[0].physical_offset) or b"") == 116


async def test_a_delayed_message_carries_its_due_time() -> None:
    async with _opened() as store:
        result = await _put(store, message(topic=SCHEDULE_TOPIC, queue_id=2, properties=b"DELAY\x013\x02"))
        ((_, _, due),) = await store.queue_units(SCHEDULE_TOPIC, 2, 0, 1)
        assert due == result.store_timestamp + 10_000


async def test_a_store_goes_on_where_it_ended() -> None:
    disk = SimDisk()
    async with _opened(disk) as store:
        for number in range(20):
            await _put(store, message(bytes([number]) * 3000, keys=(f"key{number}",)))
    assert disk.stat("/store/abort") is None
    assert disk.open_files() == 0
    async with _opened(disk) as store:
        assert store.recovered is not None
        assert store.recovered.clean
        assert disk.stat("/store/abort") is not None
        result = await _put(store, message(b"more"))
        assert result.queue_offset == 20
        assert result.store_timestamp >= 1_700_000_000_000
        disk.cold = False
        assert [body[:1] for body in await _cold_bodies(store)] == [bytes([number]) for number in range(20)] + [b"m"]


async def _cold_bodies(store: MessageStore, topic: str = "TopicTest", queue_id: int = 0) -> list[bytes]:
    offset = 0
    found: list[bytes] = []
    while True:
        result = await store.get_message_cold(topic, queue_id, offset, 32, 1 << 20, None)
        if result.status is not GetMessageStatus.FOUND:
            return found
        found += [item.body for data in result.buffers for item in decode_messages(data)]
        offset = result.next_begin_offset
        result.release()


async def test_batches_are_dispatched_message_by_message() -> None:
    async with _opened() as store:
        answers = Answers()
        answers.take(store.put_message(batch([b"a", b"b", b"c"]), answers.later))
        await trio.testing.wait_all_tasks_blocked()
        assert _bodies(store) == [b"a", b"b", b"c"]
        (result,) = answers.results
        assert store.dispatcher.last_record == list(result.offsets or [])[-1] > result.physical_offset


async def test_a_second_opening_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    config = _config(str(tmp_path))
    async with _opened(RealDisk(), config):
        before = (tmp_path / "abort").stat().st_mtime_ns
        with pytest.raises(StoreInUseError):
            async with MessageStore(config).opened():
                pass
        assert (tmp_path / "abort").stat().st_mtime_ns == before
    async with _opened(RealDisk(), config) as store:
        assert store.recovered is not None
        assert store.recovered.clean


async def test_a_file_of_another_size_is_refused_and_nothing_stays_locked() -> None:
    disk = SimDisk()
    async with _opened(disk) as store:
        await _put(store, message())
    with pytest.raises(StoreLoadError, match="has 16384 bytes, the configured file size is 32768"):
        async with _opened(disk, _config(mapped_file_size_commit_log=32768)):
            pass
    async with _opened(disk) as store:
        assert await _cold_bodies(store) == [b"body"]


async def test_a_broken_store_keeps_its_abort_file() -> None:
    disk = SimDisk()
    async with _opened(disk, _config(sync=True)) as store:
        await _put(store, message(b"good"))
        disk.fail("data_sync", errno.EIO)
        result = await _put(store, message(b"bad"))
        assert result.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert not store.is_writable
        assert store.flags.has(Flag.NOT_WRITEABLE)
        assert "read-only" in store.runtime_info()["notWriteableReason"]
        assert await _cold_bodies(store) == [b"good"]
    assert disk.stat("/store/abort") is not None
    async with _opened(disk, _config(sync=True)) as store:
        # the data still in memory has been written again: a sync alone would not have written it
        recovered = await _cold_bodies(store)
        assert recovered[:1] == [b"good"]
        assert disk.stat("/store/failed_sync") is None
        assert (await _put(store, message(b"again"))).ok
        survivor = disk.copy_after_cut(Loss.ALL)
    async with _opened(survivor, _config(sync=True)) as store:
        assert await _cold_bodies(store) == [*recovered, b"again"]


async def test_configuration_that_may_change_does() -> None:
    async with _opened() as store:
        assert (await _put(store, message(b"x" * 200))).ok
        store.set_config(_config(max_message_size=100))
        assert (await _put(store, message(b"x" * 200))).status is PutMessageStatus.MESSAGE_ILLEGAL
