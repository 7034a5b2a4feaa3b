"""A Docker daemon of the tests' own, and the images on a base made of Debian's packages: no image registry is asked.

Needs root on Debian, with the packages docker.io, docker-compose and debootstrap. TRIMQ_TEST_DOCKER=unix:///... names a
daemon that runs already; what it has of the images is not made again. For whoever works on these tests.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import REMARKS, Docker
from tests.interop.harness.waiting import wait_until

DAEMON = ("--bridge=none", "--iptables=false", "--ip6tables=false")
"""Works where the kernel has no packet filter, and leaves no bridge behind: compose makes its own.

The storage driver is Docker's choice: overlay2, or vfs where that does not work, which copies the whole image for each
container.
"""
RUNNING = "TRIMQ_TEST_DOCKER"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Sizes and times."""
    for line in config.stash.get(REMARKS, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def remarks(pytestconfig: pytest.Config) -> list[str]:
    return pytestconfig.stash.setdefault(REMARKS, [])


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    running = os.environ.get(RUNNING)
    if running:
        yield Docker(running)
        return
    missing = [name for name in ("dockerd", "docker-compose", "debootstrap") if shutil.which(name) is None]
    if os.environ.get("CI"):
        assert not missing, f"missing: {missing}; apt-get install docker.io docker-compose debootstrap"
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and from Debian: {missing}")
    folder = tmp_path_factory.mktemp("docker")
    found = Docker(f"unix://{folder}/docker.sock")
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(daemon_command(folder), stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(found, daemon, folder / "log"), "the Docker daemon answers")
        yield found
    finally:
        daemon.terminate()
        daemon.wait(30)
        subprocess.run(["umount", str(folder / "exec" / "netns" / "default")], check=False)  # the daemon forgets it
        shutil.rmtree(folder, ignore_errors=True)


def daemon_command(folder: Path) -> list[str]:
    paths = ("-p", f"{folder}/pid", f"--data-root={folder}/data", f"--exec-root={folder}/exec")
    return ["dockerd", *DAEMON, *paths, "-H", f"unix://{folder}/docker.sock"]


def answers(docker: Docker, daemon: subprocess.Popen[bytes], log: Path) -> bool:
    assert daemon.poll() is None, log.read_text()[-3000:]
    asked = subprocess.run(["docker", "info"], env=docker.environment, capture_output=True, check=False)
    return asked.returncode == 0


def made(docker: Docker, name: str, remarks: list[str], *command: str) -> None:
    """Runs what makes an image, and says how long that took and how large it is."""
    if RUNNING in os.environ and docker.run("docker", "images", "-q", name):
        return
    began = time.monotonic()
    environment = {"BASE": "trimq-base", "PYTHON": sys.executable, "OPTIONS": "--network=host"}
    docker.run(*command, timeout=500, **environment)
    size = docker.inspect(name)["Size"] / 1e6
    remarks.append(f"docker: image {name}: {size:.0f} MB, made in {time.monotonic() - began:.0f} s")


@pytest.fixture(scope="session")
def image(docker: Docker, remarks: list[str]) -> Docker:
    """A daemon with the image of broker and name server."""
    made(docker, "trimq-base", remarks, "docker/make-base")
    made(docker, "trimq", remarks, "docker/build")
    return docker


@pytest.fixture(scope="session")
def pipeline_image(image: Docker, remarks: list[str]) -> Docker:
    """A daemon with the image of jobs too."""
    made(image, "trimq-pipeline", remarks, "docker/build", "pipeline")
    return image
