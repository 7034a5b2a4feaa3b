"""Proofs between master and slave beside Apache's brokers, which cannot prove anything: by address only, both ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.interop.harness import probe
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker, NameServer, Peer
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import connected
from tests.interop.test_replication import TOPIC, Pair, log_of, replica, send
from trimq.remoting.auth.secrets import make_key_file

APACHES = "127.0.0.1"
ANOTHER = "127.0.0.2"


@contextmanager
def with_a_secret(directory: Path, master: Peer, slave: Peer, allowed: str) -> Iterator[Pair]:
    """A master and a slave, of which TriMQ's has a secret, and lets brokers at ``allowed`` prove nothing."""
    key = directory / "ha.key"
    make_key_file(key)
    secret = {"haSecretFile": str(key)} | ({"haAllowedWithoutProof": allowed} if allowed else {})
    with ExitStack() as stack:
        names = NameServer("trimq", directory / "namesrv")
        stack.enter_context(ended_afterwards(names.process))
        names.start()

        def started(peer: Peer, home: str, properties: dict[str, str]) -> Broker:
            own = properties | (secret if peer == "trimq" else {})
            broker = replica(names, peer, directory / home, own)
            stack.enter_context(ended_afterwards(broker.process, gracefully=peer == "trimq"))
            broker.start()
            return broker

        leader = started(master, "master", {"brokerRole": "ASYNC_MASTER"})
        probe.create_topic(leader.address, TOPIC, 2)
        follower = started(slave, "slave", {"brokerRole": "SLAVE", "brokerId": "1"})
        yield Pair(names, leader, follower)


MIXES: list[tuple[Peer, Peer]] = [("trimq", "apache"), ("apache", "trimq")]
IDS = [f"{one} to {other}" for one, other in MIXES]


@pytest.mark.parametrize(("master", "slave"), MIXES, ids=IDS)
def test_apaches_broker_replicates_from_its_address(master: Peer, slave: Peer, tmp_path: Path) -> None:
    with with_a_secret(tmp_path, master, slave, APACHES) as pair, connected(*pair.wire) as wire:
        send(wire, 0, 10)
        wait_until(lambda: log_of(pair.slave) == log_of(pair.master), "the slave begins", 60)
        send(wire, 10, 60)
        wait_until(lambda: log_of(pair.slave) == log_of(pair.master), "the slave follows", 60)
        assert len(log_of(pair.slave)) > 10_000


REFUSALS = {
    "trimq": r"slave_refused .*the slave proves nothing: set haSecretFile there",
    "apache": r"master_lost .*the master (sends no challenge|does not prove itself)",
}
"""What TriMQ's broker says, by the peer of the master."""


@pytest.mark.parametrize(
    "allowed", [pytest.param("", marks=pytest.mark.nightly), ANOTHER], ids=["no address", "another address"]
)
@pytest.mark.parametrize(("master", "slave"), MIXES, ids=IDS)
def test_apaches_broker_is_refused_without_it(master: Peer, slave: Peer, allowed: str, tmp_path: Path) -> None:
    with with_a_secret(tmp_path, master, slave, allowed) as pair, connected(*pair.wire) as wire:
        send(wire, 0, 10)
        ours = pair.master if master == "trimq" else pair.slave

        def refused() -> int:
            return len(re.findall(REFUSALS[master], ours.process.log.read_text("utf-8", "replace")))

        wait_until(lambda: refused() > 0, "it is refused", 60)
        send(wire, 10, 10)
        assert log_of(pair.master)
        assert log_of(pair.slave) == b""
