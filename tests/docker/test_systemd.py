"""The commands for systemd from docs/operate.md, in a container of the base image.

The container has no systemd: a script replaces systemctl and starts the units' commands as their users.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.daemon import ROOT, Docker
from tests.docs.commands import ALL

pytestmark = [pytest.mark.partners, pytest.mark.timeout(700, func_only=True)]

SYSTEMCTL = """#!/bin/sh
# Starts what our units name, as the user that they name.
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
    wheels = tmp_path / "wheels"
    tool = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel", "--no-deps"]
    locked = ["--require-hashes", "-r", "requirements/build.txt", "--wheel-dir", str(wheels)]
    subprocess.run([*tool, *locked], cwd=ROOT, check=True, timeout=300)
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    script = ALL["operate systemd"] + HEALTHY + ALL["operate systemd_upgrade"] + HEALTHY
    output = image.run(
        *("docker", "run", "--rm", "-v", f"{systemctl}:/usr/bin/systemctl:ro", "-v", f"{wheels}:/wheels:ro"),
        *("-v", f"{ROOT}:/checkout:ro", "--tmpfs", "/src:exec", "-e", "PIP_NO_INDEX=1", "-e", "PIP_NO_COMPILE=1"),
        *("-e", "PIP_FIND_LINKS=/wheels /checkout/docker/wheels/server", "trimq-base", "sh", "-euc"),
        "cd /checkout && tar -c --exclude=./.[a-hj-z]* --exclude=./docker/wheels --exclude=./tests . | tar -C /src -x\n"
        f"cd /src\n{script}",
        timeout=500,
    )
    assert output.splitlines().count("ready") >= 4, output
