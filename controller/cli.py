"""The command ``mqcontroller``: parses RocketMQ's flags, prints the effective configuration, runs the server."""

import time
from typing import Final

from trimq.controller.config import ControllerConfig, ControllerStore, load_controller
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.program import serve, server_commands
from trimq.remoting.tls.config import TlsConfig, port_text

_PROGRAM: Final = "mqcontroller"


def run(configuration: Configuration, began: float) -> None:
    """Run the controller until SIGTERM or SIGINT; the exit code is 1 if it cannot start."""
    from trimq.controller.server import ControllerManager, StartError  # noqa: PLC0415 - not needed to print a configuration

    def lines(host: str, port: int) -> list[str]:
        return banner(configuration, host, port, time.monotonic() - began)

    serve(_PROGRAM, configuration, ControllerManager(configuration), StartError, lines)


main = server_commands(
    _PROGRAM,
    "controller",
    "A controller: it elects the masters of broker groups, for TriMQ's brokers and Apache RocketMQ's.",
    lambda file, environment: load_controller(file, environment=environment),
    run,
)


def banner(configuration: Configuration, host: str, port: int, seconds: float) -> list[str]:
    """The lines that are printed after the start: addresses, and where decisions are kept."""
    where = f"port {port} of all addresses" if host in ("0.0.0.0", "::") else f"{host}:{port}"  # noqa: S104 - compared
    config = configuration.section(ControllerConfig)
    if config.controller_store is ControllerStore.ETCD:
        store = f"etcd at {config.etcd_endpoints}: start as many controllers as you like"
    else:
        store = f"{config.controller_store_path}: this is the only controller (controllerStore=sqlite)"
    return [
        f"TriMQ controller is up after {seconds:.2f} s",
        f"  listens on     {where}",
        f"  accepts        {port_text(configuration.section(TlsConfig))}",
        f"  access         {configuration.section(AuthConfig).summary}",
        f"  for brokers    enableControllerMode=true and controllerAddr=HOST:{port} in their configuration files",
        f"  decides in     {store}",
    ]
