"""The epochs of a store's log, and their file."""

import errno

import pytest

from tests.store.replication.pairs import SLAVE, SYNC_MASTER, epochs_of, led, store_of
from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.stores import fill
from trimq.broker.store.message_store import StoreLoadError
from trimq.broker.store.replication.epochs import EpochFileCache
from trimq.protocol.epoch_file import MOST_EPOCHS, Epoch, encode

PATH = "/store/epochFileCheckpoint"


def disk_with(data: bytes | None = None, path: str = PATH) -> SimDisk:
    disk = SimDisk()
    disk.make_directory("/store")
    if data is not None:
        fd = disk.create(path, 0)
        disk.pwrite(fd, data, 0)
        disk.data_sync(fd)
        disk.close(fd)
    return disk.copy()


def loaded(disk: SimDisk) -> EpochFileCache:
    epochs = EpochFileCache(disk, PATH)
    epochs.load()
    return epochs


async def test_entries_are_durable_when_they_are_appended() -> None:
    disk = disk_with()
    epochs = loaded(disk)
    assert (epochs.entries, epochs.last_epoch) == ([], -1)
    await epochs.append(1, 0)
    await epochs.append(3, 500)
    assert loaded(disk.copy_after_cut(Loss.ALL)).entries == [Epoch(1, 0), Epoch(3, 500)]
    assert disk.content(PATH) == encode([Epoch(1, 0), Epoch(3, 500)])
    assert epochs.last_epoch == 3
    assert epochs.entry_of(499) == (Epoch(1, 0), 500)


async def test_a_power_cut_leaves_the_old_or_the_new_list() -> None:
    states = set()
    for loss in Loss:
        cut, finished = 0, False
        while not finished:
            cut += 1
            disk = disk_with(encode([Epoch(1, 0)]))
            epochs = loaded(disk)
            disk.cut_at, disk.loss = disk.calls + cut, loss
            try:
                await epochs.append(2, 100)
                finished = True
            except PowerCut:
                states.add(len(loaded(disk.power_cut()).entries))
    assert states == {1, 2}


async def test_an_epoch_without_records_is_replaced() -> None:
    epochs = loaded(disk_with())
    await epochs.append(1, 0)
    await epochs.append(2, 100)
    await epochs.append(4, 100)
    assert epochs.entries == [Epoch(1, 0), Epoch(4, 100)]


@pytest.mark.parametrize("entry", [(2, 200), (1, 200), (3, 99)])
async def test_an_epoch_that_cannot_follow(entry: tuple[int, int]) -> None:
    epochs = loaded(disk_with())
    await epochs.append(2, 100)
    with pytest.raises(ValueError, match=f"epoch {entry[0]} from {entry[1]} on cannot follow"):
        await epochs.append(*entry)
    assert epochs.entries == [Epoch(2, 100)]


async def test_no_list_is_longer_than_rocketmqs_slaves_take() -> None:
    epochs = loaded(disk_with(encode([Epoch(n, n) for n in range(MOST_EPOCHS)])))
    await epochs.append(MOST_EPOCHS, MOST_EPOCHS)
    assert epochs.entries == [Epoch(n, n) for n in range(1, MOST_EPOCHS + 1)]


async def test_what_a_shorter_log_does_not_have_is_forgotten() -> None:
    entries = [Epoch(1, 0), Epoch(2, 100), Epoch(3, 200)]
    disk = disk_with(encode(entries))
    epochs = loaded(disk)
    await epochs.truncate_suffix(200, empty=False)
    assert epochs.entries == entries
    await epochs.truncate_suffix(200)
    assert loaded(disk).entries == entries[:2]
    await epochs.truncate_suffix(99)
    assert loaded(disk.copy_after_cut(Loss.ALL)).entries == entries[:1]
    await epochs.truncate_suffix(0)
    assert loaded(disk.copy_after_cut(Loss.ALL)).entries == []
    assert disk.stat(PATH) is None


async def test_what_has_expired_is_forgotten() -> None:
    disk = disk_with(encode([Epoch(1, 0), Epoch(2, 100), Epoch(3, 200)]))
    epochs = loaded(disk)
    await epochs.truncate_prefix(100)
    assert loaded(disk).entries == [Epoch(2, 100), Epoch(3, 200)]
    await epochs.truncate_prefix(1000)
    assert loaded(disk).entries == [Epoch(3, 200)]


