"""Controllers elect another master when the present one is killed, frozen, stopped or cut off: nothing is lost.

Three brokers, three controllers on an etcd of three members, and Java's client, which sends and consumes all the time.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness import REMARKS, probe
from tests.interop.harness.drivers import JavaClient, unique
from tests.interop.harness.failover import LOG_FILE, Group, running_group
from tests.interop.harness.log_image import live_image
from tests.interop.harness.networks import Host, network
from tests.interop.harness.servers import Broker
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import connected
from tests.interop.test_replication import log_of
from tests.interop.test_sync_master import Load, missing, records_of

QUEUES = 4
Fault = Callable[[Group, Broker], None]


def _kill(group: Group, master: Broker) -> None:
    master.kill()
    group.wait_for_master(but=master)
    master.start()


def _freeze(group: Group, master: Broker) -> None:
    with master.process.frozen():
        group.wait_for_master(but=master)


def _stop(group: Group, master: Broker) -> None:
    assert master.stop() == 0
    group.wait_for_master(but=master)
    master.start()


def _kill_with_etcds_leader(group: Group, master: Broker) -> None:
    assert group.etcd is not None
    leader = group.etcd.wait_for_leader()
    leader.process.kill()
    master.kill()
    group.wait_for_master(but=master)
    leader.process.start()
    master.start()
    group.etcd.wait_for_leader()


def _kill_with_a_controller(group: Group, master: Broker) -> None:
    controller = group.controllers[0]
    controller.process.kill()
    _kill(group, master)
    controller.start()


FAULTS: list[Fault] = [_kill, _freeze, _stop, _kill_with_etcds_leader, _kill_with_a_controller]


def nothing_is_lost(group: Group, load: Load) -> dict[str, Any]:
    """Stop sending, and check what was acknowledged: by a consumer, by reads, and in the log of all brokers."""
    load.is_acknowledged()
    found = load.stop()
    everything = load.acknowledged()
    load.close()
    master = group.wait_for_master()
    for broker in group.brokers:
        wait_until(lambda broker=broker: log_of(broker) == log_of(master), f"the whole log of {broker.port}")  # type: ignore[misc]
    assert len(everything) > 500
    assert not missing(everything, records_of(live_image(master.store, LOG_FILE), load.topic))
    assert found["wrong"] == 0, found["examples"]
    assert found["stored"] >= found["acknowledged"] == len(everything)
    assert found["undelivered"] == 0
    assert found["outOfOrder"] == 0
    return found


@pytest.mark.slow
@pytest.mark.timeout(900, func_only=True)
@pytest.mark.parametrize("rounds", [20, pytest.param(60, marks=pytest.mark.nightly)])
def test_nothing_acknowledged_is_lost(
    request: pytest.FixtureRequest, tmp_path: Path, latest_java: JavaClient, rounds: int
) -> None:
    with running_group(tmp_path) as group:
        topic = unique("Failover")
        probe.create_topic(group.wait_for_master().address, topic, QUEUES)
        load = Load(latest_java, topic, group.names.address)
        load.is_acknowledged()
        took: list[float] = []
        for number in range(rounds):
            fault = FAULTS[number % len(FAULTS)]
            began = time.monotonic()
            fault(group, group.wait_for_master())
            load.is_acknowledged(1)
            took.append(time.monotonic() - began)
            group.wait_for_all()
        found = nothing_is_lost(group, load)
    request.config.stash.setdefault(REMARKS, []).append(
        f"{request.node.name}: {found}; seconds a round: {sorted(round(one, 1) for one in took)}"
    )


def _post(connection: socket.socket, topic: str, body: bytes) -> None:
    """Write a send, without waiting for its answer."""
    fields = {
        "producerGroup": "frozen", "topic": topic, "defaultTopic": "TBW102", "defaultTopicQueueNums": "4",
        "queueId": "0", "sysFlag": "0", "bornTimestamp": "0", "flag": "0", "properties": "",
    }  # fmt: skip
    command = {"code": 10, "language": "PYTHON", "version": 479, "opaque": 7, "flag": 0, "extFields": fields}
    header = json.dumps(command).encode()
    connection.sendall(struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body)


def _answer(connection: socket.socket) -> int | None:
    """The code of the answer; None if the connection was closed instead."""
    data = b""
    try:
        while len(data) < 8 or len(data) < 4 + struct.unpack_from(">I", data)[0]:
            more = connection.recv(65536)
            if not more:
                return None
            data += more
    except ConnectionError:
        return None
    length = struct.unpack_from(">I", data, 4)[0] & 0xFFFFFF
    return int(json.loads(data[8 : 8 + length])["code"])


@pytest.mark.slow
@pytest.mark.timeout(180, func_only=True)
def test_a_master_that_was_frozen_acknowledges_nothing_more(tmp_path: Path) -> None:
    # Apache's master answers this send with success, and the message is lost (with its defaults).
    with running_group(tmp_path, controllers=1, etcd_members=1) as group:
        old = group.wait_for_master()
        topic = unique("Frozen")
        probe.create_topic(old.address, topic, 1)
        with connected("127.0.0.1", old.port) as wire, socket.create_connection(("127.0.0.1", old.port)) as late:
            late.settimeout(30)
            first = wire.send(topic, 0, b"before", {})
            with old.process.frozen():
                new = group.wait_for_master(but=old)
                with connected("127.0.0.1", new.port) as other:
                    second = other.send(topic, 0, b"during", {})
                _post(late, topic, b"late")
            assert _answer(late) != 0
        group.wait_for_all()
        with connected("127.0.0.1", new.port) as wire:
            third = wire.send(topic, 0, b"after", {})
        assert [found.offset for found in (first, second, third)] == [0, 1, 2]
        for broker in group.brokers:
            wait_until(lambda broker=broker: log_of(broker) == log_of(new), f"the whole log of {broker.port}")  # type: ignore[misc]
        kept = [record.body for record in live_image(old.store, LOG_FILE).of(topic)]
    assert kept == [b"before", b"during", b"after"]


@contextmanager
def _by_all(broker: Host, control: Host, others: list[Host]) -> Iterator[None]:
    with ExitStack() as stack:
        for other in (control, *others):
            stack.enter_context(other.cut_from(broker, back=False))
        yield


CUTS = {
    "from everything": lambda broker, control, others: broker.cut_from(control, *others),
    "from the controller": lambda broker, control, others: broker.cut_from(control),
    "to the controller": lambda broker, control, others: broker.cut_from(control, back=False),
    "by the controller": lambda broker, control, others: control.cut_from(broker, back=False),
    "to its slaves": lambda broker, control, others: broker.cut_from(*others, back=False),
    "by its slaves and the controller": _by_all,
}
"""Each one cuts the master off, in a way."""


@pytest.mark.slow
@pytest.mark.timeout(600, func_only=True)
def test_nothing_acknowledged_is_lost_when_links_are_cut(
    request: pytest.FixtureRequest, tmp_path: Path, latest_java: JavaClient
) -> None:
    # Clients still reach the master that is cut off.
    with network(["control", "a", "b", "c"]) as hosts, running_group(tmp_path, etcd_members=0, hosts=hosts) as group:
        control, *places = hosts[1:]
        topic = unique("Cut")
        probe.create_topic(group.wait_for_master().address, topic, QUEUES)
        load = Load(latest_java, topic, group.names.address)
        load.is_acknowledged()
        for name, cut in CUTS.items():
            old = group.wait_for_master()
            place = places[group.brokers.index(old)]
            others = [other for other in places if other is not place]
            with cut(place, control, others):
                if name == "to its slaves":  # it still leads, and takes them out
                    wait_until(lambda old=old: group.in_sync() == {old.address}, "a set of one")  # type: ignore[misc]
                else:
                    group.wait_for_master(but=old)
                load.is_acknowledged(1)
            group.wait_for_all()
        found = nothing_is_lost(group, load)
    request.config.stash.setdefault(REMARKS, []).append(f"{request.node.name}: {found}")
