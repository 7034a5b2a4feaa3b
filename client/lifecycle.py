"""What opens and closes: an object with background tasks that live exactly as long as its ``async with`` block."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeVarTuple

import anyio
from anyio.abc import TaskGroup

from trimq.client.errors import ClosedError
from trimq.remoting.client.client_log import StandardLog

CLOSE_TIMEOUT: Final = 5.0
"""Seconds that closing may take for flushing what is known, also in a cancelled scope."""

_log = StandardLog("trimq.client.lifecycle")

Ts = TypeVarTuple("Ts")


class Lifecycle:
    """Base of what the SDK opens. Errors of the block's body leave it as they are, never in a group.

    Its background tasks are shielded from the cancellation of the block: they are still there to flush and to say
    goodbye when the block is left, however it is left, and end right after that.
    """

    def __init__(self) -> None:
        self._group: TaskGroup | None = None
        self._stop: anyio.Event

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise ClosedError(f"this {type(self).__name__} is open already")
        self._stop = anyio.Event()
        host: TaskGroup | None = None
        try:
            await self._prepare()
            host = anyio.create_task_group()
            await host.__aenter__()
            ready = anyio.Event()
            host.start_soon(self._serve, ready)  # not start(): cancelled, that would wait for a task that is shielded
            await ready.wait()
        except BaseException:
            await self._finish(host)
            raise
        self._host = host
        try:
            await self._open()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is None:
            return
        try:
            with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
                await self._close()
        finally:
            await self._finish(self._host)

    async def _serve(self, ready: anyio.Event) -> None:
        """The task that everything else in the background is a child of."""
        with anyio.CancelScope(shield=True):
            async with self._serving(), anyio.create_task_group() as group:
                self._group = group
                ready.set()
                await self._stop.wait()
                self._group = None
                group.cancel_scope.cancel()

    async def _finish(self, host: TaskGroup | None) -> None:
        self._stop.set()
        try:
            if host is not None:
                # The body's error is not shown to the group: it would come back wrapped in an ExceptionGroup.
                await host.__aexit__(None, None, None)
        finally:
            await self._release()

    @property
    def is_open(self) -> bool:
        """Whether it is inside its ``async with`` block."""
        return self._group is not None

    def _check_open(self) -> None:
        if self._group is None:
            raise ClosedError(f"this {type(self).__name__} is not open: use it inside its async with block")

    def spawn(self, function: Callable[[*Ts], Awaitable[object]], *arguments: *Ts) -> None:
        """Starts a background task. An error in it is logged and ends that task only."""
        if self._group is None:
            raise ClosedError(f"this {type(self).__name__} is not open")

        async def guarded() -> None:
            try:
                await function(*arguments)
            except Exception as error:  # noqa: BLE001 - one task's fault must not end the others
                _log.failed("a background task failed", error, task=_name(function))

        self._group.start_soon(guarded)

    async def _prepare(self) -> None:
        """Opens what outlives the background tasks."""

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """What is open around the background tasks, in their task."""
        yield

    async def _open(self) -> None:
        """Makes it ready; background tasks can be started."""

    async def _close(self) -> None:
        """Flushes and says goodbye; bounded by CLOSE_TIMEOUT seconds, background tasks still run."""

    async def _release(self) -> None:
        """Closes what _prepare has opened, also where that failed half way."""


def _name(function: object) -> str:
    """Its own name; that of a partial would be told with its arguments, and message bodies among them."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)
