"""The name server as a service and as a command."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import trio

from tests.namesrv.server import running
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController, StartError
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "trimq.namesrv", *args]


def write_config(folder: Path, port: int, *more: str) -> str:
    path = folder / "namesrv.conf"
    lines = ["bindAddress=127.0.0.1", f"listenPort={port}", f"kvConfigPath={folder / 'kvConfig.json'}", *more]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


class TestController:
    async def test_a_port_that_is_taken(self) -> None:
        with taken_port() as port:
            flags = {"bindAddress": ("127.0.0.1", "test"), "listenPort": (str(port), "test")}
            with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
                NamesrvController(load_namesrv(flags=flags)).bind()

    async def test_a_named_port_that_is_taken_leaves_no_socket_open(self, tmp_path: Path) -> None:
        with taken_port() as port:
            keys = {"bindAddress": "127.0.0.1", "listenPort": "0", "kvConfigPath": str(tmp_path / "kvConfig.json")}
            keys["namedListenPorts"] = f"inner={port}"
            server = NamesrvController(load_namesrv(flags={key: (value, "test") for key, value in keys.items()}))
            with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
                server.bind()
            assert server._sock is not None
            assert server._sock.fileno() == -1

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"configTable":[]}', '{"configTable":{"n":1}}', "\xff"])
    async def test_a_kv_file_that_is_broken(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "kvConfig.json"
        path.write_bytes(text.encode("latin-1"))
        flags = {"bindAddress": ("127.0.0.1", "test"), "listenPort": ("0", "t"), "kvConfigPath": (str(path), "test")}
        with pytest.raises(StartError, match=r"kvConfig\.json"):
            NamesrvController(load_namesrv(flags=flags)).bind()

    async def test_stopping_closes_connections_and_leaves_no_task(self, tmp_path: Path) -> None:
        async with running(tmp_path) as server, server.connect() as wire:
            await wire.register()
            server.controller.shutdown()
            await server.controller.stopped.wait()
            assert await wire.stream.receive_some() == b""

    async def test_a_change_in_work_is_finished_before_the_stop(self, tmp_path: Path) -> None:
        async with running(tmp_path) as server, server.connect() as wire:
            put = RemotingCommand.request(100, {"namespace": "n", "key": "k", "value": "v"})
            await wire.stream.send_all(encode(put))
            with trio.fail_after(10):
                while not server.controller.kv_config._lock.locked():
                    await trio.lowlevel.checkpoint()
            server.controller.shutdown()
            (reply,) = await wire.receive()
            assert reply.code == 0
        assert b'"k":"v"' in (tmp_path / "kvConfig.json").read_bytes()


def read_until(stream: IO[str], word: str) -> list[str]:
    lines = []
    for line in stream:
        lines.append(line)
        if word in line:
            break
    return lines


class TestCommand:
    @pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
    def test_it_serves_until_a_signal(self, tmp_path: Path, signal_number: int) -> None:
        with taken_port() as port:
            pass
        config = write_config(tmp_path, port)
        with subprocess.Popen(command("-c", config), stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                lines = read_until(process.stdout, "brokers register again")
                assert f"listens on     127.0.0.1:{port}" in "".join(lines)
                with socket.create_connection(("127.0.0.1", port), 5) as sock:
                    sock.sendall(encode(RemotingCommand.request(206)))
                    (reply,) = FrameDecoder().feed(sock.recv(65536))
                assert bytes(reply.body) == b'{"topicList":[]}'
                os.kill(process.pid, signal_number)
                assert process.wait(20) == 0
            finally:
                process.kill()

    def test_a_port_that_is_taken(self, tmp_path: Path) -> None:
        with taken_port() as port:
            done = subprocess.run(
                command("-c", write_config(tmp_path, port)), capture_output=True, text=True, timeout=30, check=False
            )
        assert done.returncode == 1
        assert f"mqnamesrv: cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_value_that_cannot_be_used(self, tmp_path: Path) -> None:
        config = write_config(tmp_path, 9876, "orderMessageEnable=perhaps")
        done = subprocess.run(command("-c", config), capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 2
        assert f"{config}:4: orderMessageEnable=perhaps: expected true or false" in done.stderr

    def test_an_unknown_key_is_reported(self, tmp_path: Path) -> None:
        with taken_port() as port:
            config = write_config(tmp_path, port, "orderMesageEnable=true")
            done = subprocess.run(command("-c", config), capture_output=True, text=True, timeout=30, check=False)
        assert "did you mean orderMessageEnable?" in done.stderr

    def test_print_configuration(self, tmp_path: Path) -> None:
        config = write_config(tmp_path, 9999)
        done = subprocess.run(command("-c", config, "-p"), capture_output=True, text=True, timeout=30, check=True)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("listenPort=")]
        assert line.startswith("listenPort=9999")
        assert f"{config}:2" in line
        assert "Port for brokers and clients." in line
