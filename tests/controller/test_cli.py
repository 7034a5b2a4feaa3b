"""The command mqcontroller."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.namesrv.test_controller import read_until, taken_port
from tests.ports import free_port
from trimq.controller.cli import banner, main
from trimq.controller.config import load_controller
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "trimq.controller", *args]


def write_config(folder: Path, port: int, *more: str) -> str:
    path = folder / "controller.conf"
    store = f"controllerStorePath={folder / 'controller.db'}"
    path.write_text("\n".join(["bindAddress=127.0.0.1", f"listenPort={port}", store, *more]) + "\n")
    return str(path)


def ran(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(tmp_path: Path, signal_number: int) -> None:
    port, health = free_port(), free_port()
    config = write_config(tmp_path, port, f"healthPort={health}")
    with subprocess.Popen(command("-c", config), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = "".join(read_until(process.stdout, "decides in"))
            assert f"listens on     127.0.0.1:{port}" in lines
            assert f"decides in     {tmp_path / 'controller.db'}: this is the only controller" in lines
            with socket.create_connection(("127.0.0.1", port), 5) as sock:
                sock.sendall(encode(RemotingCommand.request(RequestCode.CONTROLLER_GET_METADATA_INFO)))
                (reply,) = FrameDecoder().feed(sock.recv(65536))
            assert reply.ext_fields()["controllerLeaderAddress"] == f"127.0.0.1:{port}"
            assert ran("health", "-c", config).returncode == 0
            second = ran("-c", write_config(tmp_path, free_port()))
            assert second.returncode == 1, "a store has one controller"
            assert "mqcontroller: the database" in second.stderr
            assert "database is locked: set controllerStorePath" in second.stderr
            assert "Traceback" not in second.stderr
            os.kill(process.pid, signal_number)
            assert process.wait(20) == 0
        finally:
            process.kill()
    down = ran("health", "-c", config)
    assert down.returncode == 1


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with taken_port() as port:
        done = ran("-c", write_config(tmp_path, port))
    assert done.returncode == 1
    assert f"mqcontroller: cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("enableElectUncleanMaster=perhaps", ":4: enableElectUncleanMaster=perhaps: expected true or false"),
        ("controllerStore=redis", ":4: controllerStore=redis: expected one of etcd, sqlite"),
        ("controllerStore=etcd", "etcdEndpoints"),
        ("etcdEndpoints=10.0.0.1:2379", ":4: etcdEndpoints=10.0.0.1:2379: expected http://HOST:PORT"),
        ("etcdEndpoints=http://a:1/path", ":4: etcdEndpoints=http://a:1/path: expected http://HOST:PORT"),
        ("etcdPrefix=trimq", ":4: etcdPrefix=trimq: expected a path that begins and ends with /"),
    ],
)
def test_a_value_that_cannot_be_used(tmp_path: Path, line: str, expected: str) -> None:
    done = CliRunner().invoke(main, ["-c", write_config(tmp_path, 9878, line)])
    assert done.exit_code == 2
    assert expected in done.stderr


def test_print_configuration(tmp_path: Path) -> None:
    config = write_config(tmp_path, 9999)
    done = CliRunner(env={"TRIMQ_ETCD_PREFIX": "/mine/"}).invoke(main, ["-c", config, "-p"])
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("listenPort=")]
    assert line.startswith("listenPort=9999")
    assert f"{config}:2" in line
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("etcdPrefix=")]
    assert line.startswith("etcdPrefix=/mine/")
    assert "TRIMQ_ETCD_PREFIX" in line


def test_the_banner_with_etcd() -> None:
    flags = {"controllerStore": "etcd", "etcdEndpoints": "http://a:1;http://b:1"}
    configuration = load_controller(flags={key: (value, "test") for key, value in flags.items()})
    lines = banner(configuration, "0.0.0.0", 9878, 0.5)
    assert lines[0] == "TriMQ controller is up after 0.50 s"
    assert "port 9878 of all addresses" in lines[1]
    assert "etcd at http://a:1;http://b:1: start as many controllers as you like" in lines[-1]


def test_without_httpx_the_command_says_what_to_install(tmp_path: Path) -> None:
    config = write_config(tmp_path, free_port(), "controllerStore=etcd", "etcdEndpoints=http://127.0.0.1:1")
    code = "import sys; sys.modules['httpx'] = None; from trimq.controller.cli import main; main(['-c', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "pip install 'trimq[controller]'" in done.stderr
    assert "Traceback" not in done.stderr
