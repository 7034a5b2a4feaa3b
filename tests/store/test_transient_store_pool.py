"""The transient store pool: memory first, then the file, then the device. Only bytes in the file can be read."""

import ctypes
import errno
import gc
import mmap
import os
import resource
import struct
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.builders import Answers, Rig, batch, config, message, records
from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.slowdisk import SlowDisk
from tests.store.stores import TOPIC, by_key, check_all, drain, fill, killed, opened, put, settings
from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.durability.commit import CommitRealTimeService
from trimq.broker.store.durability.flush import GroupCommitService
from trimq.broker.store.log.transient_store_pool import PooledMappedFile, TransientStorePool, WriteBuffer, lock_memory
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.running_flags import Flag
from trimq.broker.store.types import PutMessageStatus

NEVER = 1 << 30
"""Milliseconds: so long that it happens only on request."""


def pool_settings(**more: object) -> MessageStoreConfig:
    """Settings without automatic commits, so that a test decides when to commit."""
    fields: dict[str, object] = {
        "transient_store_pool_enable": True,
        "transient_store_pool_size": 3,
        "commit_interval_commit_log": NEVER,
        "commit_commit_log_thorough_interval": NEVER,
        "commit_commit_log_least_pages": 1 << 20,
    }
    return settings(**(fields | more))  # type: ignore[arg-type]


def committing(store: MessageStore) -> CommitRealTimeService:
    durability = store.write_path.durability
    assert isinstance(durability, CommitRealTimeService)
    return durability


async def commit(store: MessageStore) -> None:
    """Commit everything into the files and make it readable."""
    assert await committing(store).commit_buffers()
    await trio.testing.wait_all_tasks_blocked()


def usable(store: MessageStore) -> list[PooledMappedFile]:
    return [file for file in store.files.files if isinstance(file, PooledMappedFile)]


async def test_a_flush_that_is_not_timed_hears_of_each_put() -> None:
    more = {"flush_commit_log_timed": False, "flush_commit_log_least_pages": 0, "flush_interval_commit_log": 10**9}
    async with opened(SimDisk(), pool_settings(commit_interval_commit_log=10**9, **more)) as store:
        await put(store, b"one")
        await commit(store)
        assert store.flushed_offset < store.max_phy_offset
        await put(store, b"two")
        await trio.testing.wait_all_tasks_blocked()
        assert store.flushed_offset == store.max_phy_offset


# -- what readers see


async def test_what_has_not_been_committed_cannot_be_read(autojump_clock: trio.testing.MockClock) -> None:
    disk = SimDisk()
    async with opened(disk, pool_settings()) as store:
        result = await put(store, b"one", unique="u1", keys="k1")
        assert await drain(store) == []
        assert store.max_offset(TOPIC, 0) == 0
        assert store.max_phy_offset == 0
        assert store.look_message(result.physical_offset) == b""
        assert await store.look_message_cold(result.physical_offset) == b""
        assert await by_key(store, "k1") == []
        assert await store.earliest_message_time() == -1
        assert not any(disk.content("/store/commitlog/00000000000000000000"))
        await commit(store)
        assert [stored.body for stored in await drain(store)] == [b"one"]
        assert store.max_offset(TOPIC, 0) == 1
        assert store.max_phy_offset == result.size
        assert bytes(store.look_message(result.physical_offset) or b"")[-10:]
        assert [stored.body for stored in await by_key(store, "k1")] == [b"one"]
        assert await store.earliest_message_time() == result.store_timestamp


# guards: a commit dispatches only the bytes it has written, not those appended to the buffer while it ran
async def test_what_comes_during_a_commit_waits_for_the_next_one(autojump_clock: trio.testing.MockClock) -> None:
    disk = SlowDisk("write_range")
    async with opened(disk, pool_settings()) as store:
        await put(store, b"one")
        disk.held = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(committing(store).commit_buffers)
            await trio.testing.wait_all_tasks_blocked()
            await put(store, b"two")
            disk.held = False
            disk.gate.set()
        assert store.max_offset(TOPIC, 0) == 1
        assert [stored.body for stored in await drain(store)] == [b"one"]
        await commit(store)
        assert [stored.body for stored in await drain(store)] == [b"one", b"two"]


