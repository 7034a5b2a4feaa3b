"""Records which requests a broker's fast paths have served."""

from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

from trimq.broker.controller import BrokerController
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
                if front in table.grouped:
                    table.grouped[front] = _Counted(table.grouped[front], path.code, served)
    return _served[broker]


class _Counted:
    """A GroupedServer that records the requests it serves."""

    def __init__(self, server: GroupedServer, code: int, served: list[int]) -> None:
        self._server, self._code, self._served = server, code, served

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        result = self._server.serve(frames, spans, most)
        if result is not None:
            self._served += [self._code] * sum(count for count, _ in result.parts)
        return result

    def serve_one(self, connection: Connection, frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        answer = self._server.serve_one(connection, frame)
        if answer is not None:
            self._served.append(self._code)
        return answer


def _counted(handler: Any, code: int, served: list[int]) -> Any:
    def serve(*arguments: Any) -> Any:
        answer = handler(*arguments)
        if answer is not None:
            served.append(code)
        return answer

    return serve
