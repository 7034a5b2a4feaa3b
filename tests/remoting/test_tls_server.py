"""TLS in the reactor: which connections are served, bounded handshakes, and no byte that waits for an event."""

import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import pytest
import structlog
import trio
import trio.testing

from tests.remoting.harness import Peer, Server, echo_table, request, until, within_seconds
from tests.remoting.tls_ends import socket_pair
from tests.tls_certificates import Certificates, certificates
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.accept import Acceptor
from trimq.remoting.server.handshakes import CLOSED_AT_ONCE
from trimq.remoting.server.reactor import Connection, HandlerTable, Outcome, Reactor, ReactorLimits, ServerTls
from trimq.remoting.tls import key_files
from trimq.remoting.tls.certificates import Certificate, Side
from trimq.remoting.tls.config import TlsConfig, TlsMode
from trimq.remoting.tls.key_files import KeyPairPaths, Verification
from trimq.remoting.tls.tls_socket import TlsSocket

__all__ = ["certificates"]

MIB = 1 << 20
HELLO = b"\x16\x03\x01\x02\x00\x01\x00"
SIGN = 9
BIG_REPLY = 8


@dataclass
class Contexts:
    """Stands for TlsContexts."""

    mode: TlsMode
    server: ssl.SSLContext | None
    certificates: dict[Side, Certificate] = field(default_factory=dict)


def server_context(certificates: Certificates) -> ssl.SSLContext:
    context = certificates.server_context()
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def tls_of(
    certificates: Certificates, mode: TlsMode = TlsMode.PERMISSIVE, *, most: int = 1024, timeout: float = 10.0
) -> ServerTls:
    return ServerTls(Contexts(mode, server_context(certificates)), most, timeout)


async def big_reply(_connection: Connection, command: RemotingCommand) -> RemotingCommand:
    return command.reply(body=bytes(MIB))


def table() -> HandlerTable:
    def is_tls(connection: Connection, command: RemotingCommand) -> Outcome:
        version = None if connection.tls is None else connection.tls.version()
        return command.reply(body=str(version).encode())

    def reply(_connection: Connection, command: RemotingCommand) -> Outcome:
        return command.reply(body=bytes(MIB))

    table = echo_table()
    table.register(SIGN, is_tls)
    table.register(BIG_REPLY, reply)
    return table


async def version_of(peer: Peer) -> bytes:
    return bytes((await peer.ask(request(SIGN))).body)


def reasons(logs: list[object]) -> list[str]:
    return [log["reason"] for log in logs if log["event"] in {"connection_broken", "connection_closed"}]  # type: ignore[index]


async def test_permissive_serves_both_on_one_port(certificates: Certificates) -> None:
    async with within_seconds(table(), tls=tls_of(certificates)) as server:
        async with server.peer() as plain, server.peer(tls=certificates.client_context()) as secure:
            assert (await version_of(plain), await version_of(secure)) == (b"None", b"TLSv1.3")
            for body in (b"x", bytes(300_000), bytes(3 * MIB), b"y" * 20_000):
                for peer in (plain, secure):
                    assert bytes((await peer.ask(request(body=body))).body) == body
            stats = server.reactor.stats
            assert (stats.handshakes, stats.tls_connections, stats.connections) == (1, 1, 2)
            assert all(type(conn.sock) is not None for conn in server.reactor.connections.values())
        await until(server, "s.connections == 0")
        assert (server.reactor.stats.tls_connections, server.reactor.stats.broken) == (0, 0)


async def test_a_plain_connection_has_its_plain_socket_after_the_first_read(certificates: Certificates) -> None:
    async with within_seconds(tls=tls_of(certificates)) as server, server.peer() as peer:
        await peer.ask(request())
        conn = server.connection()
        assert (type(conn.sock).__module__, conn.tls) == ("socket", None)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_versions(certificates: Certificates, version: ssl.TLSVersion) -> None:
    context = certificates.client_context()
    context.maximum_version = version
    async with (
        within_seconds(table(), tls=tls_of(certificates, TlsMode.ENFORCING)) as server,
        server.peer(tls=context) as peer,
    ):
        assert await version_of(peer) == version.name.replace("_", ".").encode()
        assert isinstance(server.connection().sock, TlsSocket)


