"""PutOff: what waits until a connection takes its replies again, or for its turn. Most connections never have one."""

from collections import deque
from collections.abc import Awaitable, Callable, Hashable

import trio

from trimq.protocol.command import RemotingCommand
from trimq.remoting.server.handlers import Outcome


class PutOff:
    """``tasks`` are requests that have not begun, ``callbacks`` are called when the connection has drained.

    ``large_replies`` is held by the one request whose long reply is in the making.
    """

    __slots__ = ("callbacks", "large_replies", "lot", "tasks")

    def __init__(self) -> None:
        self.tasks: deque[tuple[RemotingCommand, Awaitable[Outcome]]] = deque()
        self.callbacks: dict[Hashable, Callable[[], object]] = {}
        self.lot = trio.lowlevel.ParkingLot()
        self.large_replies = trio.Lock()
