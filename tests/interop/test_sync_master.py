"""A SYNC_MASTER while its slave is killed, frozen and comes back: nothing that was acknowledged is ever lost."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness import REMARKS, probe
from tests.interop.harness.drivers import JavaClient, unique
from tests.interop.harness.log_image import LogImage, Record, live_image
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import RefusedError, Sent, Wire, connected
from tests.interop.test_replication import LOG_FILE as SMALL_FILE
from tests.interop.test_replication import TOPIC, Pair, log_of, replica, running_pair, same_logs, send

LOG_FILE = 4 * 1024 * 1024
QUEUES = 4
PROMISED = {
    "flushDiskType": "SYNC_FLUSH",
    "mappedFileSizeCommitLog": str(LOG_FILE),
    "mappedFileSizeConsumeQueue": str(20 * 5000),
    # What takes seconds by default: the answer for a frozen slave, and the end of its connection.
    "slaveTimeout": "500",
    "haSendHeartbeatInterval": "500",
    "haHousekeepingInterval": "3000",
}
LATE, REFUSED = "FLUSH_SLAVE_TIMEOUT", "1"
"""What Java's client says of a message that is stored while no slave confirms it, and of one that is not stored."""


def records_of(image: LogImage, topic: str) -> dict[tuple[int, int], Record]:
    """The records of a topic by queue and offset."""
    return {(one.queue, one.offset): one for one in image.of(topic)}


def missing(
    acknowledged: list[tuple[int, int, int]], records: dict[tuple[int, int], Record]
) -> list[tuple[int, int, int]]:
    """What was acknowledged and is not at its offset."""
    bodies = {place: record.body for place, record in records.items()}
    return [
        (queue, number, offset)
        for queue, number, offset in acknowledged
        if not bodies.get((queue, offset), b"").startswith(b"%d " % number)
    ]


def is_no_slave(leader: Broker, follower: Broker) -> bool:
    """Whether one of them has said that the other one's log is not its own."""
    return "slave_diverged" in follower.process.tail() or "slave_ahead_of_master" in leader.process.tail()


class Load:
    """Java's producers and consumer at full speed; see Flood.java."""

    def __init__(self, java: JavaClient, topic: str, namesrv: str) -> None:
        self._java = java
        self._name = unique("flood")
        self.topic = topic
        java.call("flood.start", name=self._name, topic=topic, namesrv=namesrv, size=200, keys=True, poll=1000)

    def progress(self) -> dict[str, Any]:
        found: dict[str, Any] = self._java.call("flood.progress", name=self._name)
        return found

    def refusals(self, kind: str) -> int:
        return int(self.progress()["refusals"].get(kind, 0))

    def is_acknowledged(self, count: int = 100) -> None:
        """Wait for more acknowledgements."""
        before = self.progress()["accepted"]
        wait_until(lambda: self.progress()["accepted"] >= before + count, "sends that are acknowledged", 60)

    def is_refused(self, kind: str, times: int = 1) -> None:
        """Wait for more refusals of a kind."""
        before = self.refusals(kind)
        wait_until(lambda: self.refusals(kind) >= before + times, f"a send that is answered {kind}")

    def acknowledged(self) -> list[tuple[int, int, int]]:
        """Queue, number and offset of each message that Java's client has seen acknowledged."""
        return [tuple(row) for row in self._java.call("flood.acknowledged", name=self._name)]

    def stop(self) -> dict[str, Any]:
        """Stop sending, wait for the consumer, and read all queues once more."""
        stopped: dict[str, Any] = self._java.call("flood.stop", name=self._name, wait=60_000)
        return stopped | self.verify()

    def verify(self) -> dict[str, Any]:
        """Read all queues, and compare them with what was acknowledged."""
        stored: dict[str, Any] = self._java.call("flood.verify", name=self._name)
        return stored

    def close(self) -> None:
        self._java.call("flood.close", name=self._name)


