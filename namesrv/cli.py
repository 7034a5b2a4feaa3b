"""The command ``mqnamesrv``: parses RocketMQ's flags, prints the effective configuration, runs the server."""

import time
from typing import Final

from trimq.namesrv.config import NamesrvConfig, load_namesrv
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.program import serve, server_commands
from trimq.remoting.tls.config import TlsConfig, port_text

_PROGRAM: Final = "mqnamesrv"


def run(configuration: Configuration, began: float) -> None:
    """Run the name server until SIGTERM or SIGINT; the exit code is 1 if it cannot start."""
    from trimq.namesrv.controller import NamesrvController, StartError  # noqa: PLC0415 - not needed to print a configuration

    server = NamesrvController(configuration)

    def lines(host: str, port: int) -> list[str]:
        found = banner(configuration, host, port, time.monotonic() - began)
        if server.embedded is not None and server.embedded.address is not None:
            found.append(f"  controller     controllerAddr=HOST:{server.embedded.address[1]}, in this process")
        return found

    serve(_PROGRAM, configuration, server, StartError, lines)


main = server_commands(
    _PROGRAM,
    "name server",
    "A name server for Apache RocketMQ's brokers and clients.",
    lambda file, environment: load_namesrv(file, environment=environment),
    run,
)


def banner(configuration: Configuration, host: str, port: int, seconds: float) -> list[str]:
    """The lines that are printed after the start: addresses, and what survives a restart."""
    where = f"port {port} of all addresses" if host in ("0.0.0.0", "::") else f"{host}:{port}"  # noqa: S104 - compared
    kv_path = configuration.section(NamesrvConfig).kv_config_path
    return [
        f"TriMQ name server is up after {seconds:.2f} s",
        f"  listens on     {where}",
        f"  accepts        {port_text(configuration.section(TlsConfig))}",
        f"  access         {configuration.section(AuthConfig).summary}",
        f"  for brokers    mqbroker -n HOST:{port}, or namesrvAddr=HOST:{port} in their configuration file",
        f"  remembers      keys and values in {kv_path}",
        "                 routes in memory: after a restart brokers register again within 30 s",
    ]
