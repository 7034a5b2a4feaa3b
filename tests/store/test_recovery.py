from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy

import pytest
import trio
from structlog.testing import capture_logs

from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.stores import TOPIC, by_key, check_all, drain, fill, killed, opened, put, settings
from trimq.broker.store.message_store import MessageStore, StoreLoadError
from trimq.broker.store.recovery.recovery import RecoveryReport
from trimq.protocol import checkpoint_layout
from trimq.protocol.property_text import join_properties
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.topic_rules import TIMER_TOPIC

ONE = {(TOPIC, 0): 40}


def _report(store: MessageStore) -> RecoveryReport:
    assert store.recovered is not None
    return store.recovered


def _write(disk: SimDisk, path: str, data: bytes, at: int) -> None:
    """Change a file durably without the store's knowledge."""
    fd = disk.open(path)
    disk.pwrite(fd, data, at)
    disk.data_sync(fd)
    disk.close(fd)


def _delete_below(disk: SimDisk, directory: str) -> None:
    for name in disk.list(directory):
        path = f"{directory}/{name}"
        info = disk.stat(path)
        if info is not None and info.is_directory:
            _delete_below(disk, path)
            disk.remove_directory(path)
        else:
            disk.delete(path)


def _forget_mark(disk: SimDisk) -> None:
    """Make the checkpoint as another broker would have left it."""
    fields = checkpoint_layout.decode(disk.content("/store/checkpoint"))
    _write(disk, "/store/checkpoint", checkpoint_layout.encode(fields), 0)


async def _filled(disk: SimDisk, count: int = 40) -> None:
    async with opened(disk) as store:
        await fill(store, count)


async def test_an_orderly_stop_leaves_nothing_to_read() -> None:
    disk = SimDisk()
    await _filled(disk)
    async with opened(disk) as store:
        report = _report(store)
        assert (report.clean, report.trusted, report.records) == (True, True, 0)
        assert not store.queues.queues, "queues are loaded on request"
        await check_all(store, ONE)
        await fill(store, 5, first=40)
        await check_all(store, {(TOPIC, 0): 45})


async def test_a_kill_loses_nothing() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 40)
    disk = disk.power_cut()
    async with opened(disk) as store:
        assert _report(store).units_rebuilt == 40
        await check_all(store, ONE)


async def test_a_start_after_a_kill_knows_where_messages_go_that_wait() -> None:
    """The creation of their topic may be lost, and its queues do not exist yet: they would be dropped when due."""
    disk = SimDisk()
    waits = join_properties({"REAL_TOPIC": "Later", "REAL_QID": "2"})
    async with killed(disk) as store:
        await put(store, topic=TIMER_TOPIC, more=waits)
        await put(store, topic=TIMER_TOPIC)
    async with opened(disk.power_cut()) as store:
        assert store.needed_queues() == {TIMER_TOPIC: 1, "Later": 3}


async def test_a_start_after_a_kill_reads_from_the_checkpoint_on() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 30)
        position = store.max_phy_offset
        await store._checkpoints.save()
        await fill(store, 10, first=30)
    disk = disk.power_cut()
    async with opened(disk) as store:
        report = _report(store)
        assert (report.trusted, report.scanned_from, report.records) == (True, position, 10)
        await check_all(store, ONE)


async def test_all_queues_deleted_after_an_orderly_stop() -> None:
    disk = SimDisk()
    await _filled(disk)
    _delete_below(disk, "/store/consumequeue")
    async with opened(disk) as store:
        assert _report(store).units_rebuilt == 40
        await check_all(store, ONE)


async def test_one_queue_deleted_after_an_orderly_stop() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 40)
        await fill(store, 12, queue_id=1)
    _delete_below(disk, f"/store/consumequeue/{TOPIC}/0")
    async with opened(disk) as store:
        assert _report(store).units_rebuilt == 40
        await check_all(store, {(TOPIC, 0): 40, (TOPIC, 1): 12})


