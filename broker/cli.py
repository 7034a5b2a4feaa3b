"""The command ``mqbroker``: takes RocketMQ's flags, prints the configuration, runs the broker in the foreground."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import click

from trimq.broker.config import (
    AuthConfig,
    BrokerConfig,
    ControllerModeConfig,
    FlushDiskType,
    MessageStoreConfig,
    NettyServerConfig,
    ReplicationConfig,
    load_broker,
)
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.networks import WILDCARDS
from trimq.remoting.program import fail, loaded, open_log, report_readiness
from trimq.remoting.tls.config import TlsConfig, TlsMode, port_text

if TYPE_CHECKING:
    from trimq.broker.controller import BrokerController
    from trimq.broker.replicated_broker import ReplicatedBroker

_PROGRAM: Final = "mqbroker"
IMPORTANT: Final = (
    "brokerClusterName",
    "brokerName",
    "brokerId",
    "brokerIP1",
    "bindAddress",
    "listenPort",
    "fastListenPort",
    "namesrvAddr",
    "embeddedNamesrvEnable",
    "embeddedNamesrvPort",
    "autoCreateTopicEnable",
    "autoCreateSubscriptionGroup",
    "storePathRootDir",
    "flushDiskType",
    "fileReservedTime",
    "deleteWhen",
    "diskMaxUsedSpaceRatio",
    "maxMessageSize",
    "authenticationEnabled",
    "authorizationEnabled",
    "healthPort",
    "metricsExporterType",
    "logFile",
)
"""The keys that ``-m`` prints."""


@click.group(name="mqbroker", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-c", "--configFile", "file", metavar="FILE", help="Configuration in RocketMQ's properties format.")
@click.option(
    "-n", "--namesrvAddr", "namesrv", metavar="NAMESRV", help="Name servers, HOST:PORT separated by semicolons."
)
@click.option("-p", "--printConfigItem", "show_all", is_flag=True, help="Print the effective configuration and exit.")
@click.option("-m", "--printImportantConfig", "show_some", is_flag=True, help="Print its most important keys and exit.")
@click.option(
    "--accept-missing-log",
    "accept_missing_log",
    is_flag=True,
    help="For this start only: accept an empty commit log although the checkpoint names one. Its messages are lost.",
)
@click.pass_context
def main(
    context: click.Context,
    file: str | None,
    namesrv: str | None,
    show_all: bool,
    show_some: bool,
    accept_missing_log: bool,
) -> None:
    """A message broker that Apache RocketMQ's clients can use.

    Without a name server (-n, or namesrvAddr in the configuration) it runs its own on port 9876. Each configuration
    key can also be set by an environment variable: listenPort is TRIMQ_LISTEN_PORT.
    """
    if context.invoked_subcommand is not None:
        context.obj = file
        return
    began = time.monotonic()
    flags = {} if namesrv is None else {"namesrvAddr": (namesrv, "-n")}
    configuration = loaded(_PROGRAM, lambda: load_broker(file, flags, os.environ))
    if show_all or show_some:
        from trimq.remoting.config.command_line import print_configuration  # noqa: PLC0415 - not needed to start

        print_configuration(configuration.effective(), None if show_all else IMPORTANT)
        return
    run(configuration, began, accept_missing_log=accept_missing_log)


@main.command()
@click.option("-c", "--configFile", "file", metavar="FILE", help="The broker's configuration file.")
@click.option("-t", "--timeout", type=float, default=3.0, show_default=True, help="Seconds to wait for the reply.")
@click.pass_context
def health(context: click.Context, file: str | None, timeout: float) -> None:
    """Ask the broker on this machine whether it is ready. Exit code 0 if it is; otherwise 1, and the reasons.

    The broker is found by the same configuration (file and environment), which has to set healthPort.
    """
    report_readiness(_PROGRAM, lambda: load_broker(file or context.obj, environment=os.environ), timeout)


def run(configuration: Configuration, began: float, *, accept_missing_log: bool = False) -> None:
    """Run the broker until SIGTERM or SIGINT. Exits with code 1 if it cannot start."""
    import trio  # noqa: PLC0415 - not needed to print a configuration

    from trimq.broker.start_error import StartError  # noqa: PLC0415 - as above
    from trimq.remoting.config.command_line import prepare_process, settle_memory  # noqa: PLC0415 - as above

    close_log = open_log(_PROGRAM, configuration)
    prepare_process()
    broker = _made(configuration, accept_missing_log=accept_missing_log, settle=settle_memory)

    def ready() -> None:
        for line in banner(broker.controller, time.monotonic() - began, broker.web_endpoints):
            print(line, flush=True)

    reasons: list[str] = []
    try:
        trio.run(broker.serve, ready)
    except* StartError as group:
        reasons = start_errors(group)
    finally:
        close_log()
    if reasons:
        fail(_PROGRAM, "; ".join(reasons), 1)


def _made(
    configuration: Configuration, *, accept_missing_log: bool, settle: Callable[[], None]
) -> "BrokerController | ReplicatedBroker":
    """A broker whose role is configured, or one whose role controllers assign."""
    if configuration.section(ControllerModeConfig).enable_controller_mode:
        from trimq.broker.replicated_broker import ReplicatedBroker  # noqa: PLC0415 - only in controller mode

        return ReplicatedBroker(configuration, accept_missing_log=accept_missing_log, settle=settle)
    from trimq.broker.controller import BrokerController  # noqa: PLC0415 - not needed to print a configuration

    return BrokerController(configuration, accept_missing_log=accept_missing_log, settle=settle)


def start_errors(group: BaseExceptionGroup[Exception]) -> list[str]:
    """The texts of all errors in a group, including those of nested groups."""
    texts: list[str] = []
    for error in group.exceptions:
        texts += start_errors(error) if isinstance(error, BaseExceptionGroup) else [str(error)]
    return texts


def banner(
    controller: "BrokerController", seconds: float, web_endpoints: Sequence[tuple[str, int]] | None = None
) -> list[str]:
    """The lines printed after a start: addresses, store, durability, and commands for a first message.

    ``web_endpoints``: the controller's, unless they outlive it.
    """
    from trimq.broker.addresses import join  # noqa: PLC0415 - the health command needs no trio
    from trimq.protocol.native import NATIVE  # noqa: PLC0415 - as above, nor the native extension

    broker = controller.configuration.section(BrokerConfig)
    chosen = not broker.broker_ip1 and controller.configuration.section(NettyServerConfig).bind_address in WILDCARDS
    store = controller.configuration.section(MessageStoreConfig)
    listening = " and ".join(controller.listening)
    why = "  (brokerIP1 is not set: the first address of this machine that is not the loopback)" if chosen else ""
    servers = "; ".join(controller.name_servers)
    lines = [
        f"TriMQ broker {broker.broker_name} of {broker.broker_cluster_name} is up after {seconds:.2f} s",
        f"  listens on     {listening}",
        f"  clients use    {controller.address}{why}",
        f"  accepts        {port_text(controller.configuration.section(TlsConfig))}",
        f"  name server    {servers or 'none'}",
        f"  stores in      {store.store_path_root_dir}",
        f"  acknowledged   {durability(store)}",
        f"  access         {controller.configuration.section(AuthConfig).summary}",
        *_role(controller),
        f"  runs           {NATIVE.status}",
    ]
    for host, port in controller.web_endpoints if web_endpoints is None else web_endpoints:
        lines.append(f"  health         http://{join(host, port)}/readyz")
    if servers and not controller.configuration.section(ReplicationConfig).is_slave:
        first = controller.name_servers[0].partition(" ")[0]
        mqadmin = (
            "mqadmin --tls" if controller.configuration.section(TlsConfig).mode is TlsMode.ENFORCING else "mqadmin"
        )
        lines.append(f"  first message  {mqadmin} sendMessage -n {first} -t Hello -p 'hello world'")
        lines.append(f"                 {mqadmin} consumeMessage -n {first} -t Hello")
    return lines


def _role(controller: "BrokerController") -> list[str]:
    """What the role adds to the banner: nothing for a master whose messages wait for no slave."""
    replication, replicas = controller.configuration.section(ReplicationConfig), controller.replicas
    if replicas is not None:
        master = replicas.master
        if master is None:
            return ["  role           none yet: the controllers have not elected a master"]
        if replicas.is_master:
            rule = "a message is acknowledged when every member of the SyncStateSet has it"
            return [f"  role           master of epoch {master.epoch}, broker id {replicas.broker_id}: {rule}"]
        return [
            f"  role           slave with broker id {replicas.broker_id} of {master.address} (epoch {master.epoch})"
        ]
    if replication.is_slave:
        return ["  role           a slave: it copies its master's log and takes no sends (brokerRole=SLAVE)"]
    if replication.waits_for_slaves:
        copies = f"{replication.wanted_copies} copies, this broker's included (brokerRole=SYNC_MASTER, inSyncReplicas)"
        return [f"  replicated     a message is acknowledged when it has {copies}"]
    return []


def durability(store: MessageStoreConfig) -> str:
    """Which failures an acknowledged message survives, as one sentence for the banner."""
    if store.flush_disk_type is FlushDiskType.SYNC_FLUSH:
        return "means on disk: the message survives a power cut (flushDiskType=SYNC_FLUSH)"
    seconds = store.flush_commit_log_thorough_interval / 1000
    if store.transient_store_pool_enable:
        return (
            "means in the memory of this process: its crash can lose the messages of the last"
            f" {store.commit_thorough_ms} ms, a power cut those of the last {seconds:g} s"
            " (flushDiskType=ASYNC_FLUSH, transientStorePoolEnable=true)"
        )
    return (
        "means in the page cache: the message survives a crash of this process; a power cut can lose the"
        f" messages of the last {store.flush_interval_commit_log / 1000:g} to {seconds:g} s"
        " (flushDiskType=ASYNC_FLUSH)"
    )
