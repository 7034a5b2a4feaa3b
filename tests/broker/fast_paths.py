"""Records which requests a broker's fast paths have served."""

from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

from trimq.broker.controller import BrokerController
from trimq.protocol.frame import decode
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import GroupedServer, Later, Served, Span

_served: WeakKeyDictionary[BrokerController, list[int]] = WeakKeyDictionary()


def fast_paths(broker: BrokerController) -> list[int]:
    """Return the codes of the requests served since the first call for ``broker``, one for each, alone or grouped.

    A client must be connected. Recording ends when the configuration or the features change.
    """
    if broker not in _served:
        served = _served[broker] = []
        for table in {connection.table for connection in broker.reactor.connections.values()}:
            for front, path in table.fast.items():
                table.fast[front] = path._replace(serve=_counted(path.serve, path.code, served))
            groups: dict[GroupedServer, GroupedServer] = {}  # one for each: codes of one server are served together
            for front, group in table.grouped.items():
                table.grouped[front] = groups.setdefault(group, _Counted(group, served))
    return _served[broker]


class _Counted:
    """A GroupedServer that records the requests it serves."""

    def __init__(self, server: GroupedServer, served: list[int]) -> None:
        self._server, self._served = server, served

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        result = self._server.serve(frames, spans, most)
        if result is not None:
            for span, (count, _) in zip(spans, result.parts, strict=True):
                at = span.begin
                for _ in range(count):
                    end = at + 4 + int.from_bytes(frames[at : at + 4], "big")
                    self._served.append(decode(frames[at + 4 : end]).code)
                    at = end
        return result

    def serve_one(self, connection: Connection, frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        answer = self._server.serve_one(connection, frame)
        if answer is not None:
            self._served.append(decode(frame[4:]).code)
        return answer


def _counted(handler: Any, code: int, served: list[int]) -> Any:
    def serve(*arguments: Any) -> Any:
        answer = handler(*arguments)
        if answer is not None:
            served.append(code)
        return answer

    return serve