async def test_a_queue_deleted_after_a_kill() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 40)
        await fill(store, 12, queue_id=1)
        await store._checkpoints.save()
    disk = disk.power_cut()
    _delete_below(disk, f"/store/consumequeue/{TOPIC}/1")
    async with opened(disk) as store:
        assert not _report(store).clean
        await check_all(store, {(TOPIC, 0): 40, (TOPIC, 1): 12})


async def test_a_queue_cut_short_after_an_orderly_stop_does_not_shift() -> None:
    disk = SimDisk()
    await _filled(disk)
    # the units from 35 on are lost, the exit looks orderly: RocketMQ loses number 35 and shifts the others
    _write(disk, f"/store/consumequeue/{TOPIC}/0/{600:020d}", bytes(100), 100)
    async with opened(disk) as store:
        await check_all(store, ONE)


async def test_a_checkpoint_is_forgotten_before_what_it_vouches_for_is_made_anew() -> None:
    """Otherwise a second crash could leave as many units as the checkpoint says, but wrong ones."""
    disk = SimDisk()
    await _filled(disk)
    _delete_below(disk, "/store/consumequeue")
    disk.history.clear()
    async with opened(disk) as store:
        await check_all(store, ONE)
    calls = [call for call in disk.history if call.startswith("rename")]
    assert calls[0] == "rename /store/checkpoint.tmp /store/checkpoint"
    assert calls[1].startswith("rename /store/consumequeue.unnamed ")


async def test_a_checkpoint_is_forgotten_before_a_queue_that_is_not_right_is_deleted() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 40)
        await store._checkpoints.save()
    disk = disk.power_cut()
    missing = f"/store/consumequeue/{TOPIC}/0/{200:020d}"
    disk.delete(missing)
    disk.history.clear()
    async with opened(disk) as store:
        await check_all(store, ONE)
    calls = [call for call in disk.history if call.startswith(("rename", "delete"))]
    assert calls[0] == "rename /store/checkpoint.tmp /store/checkpoint"
    assert calls[1] == f"delete /store/consumequeue/{TOPIC}/0/{0:020d}"


async def test_a_full_disk_lets_a_start_forget_the_checkpoint() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 40)
        await store._checkpoints.save()
    disk = disk.power_cut()
    disk.delete(f"/store/consumequeue/{TOPIC}/0/{200:020d}")
    capacity, disk.capacity = disk.capacity, disk.used()
    disk.history.clear()
    async with killed(disk) as store:
        assert "delete /store/checkpoint" in disk.history
        await check_all(store, ONE)
    disk = disk.power_cut()
    disk.capacity = capacity
    async with opened(disk) as store:
        assert not _report(store).trusted
        await check_all(store, ONE)


@pytest.mark.parametrize("start", [0, 200, 600])
@pytest.mark.parametrize("forget", [False, True])
async def test_a_file_missing_in_the_middle_of_a_queue(forget: bool, start: int) -> None:
    disk = SimDisk()
    await _filled(disk)
    disk.delete(f"/store/consumequeue/{TOPIC}/0/{start:020d}")
    if forget:
        _forget_mark(disk)
    async with opened(disk) as store:
        assert _report(store).notes
        await check_all(store, ONE)


@pytest.mark.parametrize("files", [1, 3])
async def test_the_first_files_of_a_queue_are_missing(files: int) -> None:
    """The remaining units end where the log does: they must not be taken for a later life of the topic."""
    disk = SimDisk()
    await _filled(disk)
    for number in range(files):
        disk.delete(f"/store/consumequeue/{TOPIC}/0/{200 * number:020d}")
    _forget_mark(disk)
    async with opened(disk) as store:
        assert any("is rebuilt" in note for note in _report(store).notes)
        assert _report(store).units_rebuilt == 40
        await check_all(store, ONE)


