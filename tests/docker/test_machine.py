"""Reports of a machine that cannot run containers: with CI=true a failure within seconds that names the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.daemon import ROOT, Docker
from tests.docker.own_daemon import mounts, overlay_works, storage_driver
from tests.interop.harness.waiting import wait_until

pytestmark = [pytest.mark.partners, pytest.mark.timeout(300)]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, or has no right that could be taken away")

ONE = "tests/docker/test_single.py::test_the_image_is_small_and_not_root"
REASON = "no containers can be run here: "
FORBIDDEN = REASON + "the kernel gives root no namespaces (CAP_SYS_ADMIN is missing?): unshare"
MISSING = REASON + "dockerd, docker, docker-compose, debootstrap not found; apt-get install debootstrap docker-compose"


def output_of(*before: str, **environment: str) -> str:
    command = [*before, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "partners", ONE]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert run.returncode == (1 if environment["CI"] else 0), run.stdout + run.stderr
    return run.stdout


@needs_root
@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_a_machine_that_forbids_containers(ci: str, outcome: str) -> None:
    printed = output_of("setpriv", "--bounding-set", "-sys_admin", "--", CI=ci, TRIMQ_TEST_DOCKER="")
    assert FORBIDDEN in printed
    assert outcome in printed


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_a_machine_without_docker(ci: str, outcome: str, tmp_path: Path) -> None:
    printed = output_of(CI=ci, PATH=str(tmp_path), TRIMQ_TEST_DOCKER="")
    assert MISSING in printed
    assert outcome in printed


def test_a_command_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    docker = Docker(f"unix://{tmp_path}/none.sock")
    child = tmp_path / "child"
    with pytest.raises(AssertionError, match=r"has not ended after 1 s\n(?s:.*)the last words"):
        docker.run("sh", "-c", f"echo the last words; sleep 1000 & echo $! > {child}; wait", timeout=1)
    process = Path("/proc", child.read_text().strip(), "stat")
    wait_until(lambda: not process.exists() or process.read_text().split()[2] == "Z", "the child has ended")


@needs_root
def test_layers_where_layers_are_already(tmp_path: Path) -> None:
    """In an overlayfs, as in a container, the daemon's files go to their own file system."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, f"{tmp_path}/merged"], check=True)
    folder = tmp_path / "merged" / "docker"
    try:
        folder.mkdir()
        assert storage_driver(folder) == "overlay2 on a file system in a file"
        assert (folder / "data", "ext4") in mounts()
        assert overlay_works(folder / "data")
    finally:
        for point in (folder / "data", tmp_path / "merged"):
            subprocess.run(["umount", str(point)], check=True)
    assert not [point for point, _ in mounts() if point.is_relative_to(tmp_path)]
