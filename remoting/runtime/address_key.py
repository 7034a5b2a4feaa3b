"""address_key: whom an address belongs to, for limits by address."""

import ipaddress


def address_key(address: str) -> str:
    """Whom an IP address belongs to: itself, or for IPv6 its network of 64 bits, of which one client has them all."""
    if ":" not in address:
        return address
    try:
        number = int(ipaddress.IPv6Address(address.partition("%")[0]))
    except ValueError:
        return address
    return f"{ipaddress.IPv6Address(number >> 64 << 64)}/64"
