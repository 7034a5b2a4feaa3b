import errno
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.store.simdisk import Loss, PowerCut, SimDisk
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.disk.store_lock import AbortFile, StoreInUseError, StoreLock

OTHER_PROCESS = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
except OSError:
    sys.exit(3)
print("locked", flush=True)
sys.stdin.read()
"""


def _other_process(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(root / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_second_opening_in_the_process_is_refused_and_does_not_end_the_lock(tmp_path: Path) -> None:
    disk = RealDisk()
    lock = StoreLock.acquire(disk, str(tmp_path))
    with pytest.raises(StoreInUseError, match="open in this process"):
        StoreLock.acquire(disk, str(tmp_path))
    with _other_process(tmp_path) as other:
        assert other.wait(20) == 3
    lock.release()
    StoreLock.acquire(disk, str(tmp_path)).release()
    assert (tmp_path / "lock").read_bytes() == b"lock"


def test_another_process_that_has_the_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"lock")
    (tmp_path / "abort").write_text("4711")
    with _other_process(tmp_path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(StoreInUseError, match=r"in use by another broker \(process 4711\)"):
            StoreLock.acquire(RealDisk(), str(tmp_path))
        other.kill()
    StoreLock.acquire(RealDisk(), str(tmp_path)).release()


def test_a_directory_that_is_not_there_is_made_and_synced() -> None:
    disk = SimDisk()
    StoreLock.acquire(disk, "/data/new/store").release()
    assert disk.power_cut(Loss.ALL).stat("/data/new/store") is not None


@pytest.mark.parametrize("loss", list(Loss))
def test_the_abort_file_survives_a_power_cut_at_any_call(loss: Loss) -> None:
    """Once the file exists, no cut makes the store look closed in order."""
    for cut_at in range(1, 30):
        disk = SimDisk(seed=cut_at)
        disk.make_directory("/store")
        disk.sync_directory("/store")
        disk.sync_directory("/")
        AbortFile(disk, "/store").create()
        disk.cut_at = disk.calls + cut_at
        disk.loss = loss
        with suppress(PowerCut):
            AbortFile(disk, "/store").create()
        assert AbortFile(disk.power_cut(loss), "/store").exists()


def test_the_abort_file_is_gone_after_an_orderly_stop() -> None:
    disk = SimDisk()
    disk.make_directory("/store")
    disk.sync_directory("/")
    abort = AbortFile(disk, "/store")
    abort.create()
    abort.remove()
    abort.remove()
    assert not AbortFile(disk.power_cut(Loss.ALL), "/store").exists()


def test_a_failed_opening_leaves_the_store_free() -> None:
    disk = SimDisk()
    disk.fail("data_sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        StoreLock.acquire(disk, "/store")
    assert disk.open_files() == 0
    StoreLock.acquire(disk, "/store").release()
