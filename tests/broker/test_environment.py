"""Environment variables as configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimq.broker.config import SCHEMA as BROKER
from trimq.broker.config import BrokerConfig, MessageStoreConfig, load_broker, saved_changes_path
from trimq.namesrv.config import SCHEMA as NAMESRV
from trimq.namesrv.config import load_namesrv
from trimq.remoting.config.configuration import Schema
from trimq.remoting.config.environment import variable_of
from trimq.remoting.config.properties import ConfigError


@pytest.mark.parametrize(
    ("key", "variable"),
    [
        ("listenPort", "TRIMQ_LISTEN_PORT"),
        ("storePathRootDir", "TRIMQ_STORE_PATH_ROOT_DIR"),
        ("brokerIP1", "TRIMQ_BROKER_IP1"),
        ("enableDLegerCommitLog", "TRIMQ_ENABLE_DLEGER_COMMIT_LOG"),
    ],
)
def test_the_rule(key: str, variable: str) -> None:
    assert variable_of(key) == variable


@pytest.mark.parametrize("schema", [BROKER, NAMESRV], ids=["broker", "namesrv"])
def test_no_two_keys_share_a_variable(schema: Schema) -> None:
    keys = [*schema.options(), *schema.inert, *schema.unsupported]
    assert len({variable_of(key) for key in keys}) == len(set(keys))


def test_variables_win_over_the_file_and_flags_over_variables(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("listenPort=1000\nbrokerName=of-the-file\nbrokerIP1=10.0.0.1\n")
    environment = {
        "TRIMQ_LISTEN_PORT": "2000",
        "TRIMQ_BROKER_IP1": "10.0.0.2",
        "TRIMQ_NAMESRV_ADDR": "h:1",
        "HOME": "/",
    }
    configuration = load_broker(path, {"namesrvAddr": ("h:2", "-n")}, environment)
    broker = configuration.section(BrokerConfig)
    assert (broker.listen_port, broker.broker_ip1, broker.broker_name) == (2000, "10.0.0.2", "of-the-file")
    assert broker.namesrv_addresses == ["h:2"]
    assert configuration.source("listenPort") == "TRIMQ_LISTEN_PORT"
    assert configuration.source("brokerName") == f"{path}:2"
    assert configuration.source("namesrvAddr") == "-n"
    assert configuration.warnings == []


def test_an_empty_variable_is_not_set() -> None:
    assert load_broker(environment={"TRIMQ_LISTEN_PORT": " "}).section(BrokerConfig).listen_port == 10911


def test_a_bad_value_names_its_variable() -> None:
    with pytest.raises(ConfigError, match="TRIMQ_LISTEN_PORT: listenPort=many: expected a whole number"):
        load_broker(environment={"TRIMQ_LISTEN_PORT": "many"})


@pytest.mark.parametrize(("value", "good"), [("", True), ("on", True), (" off", True), ("OFF", False), ("0", False)])
def test_the_switch_of_the_native_extension_is_on_or_off(value: str, good: bool) -> None:
    # guards: a value meant to switch it off that does not is reported
    if good:
        assert load_broker(environment={"TRIMQ_NATIVE": value}).warnings == []
    else:
        with pytest.raises(ConfigError, match=rf"TRIMQ_NATIVE={value}: expected on or off"):
            load_broker(environment={"TRIMQ_NATIVE": value})


def test_strange_variables_leave_a_word() -> None:
    environment = {
        "TRIMQ_LISTENPORT": "1",
        "TRIMQ_ENABLE_LMQ": "true",
        "TRIMQ_HOME": "/x",
        "TRIMQ_NATIVE": "off",
        "TRIMQ_TRANSFER_MSG_BY_HEAP": "true",
    }
    configuration = load_broker(environment=environment)
    assert configuration.warnings == [
        "TRIMQ_ENABLE_LMQ: enableLmq is not supported: " + BROKER.unsupported["enableLmq"],
        "unknown variable TRIMQ_LISTENPORT (did you mean TRIMQ_LISTEN_PORT?); ignored",
    ]
    assert len(configuration.notes) == 1


def test_saved_changes_are_found_in_the_store_that_a_variable_names(tmp_path: Path) -> None:
    saved = saved_changes_path(tmp_path)
    saved.parent.mkdir()
    saved.write_text("maxMessageSize=5000\n")
    configuration = load_broker(environment={"TRIMQ_STORE_PATH_ROOT_DIR": str(tmp_path)})
    assert configuration.section(MessageStoreConfig).max_message_size == 5000


def test_the_name_server_has_them_too() -> None:
    configuration = load_namesrv(environment={"TRIMQ_LISTEN_PORT": "1234"})
    assert configuration.value("listenPort") == "1234"


@pytest.mark.parametrize("program", ["broker", "namesrv"])
def test_the_command_shows_where_a_value_came_from(program: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", f"trimq.{program}", "-p"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TRIMQ_LISTEN_PORT": "1234"},
    )
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("listenPort=")]
    assert line.split()[:3] == ["listenPort=1234", "#", "TRIMQ_LISTEN_PORT:"]
