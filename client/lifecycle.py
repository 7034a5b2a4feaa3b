"""Lifecycle: an object with background tasks that live exactly as long as its ``async with`` block."""

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
"""Seconds that closing may take to flush and to notify servers; the limit also holds in a cancelled scope."""

_log = StandardLog("trimq.client.lifecycle")

Ts = TypeVarTuple("Ts")


class Lifecycle:
    """Base class of the objects that the SDK opens with ``async with``.

    An exception raised in the block leaves it unchanged, never wrapped in an ExceptionGroup.

    The background tasks are shielded from a cancellation of the block. They still run while the object closes, so that
    it can flush and notify the servers, and end right after that, whether the block ended, raised or was cancelled.
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
            # Not host.start(): if this task is cancelled, start() waits for the child, which is shielded and would
            # never end. Here the cancellation comes out of ready.wait(), and _finish sets the event that ends it.
            host.start_soon(self._serve, ready)
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
            # Shielded, because a cancelled program has to flush too; bounded, because it must end all the same.
            with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
                await self._close()
        finally:
            await self._finish(self._host)

    async def _serve(self, ready: anyio.Event) -> None:
        """The parent of all background tasks."""
        with anyio.CancelScope(shield=True):
            async with self._serving(), anyio.create_task_group() as group:
                self._group = group
                ready.set()
                await self._stop.wait()
                self._group = None  # before the cancellation: from here on spawn() must refuse new tasks
                group.cancel_scope.cancel()

    async def _finish(self, host: TaskGroup | None) -> None:
        self._stop.set()
        try:
            if host is not None:
                # The block's exception is not passed to the task group, which would raise it wrapped in an
                # ExceptionGroup.
                await host.__aexit__(None, None, None)
        finally:
            await self._release()

    @property
    def is_open(self) -> bool:
        """Whether the object is open, that is, inside its ``async with`` block."""
        return self._group is not None

    def _check_open(self) -> None:
        if self._group is None:
            raise ClosedError(f"this {type(self).__name__} is not open: use it inside its async with block")

    def spawn(self, function: Callable[[*Ts], Awaitable[object]], *arguments: *Ts) -> None:
        """Starts a background task. An exception in it is logged and ends that task only.

        Raises ClosedError if the object is not open.
        """
        if self._group is None:
            raise ClosedError(f"this {type(self).__name__} is not open")

        async def guarded() -> None:
            try:
                await function(*arguments)
            except Exception as error:  # noqa: BLE001 - one task's exception must not cancel the others
                _log.failed("a background task failed", error, task=_name(function))

        self._group.start_soon(guarded)

    async def _prepare(self) -> None:
        """Opens resources that have to outlive the background tasks."""

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """A context that is entered and left in the background tasks' parent, around all of them."""
        yield

    async def _open(self) -> None:
        """Makes the object ready for use. Background tasks can be started."""

    async def _close(self) -> None:
        """Flushes and notifies the servers. Bounded by CLOSE_TIMEOUT; the background tasks still run."""

    async def _release(self) -> None:
        """Closes the resources of ``_prepare``. Also called if ``_prepare`` failed midway."""


def _name(function: object) -> str:
    """The function's own name. The repr of a partial has its arguments in it, and those may be message bodies."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)
