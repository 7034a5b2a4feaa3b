"""Once a second a reactor looks at all of its connections, in slices: which are idle, whose frames do not get on."""

from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from trimq.remoting.runtime.clock import Clock
    from trimq.remoting.server.reactor import Reactor

_SCAN: Final = 1.0
"""Seconds between two looks."""
_AT_ONCE: Final = 1000
"""Connections in a slice."""


async def scan_connections(reactor: "Reactor", clock: "Clock") -> None:
    """Look again and again, for ever."""
    idle = reactor.limits.idle
    while True:
        await clock.sleep(_SCAN)
        now = reactor.now = clock.monotonic()
        reactor.resume_listeners()
        for count, conn in enumerate(list(reactor.connections.values()), 1):
            if conn.closed:
                continue
            if now - conn.active_at >= idle:
                reactor.stats.idle_closed += 1
                conn.close(f"neither sent nor received for {idle:g} s")
            else:
                reactor.unfinished.look(conn, now)
            if count % _AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        reactor.unfinished.looked()
