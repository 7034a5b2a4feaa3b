"""Limits of a server's reactor, and how much it has done."""

import resource
from dataclasses import dataclass, field
from typing import Final

from trimq.protocol.frame import MAX_FRAME
from trimq.remoting.config.configuration import NettyServerConfig
from trimq.remoting.runtime.memory_limit import unfinished_allowed

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

    A connection with ``high_water`` or more to send is over its mark until it has ``low_water`` or less: it is not
    read, none of its requests is begun, held pulls that were woken and notifications wait, and what it has sent already
    stays in its receive buffer. Every reply counts, whichever way it comes. What was begun before may still end, so
    that it has at most to send: the mark, and one reply of each of its requests in flight. Of these
    ``max_tasks_per_connection`` run as tasks at a time, and one makes a long reply (large_reply.py); the
    others are sends, whose replies are short. Beyond
    ``max_inflight`` requests without a reply (``max_inflight_per_connection`` for one client) the answer is
    SYSTEM_BUSY; held long polls and one-ways do not count. After ``turn`` seconds of work other tasks get the loop.
    For ``spin`` seconds after a reply to a single client, ``spin_many`` after replies to several, the reactor looks for
    their next requests before it waits; for ``gather`` seconds a round that serves several takes in those that become
    ready meanwhile.

    All frames that have begun and not ended take ``max_unfinished`` bytes of memory at most. A sender may be called
    slow after ``unfinished_age`` seconds. An unfinished frame brings ``frame_progress`` bytes in ``idle`` seconds.
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
        """The limits that a configuration asks for."""
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
    """Plain counters; whoever publishes them reads them. All but the last group only grow."""

    accepted: int = 0
    refused: int = 0
    """Connections closed at once: over the limit, or no descriptor left."""
    closed: int = 0
    broken: int = 0
    """Connections closed for what their peer had sent."""
    idle_closed: int = 0
    unfinished_closed: int = 0
    """Connections closed because their unfinished frame was too slow, or the slowest when memory ran out."""
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
    unfinished: int = 0
    """Bytes that unfinished frames take."""
