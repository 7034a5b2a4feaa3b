"""Time and chance in a simulation: all of it follows from the seed.

trio's clock jumps to the next deadline. The clocks of the standard library show that time too, and each node's wall
clock has a step of its own. Each look at a time for slices of work moves that one a little, so that slices end.
"""

import base64
import heapq
import itertools
import math
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from typing import Any, Final
from unittest import mock

import trio
from trio._core import _run

from tests.simulation.nodes import NODE
from trimq.broker.store.disk import page_cache
from trimq.broker.store.log import allocate
from trimq.remoting.server import intake, large_reply, reactor

_SCHEDULER: Final[Any] = _run
_Planned = list[Any]
"""A time, a number that orders calls of the same time, and the call, or None."""
START_MS: Final = 1_700_000_000_000
_LOOK: Final = 0.0003
"""Seconds that pass, for slices only, with each look at the time."""


class NodeClock:
    """A machine's clock. ``step_ms`` is how far its wall clock is off; its monotonic one is that of the simulation."""

    def __init__(self) -> None:
        self.step_ms = 0

    def wall_ms(self) -> int:
        return START_MS + int(trio.current_time() * 1000) + self.step_ms

    def monotonic(self) -> float:
        return 1000.0 + trio.current_time()

    def boot_seconds(self) -> float:
        return 2000.0 + trio.current_time()

    # These two are no coroutines themselves: a task has fewer frames to pass whenever it wakes.

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        return trio.sleep(max(0.0, seconds))  # noqa: ASYNC105 - the caller waits for it

    def sleep_until(self, deadline: float) -> Coroutine[Any, Any, None]:
        return trio.sleep_until(deadline - 1000.0)


class VirtualClock(trio.abc.Clock):
    """trio's clock: whenever no task can run, it is the time of the next deadline.

    trio's MockClock adds differences of times instead, and for some of them, rounded, never gets there.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._waits = 0
        self._order = itertools.count()
        self._events: list[_Planned] = []

    def at(self, when: float, call: Callable[[], None]) -> "_Planned":
        """Call ``call`` at a time, between the steps of tasks. It must not raise.

        With None in its last place the result is not called, and no time passes for it.
        """
        planned: _Planned = [when, next(self._order), call]
        heapq.heappush(self._events, planned)
        return planned

    async def wait_until(self, when: float, *, shielded: bool = False) -> None:
        """As trio.sleep_until, without the cancel scope that it opens and cancels. ``shielded``: as in a shield."""
        task = _run.GLOBAL_RUN_CONTEXT.task
        planned: _Planned | None = None
        if when < math.inf:
            planned = self.at(when, partial(_run.GLOBAL_RUN_CONTEXT.runner.reschedule, task))

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            if shielded:
                return trio.lowlevel.Abort.FAILED
            if planned is not None:
                planned[2] = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if not shielded and task._cancel_status.effectively_cancelled:
            # As there: a task that was cancelled after its time had come, while its node was stopped, does not go on.
            await trio.lowlevel.checkpoint_if_cancelled()

    def wait(self, seconds: float) -> Coroutine[Any, Any, None]:
        """As trio.sleep."""
        if seconds < 0:
            raise ValueError(f"{seconds} seconds")
        if not seconds:
            return trio.lowlevel.checkpoint()  # noqa: ASYNC105 - the caller waits for it
        return self.wait_until(self.now + seconds)

    def start_clock(self) -> None:
        """See Clock."""

    def current_time(self) -> float:
        """See Clock."""
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """See Clock. trio asks only when no task can run."""
        events, runnable = self._events, _run.GLOBAL_RUN_CONTEXT.runner.runq
        # Some calls let no task run: trio's loop need not turn for each of them.
        while events and events[0][0] <= deadline:
            when, _, call = heapq.heappop(events)
            if call is None:
                continue
            self.now = max(self.now, when)
            call()
            while events and events[0][0] <= self.now:
                call = heapq.heappop(events)[2]
                if call is not None:
                    call()
            if runnable:
                return 0.0
        if deadline < math.inf:
            self.now = max(self.now, deadline)
            return 0.0
        # When all has ended, trio waits for a wake-up of its own. Nothing else of a simulation waits for the system.
        self._waits += 1
        if self._waits > 10:
            raise StandstillError("no task of the simulation will ever run again")
        return 0.1


class StandstillError(AssertionError):
    """Everything waits for something else."""


def _wall_ms() -> int:
    node = NODE.get()
    clock = getattr(node, "clock", None)
    return clock.wall_ms() if clock is not None else START_MS + int(trio.current_time() * 1000)


_get_events: Final = _SCHEDULER.TheIOManager.get_events


def _events(manager: Any, timeout: float) -> Any:
    """No files are waited for, so the system is asked only when trio waits for its own wake-up, at the end."""
    return _get_events(manager, timeout) if timeout else ()


async def _run_now(function: Callable[..., Any], *arguments: Any, **_options: object) -> Any:
    """As trio.to_thread.run_sync, without a thread: its end would come at no time of the simulation."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


