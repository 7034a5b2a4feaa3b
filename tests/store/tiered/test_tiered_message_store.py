"""The whole store with a tier, on a simulated disk: upload, cleaning, reads, ids, restart."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, settings, until_dispatched
from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.broker.tiered_config import PLUG_IN, POSIX_PROVIDER, TieredStoreConfig
from trimq.protocol.message import decode_messages
from trimq.remoting.runtime.clock import ManualClock


def tier(**options: object) -> TieredStoreConfig:
    return TieredStoreConfig(
        message_store_plug_in=PLUG_IN,
        tiered_backend_service_provider=POSIX_PROVIDER,
        tiered_store_file_path="/tier",
        tiered_store_commit_log_max_size=4096,
        tiered_store_consume_queue_max_size=200,
        **options,  # type: ignore[arg-type]
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


async def get(store: MessageStore, offset: int, count: int = 32, topic: str = TOPIC) -> GetMessageResult:
    arguments = topic, 0, offset, count, 1 << 20, None
    result = store.get_message(*arguments)
    return await store.get_message_cold(*arguments) if result is None else result


async def all_offsets(store: MessageStore, begin: int, end: int) -> list[tuple[int, int]]:
    """Queue offset and log offset of all messages, as a consumer reads them."""
    found: list[tuple[int, int]] = []
    offset = begin
    while offset < end:
        result = await get(store, offset)
        assert result.status is GetMessageStatus.FOUND, (offset, result)
        messages = decode_messages(b"".join(bytes(buffer) for buffer in result.buffers))
        found += [(message.queue_offset, message.commit_log_offset) for message in messages]
        result.release()
        assert result.next_begin_offset > offset
        offset = result.next_begin_offset
    return found


async def drop_local(store: TieredMessageStore, keep: int = 1) -> None:
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
