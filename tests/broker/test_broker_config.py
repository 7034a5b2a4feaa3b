import importlib.util
from pathlib import Path

import pytest

from trimq.broker.config import SCHEMA as BROKER
from trimq.broker.config import (
    BrokerConfig,
    BrokerRole,
    FlushDiskType,
    LogConfig,
    MessageStoreConfig,
    NettyServerConfig,
    ReplicationConfig,
    load_broker,
    parse_delay_levels,
    split_addresses,
)
from trimq.namesrv.config import SCHEMA as NAMESRV
from trimq.namesrv.config import NamesrvConfig, load_namesrv
from trimq.remoting.config.configuration import Schema
from trimq.remoting.config.properties import ConfigError

CONF = Path(__file__).parents[2] / "conf"


def load(text: str, tmp_path: Path) -> tuple[BrokerConfig, MessageStoreConfig, list[str]]:
    path = tmp_path / "broker.conf"
    path.write_text(text)
    configuration = load_broker(path)
    return configuration.section(BrokerConfig), configuration.section(MessageStoreConfig), configuration.warnings


def test_a_file_as_people_have_it_for_rocketmq(tmp_path: Path) -> None:
    broker, store, warnings = load(
        "brokerClusterName = DefaultCluster\nbrokerName = broker-a\nbrokerId = 0\ndeleteWhen = 04\n"
        "fileReservedTime = 48\nbrokerRole = ASYNC_MASTER\nflushDiskType = SYNC_FLUSH\nautoCreateTopicEnable=false\n"
        "namesrvAddr=127.0.0.1:9876;10.0.0.2:9876\nhaListenPort=10912\nbrokerIP1=10.1.1.1\nsendMessageThreadPoolNums=16\n"
        "storePathRootDir=/tmp/some/store\nmapedFileSizeCommitLog=1\nenableCalcFilterBitMap=true\naclEnable=false\n",
        tmp_path,
    )
    assert (broker.broker_name, broker.broker_id, broker.broker_ip1) == ("broker-a", 0, "10.1.1.1")
    assert broker.namesrv_addresses == ["127.0.0.1:9876", "10.0.0.2:9876"]
    assert not broker.auto_create_topic_enable
    assert not broker.runs_embedded_namesrv
    assert (store.flush_disk_type, store.file_reserved_time) == (FlushDiskType.SYNC_FLUSH, 48)
    replication = load_broker(tmp_path / "broker.conf").section(ReplicationConfig)
    assert (replication.broker_role, replication.ha_listen_port) == (BrokerRole.ASYNC_MASTER, 10912)
    assert store.commit_log_path == Path("/tmp/some/store/commitlog")
    assert store.config_path == Path("/tmp/some/store/config")
    assert [warning.split(": ", 1)[1] for warning in warnings] == [
        "unknown key mapedFileSizeCommitLog (did you mean mappedFileSizeCommitLog?); ignored",
        f"enableCalcFilterBitMap is not supported: {BROKER.unsupported['enableCalcFilterBitMap']}",
    ]