async def test_damaged_units_of_another_writers_store() -> None:
    disk = SimDisk()
    await _filled(disk)
    _forget_mark(disk)
    _write(disk, f"/store/consumequeue/{TOPIC}/0/{200:020d}", UNIT.pack(4711, 50, 3), 40)
    async with opened(disk) as store:
        assert not _report(store).trusted
        await check_all(store, ONE)


@pytest.mark.parametrize("forget", [False, True])
async def test_a_queue_that_is_ahead_of_the_log(forget: bool) -> None:
    disk = SimDisk()
    await _filled(disk)
    directory = f"/store/consumequeue/{TOPIC}/0"
    behind = f"{directory}/{800:020d}"
    disk.close(disk.create(behind, 200))
    disk.sync_directory(directory)
    _write(disk, behind, b"".join(UNIT.pack(20_000 + 200 * number, 200, 0) for number in range(3)), 0)
    if forget:
        _forget_mark(disk)
    async with opened(disk) as store:
        await check_all(store, ONE)
        await fill(store, 1, first=40)
        await check_all(store, {(TOPIC, 0): 41})
    assert not any(disk.content(behind)[UNIT.size :])


@pytest.mark.parametrize("forget", [False, True])
async def test_no_empty_file_stands_at_the_end_of_a_queue(forget: bool) -> None:
    """RocketMQ's recovery takes zeros in an empty file for a unit, and every later message would be off by one."""
    disk = SimDisk()
    async with opened(disk) as store:
        store.create_queues(TOPIC, 3)
        await fill(store, 40)
    directory = f"/store/consumequeue/{TOPIC}"
    full = [f"{start:020d}" for start in range(0, 800, 200)]
    assert (disk.list(directory), disk.list(f"{directory}/0")) == (["0"], full)
    behind = f"{directory}/0/{800:020d}"
    disk.close(disk.create(behind, 200))
    disk.sync_directory(f"{directory}/0")
    if forget:
        _forget_mark(disk)
    disk.delete("/store/consumequeue.snapshot")
    async with opened(disk) as store:
        await check_all(store, ONE)
    assert disk.list(f"{directory}/0") == full


async def test_a_shifted_queue_of_rocketmq_gets_its_places_back() -> None:
    disk = SimDisk()
    await _filled(disk, 8)
    _forget_mark(disk)
    path = f"/store/consumequeue/{TOPIC}/0/{0:020d}"
    units = disk.content(path)
    _write(disk, path, units[:80] + units[100:160] + bytes(20), 0)  # without number 4
    async with opened(disk) as store:
        await check_all(store, {(TOPIC, 0): 8})


@pytest.mark.parametrize("lives", [1, 3, 6, 9])
async def test_a_topic_that_was_made_again_keeps_its_new_life(lives: int) -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 6)
        await store.delete_topic(TOPIC)
        for number in range(lives):
            await put(store, b"new life", unique=f"new{number}")
    _forget_mark(disk)
    async with opened(disk) as store:
        assert not _report(store).trusted
        assert [one.body for one in await drain(store)] == [b"new life"] * lives


async def test_no_checkpoint_at_all() -> None:
    disk = SimDisk()
    await _filled(disk)
    disk.delete("/store/checkpoint")
    async with opened(disk) as store:
        report = _report(store)
        assert (report.trusted, report.records, report.units_rebuilt, report.keys_rebuilt) == (False, 40, 0, 0)
        await check_all(store, ONE)


async def test_a_checkpoint_from_the_future() -> None:
    disk = SimDisk()
    await _filled(disk)
    mark = checkpoint_layout.decode_mark(disk.content("/store/checkpoint"))
    assert mark is not None
    fields = checkpoint_layout.CheckpointFields(1 << 60, 1 << 60, 1 << 60, 1 << 60, 1 << 60, 1 << 60)
    ahead = checkpoint_layout.CheckpointMark(position=1 << 40, units=99, clean=True)
    for data in (checkpoint_layout.encode(fields), checkpoint_layout.encode(fields, ahead)):
        _write(disk, "/store/checkpoint", data, 0)
        _delete_below(disk, f"/store/consumequeue/{TOPIC}")
        async with opened(disk) as store:
            await check_all(store, ONE)