def _in_this_thread(own: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """``own``, and in other threads ``original``: a broker of the session may run there, and goes by its own clock."""
    thread = threading.get_ident()

    def call(*arguments: Any, **named: Any) -> Any:
        return (own if threading.get_ident() == thread else original)(*arguments, **named)

    return call


class _RandomOfThread:
    """``own`` in this thread, and in other threads ``original``: their loops would take numbers of the seed."""

    def __init__(self, own: Random, original: Random) -> None:
        self._own, self._original = own, original
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if threading.get_ident() == self._thread else self._original, name)


_RANDOM_FUNCTIONS: Final = ("random", "uniform", "randrange", "randint", "getrandbits", "choice", "shuffle", "sample")
"""Those of the module that programs may use; another one would draw numbers that no seed decides."""


@contextmanager
def seeded(seed: int) -> Iterator[VirtualClock]:
    """Make the scheduler, random numbers and times follow from ``seed``. Yields the clock for ``trio.run``."""
    clock = VirtualClock()
    looks = itertools.count()

    def slice_time() -> float:
        return clock.current_time() + _LOOK * next(looks)

    def monotonic() -> float:
        return 1000.0 + clock.current_time()

    def time_ns() -> int:
        return _wall_ms() * 1_000_000

    def seconds() -> float:
        return _wall_ms() / 1000

    def token_hex(count: int) -> str:
        return bits.randbytes(count).hex()

    def token_urlsafe(count: int) -> str:
        return base64.urlsafe_b64encode(bits.randbytes(count)).decode().rstrip("=")

    program = Random(f"program {seed}")
    bits = Random(f"bytes {seed}")
    getpid = mock.Mock(return_value=4242)  # it is in the file that locks a store, and in unique ids
    patches: list[tuple[Any, str, Any]] = [
        (_SCHEDULER, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        (_SCHEDULER.TheIOManager, "get_events", _events),
        (_SCHEDULER, "_r", _RandomOfThread(Random(f"scheduler {seed}"), _SCHEDULER._r)),
        *((random, name, getattr(program, name)) for name in _RANDOM_FUNCTIONS),
        (trio, "current_time", clock.current_time),
        (_run, "current_time", clock.current_time),
        (trio, "sleep", clock.wait),
        (trio, "sleep_until", clock.wait_until),
        (trio.to_thread, "run_sync", _run_now),
        (time, "perf_counter", slice_time),
        *((module, "perf_counter", slice_time) for module in (intake, reactor, large_reply)),
        (allocate, "thread_time", slice_time),
        (page_cache, "monotonic", monotonic),
        (time, "monotonic", monotonic),
        (time, "time_ns", time_ns),
        (time, "time", seconds),
        (os, "urandom", bits.randbytes),
        (os, "getpid", getpid),
        (secrets, "token_hex", token_hex),
        (secrets, "token_urlsafe", token_urlsafe),
    ]
    shared = threading.active_count() > 1
    with ExitStack() as stack:
        for target, name, own in patches:
            found = _in_this_thread(own, getattr(target, name)) if shared and callable(own) else own
            stack.enter_context(mock.patch.object(target, name, found))
        yield clock