async def test_a_list_that_cannot_be_written_is_as_before() -> None:
    disk = disk_with(encode([Epoch(1, 0)]))
    epochs = loaded(disk)
    disk.fail("rename", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        await epochs.append(2, 100)
    assert epochs.entries == [Epoch(1, 0)]
    await epochs.append(2, 100)
    assert loaded(disk).entries == [Epoch(1, 0), Epoch(2, 100)]


async def test_rocketmqs_old_copy_does_not_come_back() -> None:
    disk = disk_with(encode([Epoch(1, 0)]), PATH + ".bak")
    with pytest.raises(StoreLoadError, match=r"epochFileCheckpoint is missing, but there is .*\.bak: restore it"):
        loaded(disk)
    epochs = EpochFileCache(disk, PATH)
    await epochs.append(2, 0)
    assert disk.stat(PATH + ".bak") is None


# -- in a store


async def test_a_damaged_file_is_refused_before_anything_changes() -> None:
    disk = SimDisk()
    async with store_of(disk, SYNC_MASTER, leadership=led(1)) as store:
        await fill(store, 3)
    fd = disk.open(PATH)
    disk.pwrite(fd, b"9", 0)
    disk.close(fd)
    before = disk.copy()
    with pytest.raises(StoreLoadError, match="epochFileCheckpoint is damaged, the file has 1 entries, not 9: restore"):
        async with store_of(disk, SYNC_MASTER, leadership=led(1, 2)):
            pass
    assert disk.content("/store/checkpoint") == before.content("/store/checkpoint")
    assert disk.stat("/store/abort") is None


async def test_a_master_notes_its_epoch_before_it_serves() -> None:
    disk = SimDisk()
    async with store_of(disk, SYNC_MASTER, leadership=led(1)) as store:
        assert loaded(disk.copy_after_cut(Loss.ALL)).entries == [Epoch(1, 0)]
        await fill(store, 3)
        end = store.appended_offset
    async with store_of(disk, SYNC_MASTER, leadership=led(1, 1)) as store:
        assert epochs_of(store) == [Epoch(1, 0)]
    async with store_of(disk, SYNC_MASTER, leadership=led(1, 4)) as store:
        assert loaded(disk.copy_after_cut(Loss.ALL)).entries == [Epoch(1, 0), Epoch(4, end)]
        assert epochs_of(store) == [Epoch(1, 0), Epoch(4, end)]


async def test_a_log_of_the_time_before_controllers_is_the_first_masters() -> None:
    disk = SimDisk()
    async with store_of(disk, SLAVE) as store:
        pass
    async with store_of(disk, SYNC_MASTER, leadership=led(1)) as store:
        await fill(store, 3)
    fd = disk.open(PATH)
    disk.close(fd)
    disk.delete(PATH)
    async with store_of(disk, SYNC_MASTER, leadership=led(1, 2)) as store:
        assert store.appended_offset > 0
        assert epochs_of(store) == [Epoch(2, 0)]


async def test_controllers_that_have_lost_their_data_are_not_believed() -> None:
    disk = SimDisk()
    async with store_of(disk, SYNC_MASTER, leadership=led(1, 5)):
        pass
    with pytest.raises(
        StoreLoadError, match="knows epoch 5, the controllers have given 1: they have lost what they knew"
    ):
        async with store_of(disk, SYNC_MASTER, leadership=led(1, 1)):
            pass


async def test_entries_behind_the_end_of_the_log_are_forgotten_at_a_start() -> None:
    """A slave notes an epoch before it appends; after a power cut its log may be shorter."""
    disk = SimDisk()
    async with store_of(disk, SYNC_MASTER, leadership=led(1)) as store:
        await fill(store, 3)
        end = store.appended_offset
        assert store.replication.epochs is not None
        await store.replication.epochs.append(2, end)
    async with store_of(disk, SLAVE, leadership=led(1, 3)) as store:
        assert epochs_of(store) == [Epoch(1, 0), Epoch(2, end)]
        assert store.replication.epochs is not None
        await store.replication.epochs.append(3, end + 1)
    async with store_of(disk, SLAVE, leadership=led(1, 3)) as store:
        assert epochs_of(store) == [Epoch(1, 0), Epoch(2, end)]


async def test_epochs_of_expired_files_are_forgotten(autojump_clock: object) -> None:
    disk = SimDisk()
    async with store_of(disk, SYNC_MASTER, leadership=led(1)) as store:
        await fill(store, 30)
        middle = store.appended_offset
    async with store_of(disk, SYNC_MASTER, leadership=led(1, 2)) as store:
        await fill(store, 100, first=30)
        while store.files.files[1].start < middle:
            store.files.remove_first().destroy()
        await store._clean.look()
        assert epochs_of(store) == [Epoch(1, 0), Epoch(2, middle)]
        store.files.remove_first().destroy()
        await store._clean.look()
        assert epochs_of(store) == [Epoch(2, middle)]
