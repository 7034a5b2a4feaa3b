"""Limits of a server's reactor, and its counters."""

import resource
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from trimq.protocol.frame import MAX_FRAME
from trimq.remoting.config.configuration import NettyServerConfig
from trimq.remoting.runtime.memory_limit import unfinished_allowed

MEBIBYTE = 1024 * 1024

RECEIVE_BUFFER: Final = 256 * 1024
"""Size in bytes of the receive buffer that all connections share: the most that one turn of a connection can read."""


IN_FLIGHT: Final = "maxRequestsInFlight"
IN_FLIGHT_HERE: Final = "maxRequestsInFlightPerConnection"


def connections_allowed() -> int:
    """Default limit of connections: three quarters of the process's descriptors. The store's files need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if soft == resource.RLIM_INFINITY else soft * 3 // 4


@dataclass(frozen=True, slots=True)
class ReactorLimits:
    """What a reactor accepts. Sizes are in bytes, times in seconds.

    A connection with ``high_water`` or more bytes to send is over its mark until it has ``low_water`` or less. While it
    is, it is not read, none of its requests is started, woken held pulls and notifications wait, and bytes received
    earlier stay unserved. Every reply counts, by whichever path it comes. Requests started before may still end, so a
    connection has at most its mark to send, and one reply for each of its requests in flight. Of these,
    ``max_tasks_per_connection`` run as tasks at a time, and one produces a long reply (large_reply.py); the others are
    sends, whose replies are short.

    Above ``max_inflight`` requests without a reply (``max_inflight_per_connection`` for one client), requests are
    answered with SYSTEM_BUSY; held long polls do not count. Requests that run as tasks count for ``max_inflight`` until
    they end, also when their client has gone. So do one-ways that run as tasks; beyond ``max_inflight``, or
    ``max_inflight_per_connection`` of them, they are dropped.

    After ``turn`` seconds of work, other tasks get the loop. After a reply to a single client the reactor polls for
    ``spin`` seconds for its next request before it waits, after replies to several for ``spin_many`` seconds. A round
    that serves several clients takes in further clients that become ready within ``gather`` seconds.

    All incompletely received frames take at most ``max_unfinished`` bytes of memory. A sender can count as slow after
    ``unfinished_age`` seconds. An unfinished frame must grow by ``frame_progress`` bytes in ``idle`` seconds.
    """

    max_frame: int = MAX_FRAME
    high_water: int = 8 * MEBIBYTE
    low_water: int = 2 * MEBIBYTE
    max_inflight: int = 65536
    max_inflight_per_connection: int = 4096
    max_connections: int = field(default_factory=connections_allowed)
    idle: float = 120.0
    turn: float = 0.001
    spin: float = 0.00005
    spin_many: float = 0.00003
    gather: float = 0.0003
    max_tasks_per_connection: int = 64
    max_unfinished: int = field(default_factory=unfinished_allowed)
    unfinished_age: float = 5.0
    frame_progress: int = 64 * 1024

    @classmethod
    def of(cls, config: NettyServerConfig) -> "ReactorLimits":
        """The limits given by a configuration."""
        return cls(
            max_frame=config.frame_max_length,
            high_water=config.write_buffer_high_water_mark,
            low_water=config.write_buffer_low_water_mark,
            max_inflight=config.max_requests_in_flight,
            max_inflight_per_connection=config.max_requests_in_flight_per_connection,
            max_connections=config.max_connections or connections_allowed(),
            idle=config.server_channel_max_idle_time_seconds,
            max_unfinished=config.max_unfinished_frame_bytes or max(unfinished_allowed(), 2 * config.frame_max_length),
            frame_progress=config.min_frame_progress_bytes,
        )


@dataclass(slots=True)
class ReactorStats:
    """Plain counters, read by the metrics. The first group only grows; the last group holds current values."""

    accepted: int = 0
    refused: int = 0
    """Connections closed right after accepting them: over the limit, or no descriptor left."""
    closed: int = 0
    broken: int = 0
    """Connections closed because the peer broke the protocol."""
    idle_closed: int = 0
    unfinished_closed: int = 0
    """Connections closed because their unfinished frame was too slow, or the slowest when memory ran short."""
    handshakes: int = 0
    """TLS handshakes that were completed."""
    handshakes_failed: int = 0
    handshakes_refused: int = 0
    """Connections closed because too many handshakes were unfinished."""
    handshakes_timed_out: int = 0
    plain_refused: int = 0
    """Connections closed because they began without TLS where it is required."""
    proxied: int = 0
    """Connections whose client's address came from a PROXY protocol preamble."""
    proxied_without_preamble: int = 0
    """Connections from a proxy that began without one: they have the proxy's address."""
    preambles_refused: int = 0
    """Connections closed because they began with a preamble and are not from a proxy."""
    limited: Counter[str] = field(default_factory=Counter)
    """Connections and requests refused by a limit of an address, a user or requests in flight, by that limit's key."""
    admin_refused: int = 0
    """Requests of administrators refused because they did not come to adminListenAddress."""
    frames: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    busy: int = 0
    """Requests answered with SYSTEM_BUSY, and dropped one-ways."""
    failures: int = 0
    """Unexpected exceptions of handlers and hooks."""
    rounds: int = 0

    connections: int = 0
    tls_connections: int = 0
    """Those whose handshake was completed."""
    certificate_ends: Callable[[], Mapping[str, float]] = dict
    """When the certificates end, in Unix seconds: of the ports ("server"), and shown to other servers ("client")."""
    inflight: int = 0
    """Requests without a reply, and all that run as tasks."""
    held: int = 0
    paused: int = 0
    """Connections that are not read because they do not read their replies."""
    unfinished: int = 0
    """Bytes of memory taken by unfinished frames."""

    def count_busy(self, key: str) -> None:
        """Count a request beyond the limit ``key``."""
        self.busy += 1
        self.limited[key] += 1


def busy_remark(key: str, limit: int, state: str) -> str:
    """The remark of SYSTEM_BUSY beyond the limit ``key``; ``state`` says how it is reached."""
    return f"system busy: {key}={limit}: {state}"
