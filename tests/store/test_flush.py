import errno
from collections.abc import Callable

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.builders import LOG, Rig, batch, config, message
from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.slowdisk import SlowDisk
from tests.store.stores import TOPIC, settings
from trimq.broker.store.disk.durable_files import make_durable_directory
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.message import decode_messages
from trimq.remoting.runtime.clock import ManualClock

FIRST = f"{LOG}/{0:020d}"
OK = PutMessageStatus.PUT_OK


def _sync_rig(disk: SimDisk | None = None, **more: int) -> Rig:
    return Rig(disk, config(1 << 16, sync=True, **more))


async def test_a_reply_comes_after_the_bytes_are_on_the_device() -> None:
    rig = _sync_rig()
    async with rig.running():

        def check(result: PutMessageResult) -> None:
            begin = result.physical_offset
            durable = rig.sim.power_cut(Loss.ALL).content(FIRST)[begin : begin + result.size]
            assert [item.body for item in decode_messages(durable)] == [b"payload"]
            assert rig.path.sync.flushed_offset >= begin + result.size
            # the readable end is reported just before the reply
            assert rig.dispatcher.records[-1].physical_offset == begin
            rig.sim.after_cut = None
            rig.answers.later(result)

        for number in range(3):
            assert rig.path.put_message(message(b"payload"), check) is None
            assert len(rig.dispatcher.records) == number
            await rig.answered(number + 1)
        assert [result.status for result in rig.answers.results] == [OK] * 3


async def test_all_that_wait_share_the_next_sync() -> None:
    disk = SlowDisk()
    rig = Rig(disk, config(1 << 16, sync=True, step=1 << 16))
    async with rig.running():
        disk.held = True
        rig.put(message(b"first"))
        await trio.testing.wait_all_tasks_blocked()
        before = disk.syncs
        # these came after the sync in flight had started: it does not cover them
        for _ in range(50):
            rig.put(message(b"more"))
        several = batch([b"a", b"b"])
        rig.put(several)
        kept = len(several.messages)
        disk.held = False
        disk.gate.set()
        await rig.answered(52)
        assert not kept, "a receive buffer is not retained while the message waits for the sync"
        assert disk.syncs == before + 1
        ends = [result.physical_offset for result in rig.answers.results]
        assert ends == sorted(ends)
        assert len(rig.dispatcher.records) == 53


# guards: a sync answers only records in the log when it started, not the record at the offset where it ended
async def test_a_sync_answers_nothing_that_came_while_it_ran() -> None:
    disk = SlowDisk()
    rig = Rig(disk, config(1 << 16, sync=True, step=1 << 16))
    async with rig.running():
        disk.held = True
        rig.put(message(b"first"))
        await trio.testing.wait_all_tasks_blocked()
        rig.put(message(b"second"))
        gate, disk.gate = disk.gate, trio.Event()
        gate.set()
        (first,) = await rig.answered(1)
        await trio.testing.wait_all_tasks_blocked()
        assert len(rig.answers.results) == len(rig.dispatcher.records) == 1
        assert rig.path.durability.readable_offset == first.physical_offset + first.size
        disk.held = False
        disk.gate.set()
        await rig.answered(2)


async def test_wait_false_is_answered_at_once_and_dispatched_in_its_turn() -> None:
    disk = SlowDisk()
    rig = _sync_rig(disk)
    async with rig.running():
        disk.held = True
        assert rig.put(message(b"first")) is None
        hasty = rig.put(message(b"second", wait=False))
        assert hasty is not None
        assert hasty.status is OK
        assert rig.put(message(b"third")) is None
        assert rig.dispatcher.records == []
        assert rig.path.durability.readable_offset == 0
        disk.held = False
        disk.gate.set()
        await rig.answered(3)
        await trio.testing.wait_all_tasks_blocked()
        assert [item.queue_offset for item in rig.dispatcher.records] == [0, 1, 2]


async def test_a_slow_device_is_a_timeout_and_the_record_is_dispatched_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    disk = SlowDisk()
    rig = _sync_rig(disk, sync_flush_timeout=5000)
    async with rig.running():
        disk.held = True
        begin = trio.current_time()
        rig.put(message(b"one"))
        await trio.sleep(2)
        rig.put(batch([b"two", b"three"]))
        results = await rig.answered(1)
        assert results[0].status is PutMessageStatus.FLUSH_DISK_TIMEOUT
        assert results[0].ok
        assert (results[0].physical_offset, results[0].queue_offset) == (0, 0)
        assert trio.current_time() - begin == pytest.approx(5)
        results = await rig.answered(2)
        assert results[1].status is PutMessageStatus.FLUSH_DISK_TIMEOUT
        assert len(results[1].offsets or []) == 2
        assert trio.current_time() - begin == pytest.approx(7)
        assert rig.dispatcher.records == []
        disk.held = False
        disk.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert [item.queue_offset for item in rig.dispatcher.records] == [0, 1, 2]
        assert len(rig.answers.results) == 2