@pytest.mark.parametrize("first", [encode(request(oneway=True)), b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\x15\x03\x01"])
async def test_enforcing_closes_plain_connections_before_anything_is_decoded(
    certificates: Certificates, first: bytes
) -> None:
    async with within_seconds(tls=tls_of(certificates, TlsMode.ENFORCING)) as server:
        with structlog.testing.capture_logs() as logs:
            async with server.peer() as peer:
                await peer.send_bytes(first)
                assert await peer.is_closed_by_server()
        stats = server.reactor.stats
        assert (stats.plain_refused, stats.frames, stats.bytes_in, stats.bytes_out) == (1, 0, 0, 0)
        assert reasons(logs) == ["it began without TLS, and tls.server.mode is enforcing"]  # type: ignore[arg-type]


@pytest.mark.parametrize("with_certificate", [True, False])
async def test_disabled_or_without_certificate_the_ports_are_plain(
    certificates: Certificates, with_certificate: bool
) -> None:
    contexts = Contexts(
        TlsMode.DISABLED if with_certificate else TlsMode.PERMISSIVE,
        server_context(certificates) if with_certificate else None,
    )
    async with within_seconds(tls=ServerTls(contexts)) as server:
        assert server.reactor._handshakes is None
        with structlog.testing.capture_logs() as logs:
            async with server.peer() as peer, server.peer() as plain:
                await peer.send_bytes(HELLO)
                assert await peer.is_closed_by_server()
                assert (await plain.ask(request())).code == 0
        assert "tls.server.certPath" in reasons(logs)[0]  # type: ignore[arg-type]


async def test_enforcing_without_a_context_serves_nothing() -> None:
    async with within_seconds(tls=ServerTls(Contexts(TlsMode.ENFORCING, None))) as server:
        with structlog.testing.capture_logs() as logs:
            for first in (HELLO, encode(request())):
                async with server.peer() as peer:
                    await peer.send_bytes(first)
                    assert await peer.is_closed_by_server()
        assert "the server has no certificate" in reasons(logs)[0]  # type: ignore[arg-type]
        assert (server.reactor.stats.handshakes_refused, server.reactor.stats.plain_refused) == (1, 1)


async def test_a_hello_after_plain_frames_is_a_broken_frame(certificates: Certificates) -> None:
    async with within_seconds(tls=tls_of(certificates)) as server, server.peer() as peer:
        await peer.ask(request())
        await peer.send_bytes(HELLO)
        assert await peer.is_closed_by_server()
        assert (server.reactor.stats.broken, server.reactor.stats.handshakes_failed) == (1, 0)


async def test_a_peer_that_leaves_before_its_first_byte_or_within_the_handshake(certificates: Certificates) -> None:
    async with within_seconds(tls=tls_of(certificates)) as server:
        async with server.peer():
            await until(server, "s.connections")
        await until(server, "s.connections == 0")
        async with server.peer() as peer:
            await peer.send_bytes(HELLO)
            await until(server, "s.connections")
            await trio.testing.wait_all_tasks_blocked()
            assert len(server.reactor._handshakes or ()) == 1
        await until(server, "s.connections == 0")
        assert (server.reactor.stats.handshakes_failed, server.reactor.stats.broken) == (1, 0)
        assert len(server.reactor._handshakes or ()) == 0


async def test_a_failed_handshake_is_closed_counted_and_explained(certificates: Certificates) -> None:
    def connect(address: tuple[str, int]) -> None:  # trio.SSLStream does not send the alert
        with socket.create_connection(address) as sock, pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")

    async with within_seconds(tls=tls_of(certificates)) as server:
        with structlog.testing.capture_logs() as logs:
            await trio.to_thread.run_sync(connect, server.address)
            await until(server, "s.closed")
        assert server.reactor.stats.handshakes_failed == 1
        assert "does not trust the authority" in reasons(logs)[0]  # type: ignore[arg-type]


async def test_clients_without_the_certificate_that_is_required(certificates: Certificates) -> None:
    context = certificates.server_context(clients=certificates.ca)
    tls = ServerTls(Contexts(TlsMode.ENFORCING, context))
    async with within_seconds(table(), tls=tls) as server:
        for pair in (None, certificates.foreign_client):
            client = certificates.client_context(pair)
            with pytest.raises((trio.BrokenResourceError, EOFError)):
                async with server.peer(tls=client) as peer:
                    await peer.ask(request())
        async with server.peer(tls=certificates.client_context(certificates.client)) as peer:
            await peer.ask(request())
            assert server.connection().tls is not None
            certificate = server.connection().tls.peer_certificate()  # type: ignore[union-attr]
            assert certificate is not None
            assert certificate["subject"] == ((("commonName", "client"),),)
        assert (server.reactor.stats.handshakes_failed, server.reactor.stats.frames) == (2, 1)


# handshakes are bounded


@asynccontextmanager
async def many(server: Server, count: int, first: bytes = HELLO) -> AsyncIterator[list[trio.SocketStream]]:
    """Connections that have begun a handshake and do not go on."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(await trio.open_tcp_stream(*server.address)) for _ in range(count)]
        await until(server, f"s.connections >= {count}")
        for stream in streams if first else ():
            await stream.send_all(first)
        while first and len(server.reactor._handshakes or ()) < count:
            await trio.lowlevel.checkpoint()
        yield streams


async def test_at_most_so_many_handshakes_are_unfinished(certificates: Certificates) -> None:
    async with within_seconds(tls=tls_of(certificates, most=3)) as server, many(server, 3):
        with structlog.testing.capture_logs() as logs:
            async with server.peer() as peer:
                await peer.send_bytes(HELLO)
                assert await peer.is_closed_by_server()
            async with server.peer() as plain:
                assert (await plain.ask(request())).code == 0
        assert reasons(logs)[0] == "3 TLS handshakes are unfinished (tlsMaxHandshakes)"  # type: ignore[arg-type]
        assert server.reactor.stats.handshakes_refused == 1


async def test_a_host_with_the_most_unfinished_handshakes_does_not_keep_others_away(certificates: Certificates) -> None:
    def secure(address: tuple[str, int]) -> str | None:
        with (
            socket.create_connection(address, source_address=("127.0.0.2", 0)) as plain,
            certificates.client_context().wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(encode(request()))
            assert client.recv(1)
            return client.version()

    async with within_seconds(tls=tls_of(certificates, most=3)) as server, many(server, 3) as streams:
        handshakes = server.reactor._handshakes
        assert handshakes is not None
        for _ in range(2):  # the second finds a place
            assert await trio.to_thread.run_sync(secure, server.address) == "TLSv1.3"
        assert len(handshakes) == 2
        assert await streams[0].receive_some(1) == b""  # the oldest
        stats = server.reactor.stats
        assert (stats.handshakes, stats.handshakes_refused, stats.handshakes_failed) == (2, 1, 0)
        assert stats.tls_connections <= 1
    assert (len(handshakes), handshakes._by_host) == (0, {})


async def test_the_addresses_of_an_ipv6_network_are_one_host(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = (f"2001:db8::{number:x}" for number in count(1))
    admit = Acceptor._admit
    monkeypatch.setattr(
        Acceptor, "_admit", lambda own, sock, peer, table: admit(own, sock, (next(addresses), peer[1]), table)
    )
    async with within_seconds(tls=tls_of(certificates, most=3)) as server, many(server, 3):
        handshakes = server.reactor._handshakes
        assert handshakes is not None
        before = list(handshakes._unfinished)
        async with server.peer() as peer:
            await peer.send_bytes(HELLO)
            assert await peer.is_closed_by_server()
        assert list(handshakes._unfinished) == before
        assert list(handshakes._by_host) == ["2001:db8::/64"]
    assert (len(handshakes), handshakes._by_host) == (0, {})


async def test_established_connections_do_not_count_as_handshakes(certificates: Certificates) -> None:
    async with within_seconds(tls=tls_of(certificates, most=1)) as server:
        context = certificates.client_context()
        async with server.peer(tls=context) as one, server.peer(tls=context) as two:
            for peer in (one, two):
                assert (await peer.ask(request())).code == 0


async def test_a_handshake_has_limited_time_from_its_first_byte(certificates: Certificates) -> None:
    clock = ManualClock()
    async with within_seconds(clock=clock, tls=tls_of(certificates)) as server:
        count = 2 * CLOSED_AT_ONCE + 5
        async with many(server, count) as streams, server.peer() as silent, server.peer() as plain:
            await plain.ask(request())
            with structlog.testing.capture_logs() as logs:
                for second in range(10):
                    assert len(server.reactor._handshakes or ()) == count, second
                    await streams[0].send_all(b"\0")  # a byte from time to time does not help
                    clock.advance(1)
                    await trio.testing.wait_all_tasks_blocked()
            stats = server.reactor.stats
            assert (stats.handshakes_timed_out, stats.handshakes_failed, stats.tls_connections) == (count, 0, 0)
            assert reasons(logs)[0] == "the TLS handshake took more than 10 s"  # type: ignore[arg-type]
            assert stats.connections == 2
            assert (await plain.ask(request())).code == 0
            for _ in range(120):
                clock.advance(1)
                await trio.testing.wait_all_tasks_blocked()
            assert await silent.is_closed_by_server()


async def test_the_bytes_of_a_handshake_keep_a_connection(certificates: Certificates) -> None:
    clock = ManualClock()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = certificates.client_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    limits = ReactorLimits(idle=5)
    async with (
        within_seconds(limits=limits, clock=clock, tls=tls_of(certificates)) as server,
        await trio.open_tcp_stream(*server.address) as stream,
    ):
        await until(server, "s.connections")
        for _ in range(3):
            for _ in range(4):
                clock.advance(1)
                await trio.testing.wait_all_tasks_blocked()
            with suppress(ssl.SSLWantReadError):
                client.do_handshake()
            await stream.send_all(outgoing.read())
            incoming.write(await stream.receive_some())
            await trio.testing.wait_all_tasks_blocked()
            if server.reactor.stats.handshakes:
                break
        for _ in range(4):
            clock.advance(1)
            await trio.testing.wait_all_tasks_blocked()
        assert (server.reactor.stats.handshakes, server.reactor.stats.idle_closed) == (1, 0)
        clock.advance(2)
        await until(server, "s.idle_closed")


async def test_one_step_is_taken_per_round_after_its_replies(certificates: Certificates) -> None:
    reactor = Reactor(tls=tls_of(certificates))
    pairs = [trio.socket.socketpair() for _ in range(11)]
    try:
        for ours, theirs in pairs:
            reactor.adopt(ours._sock, echo_table())  # type: ignore[attr-defined]
            await theirs.send(encode(request()) if theirs is pairs[-1][1] else HELLO)
        await reactor._round(reactor._selector.poll(0))
        assert (await pairs[-1][1].recv(4))[:3] == bytes(3)  # the reply
        for left in range(9, -1, -1):
            assert len(reactor._steps) == left
            await reactor._round(())
        assert not reactor._steps
    finally:
        for conn in list(reactor.connections.values()):
            conn.close("the test is over")
        for _, theirs in pairs:
            theirs.close()
        reactor._acceptor.close()
        reactor._selector.close()


async def test_requests_are_answered_among_many_handshakes(certificates: Certificates) -> None:
    async with (
        within_seconds(tls=tls_of(certificates)) as server,
        server.peer() as plain,
        many(server, 100) as streams,
    ):
        for stream in streams:
            await stream.send_all(bytes(510))  # completes the message: the next step of each fails
            assert (await plain.ask(request())).code == 0
        await until(server, "s.handshakes_failed == 100")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_request_that_arrives_with_the_end_of_the_handshake(
    certificates: Certificates, version: ssl.TLSVersion
) -> None:
    """In TLS 1.3 a client may send both at once; with 1.2 the server answers before."""
    context = certificates.client_context()
    context.maximum_version = version
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    async with (
        within_seconds(tls=tls_of(certificates)) as server,
        await trio.open_tcp_stream(*server.address) as stream,
    ):
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                await stream.send_all(outgoing.read())
                incoming.write(await stream.receive_some())
        client.write(encode(request()))
        await stream.send_all(outgoing.read())
        await until(server, "s.frames == 1 and s.bytes_out")


async def test_a_connection_closed_while_its_step_waits(certificates: Certificates) -> None:
    reactor = Reactor(tls=tls_of(certificates))
    ours, theirs = trio.socket.socketpair()
    with theirs:
        conn = reactor.adopt(ours._sock, echo_table())  # type: ignore[attr-defined]
        await theirs.send(HELLO)
        reactor.intake.serve(conn)
        assert list(reactor._steps) == [conn]
        conn.close("the test says so")
        assert (reactor.stats.handshakes_failed, len(reactor._steps)) == (1, 0)
    reactor._acceptor.close()
    reactor._selector.close()


async def test_a_client_that_sends_with_the_end_of_its_handshake_and_closes_is_served(
    certificates: Certificates,
) -> None:
    """One-way requests of short programs. Nothing may be sent after the handshake: a client that closes without having
    read it resets the connection."""
    pair = key_files.read_pair(KeyPairPaths(str(certificates.server.cert), str(certificates.server.key)))
    contexts = Contexts(TlsMode.ENFORCING, key_files.server_context(pair, Verification(ssl.CERT_NONE)))
    reactor = Reactor(tls=ServerTls(contexts))
    handshakes = reactor._handshakes
    assert handshakes is not None
    ours, theirs = socket_pair()
    conn = reactor.adopt(ours, echo_table())
    client = TlsSocket(theirs, certificates.client_context(), server_side=False, server_hostname="localhost")
    client.do_handshake()
    reactor.intake.serve(conn)
    handshakes.step()
    client.fill()
    assert client.do_handshake()
    client.send(encode(request(body=bytes(20_000), oneway=True)))
    client.close()
    for _ in range(4):  # the socket reports the bytes, and then the end
        reactor.intake.serve(conn)
    assert not conn.closed
    handshakes.step()
    assert reactor.stats.handshakes == 1
    while ours.fileno() >= 0:
        reactor.intake.serve(conn)
    assert (reactor.stats.frames, reactor.stats.handshakes_failed) == (1, 0)
    reactor._acceptor.close()
    reactor._selector.close()


async def test_nothing_is_sent_before_the_first_bytes_and_the_handshake(certificates: Certificates) -> None:
    reactor = Reactor(tls=tls_of(certificates))
    ours, theirs = trio.socket.socketpair()
    with theirs:
        conn = reactor.adopt(ours._sock, echo_table())  # type: ignore[attr-defined]
        for _ in range(2):  # before the first bytes, and within the handshake
            conn.probe()
            assert conn.sock.getpeername() == theirs.getsockname()
            assert conn.sock.getsockname() == theirs.getpeername()
            assert conn.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            with pytest.raises(BlockingIOError):
                conn.sock.send(b"x")
            with pytest.raises(BlockingIOError):
                conn.sock.sendmsg([b"x"])
            reactor._check_lost(conn)
            assert not conn.closed
            await theirs.send(HELLO)
            reactor.intake.serve(conn)
        assert conn.tls is not None
        assert conn.tls.arrived == 2 * len(HELLO)
        conn.close("the test is over")
    reactor._acceptor.close()
    reactor._selector.close()


@pytest.mark.parametrize("phase", ["nothing sent", "within the handshake", "established", "plain", "plain refused"])
async def test_a_closed_connection_is_freed_without_the_collector(certificates: Certificates, phase: str) -> None:
    mode = TlsMode.ENFORCING if phase == "plain refused" else TlsMode.PERMISSIVE
    async with within_seconds(tls=tls_of(certificates, mode)) as server:
        gc.disable()
        try:
            async with server.peer(tls=certificates.client_context() if phase == "established" else None) as peer:
                await until(server, "s.connections")
                freed = weakref.ref(server.connection())
                if phase.startswith("plain"):
                    await peer.send(request())
                elif phase == "within the handshake":
                    await peer.send_bytes(HELLO)
                await trio.testing.wait_all_tasks_blocked()
            await until(server, "s.closed")
            await trio.testing.wait_all_tasks_blocked()
            assert freed() is None
        finally:
            gc.enable()


# no byte waits for an event


async def in_one_record(peer: Peer, data: bytes) -> None:
    assert len(data) <= 16 * 1024
    await peer.send_bytes(data)


@pytest.mark.parametrize("tail", [1, 1000, 9000])
async def test_frames_in_the_record_of_a_long_frames_end_are_served(certificates: Certificates, tail: int) -> None:
    async with (
        within_seconds(tls=tls_of(certificates)) as server,
        server.peer(tls=certificates.client_context()) as peer,
    ):
        for size in (40_000, 262_000, 900_000, 1_500_000):
            frames = [encode(request(body=bytes(size), opaque=1))]
            frames += [encode(request(body=bytes(length), opaque=2)) for length in (0, 3000)]
            await peer.send_bytes(frames[0][:-tail])
            await trio.testing.wait_all_tasks_blocked()
            await in_one_record(peer, frames[0][-tail:] + frames[1] + frames[2])
            assert [(await peer.receive()).opaque for _ in range(3)] == [1, 2, 2]


async def test_a_connection_that_waits_for_memory_gets_its_bytes_though_no_event_reports_them(
    certificates: Certificates,
) -> None:
    """Its long frame has to grow, its end is inside its TLS, and the client has sent everything."""
    limits = ReactorLimits(max_unfinished=4 * MIB)
    clock = ManualClock()
    async with (
        within_seconds(limits=limits, clock=clock, tls=tls_of(certificates)) as server,
        server.peer() as one,
        server.peer() as two,
        server.peer(tls=certificates.client_context()) as peer,
    ):
        received = 0

        async def send(sender: Peer, data: bytes) -> None:
            nonlocal received
            received += len(data)
            await sender.send_bytes(data)
            await until(server, f"s.bytes_in == {received}")

        # The first 256 KiB have a buffer. Then two others take what long frames of many connections may have.
        long = encode(request(body=bytes(270_000), opaque=7))
        await send(peer, long[:200_000])
        frame = encode(request(body=bytes(2 * MIB)))
        await send(one, frame[:1_000_000])
        await send(two, frame[:1_000_000])
        await send(peer, long[200_000:262_000])
        await in_one_record(peer, long[262_000:])
        await trio.testing.wait_all_tasks_blocked()
        (waits,) = [conn for conn in server.reactor.connections.values() if conn.aside]
        assert waits.tls is not None
        assert waits.tls.has_bytes
        await one.stream.aclose()
        await until(server, "s.connections == 2")
        clock.advance(1)  # the scan reads it again
        assert (await peer.receive()).opaque == 7


async def test_a_connection_over_its_mark_gets_its_bytes_when_it_has_drained(certificates: Certificates) -> None:
    limits = ReactorLimits(high_water=2 * MIB, low_water=1000)
    async with (
        within_seconds(table(), limits, tls=tls_of(certificates)) as server,
        server.peer(tls=certificates.client_context(), receive_buffer=4096) as peer,
    ):
        requests = [encode(request(BIG_REPLY, opaque=number)) for number in range(40)]
        first = encode(request(body=bytes(100_000), opaque=100))
        await peer.send_bytes(first[:-10])
        await trio.testing.wait_all_tasks_blocked()
        await in_one_record(peer, first[-10:] + b"".join(requests[:20]))
        await until(server, "s.paused")
        await in_one_record(peer, b"".join(requests[20:]))
        assert [(await peer.receive()).opaque for _ in range(41)] == [100, *range(40)]


async def test_bytes_of_a_closed_or_paused_connection_are_not_read(certificates: Certificates) -> None:
    """They are inside its TLS, and it is among those that get a turn: it may have been closed or paused since."""
    async with (
        within_seconds(tls=tls_of(certificates)) as server,
        server.peer(tls=certificates.client_context()) as peer,
    ):
        await peer.ask(request())
        conn = server.connection()
        frames = server.reactor.stats.frames
        assert conn.tls is not None
        conn.tls._left = True
        for name in ("paused", "aside", "closed"):
            setattr(conn, name, True)
            server.reactor._sender.ready.append(conn)
            await server.reactor._round(())
            setattr(conn, name, False)
        assert (server.reactor.stats.frames, conn.tls.has_bytes) == (frames, True)
        conn.tls._left = False


async def test_the_end_that_comes_with_the_last_request(certificates: Certificates) -> None:
    async with within_seconds(tls=tls_of(certificates)) as server:
        stream = await trio.open_tcp_stream(*server.address)
        secure = trio.SSLStream(stream, certificates.client_context(), server_hostname="localhost")
        await secure.do_handshake()
        await Peer(secure).ask(request())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(secure.aclose)  # sends close_notify and waits for the server's
            await until(server, "s.connections == 0")
        assert server.reactor.stats.broken == 0


async def test_a_flight_that_the_socket_does_not_take_at_once(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The selector reports when the socket takes more; the handshake goes on then."""
    refused = 0
    flush = TlsSocket.flush

    def reluctant(self: TlsSocket) -> None:
        nonlocal refused
        if refused < 3 and self._outgoing.pending:
            refused += 1
            raise BlockingIOError
        flush(self)

    monkeypatch.setattr(TlsSocket, "flush", reluctant)
    async with within_seconds(tls=tls_of(certificates)) as server:
        async with server.peer(tls=certificates.client_context()) as peer:
            assert (await peer.ask(request())).code == 0
        assert refused == 3


async def test_a_lost_peer_whose_flight_waits(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: TlsSocket) -> bool:
        if self.unsent:
            raise BrokenPipeError
        return True

    async with (
        within_seconds(tls=tls_of(certificates)) as server,
        server.peer(tls=certificates.client_context()) as peer,
    ):
        await peer.ask(request())
        conn = server.connection()
        monkeypatch.setattr(TlsSocket, "flushed", lost)
        assert conn.tls is not None
        conn.tls._outgoing.write(b"a key update")
        server.reactor._sender.watch(conn)
        await until(server, "s.connections == 0")


async def test_a_large_reply_to_a_slow_reader(certificates: Certificates) -> None:
    limits = ReactorLimits(high_water=300_000, low_water=1000)
    async with (
        within_seconds(table(), limits, tls=tls_of(certificates)) as server,
        server.peer(tls=certificates.client_context(), receive_buffer=4096) as peer,
    ):
        for _ in range(3):
            assert len((await peer.ask(request(BIG_REPLY))).body) == MIB


def test_the_limits_come_from_the_configuration(certificates: Certificates) -> None:
    config = TlsConfig(tls_max_handshakes=5, tls_handshake_timeout_seconds=7)
    tls = ServerTls.of(Contexts(TlsMode.PERMISSIVE, None), config)
    assert (tls.max_handshakes, tls.handshake_timeout, tls.is_on) == (5, 7, False)