async def test_a_cold_read_ends_where_the_commit_ended(autojump_clock: trio.testing.MockClock) -> None:
    disk = SimDisk()
    async with opened(disk, pool_settings()) as store:
        await fill(store, 3)
        await commit(store)
        await fill(store, 3, first=3)
        file = store.files.files[0]
        file.in_memory_from = file.size
        committed = store.max_phy_offset
        assert len(await store.commit_log.read_cold(0, 8192)) == committed
        assert len(store.commit_log.read(0, 8192) or b"") == committed
        assert store.commit_log.read(committed, 10) == b""
        disk.cold = True
        assert store.commit_log.read(0, 100) is None


async def test_all_of_it_over_many_files(autojump_clock: trio.testing.MockClock) -> None:
    """At RocketMQ's intervals. The log is the same as without the pool."""
    disk, plain = SimDisk(), SimDisk()
    intervals = {"commit_interval_commit_log": 200, "commit_commit_log_thorough_interval": 200}
    for where, chosen in ((disk, pool_settings(**intervals, commit_commit_log_least_pages=4)), (plain, settings())):
        async with opened(where, chosen) as store:
            for number in range(8):
                await fill(store, 30, first=30 * number)
                await fill(store, 10, queue_id=1, first=10 * number)
                await trio.sleep(1)
            await check_all(store, {(TOPIC, 0): 240, (TOPIC, 1): 80})
        disk.check_mapped_stores()
    names = plain.list("/store/commitlog")
    assert len(names) > 6
    for name in names[:-1]:
        path = f"/store/commitlog/{name}"
        assert len(disk.content(path)) == len(plain.content(path))
    async with opened(disk) as store:
        assert store.recovered is not None
        assert store.recovered.clean
        await check_all(store, {(TOPIC, 0): 240, (TOPIC, 1): 80})


