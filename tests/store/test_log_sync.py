"""Where a sync of the log runs, and what is held and reported while it runs."""

import errno
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar, TypeVarTuple

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.builders import message
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, settings
from trimq.broker.store.disk.disk import MappedPart
from trimq.broker.store.durability.log_sync import SyncPace, SyncPlace
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.remoting.runtime.clock import ManualClock

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


def test_inline_only_while_syncs_are_short() -> None:
    pace = SyncPace(SyncPlace.AUTO)
    assert pace.inline(1000)
    for _ in range(20):
        pace.took(0.0003)
    assert pace.inline(1000)
    pace.took(0.02)
    assert not pace.inline(1000)
    assert not pace.worth_waiting(1000), "one of the last eight syncs was very long"
    for _ in range(20):
        pace.took(0.0003)
    assert not pace.inline(1000)
    assert pace.worth_waiting(1000)
    slow = SyncPace(SyncPlace.AUTO)
    for _ in range(20):
        slow.took(0.003)
    assert not slow.inline(1000)
    assert not slow.worth_waiting(1000)
    assert SyncPace(SyncPlace.INLINE).inline(1000)
    assert not SyncPace(SyncPlace.THREAD).inline(1000)
    assert not any(SyncPace(place).worth_waiting(1000) for place in (SyncPlace.INLINE, SyncPlace.THREAD))
    assert SyncPace(SyncPlace.AUTO).inline(1 << 20)
    assert not SyncPace(SyncPlace.AUTO).inline((1 << 20) + 1)
    assert not SyncPace(SyncPlace.AUTO).worth_waiting((1 << 20) + 1)


def test_each_long_sync_soon_after_another_doubles_the_time_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("trimq.broker.store.durability.log_sync.time.perf_counter", lambda: now)
    pace = SyncPace(SyncPlace.AUTO)

    def inline_after(seconds: float) -> bool:
        nonlocal now
        now += seconds
        for _ in range(40):  # short syncs, so that only the long one counts
            pace.took(0.0001)
        return pace.inline(1000)

    first = SyncPace.penalty
    pace.took(0.005)
    assert not inline_after(first - 0.01)
    assert inline_after(0.02)
    pace.took(0.005)
    assert not inline_after(2 * first - 0.01)
    assert inline_after(0.02)
    inline_after(SyncPace.memory + 0.1)
    pace.took(0.005)
    assert inline_after(first + 0.01)
    for _ in range(6):
        pace.took(0.005)
        assert not inline_after(first)
    assert inline_after(SyncPace.longest)


class Watched(SimDisk):
    """Records which syncs block the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.in_thread = False
        self.syncs: list[bool] = []

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        def in_thread(*arguments: *_Ts) -> _T:
            self.in_thread = True
            try:
                return fn(*arguments)
            finally:
                self.in_thread = False

        return await super().run(in_thread, *args)

    def data_sync(self, fd: int, part: MappedPart | None = None) -> None:
        self.syncs.append(self.in_thread)
        super().data_sync(fd, part)


@pytest.mark.parametrize(("sync", "inline"), [(False, False), (True, True)])
async def test_the_loop_waits_for_a_sync_only_where_a_client_waits_for_its_reply(sync: bool, inline: bool) -> None:
    disk = Watched()
    store = MessageStore(settings(sync=sync), disk=disk, clock=ManualClock(), sync_place=SyncPlace.AUTO)
    async with store.opened():
        await trio.testing.wait_all_tasks_blocked()
        disk.syncs.clear()
        done: list[PutMessageResult] = []
        store.put_message(message(b"one"), done.append)
        assert await store.write_path.sync.flush()
        assert disk.syncs
        assert (False in disk.syncs) is inline


class ThreadDisk(SimDisk):
    """Syncs in a thread wait for ``gate``, and are recorded with the offset in the file where they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = threading.get_ident()
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.in_thread: list[int] = []
        self.fault: OSError | None = None

    def data_sync(self, fd: int, part: MappedPart | None = None) -> None:
        if threading.get_ident() != self.loop:
            assert part is not None
            self.in_thread.append(part.end)
            self.begun.set()
            assert self.gate.wait(10)
            if self.fault is not None:
                raise self.fault
        super().data_sync(fd, part)


