import errno
import os
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from tests.store.simdisk import PAGE, Loss, MappedStoreError, PowerCut, SimDisk, _Inode, _NameChange
from trimq.broker.store.disk import real_disk
from trimq.broker.store.disk.disk import Disk, MappedPart
from trimq.broker.store.disk.durable_files import make_durable_directory, read_whole, write_durably
from trimq.broker.store.disk.real_disk import RealDisk


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return RealDisk() if request.param == "real" else SimDisk()


@pytest.fixture
def root(disk: Disk, tmp_path: Path) -> str:
    make_durable_directory(disk, str(tmp_path))
    return str(tmp_path)


def test_both_disks_do_the_same_with_files(disk: Disk, root: str) -> None:
    path = f"{root}/file"
    fd = disk.create(path, 10_000)
    with pytest.raises(FileExistsError):
        disk.create(path, 1)
    with pytest.raises(FileNotFoundError):
        disk.open(f"{root}/none")
    with pytest.raises(FileNotFoundError):
        disk.create(f"{root}/none/file", 1)
    disk.pwrite(fd, b"hello", 9_990)
    disk.pwrite(fd, memoryview(b"longer"), 9_998)
    assert disk.size(fd) == 10_004
    assert disk.pread(fd, 100, 9_990) == b"hello\0\0\0longer"
    assert disk.pread_cached(fd, 5, 9_990) == b"hello"
    assert disk.pread_cached(fd, 100, 9_990) is None
    disk.truncate(fd, 9_995)
    disk.truncate(fd, 10_000)
    assert disk.pread(fd, 100, 9_990) == b"hello\0\0\0\0\0"
    disk.data_sync(fd)
    info = disk.stat(path)
    assert info is not None
    assert (info.is_directory, info.size) == (False, 10_000)
    identity = disk.identity(path)
    assert identity is not None
    disk.rename(path, f"{root}/other")
    assert disk.identity(path) is None
    assert disk.identity(f"{root}/other") == identity
    assert disk.list(root) == ["other"]
    disk.delete(f"{root}/other")
    assert disk.pread(fd, 5, 9_990) == b"hello"
    disk.close(fd)
    with pytest.raises(FileNotFoundError):
        disk.delete(f"{root}/other")
    assert disk.stat(path) is None


def test_both_disks_do_the_same_with_directories(disk: Disk, root: str) -> None:
    disk.make_directory(f"{root}/a/b")
    disk.make_directory(f"{root}/a/b")
    assert disk.list(f"{root}/a") == ["b"]
    assert disk.list(f"{root}/nothing") == []
    with pytest.raises(OSError, match="not empty"):
        disk.remove_directory(f"{root}/a")
    disk.sync_directory(f"{root}/a")
    disk.remove_directory(f"{root}/a/b")
    assert disk.list(f"{root}/a") == []
    info = disk.stat(f"{root}/a")
    assert info is not None
    assert info.is_directory


def test_both_disks_do_the_same_with_mappings(disk: Disk, root: str) -> None:
    fd = disk.create(f"{root}/file", 16_384)
    mapping = disk.map(fd, 16_384)
    disk.pwrite(fd, b"stale", 8192)
    disk.reserve(fd, 4096, mapping.view[4096:12_288])
    assert not any(mapping.view)
    mapping.buffer[5000:5005] = b"hello"
    assert disk.pread(fd, 5, 5000) == b"hello"
    disk.pwrite(fd, b"world", 5005)
    piece = mapping.view[5000:5010]
    assert bytes(piece) == b"helloworld"
    assert disk.next_data(fd, 0) <= 4096 or isinstance(disk, RealDisk)
    disk.data_sync(fd)
    mapping.close()
    disk.close(fd)
    assert bytes(piece) == b"helloworld"


def test_both_disks_replace_a_file(disk: Disk, root: str) -> None:
    path = f"{root}/state.json"
    assert read_whole(disk, path) is None
    write_durably(disk, path, b"one")
    write_durably(disk, path, b"two")
    assert read_whole(disk, path) == b"two"
    assert disk.list(root) == ["state.json"]


