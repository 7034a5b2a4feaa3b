"""The commands for Docker and systemd that README and docs/operate.md give, typed as they stand there."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import ADDRESS, ROOT, Docker, flood, job
from tests.docs.commands import ALL

pytestmark = [pytest.mark.partners, pytest.mark.timeout(600)]


@pytest.fixture
def cleaned(image: Docker) -> Iterator[Docker]:
    yield image
    for profile in ("single", "cluster"):
        image.compose(profile, "down", "-v")


@pytest.mark.parametrize("name", ["readme", "operate docker"])
def test_one_broker(cleaned: Docker, name: str, tmp_path: Path) -> None:
    said = cleaned.type_in(name, tmp_path)
    assert "trimqtest_broker_1" in said or "trimqtest-broker-1" in said or "broker_1" in said
    assert not cleaned.container("broker")
    assert cleaned.run("docker", "volume", "ls", "-q", "--filter", "name=trimqtest_store")  # the store stays


def test_an_upgrade_loses_nothing(cleaned: Docker, tmp_path: Path) -> None:
    outside = f"{ADDRESS}:9876;{ADDRESS}:9886"
    brokers = ("broker-a", "broker-b")
    with cleaned.up("cluster", "namesrv-a", "namesrv-b", *brokers):
        before = {name: cleaned.container(name) for name in brokers}
        # a new image: what docker/build makes differs from what runs
        cleaned.run("sh", "-c", "printf 'FROM trimq\\nLABEL old=1\\n' | docker build -q -t trimq -")
        cleaned.compose("cluster", "up", "-d", *brokers)
        cleaned.wait_healthy(*brokers)
        old = {name: cleaned.container(name) for name in brokers}
        assert old != before
        with flood(outside, "Upgrade") as sender:
            assert sender.stdout is not None
            acknowledged = [sender.stdout.readline().strip() for _ in range(50)]
            cleaned.type_in("operate upgrade", tmp_path)
            rest, _ = sender.communicate(timeout=60)
        assert not set(old.values()) & {cleaned.container(name) for name in brokers}
        cleaned.wait_healthy("namesrv-a", "namesrv-b", *brokers)
        acknowledged += rest.split()
        assert set(acknowledged) <= set(job("read", outside, "Upgrade").split())


SYSTEMCTL = """#!/bin/sh
# What systemctl does with our units, as far as a machine without systemd can show it.
[ "$1" != daemon-reload ] || exit 0
order=$1; shift
for name; do case $name in trimq-*)
    unit=/etc/systemd/system/$name.service
    user=$(sed -n 's/^User=//p' $unit)
    start=$(sed -n 's/^ExecStart=//p' $unit)
    [ "$order" != restart ] || { kill "$(cat /run/$name.pid)"; tail -s 0.1 --pid="$(cat /run/$name.pid)" -f /dev/null; }
    install -d -o $user /var/lib/trimq
    cd /var/lib/trimq
    HOME=/var/lib/trimq setpriv --reuid=$user --regid=$user --clear-groups $start >/var/log/$name 2>&1 &
    echo $! >/run/$name.pid
esac; done
"""
HEALTHY = """
cd /opt/trimq/bin
until ./mqbroker -c /etc/trimq/broker.conf health && ./mqnamesrv -c /etc/trimq/namesrv.conf health; do sleep 1; done
cd -
"""


def test_the_commands_for_systemd(image: Docker, tmp_path: Path) -> None:
    """In a container of the base, which has no systemd: a script stands in for systemctl."""
    wheels = tmp_path / "wheels"
    tool = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel", "--wheel-dir", str(wheels)]
    subprocess.run([*tool, "--constraint", "requirements/build.txt", "hatchling"], cwd=ROOT, check=True, timeout=120)
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    script = ALL["operate systemd"] + HEALTHY + ALL["operate systemd_upgrade"] + HEALTHY
    said = image.run(
        *("docker", "run", "--rm", "-v", f"{systemctl}:/usr/bin/systemctl:ro", "-v", f"{wheels}:/wheels:ro"),
        *("-v", f"{ROOT}:/checkout:ro", "--tmpfs", "/src:exec", "-e", "PIP_NO_INDEX=1", "-e", "PYTHONUNBUFFERED=1"),
        *("-e", "PIP_FIND_LINKS=/wheels /checkout/docker/wheels/server", "trimq-base", "sh", "-euc"),
        "cd /checkout && tar -c --exclude=./.[a-hj-z]* --exclude=./docker/wheels --exclude=./tests . | tar -C /src -x\n"
        f"cd /src\n{script}",
        timeout=200,
    )
    assert said.splitlines().count("ready") >= 4, said
