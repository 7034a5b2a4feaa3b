"""Free ports for servers that the tests start."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 10240
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_handed_out: set[int] = set()


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def free_port(below: int = 0, above: int = 0) -> int:
    """A port P with P-below to P+above free, all under the range from which the kernel takes client ports.

    So no outgoing connection can take a broker's port between its kill and its restart.
    """
    ephemeral = int(_EPHEMERAL.read_text(encoding="ascii").split()[0]) if _EPHEMERAL.exists() else 32768
    highest = min(ephemeral, 32768) - 1
    for _ in range(1000):
        port = random.randint(LOWEST + below, highest - above)
        wanted = range(port - below, port + above + 1)
        if _handed_out.isdisjoint(wanted) and all(_is_free(one) for one in wanted):
            _handed_out.update(wanted)
            return port
    raise RuntimeError(f"no {below + above + 1} free ports in a row between {LOWEST} and {highest}")


def broker_port() -> int:
    """A broker's port: P-2 is its second listener, P+1 its replication port."""
    return free_port(below=2, above=1)
