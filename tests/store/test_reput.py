import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, by_key, check_all, drain, fill, opened, put, settings
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import GetMessageStatus
from trimq.protocol.message_keys import index_keys, index_keys_of
from trimq.protocol.property_text import decode_properties, property_of
from trimq.protocol.topic_rules import SCHEDULE_TOPIC


def _stop_dispatch(store: MessageStore) -> int:
    """Make later appends find the dispatcher behind the log."""
    position = store.dispatcher.position
    store.dispatcher.position = -1
    store.dispatcher.on_behind = lambda: None
    return position


def _resume(store: MessageStore, position: int) -> None:
    store.dispatcher.position = position
    store.dispatcher.on_behind = store._reput.wake


@pytest.mark.parametrize("cold", [False, True])
async def test_what_was_left_behind_is_dispatched_in_the_order_of_the_log(cold: bool) -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 5)
        position = _stop_dispatch(store)
        await fill(store, 60, first=5)
        await fill(store, 3, queue_id=1)
        await put(store, b"late", topic=SCHEDULE_TOPIC, queue_id=2, more="DELAY\x013\x02", tag="x")
        await put(store, b"half", unique="half", sys_flag=4)
        await put(store, b"red", tag="red", queue_id=7)
        assert store.max_offset(TOPIC, 0) == 5
        heard: list[tuple[object, ...]] = []
        store.message_arriving.append(lambda *arrived: heard.append(arrived))
        if cold:
            disk.cold = True
            for file in store.files.files:
                file.in_memory_from = file.size
        _resume(store, position)
        assert store.dispatch_behind_bytes > 0
        await store._reput.catch_up()
        assert store.dispatch_behind_bytes == 0
        disk.cold = False
        assert len(heard) == 65
        assert [one.body for one in await by_key(store, "T#red")] == [b"red"]
        assert [one[:3] for one in heard[:60]] == [(TOPIC, 0, 6 + number) for number in range(60)]
        await check_all(store, {(TOPIC, 0): 65, (TOPIC, 1): 3})
        ((_, _, due),) = await store.queue_units(SCHEDULE_TOPIC, 2, 0, 1)
        assert due == store.clock.wall_ms() + 10_000
        assert [one.body for one in await by_key(store, "half")] == [b"half"]
        assert store.stats.dispatch_max_buffer > 0


async def test_the_next_append_wakes_the_service_and_appends_dispatch_again_afterwards() -> None:
    async with opened(SimDisk()) as store:
        await fill(store, 3)
        position = _stop_dispatch(store)
        await fill(store, 3, first=3)
        _resume(store, position)
        await fill(store, 1, first=6)
        assert store.max_offset(TOPIC, 0) == 3
        await trio.testing.wait_all_tasks_blocked()
        assert store.max_offset(TOPIC, 0) == 7
        await fill(store, 1, first=7)
        assert store.max_offset(TOPIC, 0) == 8
        await check_all(store, {(TOPIC, 0): 8})


@pytest.mark.parametrize("cold", [False, True])
async def test_a_damaged_record_is_passed_over(cold: bool) -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        position = _stop_dispatch(store)
        await fill(store, 30)
        file = store.files.files[0]
        size = int.from_bytes(file.view[:4], "big")
        file.view[5 * size + 100] ^= 1
        file.view[8 * size + 4] ^= 1
        _resume(store, max(position, 0))
        if cold:
            disk.cold = True
            for mapped in store.files.files:
                mapped.in_memory_from = mapped.size
        await store._reput.catch_up()
        offsets = [one.queue_offset for one in await drain(store)]
        assert offsets == [at for at in range(30) if at not in (5, 8)]
        assert store.max_offset(TOPIC, 0) == 30


async def test_a_record_whose_length_is_damaged_costs_the_rest_of_its_file() -> None:
    async with opened(SimDisk()) as store:
        _stop_dispatch(store)
        await fill(store, 60)
        file = store.files.files[0]
        size = int.from_bytes(file.view[:4], "big")
        file.view[5 * size : 5 * size + 4] = (1 << 30).to_bytes(4, "big")
        _resume(store, 0)
        await store._reput.catch_up()
        offsets = [one.queue_offset for one in await drain(store)]
        assert offsets[:5] == [0, 1, 2, 3, 4]
        assert offsets[-1] == 59
        assert store.dispatch_behind_bytes == 0


async def test_deleted_files_are_passed_over() -> None:
    async with opened(SimDisk()) as store:
        _stop_dispatch(store)
        await fill(store, 80)
        store.files.remove_first().destroy()
        _resume(store, 10)
        await store._reput.catch_up()
        low = store.min_offset(TOPIC, 0)
        assert low > 0
        assert [one.queue_offset for one in await drain(store)] == list(range(low, 80))
        result = store.get_message(TOPIC, 0, 0, 1, 100, None)
        assert result is not None
        assert result.status is GetMessageStatus.OFFSET_TOO_SMALL


async def test_under_sync_flush_only_what_is_durable_is_dispatched() -> None:
    async with opened(SimDisk(), settings(sync=True)) as store:
        position = _stop_dispatch(store)
        await fill(store, 5)
        flushed = store.write_path.sync.flushed_offset
        store.write_path.sync.flushed_offset = flushed * 2 // 5
        _resume(store, position)
        await store._reput.catch_up()
        assert store.max_offset(TOPIC, 0) == 2
        store.write_path.sync.flushed_offset = flushed
        await store._reput.catch_up()
        assert store.max_offset(TOPIC, 0) == 5


_names = st.one_of(st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY"]), st.text("AEGIKNQSTUY_", min_size=1, max_size=8))


@given(st.lists(st.tuples(_names, st.text("abKEYS \x01", max_size=6)), max_size=6))
def test_one_property_is_what_decoding_all_of_them_gives(properties: list[tuple[str, str]]) -> None:
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties)
    for whole in (text, text[:-1]):
        decoded = decode_properties(whole)
        for name in ("KEYS", "TAGS", "UNIQ_KEY"):
            assert property_of(whole, name) == decoded.get(name, "")
        assert index_keys_of(whole) == index_keys(decoded)


@pytest.mark.parametrize("cold", [False, True])
async def test_records_larger_than_what_is_read_at_once_are_dispatched(cold: bool) -> None:
    disk = SimDisk()
    config = settings(mapped_file_size_commit_log=1 << 20, max_message_size=1 << 19)
    async with opened(disk, config) as store:
        await fill(store, 3)
        position = _stop_dispatch(store)
        bodies = [b"a" * 100_000, b"small", b"b" * 70_000, b"c" * 65_536]
        for body in bodies:
            await put(store, body)
        if cold:
            disk.cold = True
            for file in store.files.files:
                file.in_memory_from = file.size
        _resume(store, position)
        await store._reput.catch_up()
        disk.cold = False
        units = await store.queue_units(TOPIC, 0, 3, 10)
        assert len(units) == 4
        assert [size > len(body) for (_, size, _), body in zip(units, bodies, strict=True)] == [True] * 4
