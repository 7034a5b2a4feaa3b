"""A group under controllers as documented: its master and a member of etcd are killed while the SDK sends."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import ADDRESS, PATIENCE, Docker, Remarks, flood, job
from tests.interop.harness.waiting import wait_until

pytestmark = [pytest.mark.partners, pytest.mark.timeout(900, func_only=True)]

OUTSIDE = f"{ADDRESS}:9876;{ADDRESS}:9886;{ADDRESS}:9896"
INSIDE = "namesrv-1:9876;namesrv-2:9876;namesrv-3:9876"
CONTROLLERS = "controller-1:9878;controller-2:9878;controller-3:9878"
NETWORK = "trimq-ha"
THREE = (1, 2, 3)
SERVICES = [f"{kind}-{number}" for kind in ("etcd", "controller", "namesrv", "replica") for number in THREE]


@pytest.fixture
def group(etcd_image: Docker, tmp_path: Path, remarks: Remarks) -> Iterator[Docker]:
    try:
        began = time.time()
        etcd_image.type_in("operate ha", tmp_path, since="docker compose up")
        etcd_image.wait_healthy(*SERVICES)
        wait_until(lambda: len(members(etcd_image)) == len(THREE), "all members of the set", PATIENCE)
        remarks(f"profile ha is complete after {time.time() - began:.1f} s")
        yield etcd_image
    finally:
        print(etcd_image.compose("ha", "logs", "--tail=60"))
        etcd_image.compose("ha", "down", "-v")


def state(docker: Docker) -> dict[str, object]:
    """What a controller knows of the group, by the mqadmin in its container."""
    command = ("mqadmin", "getSyncStateSet", "-a", CONTROLLERS, "-b", "group", "--json")
    found: dict[str, object] = json.loads(docker.run("docker", "exec", docker.container("controller-2"), *command))
    return found["group"]  # type: ignore[return-value]


def members(docker: Docker) -> set[str]:
    """The services in the SyncStateSet."""
    brokers = state(docker)["brokers"]
    assert isinstance(brokers, list)
    return {one["brokerAddress"].partition(":")[0] for one in brokers if one["inSync"]}


def master(docker: Docker) -> str:
    """The service that is the master; the last one while none is elected."""
    return str(state(docker)["masterAddress"]).partition(":")[0]


def test_a_killed_master_is_replaced_also_without_one_member_of_etcd_and_one_controller(group: Docker) -> None:
    first = master(group)
    with flood(OUTSIDE, "Group") as sender:
        sender.send(100)
        for service in ("etcd-1", "controller-1", "namesrv-1", first):
            group.run("docker", "kill", group.container(service))
        sender.send(100)
        assert master(group) != first
        for service in ("etcd-1", "controller-1", "namesrv-1", first):
            group.run("docker", "start", group.container(service))
        wait_until(lambda: len(members(group)) == len(THREE), "all members of the set", PATIENCE)
        sender.send(100)
        acknowledged = sender.end()
    group.wait_healthy(*SERVICES)
    assert acknowledged <= set(job("read", OUTSIDE, "Group").split())
    assert acknowledged <= set(group.job_in(NETWORK, "read", INSIDE, "Group").split())
    for number in THREE:
        found = group.inspect(group.container(f"etcd-{number}"))
        assert set(found["NetworkSettings"]["Networks"]) == {"trimq-etcd"}
        assert not any(found["NetworkSettings"]["Ports"].values())
