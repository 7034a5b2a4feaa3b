"""The broker's configuration.

One frozen dataclass per section, with RocketMQ's keys and defaults (BrokerConfig, MessageStoreConfig,
NettyServerConfig).

`load_broker(file, flags)` gives a Configuration whose sections are BrokerConfig, MessageStoreConfig, NettyServerConfig
and LogConfig. Sizes are plain numbers of bytes and times plain numbers of milliseconds, as RocketMQ writes them.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trimq.broker.auth.user_limits_config import USER_LIMITS_KEYS, UserLimitsConfig, check_user_limits
from trimq.broker.controller_mode_config import ControllerModeConfig
from trimq.broker.replication_config import REPLICATION_SETTINGS, BrokerRole, ReplicationConfig, parse_addresses
from trimq.broker.store_config import (
    DEFAULT_DELAY_LEVELS,
    FlushDiskType,
    MessageStoreConfig,
    parse_delay_levels,
)
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.broker.unsupported_config import HARMLESS, INERT, UNSUPPORTED
from trimq.protocol import topic_rules
from trimq.remoting.auth.config import AUTH_INERT, AuthConfig, note_strategies
from trimq.remoting.config.client_limits import CLIENT_LIMITS_KEYS, ClientLimitsConfig
from trimq.remoting.config.configuration import Configuration, LogConfig, NettyServerConfig, Schema, option, options_of
from trimq.remoting.config.environment import variable_of
from trimq.remoting.config.networks import WILDCARDS
from trimq.remoting.config.sources import Flags, load
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.tls.config import TLS_KEYS, TlsConfig, apply_tls_file, check_tls_files

__all__ = [
    "DEFAULT_DELAY_LEVELS",
    "REPLICATION_SETTINGS",
    "SCHEMA",
    "AuthConfig",
    "BrokerConfig",
    "BrokerRole",
    "ControllerModeConfig",
    "FlushDiskType",
    "LogConfig",
    "MessageStoreConfig",
    "NettyServerConfig",
    "ReplicationConfig",
    "UserLimitsConfig",
    "load_broker",
    "parse_addresses",
    "parse_delay_levels",
    "saved_changes_path",
    "split_addresses",
]

_PORT = 65535


def _host_name() -> str:
    """RocketMQ's default brokerName: the name of this machine, with "-" for characters that no topic name may have."""
    return re.sub(r"[^a-zA-Z0-9_-]", "-", socket.gethostname()) or "DEFAULT_BROKER"


def _name_problem(name: str) -> str:
    return (
        ""
        if topic_rules.topic_problem(name) is None
        else "a name of letters, digits, % | _ and - (a topic gets this name)"
    )


def _addresses_problem(text: str) -> str:
    for address in split_addresses(text):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= _PORT:
            return "HOST:PORT, several separated by ;"
    return ""


