"""What the command lines of our servers share."""

import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Final

import trio

from trimq.remoting.config.configuration import Effective

SWITCH_INTERVAL: Final = 0.0005
"""Seconds after which a helper thread that runs Python has to give the interpreter back to the loop."""


def print_configuration(rows: Iterable[Effective], keys: Collection[str] | None = None) -> None:
    """One key a line: its value, where that came from, what it means. ``keys``: only those."""
    shown = [row for row in rows if keys is None or row.key in keys]
    width = min(max(len(row.key) + len(row.value) for row in shown) + 1, 60)
    for row in shown:
        print(f"{f'{row.key}={row.value}':<{width}}  # {row.source}: {row.meaning}")  # noqa: T201 - its purpose


def prepare_process() -> None:
    """Raise the soft descriptor limit to the hard one; keep helper threads from holding the interpreter for long."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def stop_on_signal(
    stop: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call ``stop`` at SIGTERM or SIGINT. Run it as a task for as long as the server serves."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            stop()
