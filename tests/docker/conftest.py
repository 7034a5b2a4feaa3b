"""A Docker daemon of the tests' own, and the images on a base made of Debian's packages: no image registry is asked.

Needs root on Debian, with the packages docker.io, docker-compose and debootstrap. TRIMQ_TEST_DOCKER=unix:///... names a
daemon that runs already; what it has of the images is not made again. For whoever works on these tests.

Daemon and images are fixtures of the session, outside the tests' limits of time; what makes them has limits of its own.
"""

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.docker.daemon import REMARKS, Docker
from tests.docker.own_daemon import SUITES, UnusableError, check_machine, own_daemon

RUNNING = "TRIMQ_TEST_DOCKER"
MAKE_SECONDS = 900
"""For an image or its wheels; a slow machine with two cores needs a third of that."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Sizes and times."""
    for line in config.stash.get(REMARKS, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def remarks(pytestconfig: pytest.Config) -> list[str]:
    return pytestconfig.stash.setdefault(REMARKS, [])


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory, remarks: list[str]) -> Iterator[Docker]:
    with ExitStack() as stack:
        if os.environ.get(RUNNING):
            found = Docker(os.environ[RUNNING])
        else:
            try:
                check_machine()
                found = stack.enter_context(own_daemon(tmp_path_factory.mktemp("docker"), remarks))
            except UnusableError as error:
                (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no containers can be run here: {error}")
        yield found


@pytest.fixture(scope="session")
def wheels(request: pytest.FixtureRequest, docker: Docker) -> Iterator[Future[str]]:
    """All wheels that the chosen tests need, made beside the base, which mostly waits for the network and the disk."""
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    target = "pipeline" if "pipeline_image" in needed else "server"
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(
            docker.run, "docker/make-wheels", target, timeout=MAKE_SECONDS, environment={"PYTHON": sys.executable}
        )


def made(docker: Docker, name: str, remarks: list[str], *command: str) -> None:
    """Runs what makes an image, and says how long that took and how large it is."""
    if os.environ.get(RUNNING) and docker.run("docker", "images", "-q", name):
        return
    began = time.monotonic()
    docker.run(*command, timeout=MAKE_SECONDS, environment=docker.build | {"SUITE": SUITES[sys.version_info[:2]]})
    size = docker.inspect(name)["Size"] / 1e6
    remarks.append(f"docker: image {name}: {size:.0f} MB, made in {time.monotonic() - began:.0f} s")


@pytest.fixture(scope="session")
def image(docker: Docker, wheels: Future[str], remarks: list[str]) -> Docker:
    """A daemon with the image of broker and name server."""
    made(docker, "trimq-base", remarks, "docker/make-base")
    began = time.monotonic()
    wheels.result()
    remarks.append(f"docker: the wheels are there {time.monotonic() - began:.0f} s after the base")
    made(docker, "trimq", remarks, "docker/build")
    return docker


@pytest.fixture(scope="session")
def pipeline_image(image: Docker, remarks: list[str]) -> Docker:
    """A daemon with the image of jobs too."""
    made(image, "trimq-pipeline", remarks, "docker/build", "pipeline")
    return image
