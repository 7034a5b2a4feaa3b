"""Hostile bytes where TLS begins, and inside it: a connection ends with a reason, and all others are served."""

import random
import socket
import ssl

import pytest
import trio

from tests.remoting.harness import Peer, request, within_seconds
from tests.remoting.test_tls_server import tls_of
from tests.remoting.tls_ends import contexts, over, shake_hands, slow_pair
from tests.tls_certificates import Certificates, certificates
from trimq.remoting.server.reactor import ReactorLimits
from trimq.remoting.tls.config import TlsMode

__all__ = ["certificates"]


def hostile(source: random.Random, genuine: bytes) -> bytes:
    """Random bytes, a record of random bytes, or genuine bytes that were changed, cut, or sent twice."""
    kind = source.randrange(5)
    noise = source.randbytes(source.choice((0, 1, 4, 5, 6, 100, 20_000)))
    if kind == 0:
        return b"\x16" + noise
    if kind == 1:
        return b"\x16\x03" + bytes([source.randrange(5)]) + len(noise).to_bytes(2, "big") + noise
    if kind == 2:
        changed = bytearray(genuine)
        for _ in range(source.randrange(1, 4)):
            changed[source.randrange(1, len(changed))] = source.randrange(256)
        return bytes(changed)
    if kind == 3:
        return genuine[: source.randrange(1, len(genuine))] + noise
    return genuine + genuine[1:]


def hello_of(certificates: Certificates) -> bytes:
    server, client = slow_pair()
    _, tls_client = over(server, client, *contexts(certificates))
    tls_client.do_handshake()
    return bytes(server.inward.data)


def test_hostile_handshakes_end_with_an_oserror_or_wait_for_more(certificates: Certificates) -> None:
    genuine = hello_of(certificates)
    source = random.Random(29)
    both = contexts(certificates)
    waits = 0
    texts: list[str] = []
    for _ in range(3000):
        server, client = slow_pair()
        end, _ = over(server, client, *both)
        server.inward.data += hostile(source, genuine)
        try:
            while server.inward.data:
                end.fill()
                assert not end.do_handshake()
        except OSError as error:
            texts.append(str(error))
        else:
            waits += 1
    assert min(len(texts), waits) > 300
    assert all(text.startswith("the TLS handshake failed: ") for text in texts)


def test_a_hello_that_says_it_is_long_is_refused_before_it_has_arrived(certificates: Certificates) -> None:
    """CVE-2023-34462: for each hello, Netty allocated what its length said, up to 16 MiB."""
    server, client = slow_pair()
    end, _ = over(server, client, *contexts(certificates))
    piece = b"\x16\x03\x01\x40\x00"
    server.inward.data += piece + b"\x01\xff\xff\xff" + bytes(16_380)
    reason = ""
    for _ in range(128 * 1024 // 16_384):
        try:
            end.fill()
            assert not end.do_handshake()
        except OSError as error:
            reason = str(error)
            break
        server.inward.data += piece + bytes(16_384)
    assert reason.startswith("the TLS handshake failed: ")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_hostile_records_never_give_bytes_that_were_not_sent(
    certificates: Certificates, version: ssl.TLSVersion
) -> None:
    source = random.Random(30)
    both = contexts(certificates, version)
    view = memoryview(bytearray(100_000))
    failed = 0
    for _ in range(300):
        reader, writer = over(*slow_pair(), *both)
        shake_hands(reader, writer)
        sent = source.randbytes(source.choice((1, 100, 20_000)))
        writer.send(sent)
        raw = reader.raw
        data = raw.inward.data  # type: ignore[attr-defined] # in memory
        changed = hostile(source, bytes(data))
        data[:] = changed if source.randrange(2) else bytes(data[: source.randrange(len(data))]) + changed
        got = b""
        try:
            while True:
                try:
                    count = reader.recv_into(view)
                except BlockingIOError:
                    if not data:
                        break
                    continue
                if not count:
                    break
                got += view[:count]
        except OSError:
            failed += 1
        assert sent.startswith(got)
    assert failed > 100


@pytest.mark.parametrize("mode", [TlsMode.PERMISSIVE, TlsMode.ENFORCING])
async def test_a_server_serves_on_among_hostile_connections(certificates: Certificates, mode: TlsMode) -> None:
    genuine = hello_of(certificates)
    source = random.Random(31)
    context = certificates.client_context()
    limits = ReactorLimits(max_connections=10_000)
    async with (
        within_seconds(limits=limits, tls=tls_of(certificates, mode)) as server,
        server.peer(tls=context) as good,
    ):

        async def attack() -> None:
            for _ in range(50):
                async with await trio.open_tcp_stream(*server.address) as stream:
                    try:
                        data = hostile(source, genuine)
                        cut = source.randrange(len(data) + 1)
                        await stream.send_all(data[:cut])
                        await stream.send_all(data[cut:])
                    except trio.BrokenResourceError:
                        pass

        async def use(peer: Peer) -> None:
            for number in range(100):
                body = bytes(number * 300)
                assert bytes((await peer.ask(request(body=body))).body) == body

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(attack)
            nursery.start_soon(use, good)
        while server.reactor.stats.connections > 1:
            await trio.lowlevel.checkpoint()
        stats = server.reactor.stats
        assert (stats.failures, stats.unfinished, stats.tls_connections) == (0, 0, 1)
        assert len(server.reactor._handshakes or ()) == 0
        assert stats.handshakes_failed > 100


async def test_connections_that_close_after_their_first_bytes_leave_nothing_to_wait_for(
    certificates: Certificates,
) -> None:
    hello = hello_of(certificates)
    async with within_seconds(tls=tls_of(certificates)) as server:
        handshakes = server.reactor._handshakes
        assert handshakes is not None
        for _ in range(40):
            with socket.create_connection(server.address) as client:
                client.send(hello)
        while server.reactor.stats.closed < 40:
            await trio.lowlevel.checkpoint()
            assert set(handshakes.queue) <= set(server.reactor.connections.values())
        assert server.reactor.stats.handshakes_failed == 40
