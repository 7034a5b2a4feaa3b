"""Functions shared by the servers' command lines."""

import gc
import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Final

import trio

from trimq.remoting.config.configuration import Effective
from trimq.remoting.config.malloc import use_one_arena

SWITCH_INTERVAL: Final = 0.0005
"""Seconds after which a helper thread that runs Python code must release the interpreter to the loop."""


def print_configuration(rows: Iterable[Effective], keys: Collection[str] | None = None) -> None:
    """Print one key per line: its value, the source of the value, its meaning. ``keys`` limits the keys."""
    shown = [row for row in rows if keys is None or row.key in keys]
    width = min(max(len(row.key) + len(row.value) for row in shown) + 1, 60)
    for row in shown:
        print(f"{f'{row.key}={row.value}':<{width}}  # {row.source}: {row.meaning}")  # noqa: T201 - its purpose


_GC_THRESHOLDS: Final = (50_000, 25, 50)
"""The hot path makes no reference cycles: collections are for the rest of the program, and each one stops the loop."""


def prepare_process() -> None:
    """Raise the soft descriptor limit to the hard one, and shorten the time that a thread may hold the interpreter.

    To be called before there are threads, which then share one arena of malloc.
    """
    use_one_arena()
    sys.setswitchinterval(SWITCH_INTERVAL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def settle_memory() -> None:
    """Freeze the objects of the start: they live as long as the process, so the collector need not visit them again."""
    gc.unfreeze()  # those of a former role are garbage now
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def stop_on_signal(
    stop: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call ``stop`` at SIGTERM or SIGINT. To be run as a task while the server runs."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            stop()
