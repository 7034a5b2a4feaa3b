"""docker-compose.yml from outside: clients on the host, in a container and in a second network; kills and restarts."""

import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from tests.docker.daemon import ADDRESS, Docker, flood, java_round_trip, job
from tests.interop.harness.drivers import java_client
from tests.interop.harness.waiting import wait_until

pytestmark = [pytest.mark.partners, pytest.mark.timeout(600)]

BASE_ALLOWANCE = 150e6
"""Bytes that the image may add to its base."""


def numbers(count: int) -> set[str]:
    return {str(number) for number in range(count)}


def test_the_image_is_small_and_not_root(image: Docker) -> None:
    found, base = image.inspect("trimq"), image.inspect("trimq-base")
    assert found["Config"]["User"] == "trimq"
    assert found["Size"] - base["Size"] < BASE_ALLOWANCE
    in_image = ("docker", "run", "--rm", "--no-healthcheck")
    assert image.run(*in_image, "trimq", "id", "-un") == "trimq"
    assert "# TRIMQ_LISTEN_PORT: " in image.run(*in_image, "-e", "TRIMQ_LISTEN_PORT=7", "trimq", "mqbroker", "-p")


def test_only_the_last_layer_is_new_after_a_change_of_the_code(image: Docker) -> None:
    """Dependencies before code: what a user downloads after an upgrade is small."""
    layers = image.run(
        "docker", "history", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", "trimq"
    ).splitlines()
    copied = [int(line.split()[0]) for line in layers if "COPY" in line]
    assert len(copied) == 2
    assert copied[0] < 8e6 < copied[1]


def test_single(image: Docker, remarks: list[str]) -> None:
    outside, inside = f"{ADDRESS}:9876", "broker:9876"
    with image.up("single", "broker") as seconds:
        remarks.append(f"docker: profile single is healthy after {seconds:.1f} s")
        job("send", outside, "FromHost", 50)
        image.job_in("trimq", "send", inside, "FromContainer", 50)
        assert set(image.job_in("trimq", "read", inside, "FromHost").split()) == numbers(50)
        assert set(job("read", outside, "FromContainer").split()) == numbers(50)
        with urllib.request.urlopen(f"http://{ADDRESS}:5557/metrics") as answer:
            assert b'\nrocketmq_messages_in_total{cluster="DefaultCluster"' in answer.read()

        image.compose("single", "down")  # the volume stays
        image.compose("single", "up", "-d")
        image.wait_healthy("broker")
        assert set(job("read", outside, "FromHost").split()) == numbers(50)
        began = time.monotonic()
        image.run("docker", "stop", image.container("broker"))
        remarks.append(f"docker: an orderly stop takes {time.monotonic() - began:.1f} s")
        assert image.state("broker")["ExitCode"] == 0


def test_a_killed_broker_comes_back_with_all_that_was_acknowledged(image: Docker) -> None:
    outside = f"{ADDRESS}:9876"
    with image.up("single", "broker"), flood(outside, "Flood") as sender:
        assert sender.stdout is not None
        acknowledged = [sender.stdout.readline().strip() for _ in range(300)]
        before = image.state("broker")
        os.kill(before["Pid"], signal.SIGKILL)
        wait_until(lambda: image.state("broker")["StartedAt"] != before["StartedAt"], "Docker starts it again", 60)
        image.wait_healthy("broker")
        rest, _ = sender.communicate(timeout=60)
        acknowledged += rest.split()
        assert len(acknowledged) > 300
        assert set(acknowledged) <= set(job("read", outside, "Flood").split())


@pytest.mark.usefixtures("pipeline_image")
def test_clients_of_two_networks(image: Docker, tmp_path: Path) -> None:
    """The Java client and the SDK, on the host, beside the broker and in a network that the broker is put into."""
    with image.up("single", "broker"):
        image.run("docker", "network", "create", "elsewhere")
        try:
            image.run("docker", "network", "connect", "--alias", "broker", "elsewhere", image.container("broker"))
            with java_client("5.5.0", "JSON", tmp_path / "host") as java:
                java_round_trip(java, f"{ADDRESS}:9876", "JavaOnHost", 20)
            for network in ("trimq", "elsewhere"):
                with image.java_in(network, tmp_path / network) as java:
                    java_round_trip(java, "broker:9876", f"JavaIn-{network}", 20)
                image.job_in(network, "send", "broker:9876", f"Sdk-{network}", 20)
                assert set(image.job_in(network, "read", "broker:9876", f"Sdk-{network}").split()) == numbers(20)
                assert set(job("read", f"{ADDRESS}:9876", f"Sdk-{network}").split()) == numbers(20)
            image.run("docker", "network", "disconnect", "elsewhere", image.container("broker"))
        finally:
            image.run("docker", "network", "rm", "elsewhere")


def test_cluster(image: Docker, tmp_path: Path, remarks: list[str]) -> None:
    outside = f"{ADDRESS}:9876;{ADDRESS}:9886"
    began = time.time()
    with image.up("cluster", "namesrv-a", "namesrv-b", "broker-a", "broker-b") as seconds:
        remarks.append(f"docker: profile cluster is healthy after {seconds:.1f} s")
        happened = image.events(began)
        for name in ("broker-a", "broker-b"):
            first = happened.index(f"{name} start")
            assert {"namesrv-a health_status: healthy", "namesrv-b health_status: healthy"} <= set(happened[:first])
        with java_client("5.5.0", "ROCKETMQ", tmp_path) as java:
            java_round_trip(java, outside, "Java", 40)
        with flood(outside, "Both") as sender:
            assert sender.stdout is not None
            acknowledged = [sender.stdout.readline().strip() for _ in range(300)]
            image.run("docker", "kill", image.container("namesrv-a"))
            image.run("docker", "kill", image.container("broker-b"))
            acknowledged += [sender.stdout.readline().strip() for _ in range(100)]  # broker-a goes on
            image.run("docker", "start", image.container("broker-b"))
            image.wait_healthy("broker-a", "broker-b")  # one name server is enough
            rest, _ = sender.communicate(timeout=60)
        acknowledged += rest.split()
        assert set(acknowledged) <= set(job("read", f"{ADDRESS}:9886", "Both").split())
        inside = set(image.job_in("trimq", "read", "namesrv-b:9876", "Both").split())
        assert set(acknowledged) <= inside