def test_the_real_disk_knows_its_file_system(tmp_path: Path) -> None:
    disk = RealDisk()
    system = disk.file_system(str(tmp_path))
    assert str(tmp_path.resolve()).startswith(system.mount_point)
    assert system.kind != "unknown"
    space = disk.space(str(tmp_path))
    assert 0 < space.free <= space.total
    assert disk.file_system("/proc/self").kind == "proc"


def test_how_full_a_disk_is_leaves_out_what_is_kept_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As df and Apache count. Otherwise a file system with a large reserve would be cleaned while half empty."""
    names = {"f_frsize": 4096, "f_blocks": 1000, "f_bfree": 800, "f_bavail": 200}
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(**names))
    space = RealDisk().space("/")
    assert space == (400 * 4096, 200 * 4096)
    assert (space.total - space.free) / space.total == 0.5


@pytest.mark.parametrize("advice", [real_disk._MADV_POPULATE_WRITE, 9999], ids=["populated", "an older kernel"])
def test_reserved_space_has_blocks_and_pages(advice: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_disk, "_MADV_POPULATE_WRITE", advice)
    disk = RealDisk()
    fd = disk.create(str(tmp_path / "file"), 4 << 20)
    mapping = disk.map(fd, 4 << 20)
    assert os.fstat(fd).st_blocks == 0
    disk.reserve(fd, 0, mapping.view[: 3 << 20])
    assert os.fstat(fd).st_blocks * 512 >= 3 << 20
    assert os.fstat(fd).st_size == 4 << 20
    disk.reserve(fd, 0, mapping.view[:0])
    disk.pwrite(fd, b"stale", (3 << 20) + 10)
    mapping.buffer[(3 << 20) - 5 : 3 << 20] = b"kept!"
    disk.reserve(fd, 3 << 20, mapping.view[3 << 20 :], durable=True)
    assert not any(mapping.view[3 << 20 :])
    assert bytes(mapping.view[(3 << 20) - 5 : 3 << 20]) == b"kept!"
    assert os.fstat(fd).st_blocks * 512 >= 4 << 20
    disk.reserve(fd, (3 << 20) + 10, mapping.view[(3 << 20) + 10 : (3 << 20) + 5000])  # not aligned to a page
    assert bytes(mapping.view[(3 << 20) - 5 : (3 << 20) + 5000]) == b"kept!" + bytes(5000)
    mapping.close()
    disk.close(fd)


def test_space_that_only_a_store_finds_missing_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may reserve space it does not have: populating then fails with EFAULT, a write gives the reason."""
    disk = RealDisk()
    fd = disk.create(str(tmp_path / "file"), 1 << 20)
    mapping = disk.map(fd, 1 << 20)
    refused = [errno.EFAULT]
    advise = RealDisk._advise

    def refuse(view: memoryview, advice: int) -> int:
        return refused.pop() if advice == real_disk._MADV_POPULATE_WRITE and refused else advise(view, advice)

    monkeypatch.setattr(disk, "_advise", refuse)
    disk.reserve(fd, 0, mapping.view)
    assert not refused
    assert not any(mapping.view)

    def full(_fd: int, _data: memoryview, _offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    refused.append(errno.EFAULT)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        disk.reserve(fd, 0, mapping.view[:4096])
    mapping.close()
    disk.close(fd)


def test_large_pages_are_zero_too_and_what_was_let_go_comes_back(tmp_path: Path) -> None:
    disk = RealDisk()
    fd = disk.create(str(tmp_path / "file"), 8 << 20)
    mapping = disk.map(fd, 8 << 20)
    disk.pwrite(fd, b"stale", 5 << 20)
    disk.reserve(fd, 0, mapping.view[: 3 << 20], large=True)
    disk.reserve(fd, 3 << 20, mapping.view[3 << 20 :], large=True)
    assert os.fstat(fd).st_blocks * 512 >= 8 << 20
    assert not any(mapping.view)
    mapping.buffer[4096:4100] = b"kept"
    disk.data_sync(fd, MappedPart(mapping, 0, 8192))
    mapping.buffer[6 << 20 : (6 << 20) + 4] = b"late"
    disk.evict(fd, 100, 7 << 20, mapping)
    assert bytes(mapping.view[4096:4100]) == disk.pread(fd, 4, 4096) == b"kept"
    assert bytes(mapping.view[6 << 20 : (6 << 20) + 4]) == b"late", "not on the device yet: not evicted"
    mapping.close()
    disk.close(fd)


def test_large_pages_are_made_for_what_was_asked_for_only(tmp_path: Path) -> None:
    """The kernel clears pages that it adds itself in one go, and no other task runs on the processor in that time."""
    disk = RealDisk()
    large = 2 << 20
    fd = disk.create(str(tmp_path / "file"), 8 * large)
    mapping = disk.map(fd, 8 * large)
    disk.allocate(fd, 0, 8 * large)
    disk.reserve(fd, 0, mapping.view[:large], large=True)
    assert disk.in_memory(fd, MappedPart(mapping, 0, large)) == large
    assert disk.in_memory(fd, MappedPart(mapping, large, 8 * large)) == large
    mapping.close()
    disk.close(fd)


@pytest.mark.parametrize("loss", list(Loss))
def test_a_replaced_file_is_the_old_or_the_new_one_after_a_cut_at_any_call(loss: Loss) -> None:
    cut_at = 0
    alive = False
    while not alive:
        cut_at += 1
        disk = SimDisk(seed=cut_at)
        make_durable_directory(disk, "/d")
        write_durably(disk, "/d/f", b"old")
        disk.loss, disk.cut_at = loss, disk.calls + cut_at
        try:
            write_durably(disk, "/d/f", b"new")
            alive = True
        except PowerCut:
            pass
        survivor = disk.power_cut(loss)
        content = survivor.content("/d/f")
        assert content == b"new" if alive else content in (b"old", b"new")
        write_durably(survivor, "/d/f", b"again")
    assert cut_at > 5


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_directory_whose_sync_has_failed_is_made_again(nth: int) -> None:
    disk = SimDisk()
    disk.fail("sync_directory", errno.EIO, nth)
    with pytest.raises(OSError):
        make_durable_directory(disk, "/d/e/f")
    make_durable_directory(disk, "/d/e/f")
    assert disk.power_cut(Loss.ALL).stat("/d/e/f") is not None


def test_the_simulated_disk_forgets_what_was_not_synced() -> None:
    disk = SimDisk()
    make_durable_directory(disk, "/d")
    fd = disk.create("/d/kept", 0)
    disk.pwrite(fd, b"synced", 0)
    disk.data_sync(fd)
    assert disk.power_cut(Loss.ALL).list("/d") == []
    disk.after_cut = None
    disk.sync_directory("/d")
    disk.pwrite(fd, b"not", 0)
    disk.create("/d/lost", 0)
    survivor = disk.power_cut(Loss.ALL)
    assert survivor.content("/d/kept") == b"synced"
    assert survivor.list("/d") == ["kept"]
    with pytest.raises(PowerCut):
        disk.pread(fd, 1, 0)


def test_the_simulated_disk_notices_a_store_without_a_block() -> None:
    disk = SimDisk()
    fd = disk.create("/f", 8192)
    mapping = disk.map(fd, 8192)
    disk.reserve(fd, 0, mapping.view[:4096])
    mapping.buffer[0:1] = b"x"
    disk.check_mapped_stores()
    mapping.buffer[4096:4097] = b"x"
    with pytest.raises(MappedStoreError, match="page 1"):
        disk.check_mapped_stores()
    with pytest.raises(MappedStoreError):
        disk.data_sync(fd)


def test_the_simulated_disk_fails_on_demand_and_loses_the_pages() -> None:
    disk = SimDisk(capacity=8192)
    fd = disk.create("/f", 0)
    disk.pwrite(fd, b"x", 0)
    disk.fail("data_sync", errno.EIO, nth=2)
    disk.data_sync(fd)
    disk.pwrite(fd, b"y", 0)
    with pytest.raises(OSError, match="Input/output"):
        disk.data_sync(fd)
    disk.data_sync(fd)
    assert disk.durable_content("/f") == b"x"
    with pytest.raises(OSError, match="No space"):
        disk.pwrite(fd, b"z" * 4096, 6000)
    disk.flip("/f", 0, 1)
    assert disk.content("/f") == bytes([ord("y") ^ 2])


def test_a_part_of_a_map_is_synced(disk: Disk, root: str) -> None:
    path = f"{root}/file"
    fd = disk.create(path, 5 * PAGE)
    mapping = disk.map(fd, 5 * PAGE)
    disk.reserve(fd, 0, mapping.view)
    disk.data_sync(fd)
    for number in range(5):
        mapping.view[number * PAGE : number * PAGE + 5] = b"later"
    disk.data_sync(fd, MappedPart(mapping, PAGE + 1, 3 * PAGE))
    if isinstance(disk, SimDisk):
        durable = disk.durable_content(path)
        assert [durable[number * PAGE : number * PAGE + 5] == b"later" for number in range(5)] == [0, 1, 1, 0, 0]
    else:
        with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):  # no mapping reaches this far
            disk.data_sync(fd, MappedPart(mapping, 0, 1 << 46))
    mapping.close()
    disk.close(fd)