async def test_a_short_checkpoint() -> None:
    disk = SimDisk()
    await _filled(disk)
    fd = disk.open("/store/checkpoint")
    disk.truncate(fd, 20)
    disk.close(fd)
    async with opened(disk) as store:
        await check_all(store, ONE)


async def test_a_damaged_record_in_the_middle_is_reported_and_passed_over() -> None:
    for forget in (False, True):
        disk = SimDisk()
        async with killed(disk) as store:
            await fill(store, 40)
            at = (await drain(store))[7].commit_log_offset
            size = (await drain(store))[7].size
        disk = disk.power_cut()
        if forget:
            _forget_mark(disk)
        disk.flip(f"/store/commitlog/{0:020d}", at + 100)
        async with opened(disk) as store:
            (damage,) = _report(store).damaged
            assert (damage.phy, damage.length) == (at, size)
            assert "CRC" in damage.why
            stored = await drain(store)
            assert [one.queue_offset for one in stored] == [*range(7), *range(8, 40)]
            assert store.max_offset(TOPIC, 0) == 40
            assert [one.queue_offset for one in await by_key(store, f"u{TOPIC}0-8")] == [8]
            assert await by_key(store, f"u{TOPIC}0-7") == []


async def test_a_damaged_record_is_not_served_though_its_unit_is_there() -> None:
    disk = SimDisk()
    await _filled(disk)
    _forget_mark(disk)
    disk.flip(f"/store/commitlog/{0:020d}", 100)
    async with opened(disk) as store:
        assert [one.queue_offset for one in await drain(store)] == list(range(1, 40))
        assert store.max_offset(TOPIC, 0) == 40


async def test_a_torn_tail_is_erased() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 10)
        last = (await drain(store))[-1]
    disk = disk.power_cut()
    path = f"/store/commitlog/{0:020d}"
    _write(disk, path, bytes(40), last.commit_log_offset + last.size - 40)  # its properties never reached the disk
    async with opened(disk) as store:
        report = _report(store)
        assert report.position == last.commit_log_offset
        assert report.erased
        assert not any(disk.durable_content(path)[report.position :])
        await check_all(store, {(TOPIC, 0): 9})
        await fill(store, 1, first=9)
        await check_all(store, {(TOPIC, 0): 10})


async def test_a_record_of_an_earlier_life_of_the_file_does_not_come_back() -> None:
    # another writer cut the log after five records, wrote one more of the same size and was killed: the old seventh
    # record directly follows it, and is complete
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 9)
        records = await drain(store)
        begin, behind = records[5].commit_log_offset, records[6].commit_log_offset
        image = bytearray(disk.content(f"/store/commitlog/{0:020d}"))
    disk = disk.power_cut()
    later = records[5].store_timestamp + 60_000
    image[begin + 56 : begin + 64] = later.to_bytes(8, "big")
    _write(disk, f"/store/commitlog/{0:020d}", bytes(image), 0)
    disk.delete("/store/checkpoint")
    async with opened(disk) as store:
        assert _report(store).position == behind
        assert len(await drain(store)) == 6


async def test_a_clock_that_was_set_back_is_no_end_of_the_log() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 9)
        records = await drain(store)
        image = bytearray(disk.content(f"/store/commitlog/{0:020d}"))
    disk = disk.power_cut()
    for number, one in enumerate(records):
        at = one.commit_log_offset + 56
        time = one.store_timestamp + (-60_000 if 3 <= number < 6 else 0)
        image[at : at + 8] = time.to_bytes(8, "big")
    _write(disk, f"/store/commitlog/{0:020d}", bytes(image), 0)
    disk.delete("/store/checkpoint")
    async with opened(disk) as store:
        await check_all(store, {(TOPIC, 0): 9})