def _admin_address_problem(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not text or (host and port.isascii() and port.isdigit() and int(port) <= _PORT):
        return ""
    return "HOST:PORT"


def _listeners_problem(text: str) -> str:
    for name, address in parse_listeners(text).items():
        if not name or _addresses_problem(address) or not address:
            return "NAME=HOST:PORT, several separated by ;"
    return ""


def parse_listeners(text: str) -> dict[str, str]:
    """Parse `external=localhost:10911;vpn=10.8.0.1:10911` into addresses by name."""
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    return {name.strip(): address.strip() for name, _, address in pairs}


def split_addresses(text: str) -> list[str]:
    """Parse `a:1;b:2` into a list of addresses."""
    return [part.strip() for part in text.split(";") if part.strip()]


@dataclass(frozen=True)
class BrokerConfig:
    """The broker's identity, and how it treats clients (RocketMQ's BrokerConfig)."""

    broker_cluster_name: str = option("DefaultCluster", "Cluster this broker belongs to.", check=_name_problem)
    broker_name: str = option(
        _host_name,
        "Name of the broker; a master and its slaves share it.",
        check=_name_problem,
        shown="the name of this machine",
    )
    broker_id: int = option(
        0,
        "0 is the master; other numbers are slaves. In controller mode (-1 there) the controllers assign it.",
        minimum=-1,
        maximum=2**31 - 1,
    )
    broker_ip1: str | None = option(
        None,
        "Address that the broker advertises to clients. Message ids contain it.",
        key="brokerIP1",
        unset="the first address of this machine that is not the loopback",
    )
    broker_ip2: str | None = option(
        None, "Address that the broker advertises to slaves.", key="brokerIP2", unset="brokerIP1"
    )
    advertised_listeners: str = option(
        "",
        "Other addresses by which clients reach this broker, as NAME=HOST:PORT separated by ;. A TriMQ name server "
        "returns them to clients that connect to its port of the same name (namedListenPorts).",
        check=_listeners_problem,
        ours=True,
    )
    listen_port: int = option(10911, "Port for clients.", minimum=0, maximum=_PORT)
    fast_listen_port: int | None = option(
        None,
        "Port that serves all requests except pulls (RocketMQ's VIP channel); 0 switches it off.",
        minimum=0,
        maximum=_PORT,
        unset="listenPort - 2",
    )
    admin_listen_address: str = option(
        "",
        "HOST:PORT of another port, which serves all requests. While it is set, the ports for clients answer requests "
        "of administrators with NO_PERMISSION and this address.",
        check=_admin_address_problem,
        ours=True,
    )
    namesrv_addr: str | None = option(
        None,
        "Name servers, HOST:PORT separated by ;.",
        unset="only the embedded one",
        check=_addresses_problem,
    )
    embedded_namesrv_enable: bool | None = option(
        None, "Run a name server inside this process.", unset="yes, unless namesrvAddr is set", ours=True
    )
    embedded_namesrv_port: int = option(9876, "Port of the embedded name server.", minimum=0, maximum=_PORT, ours=True)
    embedded_namesrv_named_listen_ports: str = option(
        "",
        "Additional ports of the embedded name server, as NAME=PORT separated by ; (its namedListenPorts).",
        ours=True,
    )
    auto_create_topic_enable: bool = option(
        True, "A send to an unknown topic creates it, with the template topic TBW102.", dynamic=True
    )
    default_topic_queue_nums: int = option(
        8, "Queues of TBW102, which is the most that an auto-created topic gets.", minimum=1, maximum=1024
    )
    auto_create_subscription_group: bool = option(
        True, "The first use of an unknown consumer group creates it.", dynamic=True
    )
    max_offset_groups: int = option(
        100_000,
        "Most consumer groups that may exist, and most that may have offsets. Beyond it no group is created and no "
        "offset of a further group is accepted. Existing groups stay when the limit is lowered.",
        minimum=1,
        dynamic=True,
        ours=True,
    )
    broker_permission: int = option(
        6,
        "What clients may do here: 4 read, 2 write, 6 both. Routes carry it. Without 2 the broker itself refuses only "
        "sends to order topics and messages sent back, as in RocketMQ.",
        minimum=0,
        maximum=7,
        dynamic=True,
    )
    cluster_topic_enable: bool = option(True, "Clients may use the topic with the cluster's name.")
    broker_topic_enable: bool = option(True, "Clients may use the topic with the broker's name.")
    trace_topic_enable: bool = option(False, "Create the topic for message traces.")
    msg_trace_topic_name: str = option(
        topic_rules.TRACE_TOPIC, "Name of the topic for message traces.", check=_name_problem
    )
    validate_system_topic_when_update_topic: bool = option(
        True, "Refuse to change the broker's own topics.", dynamic=True
    )
    enable_create_sys_group: bool = option(True, "Create the consumer groups that RocketMQ's own tools use.")
    reject_transaction_message: bool = option(
        False, "Refuse half messages, so that no transaction can begin here.", dynamic=True
    )
    transaction_time_out: int = option(
        6000,
        "A half message is not checked before this time, unless it has CHECK_IMMUNITY_TIME_IN_SECONDS.",
        unit="ms",
        minimum=0,
        dynamic=True,
    )
    transaction_check_max: int = option(
        15,
        "After this many checks a half message is moved to TRANS_CHECK_MAX_TIME_TOPIC. Only checks that were sent to a "
        "producer count.",
        minimum=1,
        dynamic=True,
    )
    transaction_check_interval: int = option(
        30000, "Time between two checks of half messages that were not ended.", unit="ms", minimum=1, dynamic=True
    )
    transaction_op_msg_max_size: int = option(
        4096,
        "An op record, which notes the ends of half messages, is written when it has this size.",
        unit="bytes",
        minimum=1,
        maximum=1024 * 1024,
        dynamic=True,
    )
    transaction_op_batch_interval: int = option(
        3000, "Longest time until the end of a half message is in an op record.", unit="ms", minimum=1, dynamic=True
    )
    max_pending_half_messages: int = option(
        1000000,
        "Most half messages that wait for their end. Further ones are answered SYSTEM_BUSY; each takes up to 100 bytes "
        "of memory, and up to 200 during a start.",
        minimum=1,
        dynamic=True,
        ours=True,
    )
    region_id: str = option("DefaultRegion", "Value of the property MSG_REGION that each message gets.", dynamic=True)
    trace_on: bool = option(True, "Value of the property TRACE_ON that each message gets.", dynamic=True)
    store_reply_message_enable: bool = option(
        True, "Store the replies of request-reply calls in the topic <cluster>_REPLY_TOPIC.", dynamic=True
    )
    start_accept_send_request_time_stamp: int = option(
        0, "Sends before this time are refused.", unit="ms since 1970", minimum=0, dynamic=True
    )
    long_polling_enable: bool = option(
        True,
        "Hold a pull that finds nothing for as long as the client requests; otherwise for shortPollingTimeMills.",
        dynamic=True,
    )
    short_polling_time_mills: int = option(
        1000, "How long a pull is held without long polling.", unit="ms", minimum=1, dynamic=True
    )
    max_held_requests: int = option(
        200000,
        "Most pulls held at the same time. A further one is answered PULL_NOT_FOUND immediately.",
        minimum=1,
        dynamic=True,
        ours=True,
    )
    lite_pull_message_enable: bool = option(True, "Serve pulls of lite pull consumers.", dynamic=True)
    enable_property_filter: bool = option(
        False, "Serve consumers that filter by an SQL92 expression over the properties of messages.", dynamic=True
    )
    filter_support_retry: bool = option(
        False,
        "Filter the messages of a retry topic by the group's expression for the topic to which they were sent, if the "
        "group subscribes to the retry topic by an expression.",
        dynamic=True,
    )
    filter_data_clean_time_span: int = option(
        24 * 3600 * 1000,
        "How long the expression of a group that is offline stays in consumerFilter.json.",
        unit="ms",
        minimum=0,
        dynamic=True,
    )
    notify_consumer_ids_changed_enable: bool = option(
        True, "Notify the members of a group when its membership changes.", dynamic=True
    )
    server_load_balancer_enable: bool = option(
        True,
        "Answer a client that asks for its queues with its share. Without it, with all queues of the topic.",
        dynamic=True,
    )
    load_balance_poll_name_server_interval: int = option(
        30000,
        "How long a route is used for the shares of clients before a name server is asked again.",
        unit="ms",
        minimum=1000,
        dynamic=True,
    )
    channel_expired_timeout: int = option(
        120000, "A client that sends no heartbeat for this long is removed from its groups.", unit="ms", minimum=1000
    )
    enable_register_producer: bool = option(True, "Maintain the table of producers from heartbeats.", dynamic=True)
    use_server_side_reset_offset: bool = option(
        True,
        "The broker stores an offset reset and returns it to the next pull; otherwise it sends it to the consumers.",
        dynamic=True,
    )
    flush_consumer_offset_interval: int = option(
        5000, "Time between two writes of consumerOffset.json.", unit="ms", minimum=100, dynamic=True
    )
    consumer_offset_update_version_step: int = option(
        500, "Commits after which the version of the offsets is raised.", minimum=1, dynamic=True
    )
    delay_offset_update_version_step: int = option(
        200, "Deliveries after which the version of the delay offsets is raised.", minimum=1, dynamic=True
    )
    recall_message_enable: bool = option(
        False, "Producers may recall timed messages that are not delivered yet.", dynamic=True
    )
    allow_recall_when_broker_not_writeable: bool = option(
        True, "Accept recalls also while brokerPermission does not permit writing.", dynamic=True
    )
    register_name_server_period: int = option(
        30000,
        "Time between two registrations with the name servers.",
        unit="ms",
        minimum=10000,
        maximum=60000,
        dynamic=True,
    )
    register_broker_timeout_mills: int = option(
        24000, "How long a registration may take.", unit="ms", minimum=100, dynamic=True
    )
    force_register: bool = option(
        True, "Register each time; otherwise only if the name server has another version of the topics.", dynamic=True
    )
    compressed_register: bool = option(False, "Compress registrations.", dynamic=True)
    config_black_list: str = option(
        "configBlackList;brokerConfigPath", "Keys that clients may not change, separated by ;."
    )

    def problem(self) -> tuple[str, str] | None:
        """A key whose value conflicts with other keys, and the expected value; None if there is no conflict."""
        if self.listen_port in (1, 2) and self.fast_listen_port is None:
            return "listenPort", "a port above 2, because fastListenPort is listenPort - 2"
        if self.fast_listen_port and self.fast_listen_port == self.listen_port:
            return "fastListenPort", "a port other than listenPort"
        return None

    @property
    def fast_port(self) -> int:
        """The VIP port; 0 is off. With listenPort 0 the main port is any free one, and the VIP port is off."""
        if self.fast_listen_port is not None:
            return self.fast_listen_port
        return max(0, self.listen_port - 2)

    @property
    def namesrv_addresses(self) -> list[str]:
        """The configured name servers, without the embedded one."""
        return split_addresses(self.namesrv_addr or "")

    @property
    def runs_embedded_namesrv(self) -> bool:
        """Whether the name server runs in this process."""
        return not self.namesrv_addresses if self.embedded_namesrv_enable is None else self.embedded_namesrv_enable


def _role_problem(configuration: Configuration) -> tuple[str, str] | None:
    """Key and expectation if number, role and write buffers do not fit together."""
    replication, broker = configuration.section(ReplicationConfig), configuration.section(BrokerConfig)
    role, broker_id = replication.broker_role, broker.broker_id
    if configuration.section(ControllerModeConfig).enable_controller_mode:
        # Role and id are the controllers'. What the configuration says of them is not looked at.
        if broker.runs_embedded_namesrv:
            return "namesrvAddr", "the name servers, since enableControllerMode=true: they have to outlive this broker"
        if configuration.section(MessageStoreConfig).transient_store_pool_enable:
            return "transientStorePoolEnable", "false, since enableControllerMode=true"
        return None
    if broker_id < 0:
        return "brokerId", "0 or more, unless enableControllerMode=true"
    if role is BrokerRole.SLAVE and not broker_id:
        return "brokerId", "a number above 0, since brokerRole=SLAVE"
    if role is not BrokerRole.SLAVE and broker_id:
        return "brokerRole", f"SLAVE, since brokerId={broker_id}; a master has brokerId=0"
    replicates = role is not BrokerRole.ASYNC_MASTER or replication.ha_listen_port is not None
    if replicates and configuration.section(MessageStoreConfig).transient_store_pool_enable:
        return "transientStorePoolEnable", "false with slaves: what is in a write buffer cannot be sent to them"
    return None


def _admin_port_problem(configuration: Configuration) -> tuple[str, str] | None:
    """Key and expectation if the admin port is another port of this broker."""
    broker, bind = configuration.section(BrokerConfig), configuration.section(NettyServerConfig).bind_address
    host, _, port = broker.admin_listen_address.rpartition(":")
    if not port or (host.strip("[]") != bind and host.strip("[]") not in WILDCARDS and bind not in WILDCARDS):
        return None
    replication = configuration.section(ReplicationConfig)
    own = {broker.listen_port: "listenPort", broker.fast_port: "fastListenPort"}
    if replication.ha_listen_port is not None and not replication.is_slave:
        own[replication.ha_listen_port] = "haListenPort"
    key = own.get(int(port)) if int(port) else None  # 0 is any free port
    return ("adminListenAddress", f"another port than {key}={port}") if key else None


def _ha_tls_problem(configuration: Configuration) -> tuple[str, str] | None:
    """Key and expectation if both sides of a replication with TLS could not verify each other."""
    tls = configuration.section(TlsConfig)
    if not configuration.section(ReplicationConfig).ha_tls:
        return None
    wanted = (
        ("tls.server.mode=permissive or enforcing, and tls.server.certPath", tls.server_pair is not None),
        ("tls.server.authClient=true", tls.auth_client),
        ("tls.client.certPath", bool(tls.client_cert)),
        ("tls.client.authServer=true", tls.auth_server),
        ("tls.enable=true", tls.is_client),
    )
    missing = [text for text, given in wanted if not given]
    return ("haTls", f"false, or also {', '.join(missing)}: master and slave verify each other") if missing else None


SCHEMA = Schema(
    program="mqbroker",
    sections=(
        BrokerConfig,
        MessageStoreConfig,
        ReplicationConfig,
        ControllerModeConfig,
        TieredStoreConfig,
        AuthConfig,
        UserLimitsConfig,
        NettyServerConfig,
        ClientLimitsConfig,
        TlsConfig,
        WebConfig,
        LogConfig,
    ),
    inert=INERT | AUTH_INERT,
    unsupported=UNSUPPORTED,
    harmless=HARMLESS,
    more=(apply_tls_file,),
    checks=(_role_problem, _admin_port_problem, check_tls_files, _ha_tls_problem, check_user_limits, note_strategies),
    # Users and policies can be changed by requests; who checks them cannot.
    protected=frozenset({"configBlackList", "brokerConfigPath", "adminListenAddress"})
    | USER_LIMITS_KEYS
    | CLIENT_LIMITS_KEYS
    | TLS_KEYS
    | {opt.key for opt in options_of(AuthConfig)},
)


def saved_changes_path(root: Path) -> Path:
    """The file for changes made at run time, if the broker was started without a configuration file."""
    return root / "config" / "broker.properties"


def load_broker(
    file: str | Path | None = None,
    flags: Flags | None = None,
    environment: Mapping[str, str] | None = None,
) -> Configuration:
    """Load the broker's configuration from a file, the environment, and flags (key -> (value, name of the flag)).

    Later sources override earlier ones. Without a file, changes made at run time are read from the store (see
    `saved_changes_path`). Raises ConfigError for the first invalid value.
    """
    if file is None:
        # The saved changes are in the store, whose directory the environment and the flags may set: look there first.
        default = (environment or {}).get(variable_of("storePathRootDir")) or MessageStoreConfig().store_path_root_dir
        root = (flags or {}).get("storePathRootDir", (default, ""))[0]
        saved = saved_changes_path(Path(root))
        file = saved if saved.exists() else None
    return load(SCHEMA, file, flags, environment)
