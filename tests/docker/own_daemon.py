"""A Docker daemon for the tests: checks of the machine, the daemon's start, and its removal without leftovers."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.docker.daemon import ADDRESS, Docker, Remarks
from tests.interop.harness.waiting import wait_until

PACKAGES = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
}
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Debian's releases by their Python version: the wheels are built with the running Python."""
OPTIONS = ("--bridge=none", "--iptables=false", "--ip6tables=false")
"""Options that work without a packet filter in the kernel and leave no bridge behind; compose creates its own."""
DISK_BYTES = 20 << 30
"""Size of a file system in a sparse file, which occupies only the bytes written."""
STOP_SECONDS = 90
CONTAINER = f"""
tar -ch /bin/true $(ldd /bin/true | grep -o '/[^ ]*') | docker import --message probe - trimq-probe
docker network create trimq-probe
docker run --rm --network trimq-probe -p {ADDRESS}::1 trimq-probe /bin/true
docker network rm trimq-probe
docker rmi trimq-probe
"""
"""A minimal image in a network, with a port: missing permissions show before anything is built."""


class UnusableError(Exception):
    """No containers can be run on this machine; the text has the reason."""


def check_machine() -> None:
    """Check the requirements that need no daemon, in less than a second. Raises UnusableError."""
    missing = [name for name in PACKAGES if shutil.which(name) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[name] for name in missing}))
        raise UnusableError(f"{', '.join(missing)} not found; apt-get install {packages}")
    if sys.version_info[:2] not in SUITES:
        raise UnusableError(f"no release of Debian has the Python that the wheels are made with, {sys.version}")
    if os.geteuid() != 0:
        raise UnusableError("a Docker daemon needs root")
    spaces = subprocess.run(
        ["unshare", "--mount", "--pid", "--net", "--fork", "true"], capture_output=True, text=True, check=False
    )
    if spaces.returncode:
        raise UnusableError(f"the kernel gives root no namespaces (CAP_SYS_ADMIN is missing?): {spaces.stderr.strip()}")
    if not {"cgroup", "cgroup2"} & {kind for _, kind in mounts()}:
        raise UnusableError("no control groups are mounted at /sys/fs/cgroup (apt-get install cgroupfs-mount)")


@contextmanager
def own_daemon(folder: Path, remarks: Remarks) -> Iterator[Docker]:
    """Run a daemon with all its files in ``folder``; at the end containers, processes, mounts and folder are removed.

    Raises UnusableError if it does not start or cannot run a container.
    """
    docker = Docker(f"unix://{folder}/docker.sock", folder / "log")
    driver = storage_driver(folder)
    remarks(f"layers are kept by {driver}")
    paths = ("-p", f"{folder}/pid", f"--data-root={folder}/data", f"--exec-root={folder}/exec")
    # If the tests are killed, the kernel terminates the daemon, which stops its containers.
    tied = ("setpriv", "--pdeathsig", "TERM", "--")
    place = (*paths, "-H", docker.environment["DOCKER_HOST"], "--storage-driver", driver.split()[0])
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen([*tied, "dockerd", *OPTIONS, *place], stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(docker, daemon, folder / "log"), "the Docker daemon answers", 90)
        runs_containers(docker)
        yield docker
    finally:
        end(docker, daemon, folder)


def storage_driver(folder: Path) -> str:
    """The first driver that works: overlay2, overlay2 on a file system in a file, or vfs, which copies whole images."""
    (folder / "data").mkdir()
    if overlay_works(folder / "data"):
        return "overlay2"
    disk = folder / "disk"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", str(disk)], capture_output=True, check=False)
    mounted = subprocess.run(["mount", "-o", "loop", str(disk), str(folder / "data")], capture_output=True, check=False)
    if not made.returncode and not mounted.returncode and overlay_works(folder / "data"):
        return "overlay2 on a file system in a file"
    return "vfs"


def overlay_works(folder: Path) -> bool:
    """Whether overlayfs can be used in the folder; not if it is in an overlayfs itself, as in a container."""
    trial = folder / "trial"
    for name in ("lower", "upper", "work", "merged"):
        (trial / name).mkdir(parents=True)
    options = f"lowerdir={trial}/lower,upperdir={trial}/upper,workdir={trial}/work"
    try:
        mounted = subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, f"{trial}/merged"], capture_output=True, check=False
        )
        if mounted.returncode:
            return False
        subprocess.run(["umount", f"{trial}/merged"], check=True)
        return True
    finally:
        shutil.rmtree(trial)


def answers(docker: Docker, daemon: subprocess.Popen[bytes], log: Path) -> bool:
    if daemon.poll() is not None:
        raise UnusableError(f"dockerd ended with {daemon.returncode}:\n{log.read_text()[-3000:]}")
    asked = subprocess.run(["docker", "info"], env=docker.environment, capture_output=True, check=False)
    return asked.returncode == 0


def runs_containers(docker: Docker) -> None:
    try:
        docker.run("sh", "-euc", CONTAINER)
    except AssertionError as error:
        raise UnusableError(f"dockerd runs, but starts no container:\n{error}") from None


def end(docker: Docker, daemon: subprocess.Popen[bytes], folder: Path) -> None:
    """Remove containers, networks, processes, mounts and files; AssertionError if processes outlived the daemon."""
    if daemon.poll() is None and (folder / "docker.sock").exists():
        docker.run("sh", "-euc", 'ids=$(docker ps -aq); [ -z "$ids" ] || docker rm --force --volumes $ids >/dev/null')
        docker.run("docker", "network", "prune", "--force")
    daemon.terminate()
    try:
        daemon.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.pid, signal.SIGKILL)  # the daemon and its containerd form a session
        daemon.wait()
    left = daemons_of(folder)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not daemons_of(folder), "the daemon's processes have ended")
    for point in reversed([point for point, _ in mounts() if point.is_relative_to(folder)]):
        subprocess.run(["umount", str(point)], check=True)  # the daemon leaves the mount of its networks behind
    shutil.rmtree(folder)
    assert not left, left


def daemons_of(folder: Path) -> list[int]:
    """Ids of Docker's processes that have the folder in their command line, the shims of containers among them."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended since the listing
            words = command.read_text(errors="replace").split("\0")
            if Path(words[0]).name.startswith(("containerd", "dockerd")) and any(str(folder) in word for word in words):
                found.append(int(command.parent.name))
    return found


def mounts() -> list[tuple[Path, str]]:
    """Mount points with their file system types, in the order of mounting."""
    fields = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [(Path(point), kind) for _, point, kind, *_ in fields]
