"""The preamble of the PROXY protocol: both versions, split anywhere, and bytes that are none."""

import ipaddress
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.proxy_preamble import LONGEST, LONGEST_V1, V1, V2, Preamble, ProxyPreambleError, begins, parse

TCP4, TCP6, UNIX = 0x11, 0x21, 0x31

ips = st.ip_addresses()
ports = st.integers(0, 65535)
rests = st.binary(max_size=40)


def v1(source: str, port: int) -> bytes:
    address = ipaddress.ip_address(source)
    other = "10.0.0.9" if address.version == 4 else "2001:db8::9"
    return f"PROXY TCP{address.version} {address} {other} {port} 10911\r\n".encode()


def v2(kind: int, block: bytes, command: int = 0x21) -> bytes:
    return V2 + struct.pack(">BBH", command, kind, len(block)) + block


def block(source: str, port: int, fields: bytes = b"") -> bytes:
    packed = ipaddress.ip_address(source).packed
    return packed + bytes(len(packed)) + struct.pack(">HH", port, 10911) + fields


def source_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def check(data: bytes, expected: Preamble, rest: bytes) -> None:
    """Complete only with the last byte, whatever is behind it."""
    for end in range(len(data)):
        assert begins(data[:end]) is (end > 0)
        assert parse(data[:end]) is None
    assert parse(data + rest) == expected
    assert expected.size == len(data)


@given(ips, ports, rests)
def test_version_1(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, rest: bytes) -> None:
    data = v1(str(address), port)
    check(data, Preamble(len(data), (source_of(address), port)), rest)


@given(ips, ports, st.binary(max_size=60), rests)
def test_version_2(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, fields: bytes, rest: bytes
) -> None:
    data = v2(TCP4 if address.version == 4 else TCP6, block(str(address), port, fields))
    check(data, Preamble(len(data), (source_of(address), port)), rest)


def test_an_ipv4_address_in_ipv6_is_an_ipv4_address() -> None:
    for data in (v1("::ffff:10.1.2.3", 7), v2(TCP6, block("::ffff:10.1.2.3", 7))):
        assert parse(data) == Preamble(len(data), ("10.1.2.3", 7))


@pytest.mark.parametrize(
    "data",
    [
        b"PROXY UNKNOWN\r\n",
        b"PROXY UNKNOWN 1.2.3.4 whatever\r\n",
        v2(0, b"", command=0x20),
        v2(TCP4, block("10.1.2.3", 7), command=0x20),
        v2(0x77, b"abc", command=0x20),
        v2(0, b"xyz"),
        v2(UNIX, bytes(216)),
    ],
)
def test_without_an_address_of_the_client(data: bytes) -> None:
    check(data, Preamble(len(data)), b"more")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"PROXZ ", "does not begin with PROXY"),
        (b"PROXY TCP5 1.1.1.1 2.2.2.2 1 2\r\n", "not TCP4, TCP6 or UNKNOWN"),
        (b"PROXY TCP4  1.1.1.1 2.2.2.2 1 2\r\n", "not TCP4, TCP6 or UNKNOWN"),
        (b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2 3\r\n", "not TCP4, TCP6 or UNKNOWN"),
        (b"PROXY TCP4 1.1.1.1 2.2.2.2 1\r\n", "not TCP4, TCP6 or UNKNOWN"),
        (b"PROXY TCP4 localhost 2.2.2.2 1 2\r\n", "no IP address"),
        (b"PROXY TCP4 1.1.1.1 here 1 2\r\n", "no IP address"),
        (b"PROXY TCP4 1.1.1.\xc3\xa9 2.2.2.2 1 2\r\n", "no IP address"),
        (b"PROXY TCP4 010.1.1.1 2.2.2.2 1 2\r\n", "no IP address"),
        (b"PROXY TCP4 ::1 ::2 1 2\r\n", "not of IPv4"),
        (b"PROXY TCP6 1.1.1.1 2.2.2.2 1 2\r\n", "not of IPv6"),
        (b"PROXY TCP6 fe80::1%eth0 fe80::2 1 2\r\n", "not of IPv6"),
        (b"PROXY TCP4 1.1.1.1 2.2.2.2 65536 2\r\n", "a port"),
        (b"PROXY TCP4 1.1.1.1 2.2.2.2 01 2\r\n", "a port"),
        (b"PROXY TCP4 1.1.1.1 2.2.2.2 -1 2\r\n", "a port"),
        (b"PROXY TCP4 1.1.1.1 2.2.2.2 1 \r\n", "a port"),
        (b"PROXY TCP4 1.1.1.1 2.2.2.2 1 000002\r\n", "a port"),
        (V1 + b"UNKNOWN " + b"x" * LONGEST_V1, "no line end in 107 bytes"),
        (b"\r\n\r\n\x00\r\nQUIT\r", "signature"),
        (V2 + b"\x22\x11\x00\x0c" + bytes(12), "LOCAL or PROXY"),
        (V2 + b"\x11\x11\x00\x0c" + bytes(12), "LOCAL or PROXY"),
        (V2 + b"\x21\x12\x00\x0c" + bytes(12), "not those of a TCP connection"),
        (V2 + b"\x21\x41\x00\x0c" + bytes(12), "not those of a TCP connection"),
        (V2 + b"\x21\x11\x00\x0b" + bytes(11), "12 are needed"),
        (V2 + b"\x21\x21\x00\x23" + bytes(35), "36 are needed"),
        (V2 + b"\x21\x31\x00\xd7" + bytes(215), "216 are needed"),
        (V2 + b"\x21\x11\xff\xff", "more than 4096"),
    ],
)
def test_what_is_no_preamble(data: bytes, text: str) -> None:
    with pytest.raises(ProxyPreambleError, match=text):
        parse(data)


def test_the_longest() -> None:
    line = b"PROXY UNKNOWN " + b"x" * (LONGEST_V1 - 16) + b"\r\n"
    assert parse(line) == Preamble(LONGEST_V1)
    with pytest.raises(ProxyPreambleError):
        parse(line.replace(b"\r\n", b"x\r\n"))
    fields = bytes(LONGEST - 16 - 12)
    assert parse(v2(TCP4, block("10.1.2.3", 7, fields))) == Preamble(LONGEST, ("10.1.2.3", 7))
    with pytest.raises(ProxyPreambleError):
        parse(v2(TCP4, block("10.1.2.3", 7, fields + b"x")))


@given(st.one_of(rests, rests.map(lambda rest: V1 + rest), rests.map(lambda rest: V2 + rest)))
def test_any_bytes(data: bytes) -> None:
    """They are incomplete, or an error, or have the address of one client; and what was an error stays one."""
    failed = False
    for end in range(1, len(data) + 1):
        try:
            found = parse(data[:end])
        except ProxyPreambleError:
            failed = True
            continue
        assert not failed
        if found is not None:
            assert begins(data)
            assert 0 < found.size <= end
            return


@pytest.mark.parametrize(
    "data", [b"", b"\x16\x03\x01", b"\x00\x00\x00\x10", b"PUT / HTTP/1.1", b"\r\n\r\n\x00\r\nQUIX"]
)
def test_other_beginnings(data: bytes) -> None:
    assert not begins(data)