def test_a_look_finds_what_is_in_memory(disk: Disk, root: str) -> None:
    size = 64 * 1024
    fd = disk.create(f"{root}/map", size)
    disk.pwrite(fd, bytes(size), 0)
    mapping = disk.map(fd, size)
    assert disk.in_memory(fd, MappedPart(mapping, 100, size)) == size
    mapping.close()
    disk.close(fd)


def test_untouched_pages_are_not_in_memory(tmp_path: Path) -> None:
    disk = RealDisk()
    fd = disk.create(f"{tmp_path}/map", 65536 * PAGE)
    mapping = disk.map(fd, 65536 * PAGE)
    mapping.view[:10] = b"0123456789"
    part = MappedPart(mapping, 5, 65536 * PAGE)
    seen = disk.in_memory(fd, part)  # a kernel may read more than one page in one go, but not all of them
    assert seen % PAGE == 0
    assert PAGE <= seen < part.end
    assert disk.in_memory(fd, MappedPart(mapping, 65535 * PAGE + 7, 65536 * PAGE)) == 65535 * PAGE + 7
    mapping.close()
    disk.close(fd)


@pytest.mark.parametrize("pages", [b"\1", b"\0", None])
def test_a_kernel_that_does_not_report_it_is_asked_by_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: bytes | None
) -> None:
    monkeypatch.setattr(real_disk, "_pages_of", lambda *_: pages)
    disk = RealDisk()
    size = 80 * 1024
    fd = disk.create(f"{tmp_path}/map", size)
    disk.pwrite(fd, bytes(size), 0)
    mapping = disk.map(fd, size)
    assert disk.in_memory(fd, MappedPart(mapping, 100, size)) == size
    monkeypatch.setattr(disk, "pread_cached", lambda *_: None)
    assert disk.in_memory(fd, MappedPart(mapping, 100, size)) == 100
    mapping.close()
    disk.close(fd)


