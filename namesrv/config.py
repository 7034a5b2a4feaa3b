"""The name server's configuration: RocketMQ's keys and defaults (NamesrvConfig, NettyServerConfig)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trimq.remoting.auth.config import AUTH_INERT, AuthConfig, note_strategies
from trimq.remoting.auth.followed_config import AUTH_KEYS, FollowedUsersConfig, check_followed_users
from trimq.remoting.config.client_limits import CLIENT_LIMITS_KEYS, ClientLimitsConfig
from trimq.remoting.config.configuration import Configuration, LogConfig, NettyServerConfig, Schema, option
from trimq.remoting.config.sources import Flags, load
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.tls.config import TLS_KEYS, TlsConfig, apply_tls_file, check_tls_files


def ports_problem(text: str) -> str:
    """The expected form of ``namedListenPorts``; empty for a valid value."""
    for name, port in named_ports(text).items():
        if not name or not port.isdigit() or int(port) > 65535:
            return "NAME=PORT, several separated by ;"
    return ""


def named_ports(text: str) -> dict[str, str]:
    """The ports by name of `external=9877;vpn=9878`."""
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    return {name.strip(): port.strip() for name, _, port in pairs}


@dataclass(frozen=True)
class NamesrvConfig:
    """Ports, files and behaviour of the name server (RocketMQ's NamesrvConfig)."""

    listen_port: int = option(9876, "Port for brokers and clients.", minimum=0, maximum=65535)
    named_listen_ports: str = option(
        "",
        "More ports, as NAME=PORT separated by ;. Routes that clients get there contain the addresses that brokers "
        "advertise under this name (their advertisedListeners).",
        check=ports_problem,
        ours=True,
    )
    kv_config_path: str = option(
        lambda: str(Path("~/namesrv/kvConfig.json").expanduser()),
        "File of the table of keys and values, such as the order of topics.",
        shown="namesrv/kvConfig.json in the home directory",
    )
    config_store_path: str = option(
        lambda: str(Path("~/namesrv/namesrv.properties").expanduser()),
        "File for changes of the configuration at run time, if none was given with -c.",
        shown="namesrv/namesrv.properties in the home directory",
    )
    scan_not_active_broker_interval: int = option(
        5000, "Time between two checks for silent brokers.", unit="ms", minimum=100
    )
    broker_expired_timeout: int = option(
        120000,
        "A broker that is silent for this long is removed from the routes, unless it registers with its own timeout.",
        unit="ms",
        minimum=1000,
        ours=True,
    )
    order_message_enable: bool = option(False, "Put the order of queues of ordered topics into routes.", dynamic=True)
    return_order_topic_config_to_broker: bool = option(
        True, "Send the ordered topics to brokers when they register.", dynamic=True
    )
    delete_topic_with_broker_registration: bool = option(
        False, "Remove a topic from a broker's routes if the broker's registration lacks it.", dynamic=True
    )
    support_acting_master: bool = option(
        False,
        "Show the slave with the lowest id as master if the master is missing, for brokers that have this enabled.",
        dynamic=True,
    )
    enable_all_topic_list: bool = option(True, "Answer requests for the list of all topics.", dynamic=True)
    enable_topic_list: bool = option(True, "Answer requests for lists of topics.", dynamic=True)
    need_wait_for_service: bool = option(
        False, "Refuse routes for some time after the start, while brokers register.", dynamic=True
    )
    wait_seconds_for_service: int = option(
        45, "The time after the start without routes, with needWaitForService.", unit="s", minimum=0, dynamic=True
    )
    enable_controller_in_namesrv: bool = option(
        False, "Run a controller in this process too, with the configuration of controllerConfigFile."
    )
    controller_config_file: str = option(
        "",
        "The configuration file of that controller, as for mqcontroller -c. Without one it has the defaults, "
        "and this name server's bindAddress.",
        ours=True,
    )
    config_black_list: str = option(
        "configBlackList;configStorePath;kvConfigPath", "Keys that requests may not change, separated by ;."
    )


_INERT = dict.fromkeys(
    (
        "clientRequestThreadPoolNums",
        "defaultThreadPoolNums",
        "clientRequestThreadPoolQueueCapacity",
        "defaultThreadPoolQueueCapacity",
        "unRegisterBrokerQueueCapacity",
        "serverWorkerThreads",
        "serverCallbackExecutorThreads",
        "serverSelectorThreads",
        "serverOnewaySemaphoreValue",
        "serverAsyncSemaphoreValue",
        "serverNettyWorkerGroupEnable",
        "serverPooledByteBufAllocatorEnable",
        "useEpollNativeSelector",
    ),
    "there are no thread pools; requests run in one event loop",
) | {
    "rocketmqHome": "the directory of the installation is not used",
    "productEnvName": "it has no effect",
}

_UNSUPPORTED = {
    "clusterTest": "requesting routes from another cluster's name server is not implemented",
    "notifyMinBrokerIdChanged": "brokers are not notified of a change of the acting master",
    "enableShutdownGracefully": "a stop is always orderly; shutdownWaitTimeSeconds limits it",
}

SCHEMA = Schema(
    program="mqnamesrv",
    sections=(
        NamesrvConfig,
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
    harmless={
        "clusterTest": "false",
        "notifyMinBrokerIdChanged": "false",
    },
    more=(apply_tls_file,),
    checks=(check_tls_files, note_strategies, check_followed_users),
    protected=frozenset({"configBlackList", "configStorePath", "kvConfigPath"})
    | TLS_KEYS
    | AUTH_KEYS
    | CLIENT_LIMITS_KEYS,
)


def load_namesrv(
    file: str | Path | None = None,
    flags: Flags | None = None,
    environment: Mapping[str, str] | None = None,
) -> Configuration:
    """Load the name server's configuration from a file, the environment, and flags (key -> (value, name of the flag)).

    Later sources override earlier ones. Raises ConfigError for the first invalid value.
    """
    return load(SCHEMA, file, flags, environment)