async def test_the_index_deleted() -> None:
    disk = SimDisk()
    await _filled(disk)
    _delete_below(disk, "/store/index")
    async with opened(disk) as store:
        assert _report(store).keys_rebuilt == 80
        await check_all(store, ONE)


async def test_one_index_file_deleted() -> None:
    for position in (0, 1, -1):
        disk = SimDisk()
        await _filled(disk)
        disk.delete(f"/store/index/{disk.list('/store/index')[position]}")
        async with opened(disk) as store:
            await check_all(store, ONE)


async def test_an_index_file_of_the_wrong_size_and_a_damaged_header() -> None:
    disk = SimDisk()
    await _filled(disk)
    first, second, *_ = disk.list("/store/index")
    fd = disk.open(f"/store/index/{first}")
    disk.truncate(fd, 100)
    disk.close(fd)
    _write(disk, f"/store/index/{second}", (1 << 30).to_bytes(4, "big"), 36)
    async with opened(disk) as store:
        await check_all(store, ONE)


async def test_damaged_entries_and_chains_of_another_writers_index() -> None:
    disk = SimDisk()
    await _filled(disk)
    _forget_mark(disk)
    path = f"/store/index/{disk.list('/store/index')[1]}"
    _write(disk, path, b"\x00\x00\x00\x07", 40 + 16 * 4 + 20 * 5)
    _write(disk, f"/store/index/{disk.list('/store/index')[0]}", bytes(64), 40)
    async with opened(disk) as store:
        await check_all(store, ONE)


