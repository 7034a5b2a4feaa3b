"""Faults of the tier: a full disk, metadata that cannot be written or is missing, damaged segments and side files."""

import errno
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from tests.store.simdisk import Loss, SimDisk
from tests.store.stores import TOPIC, fill, until_dispatched
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local, get, opened, tier, uploaded_store
from trimq.broker.store.disk.durable_files import write_beside
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.tiered.driver import metadata
from trimq.broker.store.tiered.driver.file_segment import Piece
from trimq.broker.store.tiered.driver.metadata import _replace
from trimq.broker.store.tiered.driver.posix import PosixFileSegment
from trimq.broker.store.types import GetMessageStatus
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.tiered_layout import APACHE_UPLOADED, METADATA_FILE, SegmentType, cluster_directory

FOLDER = f"/tier/{cluster_directory('C1')}/broker-a/{TOPIC}/0"
METADATA = f"/store/config/{METADATA_FILE}"


def files(disk: SimDisk, kind: str) -> list[str]:
    """The files of a stream in the order of their base offsets."""
    names = sorted(disk.list(f"{FOLDER}/{kind}"), key=lambda name: name[8:])
    return [f"{FOLDER}/{kind}/{name}" for name in names]


async def test_a_full_tier_stops_uploads_only_and_heals() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 60)
        await until_dispatched(store)
        await store.flush()
        before = await all_offsets(store, 0, 60)
        disk.capacity = disk.used()
        with capture_logs() as logs:
            for _ in range(2):
                await store.uploads.upload_all()
        assert store.uploads.failures == 2
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"].count("tiered_upload_failed") == 1
        assert await store.log_holds.lowest() == 0
        assert await all_offsets(store, 0, 60) == before
        assert store.min_offset(TOPIC, 0) == MessageStore.min_offset(store, TOPIC, 0) == 0
        disk.capacity = 1 << 40
        await store.uploads.upload_all()
        await drop_local(store)
        assert MessageStore.min_offset(store, TOPIC, 0) > 0
        assert await all_offsets(store, 0, 60) == before


