"""The SDK in a Spark worker: an event loop in the worker's own thread, which runs only while the worker waits for it.

A blocking facade with a thread of its own would compete for the interpreter with the thread that hands rows to Spark.
Here replies wait in the socket instead: requests are in flight while rows are handed over. When a task ends it leaves
no thread and no connection behind.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Final, TypeVar

import anyio

from trimq.client.core import Client, ClientOptions
from trimq.pipeline.topics.servers import Servers

T = TypeVar("T")

REQUEST_TIMEOUT: Final = 10.0
"""Seconds that one request may take."""
_AHEAD: Final = 2


def open_client(servers: Servers) -> Client:
    """A client instance for a worker."""
    options = ClientOptions(request_timeout=REQUEST_TIMEOUT, tls=servers.tls, credentials=servers.credentials())
    return Client(servers.namesrv, options)


def ask(servers: Servers, question: Callable[[Client], Awaitable[T]]) -> T:
    """Run ``question`` with an open client and return its result."""

    async def main() -> T:
        async with open_client(servers) as client:
            return await question(client)

    return anyio.run(main)


def stream(make: Callable[[], AsyncGenerator[T]]) -> Iterator[T]:
    """The items of an asynchronous iterator, for a blocking caller. At most two items are made ahead.

    The iterator runs in one task from start to end, as cancel scopes require. The task is cancelled if the caller stops
    early.
    """
    done = object()
    with asyncio.Runner() as runner:
        queue: asyncio.Queue[T | object] = asyncio.Queue(_AHEAD)

        async def produce() -> None:
            async with contextlib.aclosing(make()) as items:
                async for item in items:
                    await queue.put(item)
            await queue.put(done)

        async def start() -> asyncio.Task[None]:
            return asyncio.create_task(produce())

        async def following(task: asyncio.Task[None]) -> T | object:
            getting = asyncio.ensure_future(queue.get())
            await asyncio.wait((getting, task), return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            getting.cancel()
            # The task has ended. Without an item left it has failed, and this raises its error.
            if queue.empty():
                task.result()
            return queue.get_nowait()

        async def stop(task: asyncio.Task[None]) -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        task = runner.run(start())
        try:
            while (item := runner.run(following(task))) is not done:
                yield item  # type: ignore[misc] # all that is not done is an item
        finally:
            if not task.done():
                runner.run(stop(task))
