"""A Docker daemon for the tests, and images on a base built from Debian's packages, so that no registry is needed.

Needs root on Debian, with the packages docker.io, docker-compose and debootstrap. For work on these tests,
TRIMQ_TEST_DOCKER=unix:///... names a running daemon; images that it already has are not built again.

Daemon and images are session fixtures, so the tests' time limits do not include them; they have limits of their own.
"""

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.docker.daemon import MAKE_SECONDS, Docker, Remarks
from tests.docker.own_daemon import SUITES, UnusableError, check_machine, own_daemon

RUNNING = "TRIMQ_TEST_DOCKER"


@pytest.fixture(scope="session")
def remarks(pytestconfig: pytest.Config) -> Remarks:
    """Prints lines with the time, at once: a run that hangs or is ended shows how far it came, and what was slow."""
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    capture = pytestconfig.pluginmanager.get_plugin("capturemanager")

    def remark(line: str) -> None:
        if reporter is not None and capture is not None:
            with capture.global_and_fixture_disabled():
                reporter.write_line(f"{time.strftime('%H:%M:%S')} docker: {line}")

    return remark


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory, remarks: Remarks) -> Iterator[Docker]:
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
    """The wheels that the chosen tests need, built in parallel with the base, which mostly waits for I/O."""
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    target = "pipeline" if "pipeline_image" in needed else "server"
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(
            docker.run, "docker/make-wheels", target, timeout=MAKE_SECONDS, environment={"PYTHON": sys.executable}
        )


def made(docker: Docker, name: str, remarks: Remarks, *command: str) -> None:
    """Run the command that builds an image, and note its build time and size."""
    if os.environ.get(RUNNING) and docker.run("docker", "images", "-q", name):
        return
    began = time.monotonic()
    docker.run(*command, timeout=MAKE_SECONDS, environment=docker.build | {"SUITE": SUITES[sys.version_info[:2]]})
    size = docker.inspect(name)["Size"] / 1e6
    remarks(f"image {name}: {size:.0f} MB, made in {time.monotonic() - began:.0f} s")


@pytest.fixture(scope="session")
def image(docker: Docker, wheels: Future[str], remarks: Remarks) -> Docker:
    """A daemon with the image of broker and name server."""
    made(docker, "trimq-base", remarks, "docker/make-base")
    began = time.monotonic()
    wheels.result()
    remarks(f"the wheels are complete {time.monotonic() - began:.0f} s after the base")
    made(docker, "trimq", remarks, "docker/build")
    return docker


@pytest.fixture(scope="session")
def pipeline_image(image: Docker, remarks: Remarks) -> Docker:
    """A daemon that also has the image of the jobs."""
    made(image, "trimq-pipeline", remarks, "docker/build", "pipeline")
    return image


@pytest.fixture(scope="session")
def etcd_image(image: Docker, remarks: Remarks) -> Docker:
    """A daemon that also has the image of etcd."""
    made(image, "trimq-etcd", remarks, "docker/build", "etcd")
    return image


@pytest.fixture(scope="session")
def versitygw_image(image: Docker, remarks: Remarks) -> Docker:
    """A daemon that also has the image of an S3 server."""
    made(image, "trimq-versitygw", remarks, "docker/build", "versitygw")
    return image
