"""A controller's configuration: RocketMQ's keys where it has them (ControllerConfig), and where decisions are kept."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from trimq.remoting.auth.config import AUTH_INERT, AuthConfig, note_strategies
from trimq.remoting.auth.followed_config import AUTH_KEYS, FollowedUsersConfig, check_followed_users
from trimq.remoting.config.client_limits import CLIENT_LIMITS_KEYS, ClientLimitsConfig
from trimq.remoting.config.configuration import Configuration, LogConfig, NettyServerConfig, Schema, option
from trimq.remoting.config.sources import Flags, load
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.tls.config import TLS_KEYS, TlsConfig, apply_tls_file, check_tls_files


class ControllerStore(enum.StrEnum):
    """Where decisions are kept: in etcd for several controllers, in SQLite for one."""

    ETCD = "etcd"
    SQLITE = "sqlite"


def endpoints(text: str) -> list[str]:
    """The URLs in `http://10.0.0.1:2379;http://10.0.0.2:2379`."""
    return [part.strip().rstrip("/") for part in text.split(";") if part.strip()]


def _endpoints_problem(text: str) -> str:
    for url in endpoints(text):
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path:
            return "http://HOST:PORT, several separated by ;"
    return ""


def _prefix_problem(text: str) -> str:
    return (
        "" if text.startswith("/") and text.endswith("/") and text.isascii() else "a path that begins and ends with /"
    )


@dataclass(frozen=True)
class ControllerConfig:
    """Port, store and rules of a controller."""

    listen_port: int = option(9878, "Port for brokers and admin tools.", minimum=0, maximum=65535)
    controller_store: ControllerStore = option(
        ControllerStore.SQLITE,
        "Where decisions are kept: etcd for several controllers, sqlite for a single one.",
        ours=True,
    )
    controller_store_path: str = option(
        lambda: str(Path("~/controller/controller.db").expanduser()),
        "File of the database, with controllerStore=sqlite.",
        shown="controller/controller.db in the home directory",
    )
    etcd_endpoints: str = option(
        "", "URLs of etcd's members, separated by ;, with controllerStore=etcd.", check=_endpoints_problem, ours=True
    )
    etcd_prefix: str = option(
        "/trimq/controller/",
        "Where the keys in etcd begin. Clusters may share one etcd.",
        check=_prefix_problem,
        ours=True,
    )
    controller_peers: str = option(
        "",
        "All controllers, as n0:HOST:PORT;n1:HOST:PORT, for admin tools that ask one of them. Empty: this one.",
        ours=True,
    )
    enable_elect_unclean_master: bool = option(
        False,
        "Elect a broker that may lack acknowledged messages, if no member of the SyncStateSet is alive. What only the "
        "members had is lost then.",
        dynamic=True,
    )
    notify_broker_role_changed: bool = option(
        True, "Notify brokers of a new master. Without it they learn of it when they ask.", dynamic=True
    )
    scan_inactive_master_interval: int = option(
        5000, "Time between two looks for masters that are not alive.", unit="ms", minimum=100
    )
    config_store_path: str = option(
        lambda: str(Path("~/controller/controller.properties").expanduser()),
        "File for changes of the configuration at run time, if none was given with -c.",
        shown="controller/controller.properties in the home directory",
    )
    config_black_list: str = option(
        "configBlackList;configStorePath", "Keys that requests may not change, separated by ;."
    )

    def problem(self) -> tuple[str, str] | None:
        """Key and expectation of a value that does not fit the others."""
        if self.controller_store is ControllerStore.ETCD and not endpoints(self.etcd_endpoints):
            return "etcdEndpoints", "the URLs of etcd, since controllerStore=etcd"
        return None


_INERT: Final = dict.fromkeys(
    ("controllerThreadPoolNums", "controllerRequestThreadPoolQueueCapacity", "isProcessReadEvent", "mappedFileSize"),
    "there are no thread pools; requests run in one event loop",
) | {
    "rocketmqHome": "the directory of the installation is not used",
    "electMasterMaxRetryCount": "an election is tried again until it succeeds",
    "scanNotActiveBrokerInterval": "a broker's lease ends by itself",
}
_RAFT: Final = "controllers agree through etcd (controllerStore=etcd, etcdEndpoints)"
_UNSUPPORTED: Final = dict.fromkeys(
    ("controllerType", "controllerDLegerGroup", "controllerDLegerPeers", "controllerDLegerSelfId", "jRaftConfig"), _RAFT
)

SCHEMA = Schema(
    program="mqcontroller",
    sections=(
        ControllerConfig,
        AuthConfig,
        FollowedUsersConfig,
        NettyServerConfig,
        ClientLimitsConfig,
        TlsConfig,
        WebConfig,
        LogConfig,
    ),
    inert=_INERT | AUTH_INERT,
    unsupported=_UNSUPPORTED,
    more=(apply_tls_file,),
    checks=(check_tls_files, note_strategies, check_followed_users),
    protected=frozenset({"configBlackList", "configStorePath", "controllerStorePath", "etcdEndpoints", "etcdPrefix"})
    | TLS_KEYS
    | AUTH_KEYS
    | CLIENT_LIMITS_KEYS,
)


def load_controller(
    file: str | Path | None = None,
    flags: Flags | None = None,
    environment: Mapping[str, str] | None = None,
) -> Configuration:
    """Load the configuration from a file, the environment, and flags (key -> (value, name of the flag)).

    Later sources override earlier ones. Raises ConfigError for the first invalid value.
    """
    return load(SCHEMA, file, flags, environment)
