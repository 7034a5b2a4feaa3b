"""UserLimits: the feature of the gate that limits connections, requests a second, and bytes in flight of each user.

It comes behind Access, so a user is who he says, and requests that are refused there count for their address only.
While it is registered no fast path serves.

Bytes in flight are those of the bodies of requests that were let through and not answered yet. A request whose reply
comes by ``Connection.complete`` is not named there. Those of a connection count as answered in the order in which they
came, which is how the store answers them, and when it is closed. Requests that run as tasks are counted exactly, until
they end, also after the close: they go on with their bodies. Held pulls do not count.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Final

from trimq.broker.auth.user_limits_config import UserLimitsConfig
from trimq.protocol.auth.model import User
from trimq.protocol.command import RemotingCommand
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.callers import Caller, Callers
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature, Follower, Sees
from trimq.remoting.server.handlers import DEFERRED, Outcome
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.origins import busy, too_many

CONNECTIONS: Final = "maxConnectionsPerUser"
REQUESTS: Final = "maxRequestsPerSecondPerUser"
BYTES: Final = "maxBytesInFlightPerUser"

COUNT_SECONDS: Final = 0.01
"""The connections of a user at the limit are all looked at once in this time: there may be thousands."""

_DATA: Final = "auth.user_limits"


class _Usage:
    """A user: ``bytes`` are in flight, or were when his connections ``of`` were looked at last."""

    __slots__ = ("bytes", "caller", "counted_at", "of")

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.bytes = 0
        self.counted_at = float("-inf")
        self.of: set[_Sender] = set()


class _Sender:
    """A connection: its users, and the bytes of its requests whose replies come by ``complete``, in their order."""

    __slots__ = ("connection", "deferred", "users")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.users: set[_Usage] = set()
        self.deferred: deque[tuple[_Usage | None, int]] = deque()

    def look(self) -> None:
        """Count the requests no longer that have been answered since; on a closed connection, all of them."""
        left = self.connection.deferred
        while len(self.deferred) > left:
            usage, size = self.deferred.popleft()
            if usage is not None:
                usage.bytes -= size


class _Counted(Awaitable[Outcome]):
    """The awaitable of a request.

    ``ended`` is called once when it has ended, or was dropped, and then ``follower`` with its outcome if it has one.
    """

    def __init__(self, awaitable: Awaitable[Outcome], ended: Callable[[], None], follower: Follower) -> None:
        self._awaitable = awaitable
        self._ended = ended
        self._follower = follower

    def __await__(self) -> Generator[Any, Any, Outcome]:
        try:
            outcome = yield from self._awaitable.__await__()
        finally:
            self._ended()
        return self._follower(outcome)

    def close(self) -> None:
        """Drop it before it has begun."""
        getattr(self._awaitable, "close", lambda: None)()
        self._ended()


class UserLimits:
    """Limits of each user, with the feature for the gate."""

    def __init__(
        self,
        config: UserLimitsConfig,
        clock: Clock,
        stats: ReactorStats,
        user_of: Callable[[RemotingCommand], User | None],
    ) -> None:
        """``user_of``: the user of a request that was let through, see Access."""
        self._max_connections = config.max_connections_per_user
        self._rate = config.max_requests_per_second_per_user
        self._max_bytes = config.max_bytes_in_flight_per_user
        self._clock = clock
        self._stats = stats
        self._user_of = user_of
        self._callers = Callers(self._rate, clock)
        self._usages: dict[str, _Usage] = {}
        follow = self.follow if self._max_bytes else None
        self.feature = Feature("user_limits", self.check, Sees.HEADER, follow=follow)

    def bytes_in_flight(self, name: str) -> int:
        """Of a user."""
        usage = self._usages.get(name)
        return 0 if usage is None else _count(usage)

    def check(self, connection: Connection, command: RemotingCommand) -> None:
        """Count a request, or raise RemotingError(SYSTEM_BUSY)."""
        user = self._user_of(command)
        if user is None:
            return
        usage = self._usage(connection, user.username)
        bucket = usage.caller.bucket
        if bucket is not None:
            if bucket.room(self._clock.monotonic()) < 1:
                raise too_many(usage.caller, _name(usage), REQUESTS, self._rate, self._clock, self._stats)
            bucket.take(1)
        size = len(command.body)
        if self._max_bytes and size:
            self._check_bytes(connection.data[_DATA], usage, size)

    def follow(self, connection: Connection, command: RemotingCommand) -> Follower:
        """Count the bytes of a request if it is answered later. The handler may drop its body and its fields."""
        user = self._user_of(command)
        usage = None if user is None else self._usages.get(user.username)
        return partial(self._goes_on, connection, usage, len(command.body))

    def _goes_on(self, connection: Connection, usage: _Usage | None, size: int, outcome: Outcome) -> Outcome:
        if outcome is DEFERRED:
            if not connection.closed:
                sender = _sender(connection, self._closed)
                sender.look()
                sender.deferred.append((usage, size))  # also without a user: each stands for one request in flight
                self._add(usage, size)
        elif isinstance(outcome, Awaitable):
            self._add(usage, size)
            return _Counted(outcome, partial(self._add, usage, -size), partial(self._goes_on, connection, usage, size))
        return outcome

    def _add(self, usage: _Usage | None, size: int) -> None:
        """Count bytes, or no longer (negative)."""
        if usage is not None and size:
            usage.bytes += size
            self._usages.setdefault(usage.caller.key, usage)  # its last connection may have been closed by the handler
            self._forget_unused(usage)

    def _usage(self, connection: Connection, name: str) -> _Usage:
        """The user, to whom the connection belongs from now on. Raises RemotingError if that is one too many."""
        sender = _sender(connection, self._closed)
        usage = self._usages.get(name)
        if usage is not None and usage in sender.users:
            return usage
        limit = self._max_connections
        if usage is not None and limit and len(usage.of) >= limit:
            state = f"there are {len(usage.of)} connections of user {name}; close one, and try again"
            raise busy(usage.caller, _name(usage), CONNECTIONS, limit, state, self._clock.monotonic(), self._stats)
        caller = self._callers.join(name)
        if usage is None:
            usage = self._usages[name] = _Usage(caller)
        usage.caller = caller  # another one if the user had no connection meanwhile
        usage.of.add(sender)
        sender.users.add(usage)
        return usage

    def _check_bytes(self, sender: _Sender, usage: _Usage, size: int) -> None:
        limit = self._max_bytes
        if usage.bytes + size <= limit:
            return
        sender.look()
        now = self._clock.monotonic()
        if usage.bytes + size > limit and now - usage.counted_at >= COUNT_SECONDS:
            usage.counted_at = now
            _count(usage)
        if usage.bytes and usage.bytes + size > limit:
            state = (
                f"requests of user {usage.caller.key} with {usage.bytes} bytes are not answered yet, and this one has "
                f"{size}; wait for their replies"
            )
            raise busy(usage.caller, _name(usage), BYTES, limit, state, now, self._stats)

    def _closed(self, connection: Connection) -> None:
        sender: _Sender = connection.data.pop(_DATA)
        sender.look()
        for usage in sender.users:
            usage.of.discard(sender)
            self._callers.leave(usage.caller)
            self._forget_unused(usage)
        sender.users.clear()

    def _forget_unused(self, usage: _Usage) -> None:
        if not usage.of and not usage.bytes:
            self._usages.pop(usage.caller.key, None)


def _count(usage: _Usage) -> int:
    for sender in usage.of:
        sender.look()
    return usage.bytes


def _name(usage: _Usage) -> str:
    return f"user {usage.caller.key}"


def _sender(connection: Connection, closed: Callable[[Connection], None]) -> _Sender:
    sender: _Sender | None = connection.data.get(_DATA)
    if sender is None:
        sender = connection.data[_DATA] = _Sender(connection)
        connection.on_close.append(closed)
    return sender
