"""Networks of IP addresses in a configuration."""

import ipaddress
from collections.abc import Iterable
from typing import Final

from trimq.protocol.auth.model import IPNetwork, address_of, network_of

WILDCARDS: Final = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
"""The hosts to bind that mean all addresses of this machine."""


def parse_networks(text: str, separator: str) -> tuple[IPNetwork, ...]:
    """Parse `10.0.0.1;10.1.0.0/16`. Networks of IPv4 addresses in IPv6 form are those of IPv4.

    Raises ValueError: also for a network with bits of a host in it (10.0.0.1/8).
    """
    parts = [part.strip() for part in text.split(separator)]
    return tuple(network_of(str(ipaddress.ip_network(part))) for part in parts if part)


def names_everybody(networks: Iterable[IPNetwork]) -> bool:
    """Whether the networks have all addresses of IPv4, or all of IPv6."""
    found = tuple(networks)
    four = [network for network in found if isinstance(network, ipaddress.IPv4Network)]
    six = [network for network in found if isinstance(network, ipaddress.IPv6Network)]
    return any(not network.prefixlen for network in ipaddress.collapse_addresses(four)) or any(
        not network.prefixlen for network in ipaddress.collapse_addresses(six)
    )


def is_in(address: str, networks: Iterable[IPNetwork]) -> bool:
    """Whether the address of a connection is in one of the networks; a text that is no address is in none."""
    peer = address_of(address)
    return peer is not None and any(peer in network for network in networks)