class Round(NamedTuple):
    """A store whose rounds are ended by the test; records replies in the order in which they came."""

    store: MessageStore
    disk: ThreadDisk
    end: Callable[[], None]
    done: list[PutMessageResult]

    def put(self, body: bytes) -> None:
        assert self.store.put_message(message(body), self.done.append) is None

    async def answered(self, count: int) -> None:
        with trio.fail_after(10):
            while len(self.done) < count:
                await trio.testing.wait_all_tasks_blocked(0.001)


@asynccontextmanager
async def rounds_after_a_long_sync(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Round]:
    """The loop waits for syncs in a thread without a limit, until a test makes it ``impatient``."""
    disk = ThreadDisk()
    store = MessageStore(settings(sync=True), disk=disk, clock=ManualClock(), sync_place=SyncPlace.AUTO)
    hooks: list[Callable[[], None]] = []
    in_round = False
    async with store.opened():
        store.commit_rounds(hooks, lambda: in_round)
        first: list[PutMessageResult] = []
        store.put_message(message(b"makes the file"), first.append)
        while not first:
            await trio.testing.wait_all_tasks_blocked()
        in_round = True
        monkeypatch.setattr(SyncPace, "inline", lambda _self, _size: False)
        monkeypatch.setattr(SyncPace, "short", 10.0)
        try:
            yield Round(store, disk, hooks[0], [])
        finally:
            disk.gate.set()


def impatient(monkeypatch: pytest.MonkeyPatch, disk: ThreadDisk) -> None:
    """Make the next syncs take longer than the loop waits."""
    disk.gate.clear()
    disk.begun.clear()
    monkeypatch.setattr(SyncPace, "short", 0.001)


def leave_under_way(monkeypatch: pytest.MonkeyPatch, rig: Round, body: bytes) -> None:
    """Put in a round whose sync is not done at its end, nor before the gate opens."""
    impatient(monkeypatch, rig.disk)
    rig.put(body)
    rig.end()
    assert rig.disk.begun.wait(10)


async def test_after_a_long_sync_a_round_is_synced_in_a_thread_and_answered_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rounds_after_a_long_sync(monkeypatch) as rig:
        sync = rig.store.write_path.sync
        before = sum(sync.durations.counts)
        for number in range(3):
            rig.put(b"%d" % number)
        rig.end()
        assert [result.status for result in rig.done] == [PutMessageStatus.PUT_OK] * 3
        assert rig.disk.in_thread == [rig.store.max_phy_offset]
        assert rig.store.flushed_offset == rig.store.max_phy_offset
        assert rig.store.max_offset(TOPIC, 0) == 4
        assert sum(sync.durations.counts) == before + 1
        rig.end()
        assert len(rig.disk.in_thread) == 1, "a round without puts causes no sync"


async def test_the_loop_goes_on_while_a_sync_takes_long_and_answers_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rounds_after_a_long_sync(monkeypatch) as rig:
        impatient(monkeypatch, rig.disk)
        start = rig.store.flushed_offset
        rig.put(b"one")
        one = rig.store.max_phy_offset
        rig.end()
        assert rig.disk.begun.wait(10)
        rig.put(b"two")
        rig.end()
        await trio.testing.wait_all_tasks_blocked()
        assert (rig.done, rig.store.flushed_offset) == ([], start)
        assert rig.disk.in_thread == [one], "one sync at a time"
        rig.disk.gate.set()
        await rig.answered(2)
        assert [result.physical_offset for result in rig.done] == sorted([start, one])
        assert rig.store.flushed_offset == rig.store.max_phy_offset
        monkeypatch.setattr(SyncPace, "short", 10.0)
        rig.put(b"three")
        rig.end()
        assert len(rig.done) == 3


