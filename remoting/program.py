"""The start of the servers' command lines. It imports little, so that the command ``health`` is quick."""

import sys
from collections.abc import Callable
from typing import NoReturn

from trimq.remoting.config.configuration import Configuration, LogConfig
from trimq.remoting.config.properties import ConfigError


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
