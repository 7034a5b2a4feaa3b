"""The command lines of the servers, and their start. It imports little, so that the command ``health`` is quick."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn, Protocol

from trimq.remoting.config.configuration import Configuration, LogConfig
from trimq.remoting.config.properties import ConfigError

if TYPE_CHECKING:
    import click
    import trio


class Server(Protocol):
    """A server that ``serve`` runs."""

    stopped: "trio.Event"
    """Set at the end of ``run``."""

    def bind(self) -> object:
        """Take the ports, before anything runs."""
        ...

    async def run(self, task_status: "trio.TaskStatus[tuple[str, int]]") -> None:
        """Serve until ``shutdown``; reports the bound address as started."""
        ...

    def shutdown(self) -> None:
        """Stop in order."""
        ...


def fail(program: str, text: str, code: int) -> NoReturn:
    """Print why the program cannot run, and exit with ``code``."""
    print(f"{program}: {text}", file=sys.stderr)  # noqa: T201 - its purpose
    sys.exit(code)


def loaded(program: str, load: Callable[[], Configuration], code: int = 2) -> Configuration:
    """The loaded configuration. Exits with ``code`` if it is not valid."""
    try:
        return load()
    except ConfigError as error:
        fail(program, f"the configuration cannot be used: {error}", code)


def report_readiness(program: str, load: Callable[[], Configuration], timeout: float) -> NoReturn:
    """The command ``health``: ask the server of this configuration, exit with 0 if it is ready, else with 1 and why."""
    from trimq.remoting.http.health_command import check  # noqa: PLC0415 - a start does not need it

    code, lines = check(loaded(program, load, 1), timeout)
    print(*lines, sep="\n")  # noqa: T201 - its purpose
    sys.exit(code)


def open_log(program: str, configuration: Configuration) -> Callable[[], None]:
    """Start logging, follow changes of ``logLevel``, print the configuration's warnings. Returns what closes the log.

    Exits with code 1 if the log file cannot be opened.
    """
    from trimq.remoting.runtime.log_setup import configure, set_level  # noqa: PLC0415 - not needed to print a configuration

    try:
        close = configure(configuration.section(LogConfig))
    except OSError as error:
        fail(program, f"the log file cannot be opened: {error}", 1)
    for text in configuration.warnings:
        print(f"{program}: warning: {text}", file=sys.stderr)  # noqa: T201 - its purpose
    configuration.listeners.append(lambda _: set_level(configuration.section(LogConfig).log_level))
    return close


def server_commands(
    program: str,
    server: str,
    about: str,
    load: Callable[[str | None, Mapping[str, str]], Configuration],
    run: Callable[[Configuration, float], None],
) -> "click.Group":
    """RocketMQ's flags of a server without others, and the command ``health``.

    ``server`` names it in texts, ``about`` is what it does. ``load`` gets a file and the environment; ``run`` gets the
    moment at which the program began.
    """
    import click  # noqa: PLC0415 - brokers have a command line of their own

    @click.group(
        name=program,
        help=f"{about}\n\nEach key of the configuration can be set by an environment variable too: listenPort by "
        "TRIMQ_LISTEN_PORT.",
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    @click.option("-c", "--configFile", "file", metavar="FILE", help="Configuration in RocketMQ's properties format.")
    @click.option("-p", "--printConfigItem", "show", is_flag=True, help="Print the effective configuration and exit.")
    @click.pass_context
    def main(context: click.Context, file: str | None, show: bool) -> None:
        if context.invoked_subcommand is not None:
            context.obj = file
            return
        began = time.monotonic()
        configuration = loaded(program, lambda: load(file, os.environ))
        if show:
            from trimq.remoting.config.command_line import print_configuration  # noqa: PLC0415 - a start has no need

            print_configuration(configuration.effective())
            return
        run(configuration, began)

    @main.command(
        help=f"Query whether the {server} on this machine is ready: exit code 0, or 1 and the reasons.\n\nThe "
        f"{server}'s address comes from its configuration (file and environment), which must have a healthPort."
    )
    @click.option("-c", "--configFile", "file", metavar="FILE", help=f"The {server}'s configuration file.")
    @click.option("-t", "--timeout", type=float, default=3.0, show_default=True, help="Seconds to wait for an answer.")
    @click.pass_context
    def health(context: click.Context, file: str | None, timeout: float) -> None:
        report_readiness(program, lambda: load(file or context.obj, os.environ), timeout)

    return main


def serve(
    program: str,
    configuration: Configuration,
    server: Server,
    cannot_start: type[Exception],
    banner: Callable[[str, int], list[str]],
) -> None:
    """Run a server until SIGTERM or SIGINT, and print its banner. Exits with 1 if it raises ``cannot_start``."""
    import trio  # noqa: PLC0415 - not needed to print a configuration

    from trimq.remoting.config.command_line import prepare_process, stop_on_signal  # noqa: PLC0415 - as above

    close_log = open_log(program, configuration)
    prepare_process()

    async def run() -> None:
        server.bind()
        async with trio.open_nursery() as nursery:
            await nursery.start(stop_on_signal, server.shutdown)
            host, port = await nursery.start(server.run)
            for line in banner(host, port):
                print(line, flush=True)  # noqa: T201 - its purpose
            await server.stopped.wait()
            nursery.cancel_scope.cancel()

    reasons: list[str] = []
    try:
        trio.run(run)
    except* cannot_start as group:
        reasons = _texts(group)
    finally:
        close_log()
    if reasons:
        fail(program, "; ".join(reasons), 1)


def _texts(group: BaseExceptionGroup[BaseException]) -> list[str]:
    found = []
    for error in group.exceptions:
        found += _texts(error) if isinstance(error, BaseExceptionGroup) else [str(error)]
    return found
