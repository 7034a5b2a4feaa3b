"""Preambles of the PROXY protocol on a port: from proxies they give the client's address, from others they close."""

import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from structlog.testing import capture_logs

from tests.remoting.harness import Peer, Server, request, until, within_seconds
from tests.remoting.test_tls_server import tls_of
from tests.tls_certificates import Certificates, certificates
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.proxy_preamble import V2
from trimq.remoting.config.client_limits import ClientLimitsConfig
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.reactor import Connection, HandlerTable, Origins, Outcome, ServerTls
from trimq.remoting.tls.config import TlsMode

__all__ = ["certificates"]

V1_LINE = b"PROXY TCP4 10.1.2.3 10.0.0.9 4711 10911\r\n"
V2_BYTES = V2 + struct.pack(">BBH", 0x21, 0x11, 15) + bytes([10, 1, 2, 3, 10, 0, 0, 9]) + b"\x12\x67\x2a\x9f" + b"abc"
V6_BYTES = (
    V2 + struct.pack(">BBH", 0x21, 0x21, 36) + b"\x20\x01\x0d\xb8" + bytes(11) + b"\x07" + bytes(16) + b"\x12\x67\0\1"
)
LOCAL = V2 + struct.pack(">BBH", 0x20, 0, 0)
PROXIES = "127.0.0.1"


def table() -> HandlerTable:
    def whence(connection: Connection, command: RemotingCommand) -> Outcome:
        return command.reply(body=connection.peer_text.encode())

    made = HandlerTable()
    made.register(1, whence)
    return made


@asynccontextmanager
async def proxied(
    proxies: str = PROXIES, connections: int = 0, rate: int = 0, tls: ServerTls | None = None
) -> AsyncIterator[Server]:
    clock = ManualClock()
    origins = Origins(ClientLimitsConfig(connections, rate, proxies), clock, ReactorStats())
    made = table()
    if origins.feature is not None:
        made.gate.register(origins.feature)
    async with within_seconds(made, clock=clock, origins=origins, tls=tls) as server:
        yield server


async def whence(peer: Peer) -> str:
    return bytes((await peer.ask(request())).body).decode()


@pytest.mark.parametrize(
    ("preamble", "address"),
    [(V1_LINE, "10.1.2.3:4711"), (V2_BYTES, "10.1.2.3:4711"), (V6_BYTES, "[2001:db8::7]:4711")],
)
async def test_the_address_in_the_preamble_is_the_client_s(preamble: bytes, address: str) -> None:
    async with proxied() as server:
        async with server.peer() as peer:
            await peer.send_bytes(preamble + encode(request()))
            assert bytes((await peer.receive()).body).decode() == address
            assert await whence(peer) == address
        async with server.peer() as peer:
            for byte in preamble:
                await peer.send_bytes(bytes([byte]))
                await trio.lowlevel.checkpoint()
            assert await whence(peer) == address
        stats = server.reactor.stats
        assert (stats.proxied, stats.proxied_without_preamble, stats.broken) == (2, 0, 0)


@pytest.mark.parametrize("preamble", [LOCAL, b"PROXY UNKNOWN\r\n"])
async def test_a_preamble_without_an_address_keeps_the_proxy_s(preamble: bytes) -> None:
    async with proxied() as server, server.peer() as peer:
        await peer.send_bytes(preamble)
        assert (await whence(peer)).startswith("127.0.0.1:")
        assert server.reactor.stats.proxied == 1


async def test_a_proxy_s_connection_without_a_preamble_is_served_with_its_own_address() -> None:
    async with proxied() as server, server.peer() as peer:
        assert (await whence(peer)).startswith("127.0.0.1:")
        assert (server.reactor.stats.proxied, server.reactor.stats.proxied_without_preamble) == (0, 1)


async def test_only_one_preamble_is_taken() -> None:
    async with proxied() as server, server.peer() as peer:
        await peer.send_bytes(V1_LINE + V1_LINE.replace(b"10.1.2.3", b"10.9.9.9"))
        assert await peer.is_closed_by_server()
        assert server.reactor.stats.broken == 1


