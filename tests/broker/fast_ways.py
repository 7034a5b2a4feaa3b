"""What a broker's fast ways have served."""

from typing import Any
from weakref import WeakKeyDictionary

from trimq.broker.controller import BrokerController

_served: WeakKeyDictionary[BrokerController, list[int]] = WeakKeyDictionary()


def fast_ways(broker: BrokerController) -> list[int]:
    """The codes of what was served since the first call for ``broker``, one for each request; not those of groups.

    A client has to be connected. It ends where the configuration or the features are changed.
    """
    if broker not in _served:
        served = _served[broker] = []
        for table in {connection.table for connection in broker.reactor.connections.values()}:
            for front, path in table.fast.items():
                table.fast[front] = path._replace(serve=_counted(path.serve, path.code, served))
    return _served[broker]


def _counted(handler: Any, code: int, served: list[int]) -> Any:
    def serve(*arguments: Any) -> Any:
        answer = handler(*arguments)
        if answer is not None:
            served.append(code)
        return answer

    return serve