def test_writes_and_reads_that_the_system_does_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.pread
    disk = RealDisk()
    fd = disk.create(str(tmp_path / "file"), 100)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, bytes(data)[:3], offset))
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: read(fd, min(length, 3), offset))
    disk.pwrite(fd, b"0123456789", 5)
    assert disk.pread(fd, 12, 4) == b"\x000123456789\x00"
    assert disk.pread(fd, 20, 95) == bytes(5)  # the end of the file
    disk.close(fd)


def test_a_file_system_that_cannot_read_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RealDisk()
    fd = disk.create(str(tmp_path / "file"), 100)
    for number, found in ((errno.EAGAIN, None), (errno.EOPNOTSUPP, None)):

        def preadv(*_: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "preadv", preadv)
        assert disk.pread_cached(fd, 5, 0) is found

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error"):
        disk.pread_cached(fd, 5, 0)
    disk.close(fd)


@pytest.mark.parametrize(("number", "found"), [(errno.EINVAL, 7), (errno.ENXIO, 100), (errno.EIO, None)])
def test_where_the_next_data_is(
    number: int, found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk()
    fd = disk.create(str(tmp_path / "file"), 100)

    def lseek(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "lseek", lseek)
    if found is None:
        with pytest.raises(OSError, match="Input/output error"):
            disk.next_data(fd, 7)
    else:
        assert disk.next_data(fd, 7) == found
    disk.close(fd)


def test_what_is_read_ahead_is_in_memory(disk: Disk, root: str) -> None:
    """In several reads, up to the end of the file, and with an error of the file system."""
    size = (5 << 19) + 100
    fd = disk.create(f"{root}/file", size)
    disk.pwrite(fd, bytes(range(250)) * (size // 250), 0)
    disk.data_sync(fd)
    mapping = disk.map(fd, size)
    disk.evict(fd, 0, size, mapping)
    if isinstance(disk, SimDisk):
        disk.cold = True
    assert disk.read_ahead(fd, 4096, size - 4096) == size - 4096
    assert disk.in_memory(fd, MappedPart(mapping, 4096, size - 4096)) == size - 4096
    assert disk.read_ahead(fd, size - 10, size + 10) == size
    assert disk.read_ahead(fd, 7, 7) == 7
    mapping.close()
    disk.close(fd)
    if isinstance(disk, RealDisk):
        with pytest.raises(OSError, match="descriptor"):
            disk.read_ahead(fd, 0, 10)
        assert len(disk._scratch) == 1, "the buffer is reused"


def reachable(root: object) -> dict[int, object]:
    """What can change and is reached from ``root``, by its id."""
    found: dict[int, object] = {}
    left = [root]
    while left:
        one = left.pop()
        if id(one) in found or not isinstance(
            one, SimDisk | _Inode | _NameChange | dict | list | set | tuple | bytearray
        ):
            if isinstance(one, Random):
                found[id(one)] = one
            continue
        if not isinstance(one, tuple | _NameChange):
            found[id(one)] = one
        parts = one if isinstance(one, list | set | tuple) else ()
        left += [*parts, *(one.values() if isinstance(one, dict) else ()), *getattr(one, "__dict__", {}).values()]
    return found


def test_the_disk_after_a_kill_shares_nothing_with_the_one_before() -> None:
    disk = SimDisk()
    make_durable_directory(disk, "/d")
    fd = disk.create("/d/one", 2 * PAGE)
    disk.pwrite(fd, b"durable", 0)
    disk.data_sync(fd)
    disk.sync_directory("/d")
    disk.pwrite(fd, b"changed", 0)
    disk.create("/d/new", PAGE)  # its name is not durable
    disk.fail("pread", errno.EIO, 5)
    before = {loss: contents(disk.after_kill(), loss) for loss in (Loss.NOTHING, Loss.ALL)}
    after = disk.after_kill()
    assert reachable(disk).keys() & reachable(after).keys() == set()
    assert len(reachable(disk)) > 15
    # What happens on one of them from here on is not seen on the other.
    disk.pwrite(fd, b"later..", 0)
    disk.data_sync(fd)
    disk.rename("/d/new", "/d/other")
    disk.sync_directory("/d")
    assert {loss: contents(after.after_kill(), loss) for loss in before} == before
    assert before[Loss.ALL] == {"one": b"durable"}
    assert before[Loss.NOTHING] == {"one": b"changed", "new": bytes(7)}


def contents(disk: SimDisk, loss: Loss) -> dict[str, bytes]:
    """The begin of each file after a power cut with this loss."""
    left = disk.copy_after_cut(loss)
    return {name: left.pread(left.open(f"/d/{name}"), 7, 0) for name in left.list("/d")}