async def test_how_long_each_has_waited_is_counted(autojump_clock: trio.testing.MockClock) -> None:
    """Messages of one sync may have come at different times, and each message of a batch counts."""
    disk = SlowDisk()
    rig = _sync_rig(disk, sync_flush_timeout=5000)
    async with rig.running():
        disk.held = True
        rig.put(message(b"one"))
        await trio.sleep(0.1)  # its sync has started: the others share the next one
        rig.put(batch([b"two", b"three"]))
        await trio.sleep(0.2)
        rig.put(message(b"four"))
        await trio.sleep(0.3)
        disk.held = False
        disk.gate.set()
        await rig.answered(3)
        found = {round(ms, -1): count for ms, count in enumerate(rig.stats.latency_counts) if count}
        assert found == {600: 1, 500: 2, 300: 1}


async def test_a_failed_sync_acknowledges_nothing_and_is_not_repeated() -> None:
    rig = _sync_rig()
    async with rig.running():
        rig.put(message(b"good"))
        await rig.answered(1)
        rig.sim.fail("data_sync", errno.EIO)
        with capture_logs() as logs:
            rig.put(message(b"lost"))
            rig.put(message(b"lost too"))
            results = await rig.answered(3)
        assert [result.status for result in results[1:]] == [PutMessageStatus.SERVICE_NOT_AVAILABLE] * 2
        assert "Input/output error" in results[1].remark
        assert "read-only" in results[1].remark
        assert [entry["event"] for entry in logs] == ["commit_log_sync_failed"]
        assert len(rig.dispatcher.records) == 1
        calls = rig.sim.history.count("data_sync 1")
        refused = rig.put(message(b"no more"))
        assert refused is not None
        assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert rig.flags.is_broken
        assert not await rig.path.sync.flush()
        assert rig.sim.history.count("data_sync 1") == calls
        # the kernel dropped the pages: a second sync would falsely report success
        assert b"lost" not in rig.sim.durable_content(FIRST)


