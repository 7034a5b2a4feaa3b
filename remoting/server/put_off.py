"""PutOff: work of a connection that waits until it has drained, or for its turn. Most connections never have any."""

from collections import deque
from collections.abc import Awaitable, Callable, Hashable

import trio

from trimq.protocol.command import RemotingCommand
from trimq.remoting.server.handlers import Outcome


class PutOff:
    """The waiting work of one connection.

    ``tasks`` are requests that have not started, ``callbacks`` are called when the connection has drained, and tasks
    that wait for that are parked in ``lot``. ``large_replies`` is held by the one request that produces a long reply.
    """

    __slots__ = ("callbacks", "large_replies", "lot", "tasks")

    def __init__(self) -> None:
        self.tasks: deque[tuple[RemotingCommand, Awaitable[Outcome]]] = deque()
        self.callbacks: dict[Hashable, Callable[[], object]] = {}
        self.lot = trio.lowlevel.ParkingLot()
        self.large_replies = trio.Lock()
