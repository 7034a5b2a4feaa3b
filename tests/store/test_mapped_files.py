import errno

import pytest

from tests.store.simdisk import Loss, SimDisk
from trimq.broker.store.disk.durable_files import make_durable_directory
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue, StoreLoadError

LOG = "/store/commitlog"


def _disk(*sizes: int) -> SimDisk:
    disk = SimDisk()
    make_durable_directory(disk, LOG)
    for number, size in enumerate(sizes):
        disk.close(disk.create(f"{LOG}/{number * 4096:020d}", size))
    return disk


def test_a_row_is_loaded_with_all_positions_at_the_end() -> None:
    disk = _disk(4096, 4096)
    disk.make_directory(f"{LOG}/directory")
    disk.close(disk.create(f"{LOG}/notes.txt", 3))
    files = MappedFileQueue(disk, LOG, 4096)
    files.load()
    assert [(file.start, file.wrote, file.flushed) for file in files.files] == [(0, 4096, 4096), (4096, 4096, 4096)]
    assert (files.min_offset, files.max_offset, files.flushed_offset) == (0, 8192, 8192)
    files.close()
    assert disk.open_files() == 0


def test_no_directory_is_an_empty_row() -> None:
    files = MappedFileQueue(SimDisk(), "/none", 4096)
    files.load()
    assert (files.last, files.min_offset, files.max_offset, files.flushed_offset) == (None, 0, 0, 0)
    assert files.find(0) is None


def test_an_empty_last_file_is_deleted_for_good() -> None:
    disk = _disk(4096, 0)
    files = MappedFileQueue(disk, LOG, 4096)
    files.load()
    assert len(files.files) == 1
    assert disk.power_cut(Loss.ALL).list(LOG) in ([], [f"{0:020d}"])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4096, 5000), rf"{LOG}/0+4096 has 5000 bytes, the configured file size is 4096"),
        ((0, 4096), rf"{LOG}/0+ has 0 bytes, the configured file size is 4096"),
    ],
)
def test_a_file_of_another_size_is_refused_by_name(sizes: tuple[int, ...], words: str) -> None:
    disk = _disk(*sizes)
    with pytest.raises(StoreLoadError, match=words):
        MappedFileQueue(disk, LOG, 4096).load()
    assert disk.open_files() == 0


def test_a_gap_between_files_is_refused() -> None:
    disk = _disk(4096, 4096, 4096)
    disk.delete(f"{LOG}/{4096:020d}")
    with pytest.raises(StoreLoadError, match=r"the file 0+4096 before .*8192 is missing"):
        MappedFileQueue(disk, LOG, 4096).load()


def test_a_name_between_two_files_is_refused() -> None:
    disk = _disk(4096)
    disk.close(disk.create(f"{LOG}/{5000:020d}", 4096))
    with pytest.raises(StoreLoadError, match="does not start at a multiple"):
        MappedFileQueue(disk, LOG, 4096).load()


def test_files_are_found_by_any_offset_in_them() -> None:
    disk = _disk(4096, 4096, 4096)
    files = MappedFileQueue(disk, LOG, 4096)
    files.load()
    first = files.remove_first()
    assert files.find(4095) is None
    for offset, start in ((4096, 4096), (8191, 4096), (8192, 8192), (12_287, 8192)):
        found = files.find(offset)
        assert found is not None
        assert found.start == start
    assert files.find(12_288) is None
    with pytest.raises(ValueError, match="does not follow"):
        files.append(first)


def test_the_end_is_set_and_files_behind_it_come_out() -> None:
    disk = _disk(4096, 4096, 4096)
    files = MappedFileQueue(disk, LOG, 4096)
    files.load()
    removed = files.truncate_after(5000)
    assert [file.start for file in removed] == [8192]
    assert (files.max_offset, files.flushed_offset) == (5000, 5000)
    last = files.last
    assert last is not None
    assert (last.reserved, last.append_limit) == (904, -1)
    assert [file.start for file in files.truncate_after(4096)] == [4096]
    assert files.max_offset == 4096
    assert files.truncate_after(0) == []
    assert files.max_offset == 0


def test_readers_keep_a_destroyed_file() -> None:
    disk = SimDisk()
    make_durable_directory(disk, LOG)
    file = MappedFile.create(disk, f"{LOG}/{0:020d}", 0, 8192, 8192)
    file.buffer[0:5] = b"hello"
    file.wrote = 5
    view = file.read(0, 5)
    file.hold()
    file.hold()
    file.destroy()
    file.destroy()
    assert disk.list(LOG) == []
    assert disk.open_files() == 1
    assert file.is_held
    file.release()
    assert bytes(file.view[:5]) == b"hello"
    file.release()
    assert disk.open_files() == 0
    assert view is not None
    assert bytes(view) == b"hello"


def test_a_file_that_cannot_be_deleted_stays_as_it_was() -> None:
    disk = _disk(4096)
    file = MappedFile.open(disk, f"{LOG}/{0:020d}", 0, 4096)
    disk.fail("delete", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        file.destroy()
    assert not file.destroyed
    file.destroy()
    assert disk.open_files() == 0


def test_closing_keeps_the_name_and_waits_for_readers() -> None:
    disk = _disk(4096)
    file = MappedFile.open(disk, f"{LOG}/{0:020d}", 0, 4096)
    file.hold()
    file.close()
    assert disk.open_files() == 1
    file.release()
    assert disk.open_files() == 0
    assert disk.list(LOG) == [f"{0:020d}"]


def test_what_was_there_before_the_start_is_read_through_the_one_read_function() -> None:
    disk = _disk(4096)
    file = MappedFile.open(disk, f"{LOG}/{0:020d}", 0, 4096)
    assert type(file.read(0, 100)) is bytes
    disk.cold = True
    assert file.read(0, 100) is None
    assert file.read_cold(0, 100) == bytes(100)
    file.set_position(50)
    file.reserve_range(50, 4096)
    file.mark_reserved(4096)
    assert type(file.read(60, 10)) is memoryview
    assert file.read(40, 10) is None
