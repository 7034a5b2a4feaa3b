"""Nodes: the machines of a simulated cluster. Each can be paused, killed, and cut off from its power.

A task belongs to the node in whose context it was started. trio asks ``Runner.reschedule`` for every task that is to
run; tasks of a stopped node are put aside there instead. So a paused node does nothing while the time goes on, as a
process after SIGSTOP does, and a dead one never does anything again.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final
from unittest import mock

import trio
from trio._core import _run

NODE: Final[ContextVar["Node | None"]] = ContextVar("NODE", default=None)
"""The node to which the current task belongs; None for the simulation itself."""


class Node:
    """One life of a process on a machine: it ends with a kill or a power cut, and another one follows.

    ``name`` and ``host`` (its address) are those of the machine.
    """

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.is_dead = False
        self._stopped = False
        self._aside: deque[Any] = deque()

    def __repr__(self) -> str:
        return f"<Node {self.name}>"

    @property
    def is_stopped(self) -> bool:
        """Whether none of its tasks runs."""
        return self._stopped

    def stop(self) -> None:
        """Let no task of it run from here on, as SIGSTOP does."""
        if self._stopped:
            return
        self._stopped = True
        runner = _run.GLOBAL_RUN_CONTEXT.runner
        waiting = list(runner.runq)
        runner.runq.clear()
        for task in waiting:
            (self._aside if task.context.get(NODE) is self else runner.runq).append(task)

    def resume(self) -> None:
        """Let its tasks run again."""
        if self._stopped:
            self._stopped = False
            _run.GLOBAL_RUN_CONTEXT.runner.runq.extend(self._aside)
            self._aside.clear()

    def reschedule(self, runner: Any, task: Any, next_send: Any) -> None:
        """Put a task aside that is to run: it runs after ``resume``."""
        queue, runner.runq = runner.runq, self._aside
        try:
            _reschedule(runner, task, next_send)
        finally:
            runner.runq = queue


_reschedule: Final = _run.Runner.reschedule


def _checked_reschedule(runner: Any, task: Any, next_send: Any = _run._NO_SEND) -> None:
    node = task.context.get(NODE)
    if node is not None and node._stopped:
        node.reschedule(runner, task, next_send)
    else:
        _reschedule(runner, task, next_send)


@contextmanager
def stoppable() -> Iterator[None]:
    """Make nodes stoppable while the block runs."""
    with mock.patch.object(_run.Runner, "reschedule", _checked_reschedule):
        yield


@contextmanager
def inside(node: Node | None) -> Iterator[None]:
    """Tasks that the block starts belong to ``node``."""
    token = NODE.set(node)
    try:
        yield
    finally:
        NODE.reset(token)


async def run_in(node: Node, function: Any, *arguments: Any) -> None:
    """Run an async function as a task of ``node``. Started with a nursery of the simulation."""
    NODE.set(node)
    # A first turn, so that a node that is stopped already does not begin.
    await trio.lowlevel.checkpoint()
    await function(*arguments)