@pytest.mark.parametrize("preamble", [V1_LINE, V2_BYTES])
@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.1"])
async def test_a_preamble_from_elsewhere_closes_the_connection(preamble: bytes, source: str) -> None:
    async with proxied("" if source == "127.0.0.1" else PROXIES) as server, server.peer(source=source) as peer:
        with capture_logs() as logs:
            await peer.send_bytes(preamble + encode(request()))
            assert await peer.is_closed_by_server()
        (line,) = [line for line in logs if line["event"] == "connection_broken"]
        assert "proxyProtocolNetworks" in line["reason"]
        stats = server.reactor.stats
        assert (stats.preambles_refused, stats.broken, stats.proxied) == (1, 1, 0)


@pytest.mark.parametrize(
    "data",
    [b"PROXY nonsense\r\n", b"PROXY UNKNOWN " + b"x" * 200, b"PRO" + encode(request()), V2 + b"\x21\x11\xff\xff"],
)
async def test_a_broken_preamble_closes_the_connection(data: bytes) -> None:
    async with proxied() as server, server.peer() as peer:
        with capture_logs() as logs:
            await peer.send_bytes(data[:3])
            await trio.testing.wait_all_tasks_blocked()
            await peer.send_bytes(data[3:])
            assert await peer.is_closed_by_server()
        assert any("PROXY protocol preamble" in line.get("reason", "") for line in logs)
        assert server.reactor.stats.broken == 1


async def test_the_end_within_a_preamble() -> None:
    async with proxied() as server:
        async with server.peer() as peer:
            await peer.send_bytes(V1_LINE[:20])
        await until(server, "s.closed == 1")
        assert server.reactor.stats.connections == 0


async def test_the_limit_of_an_address_is_the_client_s_not_the_proxy_s() -> None:
    async with proxied(connections=1) as server:
        stats = server.reactor.stats
        async with server.peer() as one, server.peer() as two:
            await one.send_bytes(V1_LINE)
            assert await whence(one) == "10.1.2.3:4711"
            await two.send_bytes(V1_LINE)
            assert await two.is_closed_by_server()
            assert dict(stats.limited) == {"maxConnectionsPerAddress": 1}
            async with server.peer() as other:
                await other.send_bytes(V1_LINE.replace(b"10.1.2.3", b"10.1.2.4"))
                assert await whence(other) == "10.1.2.4:4711"
        await until(server, "s.connections == 0")
        async with server.peer() as again:
            await again.send_bytes(V1_LINE)
            assert await whence(again) == "10.1.2.3:4711"


async def test_the_proxy_s_own_connections_count_for_itself_only() -> None:
    async with proxied(connections=1) as server, server.peer() as own:
        assert (await whence(own)).startswith("127.0.0.1:")
        # Accepted only now, when the proxy's own address has as many as it may have.
        async with server.peer() as client, server.peer() as more:
            await client.send_bytes(V1_LINE)
            assert await whence(client) == "10.1.2.3:4711"
            await more.send(request())
            assert await more.is_closed_by_server()


async def test_requests_count_for_the_client_behind_the_proxy() -> None:
    async with proxied(rate=1) as server, server.peer() as one, server.peer() as two:
        await one.send_bytes(V1_LINE)
        await two.send_bytes(V1_LINE.replace(b"10.1.2.3", b"10.1.2.4"))
        assert [(await peer.ask(request())).code for peer in (one, two, one, two)] == [0, 0, 2, 2]


async def test_tls_begins_behind_the_preamble(certificates: Certificates) -> None:
    for mode in (TlsMode.PERMISSIVE, TlsMode.ENFORCING):
        async with proxied(tls=tls_of(certificates, mode)) as server:
            for preamble in (V1_LINE, V2_BYTES):
                plain = await trio.open_tcp_stream(*server.address)
                await plain.send_all(preamble)
                context: ssl.SSLContext = certificates.client_context()
                stream = trio.SSLStream(plain, context, server_hostname="localhost", https_compatible=True)
                async with stream:
                    assert await whence(Peer(stream)) == "10.1.2.3:4711"
            assert server.reactor.stats.handshakes == 2


async def test_plain_behind_the_preamble_where_tls_is_required(certificates: Certificates) -> None:
    async with proxied(tls=tls_of(certificates, TlsMode.ENFORCING)) as server, server.peer() as peer:
        await peer.send_bytes(V1_LINE + encode(request()))
        assert await peer.is_closed_by_server()
        assert server.reactor.stats.plain_refused == 1