async def test_what_a_long_sync_has_made_durable_does_not_wait_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = trio.Event()

    async def run(self: SimDisk, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        if fn.__name__ == "_timed_sync":
            await held.wait()
        return fn(*args)

    async with rounds_after_a_long_sync(monkeypatch) as rig:
        impatient(monkeypatch, rig.disk)
        monkeypatch.setattr(SimDisk, "run", run)
        rig.put(b"one")
        rig.end()
        assert rig.disk.begun.wait(10)
        rig.put(b"two")
        rig.end()
        rig.disk.gate.set()
        await rig.answered(1)
        await trio.testing.wait_all_tasks_blocked()
        assert len(rig.done) == 1
        held.set()
        await rig.answered(2)


async def test_a_caller_that_wants_all_durable_waits_for_the_sync_under_way_and_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rounds_after_a_long_sync(monkeypatch) as rig:
        leave_under_way(monkeypatch, rig, b"one")
        rig.put(b"two")
        rig.disk.gate.set()
        assert await rig.store.write_path.sync.flush()
        assert rig.store.flushed_offset == rig.store.max_phy_offset
        await rig.answered(2)
        rig.put(b"three")
        assert await rig.store.write_path.sync.flush()
        syncs = len(rig.disk.in_thread)
        assert len(rig.done) == 2
        rig.end()
        assert len(rig.done) == 3, "it is durable already"
        assert len(rig.disk.in_thread) == syncs


async def test_a_round_that_ends_during_another_flush_leaves_its_sync_to_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = trio.Event()
    syncs = 0

    async def run(self: SimDisk, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        nonlocal syncs
        if fn.__name__ == "_timed_sync":
            syncs += 1
            await held.wait()
        return fn(*args)

    async with rounds_after_a_long_sync(monkeypatch) as rig, trio.open_nursery() as nursery:
        monkeypatch.setattr(SimDisk, "run", run)
        rig.put(b"one")
        nursery.start_soon(rig.store.write_path.sync.flush)
        await trio.testing.wait_all_tasks_blocked()
        rig.put(b"two")
        rig.end()
        await trio.testing.wait_all_tasks_blocked()
        assert (syncs, rig.disk.in_thread, rig.done) == (1, [], [])
        held.set()
        await rig.answered(2)
        assert rig.store.flushed_offset == rig.store.max_phy_offset


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("long", [False, True])
async def test_a_sync_that_fails_in_the_thread_acknowledges_nothing(
    monkeypatch: pytest.MonkeyPatch, number: int, long: bool
) -> None:
    with capture_logs() as logs:
        async with rounds_after_a_long_sync(monkeypatch) as rig:
            if long:
                impatient(monkeypatch, rig.disk)
            rig.disk.fault = OSError(number, "the device says no")
            start = rig.store.flushed_offset
            rig.put(b"lost")
            rig.end()
            rig.disk.gate.set()
            await rig.answered(1)
            assert rig.done[0].status is PutMessageStatus.SERVICE_NOT_AVAILABLE
            assert "the device says no" in rig.done[0].remark
            assert not rig.store.is_writable
            assert rig.store.flushed_offset == start
            syncs = len(rig.disk.in_thread)
            rig.end()
            assert not await rig.store.write_path.sync.flush()
            assert len(rig.disk.in_thread) == syncs == 1, "a second sync would report success"
    assert [entry["event"] for entry in logs].count("commit_log_sync_failed") == 1


async def test_a_file_that_is_removed_during_its_sync_stays_mapped_until_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rounds_after_a_long_sync(monkeypatch) as rig:
        leave_under_way(monkeypatch, rig, b"one")
        file = rig.store.files.last
        assert file is not None
        file.destroy()
        assert file._mapping is not None
        rig.disk.gate.set()
        await rig.answered(1)
        assert file._mapping is None


async def test_the_thread_ends_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("log-sync") for thread in threading.enumerate())

    async with rounds_after_a_long_sync(monkeypatch) as rig:
        assert not threads(), "the thread is not started before it is needed"
        rig.put(b"one")
        rig.end()
        assert threads() == 1
        impatient(monkeypatch, rig.disk)
        rig.put(b"two")
        rig.end()
        rig.disk.gate.set()  # the store is closed while this sync is under way
    assert [result.status for result in rig.done] == [PutMessageStatus.PUT_OK] * 2
    assert not threads()