@pytest.mark.parametrize("rounds", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_javas_client_loses_nothing_acknowledged(
    request: pytest.FixtureRequest, tmp_path: Path, latest_java: JavaClient, rounds: int
) -> None:
    """The slave is killed and frozen under load. Then both are killed, and the slave becomes the master."""
    with running_pair(tmp_path, "trimq", "trimq", role="SYNC_MASTER", properties=PROMISED) as pair:
        topic = unique("Promised")
        probe.create_topic(pair.master.address, topic, QUEUES)
        load = Load(latest_java, topic, pair.names.address)
        for _ in range(rounds):
            load.is_acknowledged()
            with pair.slave.process.frozen():
                load.is_refused(LATE)
            load.is_acknowledged()
            pair.slave.kill()
            load.is_refused(REFUSED)
            pair.slave.start()
        load.is_acknowledged()
        with pair.slave.process.frozen():
            load.is_refused(LATE)
            load.is_refused(REFUSED)  # the master has closed the connection
        load.is_acknowledged()
        # What a frozen slave has not read is lost with it, and then with the master. The slave may have the last
        # message of each queue, without having said so; one answer more is that of a message that came later.
        with pair.slave.process.frozen():
            load.is_refused(LATE, QUEUES + 1)
            pair.slave.kill()
        pair.master.kill()
        acknowledged = load.acknowledged()
        copied = records_of(LogImage(pair.slave.store, LOG_FILE, killed=True), topic)
        leader = replica(pair.names, "trimq", pair.slave.directory, PROMISED | {"brokerRole": "SYNC_MASTER"})
        following = PROMISED | {"brokerRole": "SLAVE", "brokerId": "1"}
        follower = replica(pair.names, "trimq", pair.master.directory, following)
        with ended_afterwards(leader.process), ended_afterwards(follower.process):
            leader.start()
            load.is_refused(REFUSED)  # a new SYNC_MASTER has no slave yet
            # The old master has messages that were never acknowledged: it is no slave, until its store is empty.
            follower.start()
            wait_until(lambda: is_no_slave(leader, follower), "the old master is refused")
            load.is_refused(REFUSED)
            follower.stop()
            shutil.rmtree(follower.store)
            follower.start()
            load.is_acknowledged()
            found = load.stop()
            everything = load.acknowledged()
            load.close()
            wait_until(lambda: log_of(leader) == log_of(follower), "the new slave has the whole log")
        kept = records_of(live_image(leader.store, LOG_FILE), topic)
    request.config.stash.setdefault(REMARKS, []).append(f"{request.node.name}: {found}")
    assert len(acknowledged) > 500
    assert set(acknowledged) < set(everything)
    assert not missing(acknowledged, copied)
    assert not missing(everything, kept)
    assert found["wrong"] == 0, found["examples"]
    assert found["stored"] >= found["acknowledged"] == len(everything)
    assert found["undelivered"] == 0
    assert found["outOfOrder"] == 0
    # Stored, and no slave has confirmed it in time; or not stored. The rest had no master.
    refusals = found["refusals"]
    assert refusals[LATE] >= 4
    assert refusals[REFUSED] >= 4


@contextmanager
def sending(pair: Pair, sent: list[Sent]) -> Iterator[threading.Thread]:
    """Send in a thread, until a send is refused. ``sent`` gets the acknowledged ones."""

    def until_refused() -> None:
        with connected(*pair.wire) as wire:
            try:
                while True:
                    sent.extend(send(wire, len(sent), 1))
            except RefusedError:
                return

    thread = threading.Thread(target=until_refused, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)
    assert not thread.is_alive()


def lost(sent: list[Sent], image: LogImage) -> list[Sent]:
    """What was acknowledged and is not in the log."""
    bodies = {record.phy: record.body for record in image.records}
    return [one for one in sent if bodies.get(one.phy) != one.body]


def answer(wire: Wire) -> str:
    """What the master answers to a send; empty if it acknowledges it."""
    try:
        send(wire, 0, 1)
    except RefusedError as refused:
        return str(refused)
    return ""


def test_apaches_slave_has_what_was_acknowledged(tmp_path: Path) -> None:
    """It is killed under load, and frozen; the logs are the same bytes."""
    promised = PROMISED | {"mappedFileSizeCommitLog": str(SMALL_FILE)}
    with running_pair(tmp_path, "trimq", "apache", role="SYNC_MASTER", properties=promised) as pair:
        sent: list[Sent] = []
        with connected(*pair.wire) as wire:
            wait_until(lambda: not answer(wire), "the first send that is acknowledged", 60)
            with sending(pair, sent):
                wait_until(lambda: len(sent) >= 250, "sends that are acknowledged")
                pair.slave.kill()
            assert not lost(sent, LogImage(pair.slave.store, SMALL_FILE, killed=True))
            wait_until(lambda: ": 1 in-sync replicas not enough" in answer(wire), "a send that is refused")
            before = log_of(pair.master)
            assert ": 1 in-sync replicas not enough" in answer(wire)
            assert log_of(pair.master) == before
            pair.slave.start()
            wait_until(lambda: not answer(wire), "a slave that is back", 60)
            with pair.slave.process.frozen():
                assert ": 12 " in answer(wire)
            wait_until(lambda: not answer(wire), "a slave that goes on")
            sent += send(wire, len(sent), 20)
            wait_until(lambda: same_logs(pair), "the same logs")
        assert not lost(sent, live_image(pair.slave.store, SMALL_FILE))


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["5.3.3", "5.5.0"])
def test_apaches_slaves_take_transfers_of_a_mib(tmp_path: Path, version: str) -> None:
    """They catch up on many files at once."""
    properties = {"mappedFileSizeCommitLog": str(LOG_FILE), "haTransferBatchSize": str(1 << 20)}
    with running_pair(tmp_path, "trimq", "apache", properties=properties, version=version) as pair:
        with connected(*pair.wire) as wire:
            send(wire, 0, 10)
            wait_until(lambda: log_of(pair.slave) == log_of(pair.master), "the slave begins", 60)
            pair.slave.kill()
            for number in range(300):
                wire.send(TOPIC, number % 2, b"%d " % number + b"x" * 100_000, {"UNIQ_KEY": f"large-{number}"})
            pair.slave.start()
            wait_until(lambda: log_of(pair.slave) == log_of(pair.master), "the slave has it all", 100)
            send(wire, 10, 10)
            wait_until(lambda: log_of(pair.slave) == log_of(pair.master), "the slave follows")
        assert len(log_of(pair.slave)) > 7 * LOG_FILE
