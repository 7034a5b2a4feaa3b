import errno
import stat
from pathlib import Path

import pytest

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.config import MessageStoreConfig, load_broker
from trimq.broker.services.config_file import ConfigFile
from trimq.broker.services.state_file import StateFileError
from trimq.broker.store.disk.real_disk import RealDisk


async def test_a_change_goes_into_the_file_the_broker_was_started_with(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("# mine\nfileReservedTime = 48\nbrokerName=b\n")
    made = load_broker(path)
    await ConfigFile(made, RealDisk()).save({"fileReservedTime": "24", "deleteWhen": "03"})
    assert path.read_text() == "# mine\nfileReservedTime=24\nbrokerName=b\ndeleteWhen=03\n"
    assert (tmp_path / "broker.conf.bak").read_text().startswith("# mine\nfileReservedTime = 48")
    again = load_broker(path).section(MessageStoreConfig)
    assert (again.file_reserved_time, again.delete_when) == (24, "03")


@pytest.mark.parametrize(("mode", "after"), [(0o600, 0o600), (0o640, 0o600), (0o644, 0o644)])
async def test_a_change_does_not_let_others_read_a_file_with_secrets(tmp_path: Path, mode: int, after: int) -> None:
    path = tmp_path / "broker.conf"
    path.write_text('innerClientAuthenticationCredentials={"accessKey":"a","secretKey":"secret"}\n')
    path.chmod(mode)
    await ConfigFile(load_broker(path), RealDisk()).save({"fileReservedTime": "24"})
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, tmp_path / "broker.conf.bak")] == [after, mode]


async def test_without_a_file_it_goes_into_the_store() -> None:
    disk = SimDisk()
    await ConfigFile(configuration(), disk).save({"fileReservedTime": "24"})
    after = disk.power_cut()
    assert after.content("/store/config/broker.properties") == b"fileReservedTime=24\n"


async def test_a_failure_says_why() -> None:
    disk = SimDisk()
    disk.fail("data_sync", errno.EROFS)
    with pytest.raises(StateFileError, match=r"broker\.properties cannot be written"):
        await ConfigFile(configuration(), disk).save({"fileReservedTime": "24"})
