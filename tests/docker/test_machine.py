"""What is said where no containers can be run: with CI=true a failure, in the first seconds, that names the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.daemon import ROOT

pytestmark = [pytest.mark.partners, pytest.mark.timeout(300)]

ONE = "tests/docker/test_single.py::test_the_image_is_small_and_not_root"
REASON = "no containers can be run here: "
FORBIDDEN = REASON + "the kernel gives root no namespaces (CAP_SYS_ADMIN is missing?): unshare"
MISSING = REASON + "dockerd, docker, docker-compose, debootstrap not found; apt-get install debootstrap docker-compose"


def told(*before: str, **environment: str) -> str:
    command = [*before, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "partners", ONE]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert run.returncode == (1 if environment["CI"] else 0), run.stdout + run.stderr
    return run.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="has no right that could be taken away")
@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_a_machine_that_forbids_containers(ci: str, outcome: str) -> None:
    said = told("setpriv", "--bounding-set", "-sys_admin", "--", CI=ci, TRIMQ_TEST_DOCKER="")
    assert FORBIDDEN in said
    assert outcome in said


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_a_machine_without_docker(ci: str, outcome: str, tmp_path: Path) -> None:
    said = told(CI=ci, PATH=str(tmp_path), TRIMQ_TEST_DOCKER="")
    assert MISSING in said
    assert outcome in said
