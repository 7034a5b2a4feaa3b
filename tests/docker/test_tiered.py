"""A broker with its history in a bucket, as documented: its volume is lost, and it goes on with what was uploaded."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import ADDRESS, MAKE_SECONDS, PATIENCE, Docker, job
from tests.interop.harness.waiting import wait_until

pytestmark = [pytest.mark.partners, pytest.mark.timeout(700, func_only=True)]

OUTSIDE, INSIDE = f"{ADDRESS}:9876", "tiered-broker:9876"


@pytest.fixture
def tiered(versitygw_image: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    docker = versitygw_image
    monkeypatch.setitem(docker.environment, "TRIMQ_TIERED_STORE_GROUP_COMMIT_TIMEOUT", "500")
    try:
        docker.type_in("operate tiered_docker", tmp_path, timeout=MAKE_SECONDS)
        docker.wait_healthy("object-store", "tiered-broker")
        yield docker
    finally:
        print(docker.compose("tiered", "logs", "--tail=60"))
        docker.compose("tiered", "down", "-v")


def waiting() -> int:
    """The messages that wait for their upload."""
    with urllib.request.urlopen(f"http://{ADDRESS}:5557/metrics") as answer:
        found = re.search(r"^trimq_tiered_store_messages_waiting (\d+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_a_broker_that_has_lost_its_volume_goes_on_with_its_bucket(tiered: Docker) -> None:
    job("send", OUTSIDE, "Kept", 200)
    tiered.job_in("trimq", "send", INSIDE, "Kept2", 50)
    wait_until(lambda: waiting() == 0, "everything is uploaded", PATIENCE)
    tiered.run("docker", "rm", "-f", tiered.container("tiered-broker"))
    tiered.run("docker", "volume", "rm", "trimqtest_store-tiered")
    tiered.compose("tiered", "up", "-d")
    tiered.wait_healthy("tiered-broker")
    assert len(set(job("read", OUTSIDE, "Kept").split())) == 200
    job("send", OUTSIDE, "Kept2", 60)
    assert len(tiered.job_in("trimq", "read", INSIDE, "Kept2").split()) == 60
    # The image has what botocore needs of S3 and of roles; the other services of AWS were left out.
    in_broker = ("docker", "exec", tiered.container("tiered-broker"))
    assert json.loads(tiered.run(*in_broker, "mqstore", "tiered", "gc", "--json"))["problem"] == ""
    services = "import botocore.session as b; print(*b.Session().get_available_services())"
    assert tiered.run(*in_broker, "python3", "-c", services) == "s3 sts"
    # The server is reached by the broker only, and no key stands in the broker's log.
    assert tiered.inspect(tiered.container("object-store"))["NetworkSettings"]["Networks"].keys() == {"trimq-objects"}
    assert "only-the-broker-gets-here" not in tiered.run("docker", "logs", tiered.container("tiered-broker"))
