"""Meters: count the requests that fast paths serve, for features that limit how many there are.

A fast path is open while there is room. Without room its full handler gets the request, and the feature's check refuses
it. So each request is counted once, whichever path serves it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.handlers import FastHandler, GroupedServer, Later, Served, Span

if TYPE_CHECKING:
    from trimq.remoting.server.connection import Connection

SHORTEST: Final = 16
"""No frame with a request is shorter than this."""


class Meter(Protocol):
    """How many requests a connection may send."""

    def room(self, connection: "Connection", /) -> int:
        """How many of its requests may be served now."""
        ...

    def take(self, connection: "Connection", count: int, /) -> None:
        """Count ``count`` requests, at most ``room``. A negative number gives back what was taken and not served."""
        ...


def metered(meter: Meter, fast: FastHandler) -> FastHandler:
    """``fast`` while there is room: None without, or if it declines. A request that it refuses counts as served."""
    room, take = meter.room, meter.take

    def serve(connection: "Connection", request: TypedRequest[Any]) -> bytes | Literal[Later.DEFERRED] | None:
        if room(connection) < 1:
            return None
        take(connection, 1)
        answer = fast(connection, request)
        if answer is None:
            take(connection, -1)
        return answer

    return serve


class MeteredGroup:
    """A GroupedServer that gets as many frames of each span as there is room for."""

    def __init__(self, meter: Meter, server: GroupedServer) -> None:
        self._meter = meter
        self._server = server

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        """See GroupedServer."""
        meter = self._meter
        allowed: list[Span] = []
        for span in spans:
            # Taken before the call: several spans may be of one caller.
            count = max(0, min(span.most, meter.room(span.connection), (span.end - span.begin) // SHORTEST + 1))
            meter.take(span.connection, count)
            allowed.append(Span(span.connection, span.begin, span.end, count, span.continues))
        served = self._server.serve(frames, allowed, most)
        if served is None or not served.fits(spans):
            for span in allowed:
                meter.take(span.connection, -span.most)
            return served
        for span, (count, _) in zip(allowed, served.parts, strict=True):
            meter.take(span.connection, count - span.most)
        return served

    def serve_one(self, connection: "Connection", frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        """See GroupedServer."""
        if self._meter.room(connection) < 1:
            return None
        self._meter.take(connection, 1)
        answer = self._server.serve_one(connection, frame)
        if answer is None:
            self._meter.take(connection, -1)
        return answer