async def test_a_failed_sync_in_the_background_makes_the_store_read_only(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig(settings=config(1 << 16, flush_commit_log_least_pages=0))
    async with rig.running():
        result = rig.put(message(b"x"))
        assert result is not None
        rig.sim.fail("data_sync", errno.EIO)
        await trio.sleep(1)
        refused = rig.put(message(b"y"))
        assert refused is not None
        assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE


async def test_files_are_synced_oldest_first_and_the_prefix_is_contiguous() -> None:
    disk = SlowDisk()
    rig = Rig(disk, config(4096, sync=True))
    async with rig.running():
        disk.held = True
        rig.put(message(b"x" * 3000))
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            rig.put(message(b"x" * 3000))
            await trio.testing.wait_all_tasks_blocked()
        assert rig.path.sync.flushed_offset == 0
        disk.history.clear()
        disk.held = False
        disk.gate.set()
        await rig.answered(4)
        await trio.testing.wait_all_tasks_blocked()
        used = {f"data_sync {number}" for number in range(1, 4)}
        synced = [call for call in disk.history if call in used]
        assert synced == sorted(synced)
        assert rig.path.sync.flushed_offset == rig.log.max_offset == rig.files.flushed_offset
        rolls = [item for item in rig.dispatcher.seen if len(item) == 2]
        assert [following for _, following in rolls] == [4096, 8192, 12288]
        order = [item[0] if len(item) == 2 else item.physical_offset for item in rig.dispatcher.seen]
        assert order == sorted(order)


async def test_asynchronous_flush_by_interval_pages_and_thorough_interval(
    autojump_clock: trio.testing.MockClock,
) -> None:
    settings = config(
        1 << 20,
        flush_interval_commit_log=500,
        flush_commit_log_least_pages=4,
        flush_commit_log_thorough_interval=10_000,
    )
    rig = Rig(settings=settings)
    async with rig.running():
        result = rig.put(message(b"x" * 100))
        assert result is not None
        assert len(rig.dispatcher.records) == 1
        await trio.sleep(5)
        assert rig.path.sync.flushed_offset == 0
        await trio.sleep(6)
        assert rig.path.sync.flushed_offset == rig.log.max_offset
        rig.put(message(b"x" * 4 * 4096))
        await rig.answered(2)
        await trio.sleep(0.6)
        assert rig.path.sync.flushed_offset == rig.log.max_offset
        assert rig.path.durability.readable_offset == rig.log.max_offset
        rig.put(message(b"last"))
    assert rig.path.sync.flushed_offset == rig.log.max_offset


async def test_without_the_timer_a_put_wakes_the_flush(autojump_clock: trio.testing.MockClock) -> None:
    settings = config(1 << 20, step=1 << 20, flush_commit_log_timed=False, flush_interval_commit_log=60_000)
    rig = Rig(settings=settings)
    async with rig.running():
        for count in (1, 2):  # the first one waits for its file, the second one finds space
            rig.put(message(b"x" * 5 * 4096))
            await rig.answered(count)
            await trio.sleep(0.1)
            assert rig.path.sync.flushed_offset == rig.log.max_offset


@pytest.mark.parametrize("sync", [False, True])
async def test_stopping_answers_all_and_makes_all_durable(sync: bool) -> None:
    rig = Rig(settings=config(8192, sync=sync))
    async with rig.running():
        for number in range(30):
            rig.put(message(bytes([number]) * 1000))
        await rig.path.stop()
    results = rig.answers.results
    assert len(results) == 30
    done = [result for result in results if result.ok]
    assert done
    assert {result.status for result in results} <= {OK, PutMessageStatus.SERVICE_NOT_AVAILABLE}
    survivor = rig.sim.power_cut(Loss.ALL)
    for result in done:
        path = f"{LOG}/{result.physical_offset // 8192 * 8192:020d}"
        at = result.physical_offset % 8192
        assert decode_messages(survivor.content(path)[at : at + result.size])
    refused = rig.put(message())
    assert refused is not None
    assert refused.remark == "the broker is shutting down"


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("seed", range(3))
async def test_no_acknowledged_message_is_lost_by_a_power_cut_at_any_call(loss: Loss, seed: int) -> None:
    """The guarantee of the write path alone; the tests of recovery cover recovery's."""
    cut_at = 1
    while True:
        disk = SimDisk(seed=1000 * seed + cut_at)
        disk.loss, disk.write_back, disk.cut_at = loss, 0.2, cut_at
        rig, alive = await _work(disk)
        survivor = disk.power_cut(loss)
        for result in rig.answers.results if rig is not None else []:
            if result.status is OK:
                start = result.physical_offset // 4096 * 4096
                data = survivor.content(f"{LOG}/{start:020d}")
                at = result.physical_offset - start
                assert len(data) == 4096
                (stored,) = decode_messages(data[at : at + result.size])
                assert stored.queue_offset == result.queue_offset
                assert stored.body == bytes([stored.queue_offset]) * len(stored.body)
        if alive:
            break
        cut_at += 1
    assert cut_at > 30


async def _work(disk: SimDisk) -> tuple[Rig | None, bool]:
    """Make some sends over three files; return whether the power stayed on."""
    rig: Rig | None = None
    alive = True
    try:
        rig = Rig(disk, config(4096, sync=True))
        async with rig.running():
            for number in range(8):
                rig.put(message(bytes([number]) * 1000))
                if number % 3 == 0:
                    await rig.answered(number + 1)
            await rig.answered(8)
    except* PowerCut:
        alive = False
    return rig, alive


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_an_error_at_any_call_acknowledges_nothing_that_is_not_durable(number: int) -> None:
    """The store refuses puts or continues; it does not crash."""
    failed_at = 1
    refused = 0
    while True:
        disk = SimDisk(seed=failed_at)
        make_durable_directory(disk, LOG)
        disk.fail("*", number, failed_at)
        rig = Rig(disk, config(4096, sync=True))
        with capture_logs():
            async with rig.running():
                for at in range(8):
                    rig.put(message(bytes([at]) * 1000))
                    if at % 3 == 0:
                        await rig.answered(at + 1)
                results = await rig.answered(8)
        survivor = disk.power_cut(Loss.ALL)
        for result in results:
            if result.status is OK:
                start = result.physical_offset // 4096 * 4096
                at = result.physical_offset - start
                assert decode_messages(survivor.content(f"{LOG}/{start:020d}")[at : at + result.size])
            else:
                refused += 1
                assert result.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
                assert result.remark
        if disk._failures:
            break
        failed_at += 1
    assert failed_at > 25
    assert refused


async def test_what_a_round_has_put_is_synced_and_answered_at_its_end() -> None:
    disk = SimDisk()
    store = MessageStore(settings(sync=True), disk=disk, clock=ManualClock(), sync_place=SyncPlace.INLINE)
    hooks: list[Callable[[], None]] = []
    in_round = True
    async with store.opened():
        await trio.testing.wait_all_tasks_blocked()
        store.commit_rounds(hooks, lambda: in_round)
        (commit,) = hooks
        done: list[PutMessageResult] = []
        for number in range(3):
            assert store.put_message(message(b"%d" % number), done.append) is None
        await trio.testing.wait_all_tasks_blocked()
        assert not done
        assert store.max_offset(TOPIC, 0) == 0
        commit()
        assert [result.status for result in done] == [PutMessageStatus.PUT_OK] * 3
        assert store.max_offset(TOPIC, 0) == 3
        assert store.flushed_offset == store.max_phy_offset
        in_round = False
        assert store.put_message(message(b"outside"), done.append) is None
        await trio.testing.wait_all_tasks_blocked()
        assert len(done) == 4


async def test_a_round_whose_sync_would_take_long_leaves_it_to_the_task() -> None:
    store = MessageStore(settings(sync=True), disk=SimDisk(), clock=ManualClock(), sync_place=SyncPlace.THREAD)
    hooks: list[Callable[[], None]] = []
    async with store.opened():
        await trio.testing.wait_all_tasks_blocked()
        store.commit_rounds(hooks, lambda: True)
        done: list[PutMessageResult] = []
        assert store.put_message(message(b"one"), done.append) is None
        hooks[0]()
        assert not done
        await trio.testing.wait_all_tasks_blocked()
        assert len(done) == 1
