"""The address that the broker advertises: where clients connect, and which host its records and message ids name."""

import contextlib
import ipaddress
import socket
from typing import Final

import structlog
import trio

from trimq.protocol.record import pack_host
from trimq.remoting.config.networks import WILDCARDS
from trimq.remoting.network import Network

_log = structlog.get_logger("broker")

DIAL_SECONDS: Final = 3.0
LOOPBACK: Final = "127.0.0.1"


def advertised_address(broker_ip: str | None, bind_address: str) -> str:
    """``brokerIP1``, else the address the broker listens on, else this machine's first address that is no loopback."""
    if broker_ip:
        return broker_ip
    if bind_address not in WILDCARDS:
        return bind_address
    return first_address()


def reachable(sock: socket.socket) -> tuple[str, int]:
    """Where this process connects to a bound socket: at its own address, which ``brokerIP1`` need not be.

    At the loopback if it is bound to all addresses; at IPv4's also for ``::``, since such sockets take both.
    """
    host, port = sock.getsockname()[:2]
    return LOOPBACK if host in WILDCARDS else str(host), int(port)


def first_address() -> str:
    """The source address of this machine's default route, else an address of its host name, else 127.0.0.1.

    The route is found by connecting a UDP socket to an address reserved for documentation. No packet is sent.
    """
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            found: str = probe.getsockname()[0]
            if _reachable(found):
                return found
    with contextlib.suppress(OSError):
        for *_, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            if _reachable(str(where[0])):
                return str(where[0])
    return LOOPBACK


def _reachable(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_link_local)


def pack(host: str, port: int) -> bytes | None:
    """An address in the form that records hold; a host name is resolved. None if the name has no address."""
    with contextlib.suppress(ValueError):
        return pack_host(host, port)
    with contextlib.suppress(OSError, ValueError):
        return pack_host(str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port)
    return None


def join(host: str, port: int) -> str:
    """``host:port``; RocketMQ's clients split at the last colon, so an IPv6 address needs no brackets."""
    return f"{host}:{port}"


async def warn_if_unreachable(address: str, endpoint: tuple[str, int], network: Network) -> None:
    """Connect to the advertised address as a client would, and log a warning if that fails.

    It is only a warning because a machine behind its own firewall or NAT may fail to reach itself by an address that
    other machines can reach.
    """
    host, _, port = address.rpartition(":")
    if (host, int(port)) == endpoint:
        return
    reason = f"no answer in {DIAL_SECONDS:g} s"
    with trio.move_on_after(DIAL_SECONDS):
        try:
            async with await network.open_stream(host, int(port)):
                return
        except OSError as error:
            reason = str(error)
    _log.warning(
        "advertised_address_unreachable",
        address=address,
        reason=reason,
        advice="clients connect to this address: set brokerIP1 to one that they can reach",
    )
