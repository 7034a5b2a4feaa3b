"""Runs the commands and programs of the README."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.docs.commands import ALL
from tests.docs.examples import examples
from tests.interop.harness import partners, probe
from tests.interop.harness.processes import Process
from tests.interop.harness.servers import Cluster
from tests.interop.harness.waiting import wait_until
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = {
    found[1]: source
    for source in re.findall(r"```java\n(.*?)```", README, re.DOTALL)
    if (found := re.search(r"class (\w+)", source))
}


def example(begin: str) -> str:
    [found] = [text for text in examples("README.md") if text.startswith(begin)]
    return found


def need_default_ports() -> None:
    """Skip the test (in CI: fail it) if another process uses RocketMQ's default ports: README's servers need them."""
    taken = [port for port in (9876, 10911) if probe.accepts(f"127.0.0.1:{port}")]
    if taken:
        message = f"README's servers listen on 9876 and 10911; another process uses {taken}"
        pytest.fail(message) if partners.in_ci() else pytest.skip(message)


@contextmanager
def running(process: Process) -> Iterator[Process]:
    process.start()
    try:
        yield process
    finally:
        process.stop(30)


def test_the_first_producer_and_consumer(cluster: Cluster, tmp_path: Path) -> None:
    dependency = ET.fromstring(example("<dependency>"))
    assert [part.text for part in dependency][:2] == ["org.apache.rocketmq", "rocketmq-client"]
    version = str(dependency.findtext("version"))
    class_path = partners.java_driver(version)
    jars = Path(class_path.split(":")[1]).parent
    assert (jars / f"rocketmq-client-{version}.jar").exists()
    for name, source in PROGRAMS.items():
        (tmp_path / f"{name}.java").write_text(source.replace("127.0.0.1:9876", cluster.namesrv), encoding="utf-8")
    files = [str(tmp_path / f"{name}.java") for name in PROGRAMS]
    subprocess.run([partners.tool("javac"), "-cp", class_path, "-d", str(tmp_path), *files], check=True, timeout=60)
    java = [partners.tool("java"), f"-Duser.home={tmp_path}", "-cp", f"{class_path}:{tmp_path}"]
    sent = subprocess.run([*java, "FirstProducer"], check=True, timeout=60, capture_output=True, text=True)
    assert "sendStatus=SEND_OK" in sent.stdout
    with running(Process("first-consumer", [*java, "FirstConsumer"], tmp_path)) as consumer:
        wait_until(lambda: "Hello" in consumer.tail().splitlines(), "the consumer prints Hello", 60)


def test_the_first_python_program(cluster: Cluster, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    source = program.replace("127.0.0.1:9876", cluster.namesrv)
    (tmp_path / "first.py").write_text(source, encoding="utf-8")
    command = ["sh", "-ec", ALL["readme first"]]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert "Hello" in done.stdout.splitlines()


@pytest.mark.parametrize("command", ["mqbroker", "mqnamesrv"])
def test_the_effective_configuration_is_printed(command: str, tmp_path: Path) -> None:
    script = Path(sys.executable).parent / command
    printed = subprocess.run(
        [script, "-p"], cwd=tmp_path, check=True, timeout=30, capture_output=True, text=True
    ).stdout
    assert "listenPort" in printed
    assert "default" in printed


def test_a_broker_beside_its_name_server(tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    namesrv, port = free_port(), free_port()
    (tmp_path / "namesrv.conf").write_text(f"listenPort={namesrv}\nkvConfigPath={tmp_path}/kv.json\n", encoding="utf-8")
    (tmp_path / "broker.conf").write_text(f"listenPort={port}\nstorePathRootDir={tmp_path}/store\n", encoding="utf-8")
    name_server = Process("namesrv", [str(scripts / "mqnamesrv"), "-c", "namesrv.conf"], tmp_path)
    address = f"127.0.0.1:{namesrv}"
    broker = Process("broker", [str(scripts / "mqbroker"), "-c", "broker.conf", "-n", address], tmp_path)
    with running(name_server), running(broker):
        wait_until(lambda: probe.accepts(address), "the name server listens")
        wait_until(lambda: probe.cluster(address), "the broker is registered")


def commands(begin: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in example(begin).splitlines()]


@pytest.mark.alone
@pytest.mark.timeout(400, func_only=True)
def test_the_commands_by_hand(tmp_path: Path) -> None:
    need_default_ports()
    install, alone, send, consume = commands("pip install")
    name_server, broker = commands("mqnamesrv ")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=60)
    environment = {
        "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),  # the store is in it
        "TRIMQ_BIND_ADDRESS": "127.0.0.1",
        "TRIMQ_BROKER_IP1": "127.0.0.1",
    }

    def run(command: list[str], timeout: float = 30) -> str:
        every = {**os.environ, **environment}
        done = subprocess.run(
            ["env", *command], cwd=ROOT, env=every, check=True, timeout=timeout, capture_output=True, text=True
        )
        return done.stdout

    run([*install, "--quiet", "--disable-pip-version-check"], 300)
    # The folder that the broker starts in has the store, so it is not the checkout here.
    assert alone[1:] == ["-c", "conf/local.conf"]
    here = ["env", alone[0], "-c", str(ROOT / "conf" / "local.conf")]
    with running(Process("broker-alone", here, tmp_path / "here", environment)):
        wait_until(lambda: probe.cluster("127.0.0.1:9876"), "the broker is registered")
        run(send)
        assert "Hello" in run(consume)
    assert (tmp_path / "here" / "store" / "commitlog").is_dir()
    with running(Process("namesrv", ["env", *name_server], tmp_path / "run", environment)):
        wait_until(lambda: probe.accepts("127.0.0.1:9876"), "the name server listens")
        with running(Process("broker", ["env", *broker], tmp_path / "run", environment)):
            wait_until(lambda: probe.cluster("127.0.0.1:9876"), "the broker is registered")
    assert (tmp_path / "home" / "store" / "commitlog").is_dir()


@pytest.mark.alone
def test_make_run(tmp_path: Path) -> None:
    if not (ROOT / ".venv" / ".run-stamp").exists():
        pytest.skip("these tests were not started by make: its environment does not exist")
    need_default_ports()
    # ARGS of the make that runs these tests are arguments of pytest.
    environment = {"MAKEFLAGS": "", "ARGS": "", "PATH": os.environ["PATH"]}
    made = Process(
        "make-run",
        [partners.tool("make"), "-C", str(ROOT), "run", f"TRIMQ_HOME={tmp_path}/home"],
        tmp_path,
        environment,
    )
    with running(made):
        wait_until(lambda: "first message" in made.tail(), "the banner", 60)
        banner = made.tail()
        assert "127.0.0.1:10911" in banner
        assert "127.0.0.1:9876" in banner
        assert "ASYNC_FLUSH" in banner
        wait_until(lambda: "broker-a" in probe.cluster("127.0.0.1:9876"), "the broker is registered")
        assert (tmp_path / "home" / "store" / "commitlog").is_dir()