async def test_tag_entries_of_another_writer_stay() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        assert store.index is not None
        await put(store, b"one", tag="red", unique="u1")
        store.index.put(TOPIC, ("T#red",), 0, store.clock.wall_ms())
        await put(store, b"two", unique="u2")
        assert [one.body for one in await by_key(store, "T#red")] == [b"one"]
    _forget_mark(disk)
    async with opened(disk) as store:
        assert _report(store).keys_rebuilt == 0
        assert [one.body for one in await by_key(store, "T#red")] == [b"one"]
        assert [one.body for one in await by_key(store, "u2")] == [b"two"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
async def test_an_index_with_and_without_tags_is_no_damage_to_the_other_writer(before: bool, after: bool) -> None:
    """As written by RocketMQ before 5.5, or by a broker with indexTagEnable=false, and vice versa.

    Only the end of the index may lack its tag: the newest record's keys are put again.
    """
    disk = SimDisk()
    async with opened(disk, settings(index_tag_enable=before)) as store:
        for number in range(12):
            await put(store, b"x", tag="red" if number % 3 else "", unique=f"u{number}")
    _forget_mark(disk)
    async with opened(disk, settings(index_tag_enable=after)) as store:
        assert _report(store).keys_rebuilt == (2 if after and not before else 0)
        for number in range(12):
            assert len(await by_key(store, f"u{number}")) == 1
        assert len(await by_key(store, "T#red")) == (8 if before else int(after))
        await put(store, b"new", tag="red")
        assert len(await by_key(store, "T#red")) == (8 if before else int(after)) + after


async def test_an_index_that_lost_the_tag_at_its_end_gets_it_again() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        for number in range(5):
            await put(store, b"x", tag="red", unique=f"u{number}")
        assert store.index is not None
        await store.index.flush_pending()
        count = store.index.files[0].count
    _forget_mark(disk)
    path = f"/store/index/{disk.list('/store/index')[0]}"
    _write(disk, path, (count - 1).to_bytes(4, "big"), 36)
    async with opened(disk) as store:
        assert _report(store).keys_rebuilt == 2
        assert len(await by_key(store, "T#red")) == 5
        assert [found.body for found in await by_key(store, "u4")] == [b"x"]


async def test_an_index_made_anew_has_the_tags() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        for number in range(5):
            await put(store, b"x", tag="red", more="KEYS\x01T#none\x02" if number % 2 else "")
    _delete_below(disk, "/store/index")
    async with opened(disk, settings(index_tag_enable=False)) as store:
        assert await by_key(store, "T#red") == []
        assert len(await by_key(store, "T#none")) == 2
    _delete_below(disk, "/store/index")
    async with opened(disk) as store:
        assert len(await by_key(store, "T#red")) == 5


async def test_an_index_that_was_switched_off_for_a_while() -> None:
    disk = SimDisk()
    await _filled(disk, 10)
    async with opened(disk, settings(message_index_enable=False)) as store:
        await fill(store, 10, first=10)
    async with opened(disk) as store:
        await check_all(store, {(TOPIC, 0): 20})


def _everything(disk: SimDisk, directory: str = "/store") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in disk.list(directory):
        path = f"{directory}/{name}"
        info = disk.stat(path)
        if info is not None and info.is_directory:
            found |= _everything(disk, path)
        elif name != "lock":
            found[path] = disk.content(path)
    return found


@asynccontextmanager
async def _refused(text: str) -> AsyncIterator[None]:
    with pytest.RaisesGroup(pytest.RaisesExc(StoreLoadError, match=text), flatten_subgroups=True, allow_unwrapped=True):
        yield


# guards: an unmounted volume is not an empty store: nothing is deleted, and all messages exist once it is mounted
@pytest.mark.parametrize("kill", [False, True])
async def test_a_log_that_is_not_there_is_no_empty_store(kill: bool) -> None:
    disk = SimDisk()
    await _filled(disk)
    if kill:
        disk.close(disk.create("/store/abort", 0))
    mark = checkpoint_layout.decode_mark(disk.content("/store/checkpoint"))
    assert mark is not None
    for name in disk.list("/store/commitlog"):
        disk.rename(f"/store/commitlog/{name}", f"/{name}")
    disk.remove_directory("/store/commitlog")
    before = _everything(disk)
    text = f"/store/commitlog holds no log file, but /store/checkpoint knows a log up to offset {mark.position}: mount"
    async with _refused(text), opened(disk):
        pass
    assert _everything(disk) == before
    disk.make_directory("/store/commitlog")
    for name in disk.list("/"):
        if name.isdigit():
            disk.rename(f"/{name}", f"/store/commitlog/{name}")
    async with opened(disk) as store:
        assert _report(store).clean
        await check_all(store, ONE)


# guards: once accepted, the new log has none of the old queues and keys, and the next start needs no permission
@pytest.mark.parametrize("apache", [False, True])
@pytest.mark.parametrize("count", [0, 3])
async def test_a_log_that_is_given_up_takes_queues_and_index_with_it(apache: bool, count: int) -> None:
    disk = SimDisk()
    await _filled(disk)
    if apache:
        _forget_mark(disk)
    _delete_below(disk, "/store/commitlog")
    with capture_logs() as logs:
        async with killed(disk, accept_missing_log=True) as store:
            assert store.max_offset(TOPIC, 0) == 0
            assert not store.topics()
            assert await by_key(store, f"u{TOPIC}0-1") == []
            await fill(store, count)
            await check_all(store, {(TOPIC, 0): count})
    (warning,) = [line for line in logs if line["event"] == "missing_log_accepted"]
    assert warning["log_level"] == "warning"
    assert (warning["directory"], warning["checkpoint"]) == ("/store/commitlog", "/store/checkpoint")
    async with opened(disk.power_cut()) as store:
        await fill(store, 2, first=count)
        await check_all(store, {(TOPIC, 0): count + 2})


# guards: a crash in the accepted start leaves no checkpoint of the old log next to the remains of its queues
async def test_the_checkpoint_of_a_log_that_is_given_up_goes_first() -> None:
    disk = SimDisk()
    await _filled(disk)
    _delete_below(disk, "/store/commitlog")
    disk.history.clear()
    async with opened(disk, accept_missing_log=True):
        pass
    deleted = next(at for at, call in enumerate(disk.history) if call.startswith("delete /store/consumequeue/"))
    assert "rename /store/checkpoint.tmp /store/checkpoint" in disk.history[:deleted]


async def test_permission_that_is_not_needed_changes_nothing() -> None:
    disk = SimDisk()
    await _filled(disk)
    with capture_logs() as logs:
        async with opened(disk, accept_missing_log=True) as store:
            assert _report(store).clean
            await check_all(store, ONE)
    assert not [line for line in logs if line["event"] == "missing_log_accepted"]


# guards: a store that never had a message starts, whichever broker wrote its checkpoint
async def test_a_store_without_a_message_has_no_log_to_miss() -> None:
    disk = SimDisk()
    for _ in range(2):
        async with opened(disk):
            pass
    assert not disk.list("/store/commitlog")
    _forget_mark(disk)
    async with opened(disk) as store:
        await fill(store, 3)
        await check_all(store, {(TOPIC, 0): 3})


@pytest.mark.parametrize("field", ["physic_msg_timestamp", "logics_msg_timestamp", "logics_physical_offset"])
async def test_rocketmqs_checkpoint_knows_a_log_too(field: str) -> None:
    disk = SimDisk()
    async with opened(disk):
        pass
    _write(disk, "/store/checkpoint", checkpoint_layout.encode(checkpoint_layout.CheckpointFields(**{field: 77})), 0)
    async with _refused("knows a log of another broker .*77"), opened(disk):
        pass


async def test_a_log_that_was_cut_short_after_an_orderly_stop() -> None:
    disk = SimDisk()
    await _filled(disk)
    for name in disk.list("/store/commitlog")[1:]:
        disk.delete(f"/store/commitlog/{name}")
    async with opened(disk) as store:
        assert not _report(store).trusted
        count = store.max_offset(TOPIC, 0)
        assert 0 < count < 40
        await check_all(store, {(TOPIC, 0): count})
        await fill(store, 5, first=count)
        await check_all(store, {(TOPIC, 0): count + 5})


async def test_a_power_cut_in_the_recovery_of_a_power_cut() -> None:
    disk = SimDisk(seed=5)
    async with killed(disk, settings(sync=True), loss=Loss.SECTORS) as store:
        await fill(store, 30)
    damaged = disk.power_cut()
    cut, finished = 0, False
    while not finished:
        cut += 3
        again = deepcopy(damaged)
        again.cut_at = cut
        again.loss = Loss.PAGES
        try:
            store = MessageStore(settings(sync=True), disk=again)
            async with store.opened():
                finished = True
        except* PowerCut:
            pass
        async with opened(again.power_cut(Loss.NOTHING), settings(sync=True)) as store:
            await check_all(store, {(TOPIC, 0): 30})
    assert cut > 30


@pytest.mark.parametrize("forget", [False, True])
async def test_what_a_killed_process_had_not_synced_is_synced_by_the_next(forget: bool) -> None:
    """The machine stays up after the kill, and its power fails after the next process has stopped in order."""
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 3)
    async with killed(disk) as store:
        await fill(store, 20, first=3)
        await store.flush_queues.write()
        assert store.index is not None
        await store.index.flush_pending()
        again = disk.after_kill()
    if forget:
        _forget_mark(again)
    async with opened(again) as store:
        await fill(store, 1, first=23)  # this put syncs the newest files, not those before them
    directory = f"/store/consumequeue/{TOPIC}/0"
    for path in (f"{directory}/{name}" for name in again.list(directory)):
        assert again.durable_content(path) == again.content(path)
    async with opened(again.power_cut(Loss.ALL)) as store:
        await check_all(store, {(TOPIC, 0): 24})


