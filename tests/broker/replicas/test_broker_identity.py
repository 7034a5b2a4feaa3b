"""The files with the id that controllers have assigned, in the form of RocketMQ's."""

from pathlib import Path

import pytest

from tests.store.simdisk import Loss, SimDisk
from trimq.broker.replicas.broker_identity import Applied, BrokerIdentityFile
from trimq.broker.start_error import StartError
from trimq.broker.store.disk.real_disk import RealDisk


def _file(path: Path, broker: str = "broker-a") -> BrokerIdentityFile:
    return BrokerIdentityFile(RealDisk(), str(path / "brokerIdentity"), "C", broker)


def test_the_text_is_that_of_rocketmq(tmp_path: Path) -> None:
    # guards against another form of the two files, which Apache's broker reads
    identity = _file(tmp_path)
    assert identity.broker_id() is None
    identity.apply(Applied(3, "127.0.0.1:1;42"))
    assert (tmp_path / "brokerIdentity-temp").read_text() == "C#broker-a#3#127.0.0.1:1;42"
    assert identity.applied() == Applied(3, "127.0.0.1:1;42")
    identity.assign(3)
    assert (tmp_path / "brokerIdentity").read_text() == "C#broker-a#3"
    assert not (tmp_path / "brokerIdentity-temp").exists()
    assert _file(tmp_path).broker_id() == 3
    assert identity.applied() is None


def test_an_id_that_another_broker_got_is_forgotten(tmp_path: Path) -> None:
    # guards against asking for the same id for ever
    identity = _file(tmp_path)
    identity.apply(Applied(3, "x"))
    identity.forget_applied()
    assert identity.applied() is None


@pytest.mark.parametrize("text", ["C#broker-b#1", "D#broker-a#1", "C#broker-a#0", "C#broker-a#x", "C#broker-a", ""])
def test_a_file_of_another_broker_or_a_damaged_one_stops_the_start(tmp_path: Path, text: str) -> None:
    # guards against a store that answers for two brokers
    (tmp_path / "brokerIdentity").write_text(text)
    with pytest.raises(StartError, match="brokerIdentity"):
        _file(tmp_path).broker_id()


@pytest.mark.parametrize("loss", list(Loss))
def test_the_id_survives_a_power_cut(loss: Loss) -> None:
    # guards against a rename, or a directory, that is not synced
    disk = SimDisk()
    disk.make_directory("/store")
    disk.sync_directory("/")
    BrokerIdentityFile(disk, "/store/brokerIdentity", "C", "b").assign(7)
    assert BrokerIdentityFile(disk.copy_after_cut(loss), "/store/brokerIdentity", "C", "b").broker_id() == 7
