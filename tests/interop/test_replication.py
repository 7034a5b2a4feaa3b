"""A master and its slave, each of them TriMQ's or Apache's: the logs are the same bytes, even if one is killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.interop.harness import probe
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker, NameServer, Peer
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import Sent, Wire, connected
from tests.ports import free_port

TOPIC = "Replicated"
LOG_FILE = 64 * 1024
SIZES = {
    "mappedFileSizeCommitLog": str(LOG_FILE),
    "mappedFileSizeConsumeQueue": str(20 * 100),
    "maxHashSlotNum": "64",
    "maxIndexNum": "400",
    "haSendHeartbeatInterval": "1000",
    "brokerIP2": "127.0.0.1",
}
ONLY = {
    "apache": {"timerWheelEnable": "false"},
    "trimq": {"embeddedNamesrvEnable": "false", "bindAddress": "127.0.0.1", "commitLogReserveStep": "8192"},
}


@dataclass
class Pair:
    """A master and its slave."""

    names: NameServer
    master: Broker
    slave: Broker

    @property
    def wire(self) -> tuple[str, int]:
        return "127.0.0.1", self.master.port


def replica(names: NameServer, peer: Peer, home: Path, properties: Mapping[str, str], version: str = "5.5.0") -> Broker:
    """A broker that is a master or a slave; its store is in ``home``."""
    return Broker(
        peer,
        home,
        [names],
        store=home / "store",
        properties={**SIZES, **ONLY[peer], "haListenPort": str(free_port()), **properties},
        version=version,
    )


@contextmanager
def running_pair(
    directory: Path,
    master: Peer,
    slave: Peer,
    *,
    role: str = "ASYNC_MASTER",
    properties: Mapping[str, str] | None = None,
    version: str = "5.5.0",
) -> Iterator[Pair]:
    """Run both, with ``properties``, and a name server of TriMQ. ``version`` is the one of an Apache's slave."""
    with ExitStack() as stack:
        names = NameServer("trimq", directory / "namesrv")
        stack.enter_context(ended_afterwards(names.process))
        names.start()
        common = dict(properties or {})

        def started(broker: Broker) -> Broker:
            stack.enter_context(ended_afterwards(broker.process, gracefully=broker.peer == "trimq"))
            broker.start()
            return broker

        leader = started(replica(names, master, directory / "master", common | {"brokerRole": role}))
        probe.create_topic(leader.address, TOPIC, 2)
        following = {"brokerRole": "SLAVE", "brokerId": "1", "slaveReadEnable": "true"}
        follower = started(replica(names, slave, directory / "slave", common | following, version))
        yield Pair(names, leader, follower)


def send(wire: Wire, first: int, count: int) -> list[Sent]:
    sizes = (10, 300, 3000)
    return [
        wire.send(
            TOPIC, number % 2, f"{number} ".encode().ljust(sizes[number % 3], b"x"), {"UNIQ_KEY": f"key-{number}"}
        )
        for number in range(first, first + count)
    ]


def log_of(broker: Broker) -> bytes:
    """The bytes of the commit log, up to where nothing was written."""
    files = sorted((broker.store / "commitlog").iterdir())
    return b"".join(path.read_bytes() for path in files).rstrip(b"\0")


def same_logs(pair: Pair) -> bool:
    master = log_of(pair.master)
    return len(master) > 3 * LOG_FILE and log_of(pair.slave) == master


MIXES = [("apache", "trimq"), ("trimq", "apache"), ("trimq", "trimq")]


@pytest.mark.parametrize(("master", "slave"), MIXES, ids=[f"{one} to {other}" for one, other in MIXES])
def test_the_logs_are_the_same_bytes_after_kills(master: Peer, slave: Peer, tmp_path: Path) -> None:
    with running_pair(tmp_path, master, slave) as pair:
        with connected(*pair.wire) as wire:
            # Apache's slave that has nothing begins with the last file of its master.
            sent = send(wire, 0, 10)
            wait_until(lambda: log_of(pair.slave) == log_of(pair.master), "the slave begins", 60)
            sent += send(wire, 10, 110)
            pair.slave.kill()
            sent += send(wire, 120, 60)
        pair.slave.start()
        wait_until(lambda: log_of(pair.slave) == log_of(pair.master), "the slave has it all after a kill", 100)
        pair.master.kill()
        pair.master.start()
        with connected(*pair.wire) as wire:
            sent += send(wire, 180, 120)
            wait_until(lambda: same_logs(pair), "the slave follows a master that was killed", 100)
        with connected("127.0.0.1", pair.slave.port) as wire:
            for queue in (0, 1):
                wait_until(lambda queue=queue: wire.offsets(TOPIC, queue) == (0, 150), "the slave's queues", 30)  # type: ignore[misc]
            for message in sent[::7]:
                assert message.body in wire.view(message.phy)
                if slave == "trimq":  # Apache's knows no topic before its first minute is over
                    assert message.body in (wire.pull(TOPIC, message.queue, message.offset, 1) or b"")
