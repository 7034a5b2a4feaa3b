"""Origins: the addresses that clients connect from, and what one address may do.

An address is counted from the accept on, or behind a proxy from its preamble on (``proxied``). Requests are counted by
a feature of the gate: fast paths stay open for addresses below their limit. IPv6 addresses count by their network of 64
bits, since a client has all the addresses of one.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from trimq.protocol.auth.model import IPNetwork
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.config.client_limits import ClientLimitsConfig, parse_proxies
from trimq.remoting.config.networks import is_in
from trimq.remoting.runtime.address_key import address_key
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.callers import Caller, Callers
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature, Sees
from trimq.remoting.server.limits import ReactorStats, busy_remark

_log = structlog.get_logger("remoting")

CONNECTIONS: Final = "maxConnectionsPerAddress"
REQUESTS: Final = "maxRequestsPerSecondPerAddress"


class Origins:
    """The addresses of one server's clients, counted in ``stats``, which its reactor uses too.

    ``feature`` is for the gates of all its tables; None without a limit of requests. It is also the Meter.
    """

    def __init__(self, config: ClientLimitsConfig, clock: Clock, stats: ReactorStats) -> None:
        self.stats = stats
        self._clock = clock
        self._max_connections = config.max_connections_per_address
        self._rate = config.max_requests_per_second_per_address
        self._proxies: Sequence[IPNetwork] = parse_proxies(config.proxy_protocol_networks)
        self._callers = Callers(self._rate, clock)
        self._log_budget = LogBudget(clock)
        self.feature = Feature("address_limits", self.check, Sees.AMOUNT, meter=self) if self._rate else None

    @classmethod
    def of(cls, config: ClientLimitsConfig, clock: Clock, stats: ReactorStats) -> "Origins | None":
        """None if the configuration has neither limits nor proxies: connections then need not be looked at."""
        return cls(config, clock, stats) if config != ClientLimitsConfig() else None

    def is_proxy(self, address: str) -> bool:
        """Whether the preamble of a connection from ``address`` is believed."""
        return is_in(address, self._proxies)

    def admits(self, address: str) -> bool:
        """Whether ``address`` may have one more connection. A refusal is counted and logged."""
        limit = self._max_connections
        if not limit or (open_now := self._callers.connections(address_key(address))) < limit:
            return True
        self.stats.refused += 1
        self.stats.limited[CONNECTIONS] += 1
        if self._log_budget.allows():
            _log.warning("address_refused", peer=address, key=CONNECTIONS, limit=limit, connections=open_now)
        return False

    def join(self, connection: Connection) -> None:
        """Count a connection by its ``peer``."""
        connection.origin = self._callers.join(address_key(connection.peer[0]))

    def leave(self, connection: Connection) -> None:
        """Count a connection no more; it may be one of which the address was not known yet."""
        caller, connection.origin = connection.origin, None
        if caller is not None:
            self._callers.leave(caller)

    # the feature

    def room(self, connection: Connection) -> int:
        """See Meter. None for a connection that is closed."""
        origin = connection.origin
        if origin is None or origin.bucket is None:
            return 0
        return origin.bucket.room(self._clock.monotonic())

    def take(self, connection: Connection, count: int) -> None:
        """See Meter."""
        origin = connection.origin
        if origin is not None and origin.bucket is not None:  # closed by the request that was served
            origin.bucket.take(count)

    def check(self, connection: Connection, _command: RemotingCommand) -> None:
        """Count a request, or raise RemotingError(SYSTEM_BUSY)."""
        if self.room(connection) >= 1:
            self.take(connection, 1)
        elif (origin := connection.origin) is not None:
            raise too_many(origin, f"address {origin.key}", REQUESTS, self._rate, self._clock, self.stats)


def too_many(caller: Caller, name: str, key: str, rate: int, clock: Clock, stats: ReactorStats) -> RemotingError:
    """Count and log a request beyond the limit ``key`` of requests a second; the error that answers it."""
    now = clock.monotonic()
    wait = caller.bucket.seconds_to_next() if caller.bucket is not None else 0.0
    state = f"{name} has sent {rate} requests in the last second; the next one is served in {wait * 1000:.0f} ms"
    return busy(caller, name, key, rate, state, now, stats)


def busy(caller: Caller, name: str, key: str, limit: int, state: str, now: float, stats: ReactorStats) -> RemotingError:
    """The same for any limit; ``state`` says how it is reached."""
    stats.count_busy(key)
    if caller.may_log(now):
        _log.warning("requests_limited", caller=name, key=key, limit=limit)
    return RemotingError(ResponseCode.SYSTEM_BUSY, busy_remark(key, limit, state))
