"""Limits of a server's reactor, and how much it has done."""

import resource
from dataclasses import dataclass, field
from typing import Final

from protocol.frame import MAX_FRAME
from remoting.config import NettyServerConfig

MEBIBYTE = 1024 * 1024

RECEIVE_BUFFER: Final = 256 * 1024
"""Bytes of the buffer that all connections share: the most that one turn of one connection can take."""


def connections_allowed() -> int:
    """How many connections the process's descriptor limit leaves beside the store's files: three quarters of it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if soft == resource.RLIM_INFINITY else soft * 3 // 4


@dataclass(frozen=True, slots=True)
class ReactorLimits:
    """What a reactor takes on. Sizes in bytes, times in seconds.

    A connection with ``high_water`` or more to send is not read until it has ``low_water`` or less. Beyond
    ``max_inflight`` requests without a reply (``max_inflight_per_connection`` for one client) the answer is
    SYSTEM_BUSY; held long polls and one-ways do not count. After ``turn`` seconds of work other tasks get the loop.
    For ``spin`` seconds after a reply to a single client, ``spin_many`` after replies to several, the reactor looks for
    their next requests before it waits; for ``gather`` seconds a round that serves several takes in those that become
    ready meanwhile.
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

    @classmethod
    def of(cls, config: NettyServerConfig) -> "ReactorLimits":
        """The limits that a configuration asks for."""
        return cls(
            max_frame=config.frame_max_length,
            high_water=config.write_buffer_high_water_mark,
            low_water=config.write_buffer_low_water_mark,
            max_inflight=config.max_requests_in_flight,
            max_inflight_per_connection=config.max_requests_in_flight_per_connection,
            max_connections=config.max_connections or connections_allowed(),
            idle=config.server_channel_max_idle_time_seconds,
        )


@dataclass(slots=True)
class ReactorStats:
    """Plain counters; whoever publishes them reads them. All but the last group only grow."""

    accepted: int = 0
    refused: int = 0
    """Connections closed at once: over the limit, or no descriptor left."""
    closed: int = 0
    broken: int = 0
    """Connections closed for what their peer had sent."""
    idle_closed: int = 0
    frames: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    busy: int = 0
    """Requests answered SYSTEM_BUSY, and one-ways dropped."""
    failures: int = 0
    """Handlers that raised something unexpected."""
    rounds: int = 0

    connections: int = 0
    inflight: int = 0
    held: int = 0
    paused: int = 0
    """Connections that are not read because they do not take their replies."""
