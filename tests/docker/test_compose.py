"""The image and docker-compose.yml from outside: clients on the host and in containers, a kill, a restart.

Needs root on Debian, with the packages docker.io, docker-compose and debootstrap. The daemon that it starts keeps its
files in a temporary folder; no image registry is asked. TRIMQ_TEST_DOCKER=unix:///... names a daemon that runs already
and has the image trimq on the base trimq-base: for whoever works on these tests.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.partners, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("sdk_job.py")
ADDRESS = "127.7.0.1"  # of this machine like 127.0.0.1, but nobody else's ports are there
DAEMON = ("--storage-driver=vfs", "--iptables=false", "--ip6tables=false")
START_SECONDS = 60


class Docker:
    """The commands docker and docker-compose, for one daemon."""

    def __init__(self, host: str) -> None:
        self.environment = os.environ | {
            "DOCKER_HOST": host,
            "TRIMQ_ADDRESS": ADDRESS,
            "TRIMQ_METRICS_ADDRESS": ADDRESS,
            "COMPOSE_PROJECT_NAME": "trimqtest",
            "DOCKER_BUILDKIT": "0",
        }

    def run(self, *command: str, **environment: str) -> str:
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self.environment | environment, cwd=ROOT
        )
        assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}\n{run.stderr}"
        return run.stdout.strip()

    def compose(self, profile: str, *arguments: str) -> str:
        return self.run("docker-compose", "-f", "docker/docker-compose.yml", "--profile", profile, *arguments)

    def container(self, service: str) -> str:
        return self.run("docker", "ps", "-aq", "--filter", f"label=com.docker.compose.service={service}")

    def inspect(self, what: str) -> Any:
        (found,) = json.loads(self.run("docker", "inspect", what))
        return found

    def wait_healthy(self, *services: str) -> None:
        ends = time.monotonic() + START_SECONDS
        while True:
            states = {name: self.inspect(self.container(name))["State"]["Health"] for name in services}
            if all(state["Status"] == "healthy" for state in states.values()):
                return
            assert time.monotonic() < ends, json.dumps(states, indent=1)
            time.sleep(0.5)

    def job_in(self, network: str, *arguments: object) -> str:
        """The SDK in a container of its own."""
        return self.run(
            *("docker", "run", "--rm", "--network", network, "-v", f"{JOB}:/job.py:ro", "--no-healthcheck"),
            *("trimq", "python3", "/job.py", *map(str, arguments)),
        )


def job(*arguments: object) -> str:
    """The SDK on this machine."""
    command = [sys.executable, str(JOB), *map(str, arguments)]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    running = os.environ.get("TRIMQ_TEST_DOCKER")
    if running:
        yield Docker(running)
        return
    missing = [name for name in ("dockerd", "docker-compose", "debootstrap") if shutil.which(name) is None]
    if os.environ.get("CI"):
        assert not missing, f"missing: {missing}; apt-get install docker.io docker-compose debootstrap"
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and from Debian: {missing}")
    folder = tmp_path_factory.mktemp("docker")
    socket = f"unix://{folder}/docker.sock"
    paths = ("-p", f"{folder}/pid", f"--data-root={folder}/data", f"--exec-root={folder}/exec")
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", *DAEMON, *paths, "-H", socket],
            stdout=log,
            stderr=log,
        )
    found = Docker(socket)
    try:
        ends = time.monotonic() + 30
        while subprocess.run(["docker", "info"], env=found.environment, capture_output=True, check=False).returncode:
            assert daemon.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < ends, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield found
    finally:
        daemon.terminate()
        daemon.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def image(docker: Docker) -> Docker:
    """The image, on a base made of Debian's packages."""
    if "TRIMQ_TEST_DOCKER" not in os.environ:
        docker.run("docker/make-base", "trimq-base")
        docker.run("docker/build", "trimq", BASE="trimq-base", PYTHON=sys.executable)
    return docker


def test_the_image_is_small_and_not_root(image: Docker) -> None:
    found = image.inspect("trimq")
    base = image.inspect("trimq-base")
    print(f"image {found['Size'] / 1e6:.0f} MB, of which base {base['Size'] / 1e6:.0f} MB")
    assert found["Config"]["User"] == "trimq"
    assert found["Size"] - base["Size"] < 150e6
    assert image.run("docker", "run", "--rm", "--no-healthcheck", "trimq", "id", "-un") == "trimq"
    shown = image.run(
        "docker", "run", "--rm", "--no-healthcheck", "-e", "TRIMQ_LISTEN_PORT=7", "trimq", "mqbroker", "-p"
    )
    assert "# TRIMQ_LISTEN_PORT: " in shown


def test_single(image: Docker) -> None:
    began = time.monotonic()
    image.compose("single", "up", "-d")
    try:
        image.wait_healthy("broker")
        print(f"single is healthy after {time.monotonic() - began:.1f} s")
        outside = f"{ADDRESS}:9876"
        job("send", outside, "FromHost", 50)
        image.job_in("trimq", "send", "broker:9876", "FromContainer", 50)
        assert image.job_in("trimq", "read", "broker:9876", "FromHost", 50) == "50"
        assert job("read", outside, "FromContainer", 50) == "50"

        image.run("docker", "network", "create", "elsewhere")
        image.run("docker", "network", "connect", "--alias", "broker", "elsewhere", image.container("broker"))
        assert image.job_in("elsewhere", "read", "broker:9876", "FromHost", 50) == "50"

        with urllib.request.urlopen(f"http://{ADDRESS}:5557/metrics") as answer:
            assert b'\nrocketmq_messages_in_total{cluster="DefaultCluster"' in answer.read()

        container = image.container("broker")
        image.run("docker", "kill", container)
        image.run("docker", "start", container)
        image.wait_healthy("broker")
        assert job("read", outside, "FromHost", 50) == "50"
        assert job("read", outside, "FromContainer", 50) == "50"

        image.compose("single", "down")  # the volume stays
        image.compose("single", "up", "-d")
        image.wait_healthy("broker")
        assert job("read", outside, "FromHost", 50) == "50"
        began = time.monotonic()
        image.run("docker", "stop", image.container("broker"))
        assert time.monotonic() - began < 15
        assert image.inspect(image.container("broker"))["State"]["ExitCode"] == 0
    finally:
        print(image.compose("single", "logs", "--tail=40"))
        image.compose("single", "down", "-v")


def test_cluster(image: Docker) -> None:
    image.compose("cluster", "up", "-d")
    try:
        image.wait_healthy("namesrv-a", "namesrv-b", "broker-a", "broker-b")
        outside = f"{ADDRESS}:9876;{ADDRESS}:9886"
        job("send", outside, "Both", 80)
        assert image.job_in("trimq", "read", "namesrv-a:9876;namesrv-b:9876", "Both", 80) == "80"
        image.run("docker", "kill", image.container("namesrv-a"))
        image.run("docker", "kill", image.container("broker-b"))
        image.run("docker", "start", image.container("broker-b"))
        image.wait_healthy("broker-a", "broker-b")  # one name server is enough
        assert job("read", f"{ADDRESS}:9886", "Both", 80) == "80"
    finally:
        print(image.compose("cluster", "logs", "--tail=40"))
        image.compose("cluster", "down", "-v")
