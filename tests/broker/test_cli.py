"""``mqbroker`` as a process: what it prints, how it refuses to start, how it stops."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.ports import free_port
from trimq.broker import cli
from trimq.broker.cli import IMPORTANT, durability, main
from trimq.broker.config import FlushDiskType, MessageStoreConfig, load_broker
from trimq.broker.controller import BrokerController
from trimq.protocol import checkpoint_layout
from trimq.protocol.native import NATIVE


def write_config(directory: Path, **changes: object) -> Path:
    values = {
        "brokerName": "broker-a",
        "bindAddress": "127.0.0.1",
        "listenPort": free_port(),
        "fastListenPort": 0,
        "embeddedNamesrvPort": free_port(),
        "storePathRootDir": directory / "store",
        "mappedFileSizeCommitLog": 4194304,
        "commitLogReserveStep": 1048576,
        "maxHashSlotNum": 1000,
        "maxIndexNum": 4000,
        **changes,
    }
    path = directory / f"broker-{values['listenPort']}.conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
    return path


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trimq.broker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def banner(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "consumeMessage" in line:
            break
    return "".join(lines)


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    return errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_starts_says_what_it_is_and_stops(tmp_path: Path, number: int) -> None:
    config = write_config(tmp_path)
    process = start("-c", str(config))
    text = banner(process)
    values = dict(line.split("=", 1) for line in config.read_text().splitlines())
    assert "TriMQ broker broker-a of DefaultCluster is up" in text
    assert f"127.0.0.1:{values['listenPort']}" in text
    assert f"127.0.0.1:{values['embeddedNamesrvPort']} (in this process)" in text
    assert values["storePathRootDir"] in text
    assert "survives a crash of this process" in text
    assert "brokerIP1" not in text
    assert "mqadmin sendMessage -n" in text
    with socket.create_connection(("127.0.0.1", int(values["listenPort"])), timeout=5):
        pass
    errors = stop(process, number)
    assert process.returncode == 0, errors
    assert not (tmp_path / "store" / "abort").exists()
    assert "store_closed " in errors


def test_a_process_of_its_own_settles_its_memory(tmp_path: Path) -> None:
    code = (
        "import os, sys, trimq.remoting.config.command_line as process; process.settle_memory = lambda: os._exit(7);"
        "from trimq.broker.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "-c", str(write_config(tmp_path))]
    assert subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 7


@pytest.mark.parametrize("value", ["on", "off"])
def test_says_whether_the_native_extension_runs(tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if value == "on" and not NATIVE.is_on:
        pytest.skip(f"no native extension: {NATIVE.reason}")
    monkeypatch.setenv("TRIMQ_NATIVE", value)
    process = start("-c", str(write_config(tmp_path)))
    runs = NATIVE.status if value == "on" else "python (TRIMQ_NATIVE=off)"
    said = banner(process)
    logged = stop(process)
    assert f"\n  runs           {runs}\n" in said
    assert re.search(rf"broker_started .* runs=\"{re.escape(runs)}\"\n", logged)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [({}, True), ({"bindAddress": "127.0.0.1"}, False), ({"brokerIP1": "10.0.0.1"}, False)],
)
def test_says_which_address_it_has_chosen_itself(settings: dict[str, str], chosen: bool) -> None:
    controller = BrokerController(load_broker(flags={key: (value, "test") for key, value in settings.items()}))
    controller.address = "10.0.0.1:10911"
    (line,) = [line for line in cli.banner(controller, 0.1) if "clients use" in line]
    assert "10.0.0.1:10911" in line
    assert ("brokerIP1 is not set: the first address of this machine that is not the loopback" in line) == chosen


@pytest.mark.parametrize(
    ("lines", "expected", "sends"),
    [
        ("", None, True),
        (
            "brokerRole=SYNC_MASTER\nhaListenPort=10912\n",
            "replicated     a message is acknowledged when it has 2 copies",
            True,
        ),
        ("brokerRole=SYNC_MASTER\ninSyncReplicas=1\n", None, True),
        (
            "brokerRole=SLAVE\nbrokerId=1\n",
            "role           a slave: it copies its master's log and takes no sends",
            False,
        ),
    ],
)
def test_the_banner_says_what_the_role_promises(lines: str, expected: str | None, sends: bool, tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(f"namesrvAddr=127.0.0.1:9876\n{lines}")
    controller = BrokerController(load_broker(path))
    controller.name_servers = ["127.0.0.1:9876"]
    text = "\n".join(cli.banner(controller, 0.1))
    if expected is None:
        assert not re.search("^  (role|replicated) ", text, re.MULTILINE)
    else:
        assert f"  {expected}" in text
    assert ("first message" in text) == sends


def test_second_broker_on_a_store_refuses(tmp_path: Path) -> None:
    first = start("-c", str(write_config(tmp_path)))
    banner(first)
    try:
        second = start("-c", str(write_config(tmp_path)))
        _, errors = second.communicate(timeout=20)
        assert second.returncode == 1
        assert f"is in use by another broker (process {first.pid})" in errors
        assert "Traceback" not in errors
    finally:
        stop(first)


def test_taken_ports_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for key in ("listenPort", "embeddedNamesrvPort"):
            process = start("-c", str(write_config(tmp_path, **{key: port})))
            _, errors = process.communicate(timeout=20)
            assert process.returncode == 1
            assert f"127.0.0.1:{port}" in errors
            assert "Traceback" not in errors


def test_bad_value(tmp_path: Path) -> None:
    path = write_config(tmp_path, flushDiskType="SOMETIMES")
    result = CliRunner().invoke(main, ["-c", str(path)])
    assert result.exit_code == 2
    assert re.search(r"broker-\d+\.conf:\d+: flushDiskType=SOMETIMES: expected one of ASYNC_FLUSH", result.output)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["-c", str(tmp_path / "none.conf")])
    assert result.exit_code == 2
    assert "none.conf" in result.output


def test_log_file_that_cannot_be(tmp_path: Path) -> None:
    path = write_config(tmp_path, logFile=f"{tmp_path}/broker.conf/x/log")
    (tmp_path / "broker.conf").write_text("a file, not a directory")
    result = CliRunner().invoke(main, ["-c", str(path)])
    assert result.exit_code == 1
    assert "log file" in result.output


def test_prints_the_effective_configuration(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    every = CliRunner().invoke(main, ["-c", str(path), "-n", "10.0.0.1:9876", "-p"]).output.splitlines()
    keys = [line.partition("=")[0] for line in every]
    assert len(keys) == len(set(keys)) == len(list(load_broker().options()))
    (name,) = (line for line in every if line.startswith("brokerName="))
    assert re.search(rf"brokerName=broker-a +# {re.escape(str(path))}:1: Name of the broker", name)
    (servers,) = (line for line in every if line.startswith("namesrvAddr="))
    assert re.search(r"namesrvAddr=10.0.0.1:9876 +# -n: ", servers)
    some = CliRunner().invoke(main, ["-c", str(path), "-m"]).output.splitlines()
    assert {line.partition("=")[0] for line in some} == set(IMPORTANT)


def test_durability_in_words() -> None:
    assert "survives a power cut" in durability(MessageStoreConfig(flush_disk_type=FlushDiskType.SYNC_FLUSH))
    assert "a power cut can lose" in durability(MessageStoreConfig())
    pool = durability(MessageStoreConfig(transient_store_pool_enable=True))
    assert "its crash can lose the messages of the last 400 ms" in pool
    sync = MessageStoreConfig(transient_store_pool_enable=True, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    assert "survives a power cut" in durability(sync)


# guards: the refusal to start with an empty log names the option that permits it, and that option works
def test_a_log_that_is_missing(tmp_path: Path) -> None:
    path = str(write_config(tmp_path))
    (tmp_path / "store").mkdir()
    mark = checkpoint_layout.CheckpointMark(position=4711, last_record=4000)
    (tmp_path / "store" / "checkpoint").write_bytes(
        checkpoint_layout.encode(checkpoint_layout.CheckpointFields(), mark)
    )
    refused = start("-c", path)
    _, errors = refused.communicate(timeout=20)
    assert refused.returncode == 1
    assert "checkpoint knows a log up to offset 4711" in errors
    assert "start once with --accept-missing-log" in errors
    process = start("-c", path, "--accept-missing-log")
    try:
        assert "is up after" in banner(process)
    finally:
        stop(process)
