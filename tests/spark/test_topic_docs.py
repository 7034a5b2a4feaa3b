"""Runs the commands of docs/pipeline.md and its example unchanged."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.interop.harness import probe
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until
from tests.ports import broker_port, free_port
from tests.spark.conftest import demand_spark
from tests.spark.session import QUICK_JAVA

pytestmark = pytest.mark.one_pyspark

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")


class Shell:
    """Runs commands one after the other in one folder and session; ends the processes that they leave running."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.environment = {**os.environ, **environment}
        self.groups: list[int] = []

    def run(self, command: str, directory: Path | None = None) -> str:
        log = self.directory / "output.log"
        with log.open("wb") as output:
            shell = subprocess.Popen(
                ["bash", "-ec", command],
                cwd=directory or self.directory,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.groups.append(shell.pid)
            try:
                code = shell.wait(400)
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
                raise
        text = log.read_text(encoding="utf-8")
        assert code == 0, text
        return text

    def end(self) -> None:
        for group in self.groups:
            try:
                os.killpg(group, signal.SIGTERM)
            except ProcessLookupError:
                continue


@contextmanager
def shell_in(directory: Path, environment: dict[str, str]) -> Iterator[Shell]:
    shell = Shell(directory, environment)
    try:
        yield shell
    finally:
        shell.end()


@pytest.mark.timeout(1000, func_only=True)
def test_a_streaming_count_in_five_commands(tmp_path: Path) -> None:
    demand_spark()
    section = PAGE.split("## A streaming count in five commands")[1].split("\n## ")[0]
    commands = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert len(commands) == 5
    name_server, port = free_port(), broker_port()
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TRIMQ_LISTEN_PORT": str(port),
        "TRIMQ_EMBEDDED_NAMESRV_PORT": str(name_server),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_TOOL_OPTIONS": QUICK_JAVA,
    }
    install, broker, send, program, count = (text.replace("9876", str(name_server)) for text in commands)
    with shell_in(tmp_path, environment) as shell:
        # The extra names all requirements: pip would install only TriMQ, here a link to the checkout.
        printed = shell.run(install.replace(" install ", " install --dry-run "), ROOT)
        assert re.findall(r"^Would install (.*)$", printed, re.MULTILINE) == [f"trimq-{version('trimq')}"]
        shell.run(broker)
        wait_until(lambda: probe.accepts(f"127.0.0.1:{port}"), "the broker", 60)
        wait_until(lambda: probe.cluster(f"127.0.0.1:{name_server}"), "its registration", 60)
        shell.run(send)
        shell.run(program)
        assert re.search(r"paid *\| *2.*refunded *\| *1|refunded *\| *1.*paid *\| *2", shell.run(count), re.DOTALL)
        shell.run(send)
        assert re.search(r"paid *\| *4.*refunded *\| *2|refunded *\| *2.*paid *\| *4", shell.run(count), re.DOTALL)


@pytest.mark.timeout(600, func_only=True)
def test_orders_and_payments_end_in_a_plot(cluster: Cluster, tmp_path: Path) -> None:
    demand_spark()
    command = [sys.executable, str(ROOT / "docs" / "examples" / "orders_and_payments.py"), cluster.namesrv, "600"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": path, "JAVA_TOOL_OPTIONS": QUICK_JAVA}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=560, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"600 orders, (\d+) payments, (\d+) joined", done.stdout)
    assert found is not None
    assert found[1] == found[2], "every payment finds its order"
    assert (tmp_path / "payments.png").read_bytes().startswith(b"\x89PNG")
