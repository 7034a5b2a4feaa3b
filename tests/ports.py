"""Free ports for servers that the tests start, and for tests that need a port without a server."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 10240
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_reserved: list[socket.socket] = []
"""Sockets held until this process ends, so that no other test process gets the same port."""


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _reserve(port: int) -> bool:
    """Bind an abstract socket named after the port; the kernel frees it when the process ends, even by SIGKILL."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0trimq-test-port-{port}")
    except OSError:
        name.close()
        return False
    _reserved.append(name)
    return True


def free_port(below: int = 0, above: int = 0) -> int:
    """Allocate a port P such that P-below to P+above are free and reserved for this test process.

    All are below the range from which the kernel takes ports for clients and for listeners on port 0. Otherwise a
    connection could take the port before its server starts, or between a broker's kill and its restart.
    """
    ephemeral = int(_EPHEMERAL.read_text(encoding="ascii").split()[0]) if _EPHEMERAL.exists() else 32768
    highest = min(ephemeral, 32768) - 1
    for _ in range(1000):
        port = random.randint(LOWEST + below, highest - above)
        wanted = range(port - below, port + above + 1)
        if all(_is_free(one) for one in wanted) and all(_reserve(one) for one in wanted):
            return port
    raise RuntimeError(f"no {below + above + 1} free ports in a row between {LOWEST} and {highest}")


def broker_port() -> int:
    """Allocate a port P for a broker, with P-2 for its second listener and P+1 for replication."""
    return free_port(below=2, above=1)
