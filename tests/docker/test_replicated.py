"""A SYNC_MASTER and its slave as documented: the slave is killed and frozen while the SDK sends."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import ADDRESS, Docker, flood, job

pytestmark = [pytest.mark.partners, pytest.mark.timeout(600, func_only=True)]

OUTSIDE, INSIDE = f"{ADDRESS}:9876", "namesrv:9876"
NETWORK = "trimq-replicated"
REFUSED, LATE = "1", "12"
"""Codes of a message that is not stored because no slave is there, and of one that is stored, not replicated."""


@pytest.fixture
def pair(image: Docker, tmp_path: Path) -> Iterator[Docker]:
    try:
        image.type_in("operate replicated", tmp_path)
        image.wait_healthy("namesrv", "master", "slave")
        yield image
    finally:
        print(image.compose("replicated", "logs", "--tail=60"))
        image.compose("replicated", "down", "-v")


def test_sends_wait_for_the_slave(pair: Docker) -> None:
    slave = pair.container("slave")
    with flood(OUTSIDE, "Pair") as sender:
        sender.send(100)
        pair.run("docker", "kill", slave)
        sender.is_refused(REFUSED)
        pair.run("docker", "start", slave)
        sender.send(100)
        pair.run("docker", "pause", slave)
        sender.is_refused(LATE)
        pair.run("docker", "unpause", slave)
        sender.send(100)
        acknowledged = sender.end()
    assert acknowledged <= set(job("read", OUTSIDE, "Pair").split())
    assert acknowledged <= set(pair.job_in(NETWORK, "read", INSIDE, "Pair").split())
    for name in ("master", "slave"):
        found = pair.inspect(pair.container(name))
        assert set(found["NetworkSettings"]["Networks"]) == {NETWORK}
        assert "10912/tcp" not in found["NetworkSettings"]["Ports"]