@pytest.mark.parametrize("loss", [Loss.ALL, Loss.NOTHING])
@pytest.mark.parametrize("done", ["nothing", "written", "renamed"])
async def test_metadata_that_cannot_be_written_loses_nothing(
    done: str, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimDisk()
    calls = 0

    def replace(disk: SimDisk, file: str, pieces: list[bytes]) -> None:
        nonlocal calls
        calls += 1
        if calls % 3:
            temporary = "" if done == "nothing" else write_beside(disk, file, *pieces)
            if done == "renamed":
                disk.rename(temporary, file)
            raise OSError(errno.EIO, "no metadata")
        _replace(disk, file, pieces)

    async with opened(disk) as store:
        await fill(store, 40)
        await until_dispatched(store)
        await store.flush()
        before = await all_offsets(store, 0, 40)
        with monkeypatch.context() as patch:
            patch.setattr(metadata, "_replace", replace)
            for step in range(12):
                await store.uploads.upload_all()
                await fill(store, 2, first=40 + 2 * step)
                await until_dispatched(store)
                await store.flush()
            await store.uploads.upload_all()
        assert store.uploads.failures > 1
        end = store.max_offset(TOPIC, 0)
        before += await all_offsets(store, 40, end)
        survivor = disk.copy_after_cut(loss)
    async with opened(survivor) as store:
        await store.uploads.upload_all()
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None
        assert (file.min_offset, file.commit_offset) == (0, end)
        await drop_local(store)
        assert await all_offsets(store, 0, end) == before


async def test_a_start_without_the_metadata_is_refused_while_the_tier_has_segments() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await uploaded_store(store)
    kept = {path: disk.content(path) for path in files(disk, "COMMIT_LOG")}
    disk.delete(METADATA)
    with pytest.raises(BaseExceptionGroup) as found:
        async with opened(disk):
            pass
    assert found.group_contains(StoreLoadError, match="tieredStoreMetadata.json is missing")
    assert {path: disk.content(path) for path in files(disk, "COMMIT_LOG")} == kept


async def test_metadata_that_rocketmqs_broker_was_replacing_when_it_was_killed_are_read_from_their_backup() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        before = await uploaded_store(store)
    disk.rename(METADATA, f"{METADATA}.bak")
    with capture_logs() as logs:
        async with opened(disk) as store:
            await fill(store, 4, first=60)
            await until_dispatched(store)
            await store.flush()
            await store.uploads.upload_all()
            await drop_local(store)
            assert await all_offsets(store, 0, 60) == before
            file = store.flat_files.find(TOPIC, 0)
            assert file is not None
            assert (file.min_offset, file.commit_offset) == (0, 64)
    assert "state_file_from_backup" in [log["event"] for log in logs]
    # It would be older than the file.
    survivor = disk.copy_after_cut(Loss.ALL)
    assert survivor.stat(METADATA) is not None
    assert survivor.stat(f"{METADATA}.bak") is None


async def test_damaged_metadata_refuse_the_start() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await uploaded_store(store)
    fd = disk.open(METADATA)
    disk.truncate(fd, disk.size(fd) // 2)
    disk.close(fd)
    with pytest.raises(BaseExceptionGroup) as found:
        async with opened(disk):
            pass
    assert found.group_contains(StoreLoadError, match="is damaged")


async def test_a_segment_that_has_lost_bytes_fails_its_own_reads_only() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        before = await uploaded_store(store)
        local = MessageStore.min_offset(store, TOPIC, 0)
        first = files(disk, "COMMIT_LOG")[0]
        fd = disk.open(first)
        disk.truncate(fd, 500)
        disk.close(fd)
        result = await get(store, 0)
        assert (result.status, result.next_begin_offset) == (GetMessageStatus.OFFSET_FOUND_NULL, 0)
        behind = len([1 for _, physical in before if physical < 4096]) + 1
        assert 1 < behind < local
        assert await all_offsets(store, behind, 60) == before[behind:]


async def test_the_last_segment_may_be_shorter_than_the_metadata_say() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        before = await uploaded_store(store)
        await store.uploads._save()
    last = files(disk, "COMMIT_LOG")[-1]
    fd = disk.open(last)
    disk.truncate(fd, 300)
    disk.close(fd)
    async with opened(disk) as store:
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None
        await store.uploads.upload_all()
        assert file.commit_offset == 60
        found = []
        offset = 0
        while offset < 60:
            messages, offset = await file.read_messages(offset, 100, 1 << 20)
            found += [message.offset for message in messages]
        assert found == sorted(set(found))
        assert await all_offsets(store, 0, found[-1] + 1) is not None
        assert (
            dict(await all_offsets(store, MessageStore.min_offset(store, TOPIC, 0), 60)).items() <= dict(before).items()
        )


async def test_a_side_file_of_other_messages_gives_no_wrong_offset() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        before = await uploaded_store(store)
    side = [path for path in files(disk, "CONSUME_QUEUE") if path.endswith(".phy")]
    for path in side:
        fd = disk.open(path)
        data = disk.pread(fd, disk.size(fd), 0)
        # Each message gets the entry of the one behind it.
        disk.pwrite(fd, data[16:] + data[:16], 0)
        disk.close(fd)
    async with opened(disk) as store:
        local = MessageStore.min_offset(store, TOPIC, 0)
        found = await all_offsets(store, 0, 60)
        assert [offset for offset, _ in found] == list(range(60))
        assert all(physical >= APACHE_UPLOADED for _, physical in found[:local])
        for _, physical in before[:local]:
            assert len(await store.look_message_cold(physical)) == 0


async def test_a_clock_that_goes_back_delays_no_upload_and_expires_nothing() -> None:
    disk = SimDisk()
    async with opened(disk, tier(tiered_store_group_commit_timeout=10_000)) as store:
        await fill(store, 20)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        now = store.clock.wall_ms()
        store.clock.set_wall_ms(now - 86_400_000)  # type: ignore[attr-defined]
        await fill(store, 20, first=20)
        await until_dispatched(store)
        await store.flush()
        waiting = store.uploads.waiting.pending[TOPIC, 0]
        store.clock.advance(11.0)  # type: ignore[attr-defined]
        assert store.uploads._is_due(waiting, store.clock.wall_ms())
        await store.uploads.upload_all()
        assert await store.expire_tier() == 0
        before = await all_offsets(store, 0, 40)
        await drop_local(store)
        assert await all_offsets(store, 0, 40) == before
        times = [await store.message_store_time(TOPIC, 0, offset) for offset in range(40)]
        assert times == sorted(times)
        assert await store.offset_by_time(TOPIC, 0, times[0]) == 0


async def test_a_queue_without_local_files_and_messages_goes_on_behind_the_tier() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        before = await uploaded_store(store)
        await fill(store, 60, topic="Other")
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        await drop_local(store)
        assert MessageStore.min_offset(store, TOPIC, 0) == 60
    folder = f"/store/consumequeue/{TOPIC}/0"
    for name in disk.list(folder):
        disk.delete(f"{folder}/{name}")
    async with opened(disk) as store:
        assert store.max_offset(TOPIC, 0) == 60
        await fill(store, 3, first=60)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        found = await all_offsets(store, 0, 63)
        assert found[:60] == before
        assert [offset for offset, _ in found[60:]] == [60, 61, 62]
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None
        assert file.commit_offset == 63


async def test_records_whose_units_could_not_be_written_are_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    write = PosixFileSegment.write

    async def failing(segment: PosixFileSegment, pieces: Sequence[Piece], position: int) -> None:
        if segment.type is SegmentType.CONSUME_QUEUE:
            raise OSError(errno.EIO, "no units")
        await write(segment, pieces, position)

    async with opened(SimDisk()) as store:
        await fill(store, 10)
        await until_dispatched(store)
        await store.flush()
        with monkeypatch.context() as patch:
            patch.setattr(PosixFileSegment, "write", failing)
            await store.uploads.upload_all()
        assert store.uploads.failures == 1
        await store.uploads.upload_all()
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None
        found = await file.read_messages(0, 10, 1 << 20)
        assert len(found.messages) == 10
        assert file.commit_log.commit_offset == sum(len(message.record) for message in found.messages)


@pytest.mark.parametrize("unit", [(0, 0, 0), (1 << 40, 231, 0), (0, 231, 0)])
async def test_units_that_lead_to_no_record_of_theirs_are_cut(unit: tuple[int, int, int]) -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 5)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
    (units,) = [path for path in files(disk, "CONSUME_QUEUE") if not path.endswith(".phy")]
    fd = disk.open(units)
    disk.pwrite(fd, UNIT.pack(*unit) + b"torn", 5 * UNIT_SIZE)
    disk.close(fd)
    async with opened(disk) as store:
        file = store.flat_files.find(TOPIC, 0)
        assert file is not None
        assert (file.min_offset, file.commit_offset) == (0, 5)
        await fill(store, 3, first=5)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        found = await file.read_messages(0, 10, 1 << 20)
        assert [message.offset for message in found.messages] == list(range(8))