def test_defaults() -> None:
    broker, store = BrokerConfig(), MessageStoreConfig()
    assert (broker.listen_port, broker.fast_port) == (10911, 10909)
    assert broker.runs_embedded_namesrv
    assert store.mapped_file_size_commit_log == 1024**3
    assert store.consume_queue_file_size == 6_000_000
    assert store.delay_levels_ms[:3] == (0, 1000, 5000)
    assert len(store.delay_levels_ms) == 19
    assert store.delay_levels_ms[18] == 7_200_000


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("brokerName=a@b", "a name of letters, digits"),
        ("brokerId=-1", "0 or more, unless enableControllerMode=true"),
        ("brokerId=-2", "a whole number from -1 to 2147483647"),
        ("namesrvAddr=localhost", "HOST:PORT, several separated by ;"),
        ("namesrvAddr=localhost:0", "HOST:PORT, several separated by ;"),
        ("listenPort=65536", "a whole number from 0 to 65535"),
        ("listenPort=2", "a port above 2"),
        ("fastListenPort=10911", "a port other than listenPort"),
        ("brokerRole=LEADER", "one of ASYNC_MASTER, SYNC_MASTER, SLAVE"),
        ("deleteWhen=24", "hours from 00 to 23"),
        ("deleteWhen=;", "hours from 00 to 23"),
        ("messageDelayLevel=1s 5x", "numbers with s, m, h or d"),
        ("messageDelayLevel=", "numbers with s, m, h or d"),
        ("diskMaxUsedSpaceRatio=99", "a whole number from 10 to 95 (percent)"),
    ],
)
def test_bad_values_are_refused(line: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(line, tmp_path)
    assert expected in caught.value.expected
    assert caught.value.where == f"{tmp_path}/broker.conf:1"


def test_sizes_round_up_to_units(tmp_path: Path) -> None:
    _, store, _ = load("mappedFileSizeConsumeQueue=101\nstorePathCommitLog=/elsewhere\n", tmp_path)
    assert store.consume_queue_file_size == 120
    assert store.commit_log_path == Path("/elsewhere")


def test_delay_levels() -> None:
    assert parse_delay_levels("1s 2m 3h 4d") == (0, 1000, 120_000, 10_800_000, 345_600_000)
    with pytest.raises(ValueError, match="at least one"):
        parse_delay_levels(" ")
    with pytest.raises(ValueError, match="5"):
        parse_delay_levels("5")


def test_addresses() -> None:
    assert split_addresses(" a:1 ;; b:2;") == ["a:1", "b:2"]


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("namesrvAddr=a:1\n")
    configuration = load_broker(path, {"namesrvAddr": ("b:2", "-n")})
    assert configuration.section(BrokerConfig).namesrv_addresses == ["b:2"]
    assert configuration.source("namesrvAddr") == "-n"


def test_without_a_file_earlier_changes_are_read_from_the_store(tmp_path: Path) -> None:
    saved = tmp_path / "config" / "broker.properties"
    saved.parent.mkdir()
    saved.write_text("fileReservedTime=5\n")
    configuration = load_broker(None, {"storePathRootDir": (str(tmp_path), "test")})
    assert configuration.section(MessageStoreConfig).file_reserved_time == 5
    assert configuration.source("fileReservedTime") == f"{saved}:1"


def test_the_black_list_protects(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("configBlackList=fileReservedTime\n")
    configuration = load_broker(path)
    for key in ("fileReservedTime", "configBlackList", "brokerConfigPath"):
        assert configuration.check_change({key: "1"})[0].protected


REFUSED_SWITCHES = {
    "timerRocksDBEnable": "timers in RocksDB",
    "transRocksDBEnable": "transactions in RocksDB",
    "indexRocksDBEnable": "RocksDB",
    "enableSlaveActingMaster": "acting master",
    "coldDataFlowControlEnable": "flow control of cold reads",
}


def test_a_switch_that_is_off_is_no_use_of_its_feature(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("".join(f"{key}=false\n" for key in REFUSED_SWITCHES))
    configuration = load_broker(path)
    assert configuration.warnings == configuration.notes == []
    assert configuration.check_change(dict.fromkeys(REFUSED_SWITCHES, "false")) == []


@pytest.mark.parametrize(("key", "feature"), REFUSED_SWITCHES.items())
def test_a_switch_that_is_on_is_refused_by_name(key: str, feature: str, tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(f"{key}=true\n")
    configuration = load_broker(path)
    [warning] = configuration.warnings
    [refusal] = configuration.check_change({key: "true"})
    assert (refusal.key, refusal.protected) == (key, False)
    assert warning == f"{path}:1: {key} {refusal.reason}"
    assert feature in refusal.reason


def test_the_name_servers_configuration(tmp_path: Path) -> None:
    path = tmp_path / "namesrv.conf"
    path.write_text("listenPort=9999\nclusterTest=false\ndefaultThreadPoolNums=1\n")
    configuration = load_namesrv(path)
    assert configuration.section(NamesrvConfig).listen_port == 9999
    assert configuration.warnings == []
    assert len(configuration.notes) == 1
    assert configuration.check_change({"kvConfigPath": "x"})[0].protected


@pytest.mark.parametrize("schema", [BROKER, NAMESRV], ids=lambda schema: schema.program)
def test_no_key_is_reported_twice(schema: Schema) -> None:
    honoured = set(schema.options())
    assert not honoured & set(schema.inert)
    assert not honoured & set(schema.unsupported)
    assert not set(schema.inert) & set(schema.unsupported)
    assert set(schema.harmless) <= set(schema.unsupported)
    assert all(value == value.lower() for value in schema.harmless.values())


@pytest.mark.parametrize("schema", [BROKER, NAMESRV], ids=lambda schema: schema.program)
def test_each_option_says_what_it_means(schema: Schema) -> None:
    for _, option in schema.options().values():
        assert option.doc[0].isupper() or option.doc[0].isdigit(), option.key
        assert option.doc.endswith("."), option.key
        assert not option.optional or option.unset, option.key


def test_the_documented_files_are_current() -> None:
    spec = importlib.util.spec_from_file_location("conf_generate", CONF / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.wanted().items():
        assert path.read_text("utf-8") == text, "run python conf/generate.py"


def test_the_documented_files_configure_nothing() -> None:
    broker = load_broker(CONF / "broker.conf")
    assert broker.section(BrokerConfig) == BrokerConfig()
    assert broker.section(MessageStoreConfig) == MessageStoreConfig()
    assert broker.section(NettyServerConfig) == NettyServerConfig()
    assert broker.section(LogConfig) == LogConfig()
    assert broker.warnings == broker.notes == []
    assert load_namesrv(CONF / "namesrv.conf").section(NamesrvConfig) == NamesrvConfig()