async def test_batches_and_delays_come_through(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(SimDisk(), pool_settings()) as store:
        answers = Answers()
        result = answers.take(store.put_message(batch([b"a", b"b", b"c"]), answers.later))
        assert result is not None
        assert result.ok
        await put(store, b"later", topic="SCHEDULE_TOPIC_XXXX", queue_id=2, more="DELAY\x013\x02")
        await commit(store)
        assert [stored.body for stored in await drain(store)] == [b"a", b"b", b"c"]
        units = await store.queue_units("SCHEDULE_TOPIC_XXXX", 2, 0, 1)
        assert units[0][2] == result.store_timestamp + 10_000


@pytest.mark.parametrize(
    ("least", "interval", "thorough", "after"),
    [(1, NEVER, NEVER, 0.0), (0, NEVER, NEVER, 0.0), (99, 200, 1000, 1.0)],
    ids=["pages", "no pages", "time"],
)
async def test_when_it_is_committed(
    autojump_clock: trio.testing.MockClock, least: int, interval: int, thorough: int, after: float
) -> None:
    config = pool_settings(
        commit_commit_log_least_pages=least,
        commit_interval_commit_log=interval,
        commit_commit_log_thorough_interval=thorough,
    )
    async with opened(SimDisk(), config) as store:
        arrived = trio.Event()
        store.message_arriving.append(lambda *_: arrived.set())
        began = trio.current_time()
        if least == 1:
            await fill(store, 10)
            await trio.testing.wait_all_tasks_blocked()
            assert not arrived.is_set()
            await fill(store, 20, first=10)
        else:
            await fill(store, 1)
        await arrived.wait()
        assert trio.current_time() - began == pytest.approx(after, abs=0.01)


async def test_an_orderly_stop_commits_all() -> None:
    disk = SimDisk()
    async with opened(disk, pool_settings()) as store:
        await fill(store, 100)
    async with opened(disk.power_cut(Loss.ALL), settings()) as store:
        assert store.recovered is not None
        assert store.recovered.clean
        await check_all(store, {(TOPIC, 0): 100})


async def test_the_last_file_of_a_start_has_no_buffer(autojump_clock: trio.testing.MockClock) -> None:
    """As in RocketMQ: its records can be read immediately, and the next file uses the pool again."""
    disk = SimDisk()
    async with opened(disk, settings()) as store:
        await fill(store, 5)
    async with opened(disk, pool_settings()) as store:
        await fill(store, 5, first=5)
        await trio.testing.wait_all_tasks_blocked()
        await check_all(store, {(TOPIC, 0): 10})
        await fill(store, 60, first=10)
        await commit(store)
        assert usable(store)
        await check_all(store, {(TOPIC, 0): 70})


# -- what is lost


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_kill_takes_what_was_not_committed_and_nothing_else(
    autojump_clock: trio.testing.MockClock, loss: Loss
) -> None:
    """Also a power cut after the committed bytes have been flushed. Offsets continue after the last survivor."""
    disk = SimDisk()
    async with killed(disk, pool_settings(), loss=loss) as store:
        await fill(store, 50)
        await commit(store)
        assert await store.write_path.sync.flush()
        await fill(store, 7, first=50)
        lost_from = store.max_phy_offset
        assert store.commit_log.max_offset > lost_from
    disk = disk.power_cut()
    async with opened(disk, pool_settings()) as store:
        assert store.recovered is not None
        assert store.recovered.position == lost_from
        assert not store.recovered.damaged
        await check_all(store, {(TOPIC, 0): 50})
        assert await by_key(store, f"u{TOPIC}0-50") == []
        result = await put(store, b"after")
        assert (result.queue_offset, result.physical_offset) == (50, lost_from)
        await trio.testing.wait_all_tasks_blocked()
        assert [stored.body for stored in await drain(store)][50:] == [b"after"]
    disk.check_mapped_stores()


@pytest.mark.parametrize("loss", [Loss.ALL, Loss.PAGES, Loss.SECTORS])
async def test_a_power_cut_at_any_call_of_a_commit(loss: Loss) -> None:
    """The survivors are a prefix of the puts, except for holes that the device left in bytes not flushed."""

    async def run(disk: SimDisk) -> tuple[int, int]:
        """Make puts with commits and flushes in between; return how many are durable and how many were put."""
        durable = number = 0
        try:
            async with opened(disk, pool_settings()) as store:
                for _ in range(6):
                    await fill(store, 11, first=number)
                    number += 11
                    await commit(store)
                    assert await store.write_path.sync.flush()
                    durable = number
        except* PowerCut:
            pass
        return durable, number

    whole = SimDisk()
    await run(whole)
    assert whole.calls > 40
    for cut_at in range(1, whole.calls, 7):
        disk = SimDisk(seed=cut_at)
        disk.cut_at, disk.loss = cut_at, loss
        durable, sent = await run(disk)
        async with opened(disk.power_cut(loss), pool_settings()) as store:
            stored = await drain(store)
            assert store.recovered is not None
            if loss is Loss.ALL or not store.recovered.damaged:
                assert durable <= len(stored) <= sent, cut_at
                await check_all(store, {(TOPIC, 0): len(stored)})
            else:  # the part that was not durable has holes, which are left out
                numbers = [int(one.body.split(b"-")[2]) for one in stored]
                assert numbers == sorted(set(numbers)), cut_at
                assert numbers[:durable] == list(range(durable)), cut_at
                assert all(number < sent for number in numbers), cut_at


# -- faults


async def test_a_commit_that_fails_makes_the_store_read_only(autojump_clock: trio.testing.MockClock) -> None:
    """The records are still in memory: those that a later try commits can be read, and survive."""
    disk = SimDisk()
    async with opened(disk, pool_settings()) as store:
        await fill(store, 3)
        disk.fail("pwrite", errno.EIO)
        assert not await committing(store).commit_buffers()
        assert not store.is_writable
        assert "read-only" in store.flags.reason
        answers = Answers()
        refused = store.put_message(message(), answers.later)
        assert refused is not None
        assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert await drain(store) == []
        await commit(store)
        assert not store.is_writable
        await check_all(store, {(TOPIC, 0): 3})
    async with opened(disk, settings()) as store:
        assert store.is_writable
        await check_all(store, {(TOPIC, 0): 3})


async def test_a_full_disk_refuses_and_heals(autojump_clock: trio.testing.MockClock) -> None:
    disk = SimDisk()
    async with opened(disk, pool_settings()) as store:
        await fill(store, 10)
        disk.capacity = disk.used()
        answers = Answers()
        for _ in range(80):
            answers.take(store.put_message(message(b"x" * 300), answers.later))
        await trio.sleep(2)
        assert store.flags.has(Flag.NO_SPACE)
        assert [result.status for result in answers.results][-1] is PutMessageStatus.SERVICE_NOT_AVAILABLE
        await commit(store)
        taken = 10 + sum(result.ok for result in answers.results)
        assert len(await drain(store)) == taken
        disk.capacity = 1 << 40
        await trio.sleep(2)
        assert store.is_writable
        await put(store, b"again")


# -- the pool


async def test_files_without_a_buffer_are_written_through_their_map(autojump_clock: trio.testing.MockClock) -> None:
    with capture_logs() as logs:
        async with opened(SimDisk(), pool_settings(transient_store_pool_size=1)) as store:
            await fill(store, 100)
            assert {isinstance(file, PooledMappedFile) for file in store.files.files} == {True, False}
            await commit(store)
            await check_all(store, {(TOPIC, 0): 100})
    assert any(entry["event"] == "no_write_buffer" for entry in logs)


@pytest.mark.parametrize("buffers", [1, 2, 3])
async def test_a_kill_leaves_no_hole_where_a_file_had_no_buffer(
    buffers: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Bytes stored through a map survive a kill, so no earlier bytes may be in a buffer only."""
    held: set[int] = set()
    for count in range(20, 170, 3):
        disk = SimDisk()
        async with killed(disk, pool_settings(transient_store_pool_size=buffers)) as store:
            began = trio.current_time()
            await fill(store, count)
            assert trio.current_time() == began, "a put that waited was not woken"
            held.add(len(usable(store)))
        with capture_logs() as logs:
            async with opened(disk.power_cut()) as store:
                assert store.recovered is not None
                assert not store.recovered.damaged, (count, logs)
                found = [stored.queue_offset for stored in await drain(store)]
                assert found == list(range(len(found))), count
                await put(store, b"again")
                assert (await drain(store))[-1].queue_offset == len(found)
    assert max(held) >= buffers


async def test_fail_fast_where_all_buffers_are_in_use(autojump_clock: trio.testing.MockClock) -> None:
    config = pool_settings(transient_store_pool_size=2, fast_fail_if_no_buffer_in_store_pool=True)
    async with opened(SimDisk(), config) as store:
        answers = Answers()
        began = trio.current_time()
        for number in range(100):
            answers.take(store.put_message(message(b"x" * 300, keys=(f"k{number}",)), answers.later))
        await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() == began
        refused = [result for result in answers.results if not result.ok]
        assert {result.status for result in refused} == {PutMessageStatus.CREATE_MAPPED_FILE_FAILED}
        assert "fastFailIfNoBufferInStorePool" in refused[0].remark
        assert len(answers.results) == 100
        assert len(store.files.files) == 2
        await commit(store)
        await put(store, b"again")
        await commit(store)
        assert len(await drain(store)) == 101 - len(refused)


def test_a_pool_counts_its_buffers() -> None:
    pool = TransientStorePool(2, 8192)
    returned: list[int] = []
    pool.on_returned = lambda: returned.append(pool.available)
    first, second = pool.borrow(), pool.borrow()
    assert first is not None
    assert second is not None
    assert pool.borrow() is None
    pool.give_back(first)
    assert returned == [1]
    third = pool.borrow()
    assert third is not None
    pool.give_back(second)
    pool.give_back(third)
    assert pool.available == 2


def resident(memory: mmap.mmap) -> int:
    """Bytes of ``memory`` with a page. The process's resident size is an estimate and includes other allocations."""
    place = ctypes.c_char.from_buffer(memory)
    first, pages = ctypes.addressof(place) // mmap.PAGESIZE, len(memory) // mmap.PAGESIZE
    del place  # otherwise the memory could not be closed
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        entries = struct.unpack(f"={pages}Q", os.pread(file.fileno(), 8 * pages, 8 * first))
    there: int = sum(entry >> 62 != 0 for entry in entries)  # in memory or swapped out
    return there * mmap.PAGESIZE


def test_memory_is_taken_and_given_back_in_pieces() -> None:
    size = 64 << 20
    buffer = WriteBuffer(size, lambda *_: errno.ENOMEM)
    memory = buffer.memory
    assert resident(memory) == 0
    buffer.make_ready(0, size // 2)
    assert size // 2 <= resident(memory) < size
    buffer.give_back(size // 4 + 5)
    assert resident(memory) == size // 4
    memory[size // 4 : size // 4 + 4] = b"kept"
    buffer.give_back(size // 4 + 5)
    assert memory[size // 4 : size // 4 + 4] == b"kept"
    buffer.close()
    assert memory.closed


def locked() -> int:
    return int(Path("/proc/self/status").read_text().split("VmLck:")[1].split()[0]) << 10


def test_memory_is_locked_where_that_is_allowed() -> None:
    memory = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before = locked()
    refused = lock_memory(memory, 0, 1 << 16)
    if refused:  # the limit of an ordinary user
        assert refused in (errno.ENOMEM, errno.EPERM, errno.EAGAIN)
        assert locked() == before
    else:
        assert locked() - before == 1 << 16
        buffer = WriteBuffer(1 << 16)
        buffer.make_ready(0, 1 << 16)
        assert locked() - before == 2 << 16
        buffer.give_back(1 << 15)
        assert locked() - before == (1 << 16) + (1 << 15)
        buffer.close()
    memory.close()
    assert locked() == before


async def test_a_refused_lock_is_reported_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = lambda *_: errno.ENOMEM  # noqa: E731
    monkeypatch.setattr(TransientStorePool.__init__, "__defaults__", (refuse,))
    with capture_logs() as logs:
        async with opened(SimDisk(), pool_settings()) as store:
            await fill(store, 100)
            await commit(store)
            await fill(store, 10, first=100)
            await commit(store)
    warnings = [entry for entry in logs if entry["event"] == "write_buffers_not_locked"]
    assert len(warnings) == 1
    assert "ulimit -l" in warnings[0]["reason"]


async def test_the_limit_of_locked_memory_is_used_to_the_full() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, hard))
    try:
        async with opened(SimDisk(), settings()):
            assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (1 << 16, hard)
        async with opened(SimDisk(), pool_settings()):
            assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


async def test_the_start_says_what_may_be_lost() -> None:
    with capture_logs() as logs:
        async with opened(SimDisk(), pool_settings(commit_interval_commit_log=200)):
            pass
    warning = next(entry for entry in logs if entry["event"] == "transient_store_pool")
    assert warning["log_level"] == "warning"
    assert "crash of this process loses" in warning["reason"]


async def test_sync_flush_has_no_use_for_it() -> None:
    disk = SimDisk()
    with capture_logs() as logs:
        async with opened(disk, pool_settings(flush_disk_type=FlushDiskType.SYNC_FLUSH)) as store:
            assert isinstance(store.write_path.durability, GroupCommitService)
            await fill(store, 3)
            await check_all(store, {(TOPIC, 0): 3})
    assert any(entry["event"] == "transient_store_pool_not_used" for entry in logs)


# -- the real disk


async def test_on_the_real_disk(tmp_path: Path) -> None:
    config = settings(
        str(tmp_path),
        transient_store_pool_enable=True,
        mapped_file_size_commit_log=1 << 18,
        commit_log_reserve_step=1 << 16,
    )
    gc.collect()  # an earlier test's memory must not be released in between
    before = locked()
    async with opened(RealDisk(), config) as store:
        await fill(store, 3_000)
        await commit(store)
        assert len(store.files.files) > 2
        assert len(await drain(store)) == 3_000
    assert locked() == before
    async with opened(RealDisk(), settings(str(tmp_path), mapped_file_size_commit_log=1 << 18)) as store:
        assert len(await drain(store)) == 3_000


# -- warmMapedFileEnable


@pytest.mark.parametrize("sync", [False, True])
async def test_whole_files_are_made_ready(autojump_clock: trio.testing.MockClock, sync: bool) -> None:
    for warm in (False, True):
        rig = Rig(settings=config(1 << 16, sync=sync, warm_maped_file_enable=warm))
        async with rig.running():
            rig.put(message())
            await rig.answered(1)
            await trio.testing.wait_all_tasks_blocked()
            assert (rig.files.files[0].reserved == 1 << 16) is warm
            while rig.path.allocator.next_file is None:
                count = len(rig.answers.results) + 1
                rig.put(message(b"x" * 4000))
                await rig.answered(count)
                await trio.testing.wait_all_tasks_blocked()
            assert (rig.path.allocator.next_file.reserved == 1 << 16) is warm
        rig.sim.check_mapped_stores()
        assert len(records(rig.files)) == len(rig.answers.results)
