"""Limits of clients by their address, and whose word is taken for that address."""

from dataclasses import dataclass

from trimq.protocol.auth.model import IPNetwork
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.networks import names_everybody, parse_networks
from trimq.remoting.config.options import option, options_of


def parse_proxies(text: str) -> tuple[IPNetwork, ...]:
    """Parse `10.0.0.1,10.1.0.0/16`. Raises ValueError."""
    return parse_networks(text, ",")


def _proxies_problem(text: str) -> str:
    try:
        proxies = parse_proxies(text)
    except ValueError:
        return "IP addresses or networks as 10.0.0.0/8, several separated by commas"
    if names_everybody(proxies):
        return "the addresses of your proxies: with all addresses each client could say that it has another one"
    return ""


@dataclass(frozen=True)
class ClientLimitsConfig:
    """What each client may do, by its address, on every port for clients. 0: no limit."""

    max_connections_per_address: int = option(
        0,
        "The most open connections from one address, or from one IPv6 network of 64 bits. Further ones are closed at "
        "once. 0: no limit.",
        minimum=0,
        ours=True,
    )
    max_requests_per_second_per_address: int = option(
        0,
        "The most requests in a second from such an address; further ones are answered with SYSTEM_BUSY. 0: no limit.",
        minimum=0,
        ours=True,
    )
    proxy_protocol_networks: str = option(
        "",
        "Addresses of proxies, as 10.0.0.1,10.1.0.0/16: the client's address is taken from the PROXY protocol preamble "
        "that a connection from there begins with. From elsewhere, a connection with a preamble is closed.",
        check=_proxies_problem,
        ours=True,
    )


CLIENT_LIMITS_KEYS = frozenset(opt.key for opt in options_of(ClientLimitsConfig))
"""All keys of the section. No request may change one (Schema.protected)."""


def limits_of(configuration: Configuration) -> dict[str, str]:
    """The section's values by key, for another server in this process."""
    config = configuration.section(ClientLimitsConfig)
    return {opt.key: opt.text(getattr(config, opt.name)) for opt in options_of(ClientLimitsConfig)}
