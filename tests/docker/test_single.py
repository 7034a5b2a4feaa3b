"""One broker with its name server, as documented: clients on the host, in containers and in a second network.

The tests of this module share the broker and depend on their order: it is started, recreated, killed and stopped.
"""

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import ADDRESS, MAKE_SECONDS, PATIENCE, Docker, Remarks, flood, java_round_trip, job
from tests.interop.harness.drivers import java_client
from tests.interop.harness.waiting import wait_until
from tests.packaging.rust import demanded
from trimq.protocol.native import VERSION

pytestmark = [pytest.mark.partners, pytest.mark.timeout(700, func_only=True)]

BASE_ALLOWANCE = 150e6
"""Maximum number of bytes that the image may add to its base."""
CODE_ALLOWANCE = 16e6
"""Maximum number of bytes of the layer with TriMQ's own files, which is what an upgrade downloads, before compression.

Of 13 MB now, 4.5 are the sources, 7.6 their compiled forms, without which a start takes twice as long, and 0.8 the
native extension. It has no tests and no debug symbols. The dependencies are more than that."""
OUTSIDE, INSIDE = f"{ADDRESS}:9876", "broker:9876"
DOWN = "docker compose down"


def numbers(count: int) -> set[str]:
    return {str(number) for number in range(count)}


def test_the_image_is_small_and_not_root(image: Docker, tmp_path: Path) -> None:
    found, base = image.inspect("trimq"), image.inspect("trimq-base")
    assert found["Config"]["User"] == "trimq"
    assert found["Size"] - base["Size"] < BASE_ALLOWANCE
    in_image = ("docker", "run", "--rm", "--no-healthcheck")
    assert image.run(*in_image, "trimq", "id", "-un") == "trimq"
    assert "# TRIMQ_LISTEN_PORT: " in image.run(*in_image, "-e", "TRIMQ_LISTEN_PORT=7", "trimq", "mqbroker", "-p")
    (tmp_path / "broker.conf").write_text("listenPort=7\n")
    mounted = ("-v", f"{tmp_path}/broker.conf:/broker.conf:ro", "trimq", "mqbroker", "-c", "/broker.conf", "-p")
    assert re.search(r"^listenPort=7 .*# /broker.conf:1:", image.run(*in_image, *mounted), re.MULTILINE)


def test_only_the_last_layer_is_new_after_a_change_of_the_code(image: Docker) -> None:
    """Dependencies are in an earlier layer than the code, so that an upgrade downloads little."""
    layers = image.run(
        "docker", "history", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", "trimq"
    ).splitlines()
    copied = [int(line.split()[0]) for line in layers if "COPY" in line]
    assert len(copied) == 2
    assert copied[0] < CODE_ALLOWANCE < copied[1]


def test_the_image_has_the_native_extension_of_the_machine_that_made_it(image: Docker) -> None:
    """The extension built on this machine installs and loads in the image; without Rust the image has none."""
    code = "from trimq.protocol.native import NATIVE; print(NATIVE.status, NATIVE.reason)"
    output = image.run("docker", "run", "--rm", "--no-healthcheck", "trimq", "python3", "-c", code)
    if demanded():
        assert output == f"native {VERSION}"
    else:
        assert output.startswith("python (not installed) ")


@pytest.fixture(scope="module")
def single(image: Docker, tmp_path_factory: pytest.TempPathFactory, remarks: Remarks) -> Iterator[Docker]:
    try:
        output = image.type_in("operate docker", tmp_path_factory.mktemp("operate"), until=DOWN, timeout=MAKE_SECONDS)
        assert "TriMQ broker broker of DefaultCluster is up" in output
        assert f"runs           {'native' if demanded() else 'python'} " in output
        remarks(f"the broker is up {image.started_in('broker')} s after its container's start")
        yield image
    finally:
        print(image.compose("single", "logs", "--tail=60"))
        image.compose("single", "down", "-v")


def test_the_sdk_on_the_host_and_in_a_container(single: Docker) -> None:
    job("send", OUTSIDE, "FromHost", 50)
    single.job_in("trimq", "send", INSIDE, "FromContainer", 50)
    assert set(single.job_in("trimq", "read", INSIDE, "FromHost").split()) == numbers(50)
    assert set(job("read", OUTSIDE, "FromContainer").split()) == numbers(50)
    with urllib.request.urlopen(f"http://{ADDRESS}:5557/metrics") as answer:
        assert b'\nrocketmq_messages_in_total{cluster="DefaultCluster"' in answer.read()


def test_the_store_stays_when_containers_go(single: Docker, tmp_path: Path) -> None:
    job("send", OUTSIDE, "Stays", 50)
    single.type_in("operate docker", tmp_path, since=DOWN)
    assert not single.container("broker")
    single.type_in("readme", tmp_path, until=DOWN, timeout=MAKE_SECONDS)
    single.wait_healthy("broker")
    assert set(job("read", OUTSIDE, "Stays").split()) == numbers(50)


def test_a_killed_broker_comes_back_with_all_that_was_acknowledged(single: Docker) -> None:
    with flood(OUTSIDE, "Flood") as sender:
        sender.send(300)
        before = single.state("broker")
        os.kill(before["Pid"], signal.SIGKILL)
        wait_until(
            lambda: single.state("broker")["StartedAt"] != before["StartedAt"], "Docker starts it again", PATIENCE
        )
        single.wait_healthy("broker")
        sender.send(1)
        acknowledged = sender.end()
    assert acknowledged <= set(job("read", OUTSIDE, "Flood").split())


@pytest.mark.usefixtures("pipeline_image")
def test_clients_of_two_networks(single: Docker, tmp_path: Path) -> None:
    """The Java client and the SDK on the host, in the broker's network, and in another that the broker joins later."""
    single.run("docker", "network", "create", "elsewhere")
    try:
        single.run("docker", "network", "connect", "--alias", "broker", "elsewhere", single.container("broker"))
        with java_client("5.5.0", "JSON", tmp_path / "host") as java:
            java_round_trip(java, OUTSIDE, "JavaOnHost", 20)
        for network in ("trimq", "elsewhere"):
            with single.java_in(network, tmp_path / network) as java:
                java_round_trip(java, INSIDE, f"JavaIn-{network}", 20)
            single.job_in(network, "send", INSIDE, f"Sdk-{network}", 20)
            assert set(single.job_in(network, "read", INSIDE, f"Sdk-{network}").split()) == numbers(20)
            assert set(job("read", OUTSIDE, f"Sdk-{network}").split()) == numbers(20)
        single.run("docker", "network", "disconnect", "elsewhere", single.container("broker"))
    finally:
        single.run("docker", "network", "rm", "elsewhere")


def test_an_orderly_stop(single: Docker, tmp_path: Path, remarks: Remarks) -> None:
    began = time.monotonic()
    single.run("docker", "stop", single.container("broker"))
    remarks(f"an orderly stop takes {time.monotonic() - began:.1f} s")
    assert single.state("broker")["ExitCode"] == 0
    single.type_in("readme", tmp_path, since=DOWN)
    assert not single.container("broker")


def test_the_store_is_deleted_on_request(single: Docker) -> None:
    assert "trimqtest_store" in single.run("docker", "volume", "ls", "--quiet").splitlines()
    single.compose("single", "down", "-v")  # as documented below the manual's commands
    assert "trimqtest_store" not in single.run("docker", "volume", "ls", "--quiet").splitlines()
