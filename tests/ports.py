"""Free ports for servers that the tests start, and for tests of servers that are not there."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 10240
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_reserved: list[socket.socket] = []
"""Held until this process ends, so that no other test process is given the same port."""


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _reserve(port: int) -> bool:
    """Takes a name that goes with the port: an abstract socket, which the kernel frees however a process ends."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0trimq-test-port-{port}")
    except OSError:
        name.close()
        return False
    _reserved.append(name)
    return True


def free_port(below: int = 0, above: int = 0) -> int:
    """A port P with P-below to P+above free, which no other test is given.

    All are under the range from which the kernel takes client ports and those of listeners on port 0: else
    a connection could take the port before its server starts, or between a broker's kill and its restart.
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
    """A broker's port: P-2 is its second listener, P+1 its replication port."""
    return free_port(below=2, above=1)
