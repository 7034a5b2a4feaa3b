"""The command ``mqnamesrv``: parses RocketMQ's flags, prints the effective configuration, runs the server."""

import os
import time
from typing import Final

import click

from trimq.namesrv.config import NamesrvConfig, load_namesrv
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.program import fail, loaded, open_log, report_readiness

_PROGRAM: Final = "mqnamesrv"


@click.group(name="mqnamesrv", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-c", "--configFile", "file", metavar="FILE", help="Configuration in RocketMQ's properties format.")
@click.option("-p", "--printConfigItem", "show", is_flag=True, help="Print the effective configuration and exit.")
@click.pass_context
def main(context: click.Context, file: str | None, show: bool) -> None:
    """A name server for Apache RocketMQ's brokers and clients.

    Each key of the configuration can be set by an environment variable too: listenPort by TRIMQ_LISTEN_PORT.
    """
    if context.invoked_subcommand is not None:
        context.obj = file
        return
    began = time.monotonic()
    configuration = loaded(_PROGRAM, lambda: load_namesrv(file, environment=os.environ))
    if show:
        from trimq.remoting.config.command_line import print_configuration  # noqa: PLC0415 - a start does not need it

        print_configuration(configuration.effective())
        return
    run(configuration, began)


@main.command()
@click.option("-c", "--configFile", "file", metavar="FILE", help="The name server's configuration file.")
@click.option("-t", "--timeout", type=float, default=3.0, show_default=True, help="Seconds to wait for an answer.")
@click.pass_context
def health(context: click.Context, file: str | None, timeout: float) -> None:
    """Query whether the name server on this machine is ready: exit code 0, or 1 and the reasons.

    The name server's address comes from its configuration (file and environment), which must have a healthPort.
    """
    report_readiness(_PROGRAM, lambda: load_namesrv(file or context.obj, environment=os.environ), timeout)


def run(configuration: Configuration, began: float) -> None:
    """Run the name server until SIGTERM or SIGINT; the exit code is 1 if it cannot start."""
    import trio  # noqa: PLC0415 - not needed to print a configuration

    from trimq.namesrv.controller import NamesrvController, StartError  # noqa: PLC0415 - as above
    from trimq.remoting.config.command_line import prepare_process, stop_on_signal  # noqa: PLC0415 - as above

    close_log = open_log(_PROGRAM, configuration)
    prepare_process()
    controller = NamesrvController(configuration)

    async def serve() -> None:
        controller.bind()
        async with trio.open_nursery() as nursery:
            await nursery.start(stop_on_signal, controller.shutdown)
            host, port = await nursery.start(controller.run)
            for line in banner(configuration, host, port, time.monotonic() - began):
                print(line, flush=True)
            await controller.stopped.wait()
            nursery.cancel_scope.cancel()

    try:
        trio.run(serve)
    except StartError as error:
        fail(_PROGRAM, str(error), 1)
    finally:
        close_log()


def banner(configuration: Configuration, host: str, port: int, seconds: float) -> list[str]:
    """The lines that are printed after the start: addresses, and what survives a restart."""
    where = f"port {port} of all addresses" if host in ("0.0.0.0", "::") else f"{host}:{port}"  # noqa: S104 - compared
    kv_path = configuration.section(NamesrvConfig).kv_config_path
    return [
        f"TriMQ name server is up after {seconds:.2f} s",
        f"  listens on     {where}",
        f"  for brokers    mqbroker -n HOST:{port}, or namesrvAddr=HOST:{port} in their configuration file",
        f"  remembers      keys and values in {kv_path}",
        "                 routes in memory: after a restart brokers register again within 30 s",
    ]
