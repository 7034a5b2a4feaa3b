"""Apache's brokers under Apache's controllers: what tests of controller mode are built on. And both kinds of mqadmin.

The tests of this file take turns on one group. Each leaves both of its brokers running, and in the SyncStateSet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.interop.harness import probe
from tests.interop.harness.controllers import Group, running_group
from tests.interop.harness.drivers import mqadmin
from tests.interop.harness.servers import Broker, Cluster
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import Sent, connected
from trimq.client.mqadmin import main

TOPIC = "Grouped"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A group of two of Apache's brokers."""
    with running_group(tmp_path_factory.mktemp("group"), ["apache", "apache"]) as running:
        probe.create_topic(running.wait_for_master().address, TOPIC, 1)
        yield running


def both(group: Group) -> tuple[Broker, Broker]:
    """The master, and the other one."""
    master = group.wait_for_master()
    return master, next(one for one in group.brokers if one is not master)


def store(group: Group) -> Sent:
    """Store a message on both brokers, whose offsets are equal before and afterwards."""
    master, other = both(group)
    with connected("127.0.0.1", master.port) as wire:
        sent = wire.send(TOPIC, 0, b"a message", {})
    # with its defaults Apache's master does not wait for the other members before it answers
    with connected("127.0.0.1", other.port) as wire:
        wait_until(lambda: wire.offsets(TOPIC, 0)[1] == sent.offset + 1, "the message on the slave")
    return sent


def ours(group: Group, command: str, *words: str) -> Result:
    return CliRunner().invoke(main, [command, *words, "-n", group.names.address])


def answered(group: Group, command: str, *words: str) -> Any:
    result = ours(group, command, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def numbers(group: Group) -> dict[str, int]:
    """The ids at the controllers, by address."""
    state = answered(group, "getSyncStateSet", "-a", group.controllers.addresses, "-b", group.name)[group.name]
    return {one["brokerAddress"]: one["brokerId"] for one in state["brokers"]}


def elect(group: Group, broker: Broker, *words: str) -> Result:
    at = ["-a", group.controllers.addresses, "-bn", group.name, "-c", "DefaultCluster"]
    return ours(group, "electMaster", *at, "-b", str(numbers(group)[broker.address]), *words)


def test_when_the_master_is_killed_the_other_one_is_elected(
    group: Group, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, second = both(group)
    epoch = group.controllers.replicas(group.name)["masterEpoch"]
    sent = store(group)  # 5.5.0 notes no new epoch if the old one has no message
    with mqadmin(Cluster([group.names], group.brokers), tmp_path_factory.mktemp("mqadmin")) as admin:
        shown = admin.run("getSyncStateSet", "-a", group.controllers.addresses, "-b", group.name)
        assert f"#MasterAddr\t{first.address}\n#MasterEpoch\t{epoch}\n" in shown
        assert "#SyncStateSetNums\t2" in shown
        assert f"brokerAddress='{second.address}'" in shown
        first.kill()
        wait_until(lambda: group.master() is second, "the other one is the master")
        assert group.controllers.replicas(group.name)["masterEpoch"] == epoch + 1
        shown = admin.run("getBrokerEpoch", "-b", group.name)
        assert f"#brokerAddr\t{second.address}\n#brokerId\t0" in shown
        assert f"epoch={epoch + 1}" in shown
    with connected("127.0.0.1", second.port) as wire:
        assert sent.body in wire.view(sent.phy)
    first.start()
    group.wait_for_set(first, second)
    assert group.master() is second


def test_our_mqadmin_shows_what_apaches_controller_knows(group: Group) -> None:
    master, other = both(group)
    store(group)
    at = ("-a", group.controllers.addresses)
    state = answered(group, "getSyncStateSet", *at, "-c", "DefaultCluster")[group.name]
    assert state["masterAddress"] == master.address
    shown = {one["brokerAddress"]: (one["inSync"], one["alive"]) for one in state["brokers"]}
    assert shown == {master.address: (True, True), other.address: (True, True)}
    rows = answered(group, "getBrokerEpoch", "-b", group.name)
    assert {row["Addr"] for row in rows} == {master.address, other.address}
    last = {row["Addr"]: row for row in rows}
    assert last[master.address]["End Offset"] == last[other.address]["End Offset"] > 0
    assert (last[master.address]["BID"], last[master.address]["Epoch"]) == (0, state["masterEpoch"])
    found = answered(group, "getControllerMetaData", *at)
    assert found["controllerLeaderAddress"] == group.controllers.addresses
    assert found["peers"] == [f"n0:{group.controllers.addresses}"]
    for value in ("4", "3"):
        changed = ours(group, "updateControllerConfig", *at, "-k", "electMasterMaxRetryCount", "-v", value)
        assert changed.exit_code == 0, changed.output
        assert answered(group, "getControllerConfig", *at)["electMasterMaxRetryCount"] == value
    refused = ours(group, "updateControllerConfig", *at, "-k", "configStorePath", "-v", "elsewhere")
    assert (refused.exit_code, "NO_PERMISSION" in refused.output) == (1, True)


def test_our_mqadmin_elects_a_member_and_keeps_the_master(group: Group) -> None:
    master, other = both(group)
    store(group)
    kept = elect(group, master)
    assert (kept.exit_code, "is the master already" in kept.output) == (0, True), kept.output
    assert group.master() is master
    elected = elect(group, other)
    assert elected.exit_code == 0, elected.output
    assert f"#BrokerMasterAddr  : {other.address}" in elected.output
    wait_until(lambda: group.master() is other, "the elected one is the master")
    group.wait_for_set(master, other)


def test_our_mqadmin_removes_only_a_broker_that_is_gone(group: Group) -> None:
    master, other = both(group)
    before = numbers(group)
    at = ["-a", group.controllers.addresses, "-bn", group.name, "-c", "DefaultCluster"]
    refused = ours(group, "cleanBrokerMetadata", *at, "-b", str(before[other.address]))
    assert (refused.exit_code, "INVALID_CLEAN_BROKER_METADATA" in refused.output) == (1, True), refused.output
    assert numbers(group) == before
    assert group.master() is master


def test_our_mqadmin_elects_a_broker_outside_of_the_set_only_with_two_permissions(group: Group) -> None:
    master, other = both(group)
    store(group)
    other.kill()
    group.wait_for_set(master)
    with connected("127.0.0.1", master.port) as wire:
        lost = wire.send(TOPIC, 0, b"only on the master", {})
    master.kill()
    other.process.start()  # no start(): it is not registered at the name server, as it has no master
    wait_until(lambda: other.address in group.alive(), "heartbeats of the other one")
    refused = elect(group, other)
    assert (refused.exit_code, "--unclean" in refused.output) == (1, True), refused.output
    assert f"unknown: {master.address} does not answer" in refused.output
    refused = elect(group, other, "--unclean")
    assert (refused.exit_code, "-k enableElectUncleanMaster -v true" in refused.output) == (1, True), refused.output
    at = ("-a", group.controllers.addresses, "-k", "enableElectUncleanMaster")
    assert ours(group, "updateControllerConfig", *at, "-v", "true").exit_code == 0
    elected = elect(group, other, "--unclean")
    assert elected.exit_code == 0, elected.output
    assert ours(group, "updateControllerConfig", *at, "-v", "false").exit_code == 0
    wait_until(lambda: group.master() is other, "the elected one is the master")
    with connected("127.0.0.1", other.port) as wire:
        assert wire.offsets(TOPIC, 0)[1] == lost.offset
    master.start()
    group.wait_for_set(master, other)
