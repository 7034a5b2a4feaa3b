"""A controller in the name server's process."""

import subprocess
import sys
from pathlib import Path

import pytest
import trio

from tests.namesrv.server import Wire, running
from trimq.controller.config import load_controller
from trimq.controller.server import ControllerManager
from trimq.controller.server import StartError as ControllerStartError
from trimq.namesrv import embedded_controller
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController, StartError
from trimq.protocol.codes import RequestCode
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.http.health import STOPPING


def controller_file(folder: Path) -> str:
    path = folder / "controller.conf"
    path.write_text(f"listenPort=0\nbindAddress=127.0.0.1\ncontrollerStorePath={folder / 'controller.db'}\n")
    return str(path)


def with_controller(folder: Path, file: str) -> NamesrvController:
    """A name server that has not begun, with a controller whose configuration is in ``file``."""
    keys = {
        "bindAddress": "127.0.0.1",
        "listenPort": "0",
        "enableControllerInNamesrv": "true",
        "controllerConfigFile": file,
        "kvConfigPath": str(folder / "kvConfig.json"),
    }
    return NamesrvController(load_namesrv(flags={key: (value, "test") for key, value in keys.items()}))


async def test_it_serves_and_stops_with_the_name_server(tmp_path: Path) -> None:
    config = {"enableControllerInNamesrv": "true", "controllerConfigFile": controller_file(tmp_path)}
    async with running(tmp_path, **config) as server:
        embedded = server.controller.embedded
        assert embedded is not None
        assert embedded.address is not None
        async with await trio.open_tcp_stream(*embedded.address) as stream:
            reply = await Wire(stream).ask(RequestCode.CONTROLLER_GET_METADATA_INFO)
            assert reply.ext_fields()["controllerLeaderAddress"] == f"127.0.0.1:{embedded.address[1]}"
        async with server.connect() as wire:
            assert (await wire.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)).code == 0
        embedded._failure = "the disk is full"
        reasons = server.controller.health.readiness().reasons
        assert [reason.text for reason in reasons] == ["the disk is full"]
    assert embedded.stopped.is_set()
    assert [reason.code for reason in embedded.health.readiness().reasons][:1] == [STOPPING]  # it was not cancelled
    assert server.controller.stopped.is_set()


async def test_without_a_file_it_has_the_name_servers_limits_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_the_folder(file: str | None, flags: dict[str, tuple[str, str]]) -> Configuration:
        own = {"listenPort": "0", "controllerStorePath": str(tmp_path / "controller.db")}
        return load_controller(file, flags | {key: (value, "test") for key, value in own.items()})

    monkeypatch.setattr(embedded_controller, "load_controller", in_the_folder)
    config = {"enableControllerInNamesrv": "true", "controllerConfigFile": "", "maxConnectionsPerAddress": "1"}
    async with running(tmp_path, **config) as server:
        embedded = server.controller.embedded
        assert embedded is not None
        assert embedded.address is not None
        async with await trio.open_tcp_stream(*embedded.address) as stream:
            assert (await Wire(stream).ask(RequestCode.CONTROLLER_GET_METADATA_INFO)).code == 0
            with trio.fail_after(10):
                async with await trio.open_tcp_stream(*embedded.address) as other:
                    assert await other.receive_some(1) == b""


def test_the_command_says_where_it_is(tmp_path: Path) -> None:
    config = tmp_path / "namesrv.conf"
    config.write_text(
        "listenPort=0\nbindAddress=127.0.0.1\nenableControllerInNamesrv=true\n"
        f"kvConfigPath={tmp_path / 'kv.json'}\ncontrollerConfigFile={controller_file(tmp_path)}\n"
    )
    command = [sys.executable, "-m", "trimq.namesrv", "-c", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "controllerAddr=HOST:" in line)
            assert line.rstrip().endswith(", in this process")
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()


async def test_there_is_none_by_default(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        assert server.controller.embedded is None


async def test_a_database_that_another_controller_has_open(tmp_path: Path) -> None:
    configuration = load_controller(controller_file(tmp_path))
    first = ControllerManager(configuration)
    sock = first.bind()
    assert first._kv is not None
    try:
        with pytest.raises(ControllerStartError, match="database is locked: set controllerStorePath"):
            ControllerManager(configuration).bind()
        namesrv = with_controller(tmp_path, controller_file(tmp_path))
        with pytest.raises(StartError, match=r"the controller in this process: the database .* is locked"):
            namesrv.bind()
    finally:
        sock.close()
        await first._kv.close()


def test_a_controller_file_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "controller.conf"
    path.write_text("listenPort=99999\n")
    namesrv = with_controller(tmp_path, str(path))
    with pytest.raises(StartError, match=r"the controller in this process: .*listenPort"):
        namesrv.bind()
