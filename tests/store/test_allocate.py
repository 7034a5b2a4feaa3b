import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import pytest
import trio
import trio.lowlevel
import trio.testing
from structlog.testing import capture_logs

from tests.store.builders import LOG, Rig, config, message, records
from tests.store.simdisk import SimDisk
from trimq.broker.store.disk.disk import FileSystem
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.log.page_recycling import PageRecycling
from trimq.broker.store.log.transient_store_pool import PooledMappedFile
from trimq.broker.store.running_flags import Flag
from trimq.broker.store.types import PutMessageStatus

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def test_space_is_reserved_in_steps_ahead_of_the_writer() -> None:
    async with Rig(settings=config(1 << 20, step=8192)).running() as rig:
        assert rig.sim.used() <= 2 * 8192
        for _ in range(100):
            rig.put(message(b"x" * 900))
            await trio.testing.wait_all_tasks_blocked()
            file = rig.files.files[0]
            assert 4096 <= file.reserved - file.wrote <= 3 * 8192
        assert all(result.ok for result in rig.answers.results)
        rig.sim.check_mapped_stores()


async def test_steps_grow_while_the_log_grows_quickly_and_shrink_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    mib = 1 << 20
    rig = Rig(settings=config(96 * mib, step=16 * mib, max_message_size=mib))
    async with rig.running():
        file = rig.files.last or rig.path.allocator.next_file
        assert file is not None
        reserved = [file.reserved // mib]
        for number in range(60):
            if number in {20, 30}:
                await trio.sleep(2)
            rig.put(message(bytes(mib)))
            await rig.answered(number + 1)
            await trio.testing.wait_all_tasks_blocked()
            if rig.files.files[0].reserved // mib != reserved[-1]:
                reserved.append(rig.files.files[0].reserved // mib)
        steps = [after - before for before, after in itertools.pairwise(reserved)]
        assert steps[:8] == [4, 8, 16, 16, 8, 4, 8, 16], steps


async def test_the_next_file_is_there_before_the_current_one_is_full() -> None:
    async with Rig(settings=config(65536, step=4096)).running() as rig:
        assert rig.put(message(b"x" * 2000)) is not None
        await trio.testing.wait_all_tasks_blocked()
        while rig.files.files[0].wrote < 65536 * 9 // 10:
            rig.put(message(b"x" * 2000))
            await trio.testing.wait_all_tasks_blocked()
        assert rig.path.allocator.next_file is not None
        assert f"{LOG}/{65536:020d}" in rig.sim._names


async def test_an_unused_next_file_is_removed_at_the_end() -> None:
    rig = Rig(settings=config(16384))
    async with rig.running():
        rig.put(message(b"x" * 10_000))
        await rig.answered(1)
        await trio.testing.wait_all_tasks_blocked()
        assert len(rig.sim.list(LOG)) == 2
    assert rig.sim.list(LOG) == [f"{0:020d}"]
    assert rig.sim.open_files() == 1
    rig.files.close()
    assert rig.sim.open_files() == 0


async def test_a_full_disk_is_refused_with_figures_and_heals(autojump_clock: trio.testing.MockClock) -> None:
    disk = SimDisk(capacity=20 * 4096)
    async with Rig(disk, config(16384, step=4096)).running() as rig:
        with capture_logs() as logs:
            for _ in range(200):
                rig.put(message(b"x" * 1000))
                await trio.sleep(0.01)
                if rig.flags.has(Flag.NO_SPACE):
                    break
        refused = rig.put(message(b"x"))
        assert refused is not None
        assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert "the disk is full: / (sim) has" in refused.remark
        assert f"of {20 * 4096} bytes free, 12288 are needed" in refused.remark
        assert rig.flags.bits == Flag.DISK_FULL
        assert [entry["event"] for entry in logs] == ["no_space_for_commit_log"]
        # reads still succeed
        assert rig.log.read(0, 4) is not None
        stored = len(records(rig.files))
        assert stored == sum(result.ok for result in rig.answers.results)
        # a little space is not enough: hysteresis
        disk.capacity += 2 * 4096
        await trio.sleep(3)
        assert rig.flags.has(Flag.NO_SPACE)
        disk.capacity += 10 * 4096
        await trio.sleep(3)
        assert rig.flags.bits == 0
        again = rig.put(message(b"back"))
        assert again is not None
        assert again.ok


class GatedDisk(SimDisk):
    """A step of a file waits until the gate opens, with its buffer in use as by mlock(2), and may end in an error.

    If ``gated`` is "_new", the creation of a new file waits instead.
    """

    def __init__(self, gated: str = "_ready") -> None:
        super().__init__()
        self.gated = gated
        self.gate: trio.Event | None = None
        self.error = 0

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        file = args[0] if args else None
        if self.gate is not None and fn.__name__ == self.gated:
            with memoryview(file.buffer if isinstance(file, MappedFile) else b""):
                await self.gate.wait()
            if self.error:
                raise OSError(self.error, "in a step")
        return await super().run(fn, *args)


async def closed_while_a_step_is_made(rig: Rig, disk: GatedDisk) -> trio.Event:
    """Let the log roll over to its second file during the first one's last step; return the event ending that step."""
    while rig.files.last is None or rig.files.last.wrote < 38000:
        rig.put(message(bytes(1800)))
        await trio.testing.wait_all_tasks_blocked()
    file = rig.files.last
    assert rig.path.allocator.next_file is not None
    disk.gate = gate = trio.Event()
    while file.wrote < 46500:
        rig.put(message(bytes(900)))
        await trio.testing.wait_all_tasks_blocked()
    assert file.reserved < file.size
    rig.put(message(bytes(6700)))
    assert file.is_full
    assert len(rig.files.files) == 2
    return gate


async def test_space_is_back_although_the_log_went_on_in_another_file(autojump_clock: trio.testing.MockClock) -> None:
    disk = GatedDisk()
    async with Rig(disk, config(53248, step=16384)).running() as rig:
        gate = await closed_while_a_step_is_made(rig, disk)
        disk.error, disk.capacity = errno.ENOSPC, disk.used()
        gate.set()
        await trio.sleep(3)
        assert rig.flags.has(Flag.NO_SPACE)
        disk.gate, disk.capacity = None, 1 << 40
        await trio.sleep(3)
        assert rig.flags.bits == 0
        again = rig.put(message(b"back"))
        assert again is not None
        assert again.ok


async def test_a_buffer_is_given_back_after_the_step_that_uses_it(autojump_clock: trio.testing.MockClock) -> None:
    disk = GatedDisk()
    settings = config(53248, step=16384, transient_store_pool_enable=True, transient_store_pool_size=3)
    async with Rig(disk, settings).running() as rig:
        gate = await closed_while_a_step_is_made(rig, disk)
        await trio.sleep(1)
        first = rig.files.files[0]
        assert isinstance(first, PooledMappedFile)
        assert first.committed == first.size
        in_use = first.buffer
        gate.set()
        await trio.sleep(1)
        assert first.buffer is not in_use
        assert rig.flags.bits == 0


async def test_a_file_that_is_full_gets_no_more_space_while_its_successor_is_made(
    autojump_clock: trio.testing.MockClock,
) -> None:
    disk = GatedDisk("_new")
    async with Rig(disk, config(53248, step=32768)).running() as rig:
        disk.gate = trio.Event()
        while rig.files.last is None or rig.files.last.wrote < 22000:
            rig.put(message(bytes(900)))
            await trio.testing.wait_all_tasks_blocked()
        file, count = rig.files.last, len(rig.answers.results)
        assert rig.put(message(bytes(31200))) is None
        assert file.is_full
        await trio.sleep(3)  # a put waits longer for a file than for the next step of one
        assert len(rig.answers.results) == count
        disk.gate.set()
        assert (await rig.answered(count + 1))[-1].ok
        assert len(rig.files.files) == 2
        assert file.reserved == 32768


async def test_those_that_wait_when_the_disk_fills_up_are_refused(autojump_clock: trio.testing.MockClock) -> None:
    disk = SimDisk(capacity=3 * 4096)
    async with Rig(disk, config(65536, step=4096)).running() as rig:
        rig.put(message(b"x" * 60000))
        (result,) = await rig.answered(1)
        assert result.status is PutMessageStatus.SERVICE_NOT_AVAILABLE


@pytest.mark.parametrize("method", ["create", "reserve", "data_sync", "sync_directory", "map"])
async def test_a_failed_new_file_leaves_nothing_behind(method: str) -> None:
    disk = SimDisk()
    disk.make_directory(LOG)
    disk.fail(method, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        MappedFile.create(disk, f"{LOG}/{0:020d}", 0, 8192, 4096)
    assert disk.list(LOG) == []
    assert disk.open_files() == 0


async def test_an_error_that_no_space_explains_makes_the_store_read_only(
    autojump_clock: trio.testing.MockClock,
) -> None:
    disk = SimDisk()
    disk.make_directory(LOG)
    disk.fail("reserve", errno.EIO)
    async with Rig(disk).running() as rig:
        refused = rig.put(message())
        assert refused is not None
        assert refused.status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert "Input/output error" in refused.remark
        assert rig.flags.is_broken
        rig.flags.clear(Flag.NOT_WRITEABLE)
        await trio.sleep(10)
        assert not rig.flags.writable


async def test_where_reservations_promise_nothing_a_margin_is_kept(autojump_clock: trio.testing.MockClock) -> None:
    class Btrfs(SimDisk):
        def file_system(self, path: str) -> FileSystem:
            return FileSystem("/mnt", "btrfs", "/dev/sdb")

    disk = Btrfs(capacity=10 * 4096)
    with capture_logs() as logs:
        async with Rig(disk, config(1 << 20, step=4096)).running() as rig:
            for _ in range(60):
                rig.put(message(b"x" * 1000))
                await trio.sleep(0.01)
            assert rig.flags.has(Flag.NO_SPACE)
            assert disk.capacity - disk.used() >= 2 * 4096
    assert logs[0]["event"] == "reserved_space_not_guaranteed"


async def test_on_the_real_disk(tmp_path: Path) -> None:
    rig = Rig(RealDisk(), config(1 << 16, step=4096), directory=str(tmp_path / "commitlog"))
    async with rig.running():
        for number in range(300):
            rig.put(message(bytes([number % 256]) * 1000))
            await rig.answered(number + 1)
        assert all(result.ok for result in rig.answers.results)
        assert len(records(rig.files)) == 300
        blocks = (tmp_path / "commitlog" / f"{0:020d}").stat().st_blocks * 512
        assert blocks >= 1 << 16
    names = sorted(path.name for path in (tmp_path / "commitlog").iterdir())
    assert names == [f"{number << 16:020d}" for number in range(6)]
    rig.files.close()


async def test_space_that_is_made_while_nothing_comes_is_not_taken_for_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    paces: list[float] = []

    def made(_self: PageRecycling, _file: MappedFile, _begin: int, _end: int, *, cost: float, pace: float) -> None:
        assert cost >= 0
        paces.append(pace)

    monkeypatch.setattr(PageRecycling, "made", made)
    async with Rig(settings=config(1 << 20, step=65536, warm_maped_file_enable=True)).running() as rig:
        rig.put(message(b"x" * 900))
        await trio.testing.wait_all_tasks_blocked()
        quiet = len(paces)
        assert paces[3:] == [0.0] * (quiet - 3)
        assert quiet > 10