# guards: recovery syncs all log files, not only the one written next: the kill left several of them unsynced
@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("more", [0, 1])
async def test_older_log_files_that_a_killed_process_had_not_synced(forget: bool, more: int) -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 3)
    async with killed(disk) as store:
        await fill(store, 97, first=3)
        again = disk.after_kill()
    assert len(again.list("/store/commitlog")) > 2
    if forget:
        _forget_mark(again)
    async with opened(again) as store:
        await fill(store, more, first=100)
    async with opened(again.power_cut(Loss.ALL)) as store:
        await check_all(store, {(TOPIC, 0): 100 + more})


# guards: units of lost records are erased from their files: RocketMQ would take them for messages, as would a start
# after a kill, once the log has grown past the offset that they point to
@pytest.mark.parametrize("kept", [30, 31, 35, 39])
async def test_units_behind_a_cut_are_erased_from_their_files(kept: int) -> None:
    disk = SimDisk()
    await _filled(disk)
    _forget_mark(disk)
    async with opened(disk) as store:
        end = (await drain(store))[kept].commit_log_offset
    _forget_mark(disk)
    for name in disk.list("/store/commitlog"):
        at = max(end - int(name), 0)
        if at < 8192:
            _write(disk, f"/store/commitlog/{name}", bytes(8192 - at), at)
    directory = f"/store/consumequeue/{TOPIC}/0"
    async with opened(disk) as store:
        assert _report(store).position == end
        units = b"".join(disk.content(f"{directory}/{name}") for name in disk.list(directory))
        assert len(units) == -(-kept // 10) * 200, "an empty file goes"
        assert all(UNIT.unpack_from(units, 20 * number)[1] for number in range(kept))
        assert not any(units[20 * kept :])
        await check_all(store, {(TOPIC, 0): kept})


# guards: index files after those of the checkpoint are not part of the index, also after an orderly stop
async def test_an_index_file_left_behind_an_orderly_stop() -> None:
    disk = SimDisk()
    await _filled(disk)
    names = disk.list("/store/index")
    stray = f"/store/index/{int(names[-1]) + 1000}"
    fd = disk.create(stray, 0)
    disk.pwrite(fd, disk.content(f"/store/index/{names[0]}"), 0)
    disk.data_sync(fd)
    disk.close(fd)
    disk.sync_directory("/store/index")
    async with opened(disk) as store:
        assert disk.list("/store/index") == names
        await fill(store, 5, first=40)
        await check_all(store, {(TOPIC, 0): 45})


async def test_half_messages_and_rolled_back_ones_stay_out_of_queues() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await put(store, b"prepared", unique="p", sys_flag=0x4)
        await put(store, b"rolled back", unique="r", sys_flag=0xC)
        await put(store, b"ordinary", unique="o")
    async with opened(disk.power_cut()) as store:
        assert [one.body for one in await drain(store)] == [b"ordinary"]
        assert [one.body for one in await by_key(store, "p")] == [b"prepared"]
        assert await by_key(store, "r") == []


async def test_recovery_yields_to_other_tasks() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await fill(store, 300)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        before = turns
        store = MessageStore(settings(), disk=disk.power_cut())
        async with store.opened():
            assert _report(store).records == 300
        assert turns > before + 3
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_deleted_abort_file(loss: Loss) -> None:
    """The stop looks orderly but was not: a start trusts only the mark of an orderly stop."""
    disk = SimDisk(seed=5)
    async with killed(disk, settings(sync=True), loss=loss) as store:
        await fill(store, 20)
        await store._checkpoints.save()
        await fill(store, 20, first=20)
    disk = disk.power_cut(loss)
    disk.delete("/store/abort")
    async with opened(disk, settings(sync=True)) as store:
        assert not _report(store).clean
        await check_all(store, ONE)
