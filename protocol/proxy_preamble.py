"""The preamble of the PROXY protocol, versions 1 and 2: the address of the client behind a proxy or load balancer.

It is the first thing on a connection, before a TLS handshake. Strict: what is not exactly as specified is an error,
since a receiver that guesses can be given an address that is not the client's.

Source: HAProxy's proxy-protocol.txt. RocketMQ uses Netty's HAProxyMessageDecoder.
"""

import ipaddress
import struct
from dataclasses import dataclass
from typing import Final

V1: Final = b"PROXY "
V2: Final = b"\r\n\r\n\x00\r\nQUIT\n"
LONGEST_V1: Final = 107
"""Bytes of the longest text, with its line end."""
LONGEST: Final = 4096
"""Bytes of the longest preamble that is accepted: one of version 2 with fields behind the addresses, as proxies add."""

_V2_HEAD: Final = 16
_head_at = struct.Struct(">12sBBH").unpack_from
_LOCAL, _PROXY = 0x20, 0x21
_UNSPECIFIED: Final = 0x00
_UNIX: Final = 0x31
_ADDRESS_BYTES: Final = {0x11: 4, 0x21: 16}
"""By family and transport: TCP over IPv4, TCP over IPv6."""
_UNIX_BYTES: Final = 216


class ProxyPreambleError(ValueError):
    """Bytes that begin as a preamble and are none."""


@dataclass(frozen=True, slots=True)
class Preamble:
    """``size`` is its length in bytes. ``source`` is the client's IP address and port.

    ``source`` is None if the preamble has none: the proxy speaks for itself (LOCAL), or the address is not known
    (UNKNOWN, UNSPEC), or it is no IP address (AF_UNIX).
    """

    size: int
    source: tuple[str, int] | None = None


def begins(data: bytes) -> bool:
    """Whether ``data``, the first bytes of a connection, are the start of a preamble, or one with more behind it."""
    return bool(data) and any(data[: len(mark)] == mark[: len(data)] for mark in (V1, V2))


def parse(data: bytes) -> Preamble | None:
    """The preamble at the start of ``data``; None if it is not complete. Raises ProxyPreambleError.

    An error is raised as soon as it is known. What is behind the preamble is not looked at.
    """
    if data[:1] == V1[:1]:
        return _parse_v1(data)
    return _parse_v2(data)


def _parse_v1(data: bytes) -> Preamble | None:
    if data[: len(V1)] != V1[: len(data)]:
        raise ProxyPreambleError("it does not begin with PROXY")
    end = data.find(b"\r\n", 0, LONGEST_V1)
    if end < 0:
        if len(data) >= LONGEST_V1:
            raise ProxyPreambleError(f"no line end in {LONGEST_V1} bytes")
        return None
    size = end + 2
    kind, *rest = data[len(V1) : end].split(b" ")
    if kind == b"UNKNOWN":
        return Preamble(size)
    version = {b"TCP4": 4, b"TCP6": 6}.get(kind)
    if version is None or len(rest) != 4:
        raise ProxyPreambleError("not TCP4, TCP6 or UNKNOWN with two addresses and two ports")
    source, destination, source_port, destination_port = rest
    _address(destination, version)
    _port(destination_port)
    return Preamble(size, (_address(source, version), _port(source_port)))


def _address(text: bytes, version: int) -> str:
    try:
        address = ipaddress.ip_address(text.decode("ascii"))
    except ValueError:
        raise ProxyPreambleError("an address that is no IP address") from None
    if address.version != version or getattr(address, "scope_id", None) is not None:
        raise ProxyPreambleError(f"an address that is not of IPv{version}")
    return _as_text(address)


def _as_text(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """As text. An IPv4 address inside of IPv6 is an IPv4 address, as for a socket's own peer."""
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(inner or address)


def _port(text: bytes) -> int:
    # isdigit of bytes knows ASCII only.
    if not text.isdigit() or len(text) > 5 or (text[:1] == b"0" and text != b"0") or int(text) > 65535:
        raise ProxyPreambleError("a port that is not a number up to 65535")
    return int(text)


def _parse_v2(data: bytes) -> Preamble | None:
    if data[: len(V2)] != V2[: len(data)]:
        raise ProxyPreambleError("it does not begin with the signature of version 2")
    if len(data) < _V2_HEAD:
        return None
    _, command, kind, length = _head_at(data)
    size = _V2_HEAD + length
    if command not in (_LOCAL, _PROXY):
        raise ProxyPreambleError(f"version and command 0x{command:02x}, which are not LOCAL or PROXY of version 2")
    if size > LONGEST:
        raise ProxyPreambleError(f"{size} bytes, more than {LONGEST}")
    if command == _PROXY:
        _check_kind(kind, length)
    if len(data) < size:
        return None
    width = _ADDRESS_BYTES.get(kind)
    if command == _LOCAL or width is None:
        return Preamble(size)
    source = ipaddress.ip_address(bytes(data[_V2_HEAD : _V2_HEAD + width]))
    port_at = _V2_HEAD + 2 * width
    return Preamble(size, (_as_text(source), int.from_bytes(data[port_at : port_at + 2], "big")))


def _check_kind(kind: int, length: int) -> None:
    if kind == _UNSPECIFIED:
        return
    needed = _UNIX_BYTES if kind == _UNIX else 2 * _ADDRESS_BYTES.get(kind, 0) + 4
    if kind != _UNIX and kind not in _ADDRESS_BYTES:
        raise ProxyPreambleError(f"family and transport 0x{kind:02x}, which are not those of a TCP connection")
    if length < needed:
        raise ProxyPreambleError(f"{length} bytes of addresses where {needed} are needed")
