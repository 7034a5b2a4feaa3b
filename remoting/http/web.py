"""The HTTP side of a server: a small ASGI application on hypercorn's trio worker. Imported only if it is enabled.

/livez    200 as long as the event loop runs
/readyz   200, or 503 with the reasons, as JSON
/metrics  Prometheus's text format, if metrics are enabled

A page is rendered in slices of about a millisecond, and other tasks run in between: so a page for ten thousand topics
does not stall the loop.
"""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, Final

import msgspec
import structlog
import trio
from hypercorn.config import Config
from hypercorn.logging import Logger
from hypercorn.trio import serve

from trimq.remoting.http.health import Health
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.server.reactor import listen

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Any], Awaitable[None]]
Page = Callable[[], Awaitable[Iterator[str]]]
"""Returns the pieces of a page. Producing each piece has to be quick."""

SLICE: Final = 0.001
"""Seconds of rendering before other tasks run."""
PROMETHEUS_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"

_log = structlog.get_logger("web")


class WebApp:
    """The ASGI application. ``metrics`` may be set at any time; until then /metrics is answered with 404."""

    def __init__(self, health: Health, metrics: Page | None = None) -> None:
        self.health = health
        self.metrics = metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or the messages of ASGI's lifespan protocol."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope["method"], scope["path"], send)

    async def _answer(self, method: str, path: str, send: Send) -> None:
        if method not in ("GET", "HEAD"):
            await _reply(send, 405, _TEXT, b"only GET\n", method)
        elif path == "/livez":
            await _reply(send, 200, _TEXT, b"ok\n", method)
        elif path == "/readyz":
            found = self.health.readiness()
            body = msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
            await _reply(send, 200 if found.ready else 503, _JSON, body, method)
        elif path == "/metrics" and self.metrics is not None:
            await _stream(send, await self.metrics(), method)
        else:
            known = "/livez /readyz" + (" /metrics" if self.metrics is not None else "")
            await _reply(send, 404, _TEXT, f"not found; known paths: {known}\n".encode(), method)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def _start(status: int, content_type: str, *more: tuple[bytes, bytes]) -> Message:
    headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store"), *more]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _reply(send: Send, status: int, content_type: str, body: bytes, method: str) -> None:
    await send(_start(status, content_type, (b"content-length", str(len(body)).encode())))
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body, "more_body": False})


async def _stream(send: Send, pieces: Iterator[str], method: str) -> None:
    await send(_start(200, PROMETHEUS_TEXT))
    if method == "GET":
        parts: list[str] = []
        until = perf_counter() + SLICE
        for piece in pieces:
            parts.append(piece)
            if perf_counter() >= until:
                await _send_slice(send, parts)
                until = perf_counter() + SLICE
        await _send_slice(send, parts)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_slice(send: Send, parts: list[str]) -> None:
    body = "".join(parts).encode()
    parts.clear()
    await trio.lowlevel.checkpoint()
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await trio.lowlevel.checkpoint()


class _Log(Logger):
    """Logs hypercorn's errors as events; requests are not logged."""

    async def error(self, message: str, *args: Any, **_: Any) -> None:
        _log.error("web_failed", reason=message % args if args else message)

    critical = error

    async def exception(self, message: str, *args: Any, **_: Any) -> None:
        _log.exception("web_failed", reason=message % args if args else message)


def bind(config: WebConfig) -> list[socket.socket]:
    """The listening sockets of a configuration. Raises OSError with the address."""
    sockets: list[socket.socket] = []
    try:
        for host, port in config.addresses:
            sockets.append(listen(host, port))
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


@asynccontextmanager
async def served(app: WebApp, sockets: list[socket.socket]) -> AsyncIterator[None]:
    """Serve for the duration of the block, then close the sockets."""
    config = Config()
    config.bind = [f"fd://{sock.detach()}" for sock in sockets]
    config.errorlog = None
    config.logger_class = _Log
    config.include_server_header = False
    config.graceful_timeout = 0.0
    config.keep_alive_timeout = 75
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: serve(app, config, mode="asgi", task_status=task_status))  # type: ignore[arg-type]
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
