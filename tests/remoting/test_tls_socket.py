"""TlsSocket: the same bytes in the same order at the other end, however the cipher bytes are cut on the way."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.remoting.tls_ends import SlowSocket, contexts, over, shake_hands, slow_pair, socket_pair
from tests.tls_certificates import Certificates, certificates
from trimq.remoting.tls.tls_socket import MOST_ENCRYPTED, MOST_HANDSHAKE, RECORD, TlsSocket

__all__ = ["certificates"]

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
PATTERN = bytes(range(251)) * 5000


@pytest.fixture(scope="module")
def both(certificates: Certificates) -> dict[ssl.TLSVersion, tuple[ssl.SSLContext, ssl.SSLContext]]:
    return {version: contexts(certificates, version) for version in VERSIONS}


def ends(
    both: dict[ssl.TLSVersion, tuple[ssl.SSLContext, ssl.SSLContext]], version: ssl.TLSVersion = VERSIONS[1]
) -> tuple[TlsSocket, TlsSocket, SlowSocket, SlowSocket]:
    """Two ends after their handshake, and the sockets in memory below them."""
    server, client = slow_pair()
    tls_server, tls_client = over(server, client, *both[version])
    shake_hands(tls_server, tls_client)
    take_tickets(tls_client)
    return tls_server, tls_client, server, client


def take_tickets(client: TlsSocket) -> None:
    """Let a client of TLS 1.3 read the session tickets, which come behind the handshake."""
    with pytest.raises(BlockingIOError):
        client.recv_into(memoryview(bytearray(1)))


def show_content(writer: TlsSocket, reader: TlsSocket) -> None:
    """Before a peer has sent content, little is decrypted in one call."""
    writer.send(bytes(1000))
    assert received(reader) == bytes(1000)


def received(end: TlsSocket, size: int = 1 << 20) -> bytes:
    """All that has arrived, read with views of ``size`` bytes, as a reactor does: again while bytes are inside."""
    data = bytearray()
    view = memoryview(bytearray(size))
    while True:
        try:
            count = end.recv_into(view)
        except BlockingIOError:
            assert not end.has_bytes
            if isinstance(end.raw, SlowSocket) and end.raw.inward.data:
                continue  # the socket still reports that
            return bytes(data)
        if not count:
            return bytes(data)
        data += view[:count]


class Uneven:
    """Sizes from a list, again and again; a 0 in it stands for a socket that is full or empty at that moment."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = [*sizes, 1 << 20]
        self.at = 0

    def __call__(self) -> int:
        self.at += 1
        return self.sizes[self.at % len(self.sizes)]


sizes = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 40_000)), max_size=8)


class Queue:
    """Sends as OutBuffer and ClientConnection do: the same bytes again until they were taken, more of them behind."""

    def __init__(self, end: TlsSocket) -> None:
        self.end = end
        self.chunks: list[memoryview] = []
        self.sent = 0

    def flush(self, *, several: bool) -> None:
        while self.chunks:
            try:
                count = self.end.sendmsg(self.chunks) if several else self.end.send(self.chunks[0])
            except BlockingIOError:
                return
            self.sent += count
            while self.chunks and count >= len(self.chunks[0]):
                count -= len(self.chunks.pop(0))
            if count:
                self.chunks[0] = self.chunks[0][count:]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(VERSIONS),
    st.lists(st.tuples(st.one_of(st.integers(1, 300), st.integers(1, 400_000)), st.booleans()), max_size=12),
    sizes,
    sizes,
    st.lists(st.one_of(st.integers(1, 50), st.integers(1, 300_000)), min_size=1, max_size=4),
)
def test_any_cut_of_the_cipher_bytes_gives_the_same_plain_bytes(
    both: Any,
    version: ssl.TLSVersion,
    writes: list[tuple[int, bool]],
    takes: list[int],
    gives: list[int],
    views: list[int],
) -> None:
    reader, writer, raw_reader, raw_writer = ends(both, version)
    raw_writer.takes, raw_reader.gives = Uneven(takes), Uneven(gives)
    queue = Queue(writer)
    expected = bytearray()
    got = bytearray()
    turn = 0

    def read() -> None:
        nonlocal turn
        turn += 1
        view = memoryview(bytearray(views[turn % len(views)]))
        try:
            count = reader.recv_into(view)
        except BlockingIOError:
            assert not reader.has_bytes
            return
        assert count
        got.extend(view[:count])

    for size, several in writes:
        queue.chunks.append(memoryview(PATTERN)[len(expected) % 251 :][:size])
        expected += queue.chunks[-1]
        queue.flush(several=several)
        # What counts as sent has left: the other end gets that and, with bytes on the way, no more than was queued.
        assert len(got) <= len(expected)
        read()
    for _ in range(1_000_000):
        if len(got) == len(expected):
            break
        queue.flush(several=False)
        read()
    assert got == expected
    assert queue.sent == len(expected)
    assert not writer.encrypted
    assert not writer.unsent


def test_a_byte_counts_as_sent_when_its_cipher_text_has_left(both: Any) -> None:
    reader, writer, _, raw = ends(both)
    raw.takes = iter((1000, 0, 1 << 20)).__next__
    with pytest.raises(BlockingIOError):
        writer.send(PATTERN[:5000])
    assert (writer.encrypted, writer.unsent > 4000) == (5000, True)
    with pytest.raises(BlockingIOError):
        writer.send(PATTERN[:9000])
    assert writer.send(PATTERN[:9000]) == 5000
    assert (writer.encrypted, writer.unsent) == (0, 0)
    assert received(reader) == PATTERN[:5000]


def test_the_next_call_may_ask_for_a_part_of_what_is_encrypted(both: Any) -> None:
    reader, writer, _, raw = ends(both)
    raw.takes = iter((0, 1 << 20, 1 << 20)).__next__
    with pytest.raises(BlockingIOError):
        writer.sendmsg([PATTERN[:3], PATTERN[3:10]])
    assert writer.send(PATTERN[:3]) == 3
    assert writer.send(PATTERN[3:20]) == 7
    assert writer.send(PATTERN[10:20]) == 10
    assert received(reader) == PATTERN[:20]


def test_one_call_encrypts_a_limited_part(both: Any) -> None:
    reader, writer, _, raw = ends(both)
    assert writer.send(PATTERN) == MOST_ENCRYPTED
    assert writer.sendmsg([PATTERN[:100], PATTERN[100:], PATTERN]) == MOST_ENCRYPTED
    assert received(reader) == PATTERN[:MOST_ENCRYPTED] * 2
    raw.takes = lambda: 0
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            writer.send(PATTERN)
        assert writer.unsent < MOST_ENCRYPTED * 1.01


def test_short_buffers_share_a_record(both: Any) -> None:
    reader, writer, raw, _ = ends(both)
    assert writer.sendmsg([b"a" * 10, b"", b"b" * 10, b"c" * 20_000, b"d" * 10, b"e" * 10]) == 20_040
    assert len(raw.inward.data) == 20_040 + 22 * 4  # the long buffer takes two records
    assert received(reader) == b"a" * 10 + b"b" * 10 + b"c" * 20_000 + b"d" * 10 + b"e" * 10
    assert writer.sendmsg([]) == 0
    assert writer.send(b"") == 0


def test_bytes_without_space_stay_inside_and_are_reported(both: Any) -> None:
    reader, writer, raw, _ = ends(both)
    show_content(writer, reader)
    calls: list[bool] = []
    reader.on_left = lambda: calls.append(reader.has_bytes)
    writer.send(PATTERN[:10_000])
    writer.send(PATTERN[10_000:10_100])
    view = memoryview(bytearray(9_990))
    assert reader.recv_into(view) == 9_990
    assert not raw.inward.data  # nothing is left that an event could report
    assert calls == [True]
    assert received(reader) == PATTERN[9_990:10_100]
    assert not reader.has_bytes


def test_a_view_of_two_records_takes_everything(both: Any) -> None:
    reader, writer, raw, _ = ends(both)
    show_content(writer, reader)
    reader.on_left = lambda: pytest.fail("bytes were left inside")
    sent = writer.send(PATTERN[:200_000]) + writer.send(PATTERN[:60_000])
    view = memoryview(bytearray(2 * RECORD))
    got = 0
    while raw.inward.data:
        got += reader.recv_into(view)
    assert got == sent


def test_the_first_bytes_may_have_been_read_before(both: Any) -> None:
    server, client = slow_pair()
    _, tls_client = over(server, client, *both[VERSIONS[1]])
    tls_client.do_handshake()
    first = bytes(server.inward.data)
    server.inward.data.clear()
    tls_server = TlsSocket(server, both[VERSIONS[1]][0], server_side=True, first=first)  # type: ignore[arg-type] # in memory
    assert tls_server.arrived == len(first)
    shake_hands(tls_server, tls_client)
    assert tls_server.version() == "TLSv1.3"


def test_bytes_that_arrive_with_the_end_of_the_handshake_are_reported(both: Any) -> None:
    server, client = slow_pair()
    tls_server, tls_client = over(server, client, *both[VERSIONS[1]])
    tls_client.do_handshake()
    tls_server.fill()
    assert not tls_server.do_handshake()
    tls_client.fill()
    assert tls_client.do_handshake()
    tls_client.send(b"early")
    tls_server.fill()
    assert tls_server.do_handshake()
    assert tls_server.has_bytes
    assert received(tls_server) == b"early"


def test_nothing_passes_before_the_handshake(both: Any) -> None:
    tls_server, tls_client = over(*slow_pair(), *both[VERSIONS[1]])
    with pytest.raises(BlockingIOError):
        tls_client.send(b"x")
    with pytest.raises(BlockingIOError):
        tls_client.sendmsg([b"x"])
    with pytest.raises(BlockingIOError):
        tls_server.recv_into(memoryview(bytearray(10)))
    assert tls_client.unsent == 0
    assert not tls_server.fill()


def test_a_flight_leaves_when_the_socket_takes_it(both: Any) -> None:
    server, client = slow_pair()
    tls_server, tls_client = over(server, client, *both[VERSIONS[1]])
    server.takes = Uneven([100, 0])
    client.takes = Uneven([7, 0])
    shake_hands(tls_server, tls_client)
    server.takes = lambda: 1 << 20
    assert tls_server.send(b"x") == 1
    assert received(tls_client) == b"x"


def test_a_handshake_takes_a_limited_number_of_bytes_at_a_time(both: Any) -> None:
    server, client = slow_pair()
    tls_server, _ = over(server, client, *both[VERSIONS[1]])
    server.inward.data += b"\x16\x03\x01" + bytes(MOST_HANDSHAKE * 2)
    for _ in range(3):
        assert tls_server.fill()
        assert tls_server.arrived == MOST_HANDSHAKE
    assert len(server.inward.data) == MOST_HANDSHAKE + 3


def test_the_end_of_the_stream(both: Any) -> None:
    reader, writer, _, raw = ends(both)
    writer.send(b"last")
    writer.close()
    assert raw.closed
    view = memoryview(bytearray(100))
    assert reader.recv_into(view) == 4
    assert reader.has_bytes  # the end is inside: no event may report it again
    assert reader.recv_into(view) == 0
    assert reader.recv_into(view) == 0
    writer.close()


def test_an_end_without_a_close_notify_is_an_end_too(both: Any) -> None:
    reader, writer, _, raw = ends(both)
    writer.send(b"last")
    raw.close()
    assert received(reader) == b"last"
    assert reader.recv_into(memoryview(bytearray(100))) == 0


def test_an_end_within_the_handshake(both: Any) -> None:
    server, client = slow_pair()
    tls_server, tls_client = over(server, client, *both[VERSIONS[1]])
    client.close()
    with pytest.raises(ConnectionResetError, match="closed within the TLS handshake"):
        tls_server.fill()
    tls_client.close()


def test_a_changed_record_ends_the_connection(both: Any) -> None:
    reader, writer, raw, _ = ends(both)
    writer.send(b"x" * 100)
    raw.inward.data[50] ^= 1
    with pytest.raises(OSError, match="the TLS connection failed: a record was changed on the way"):
        reader.recv_into(memoryview(bytearray(1000)))
    with pytest.raises(OSError, match="the TLS connection failed"):  # the alert
        writer.recv_into(memoryview(bytearray(1000)))


def test_a_lost_connection_raises(both: Any) -> None:
    _, writer, _, raw = ends(both)
    raw.outward.ended = True
    with pytest.raises(BrokenPipeError):
        writer.send(b"x")


def bad_client_cases(certificates: Certificates) -> Iterator[tuple[ssl.SSLContext, ssl.SSLContext, str, str]]:
    server, client = contexts(certificates)
    client.maximum_version = client.minimum_version = ssl.TLSVersion.TLSv1_2
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    yield server, client, "no common TLS version", "accepts none of the offered TLS versions"
    server, client = contexts(certificates)
    yield (
        server,
        ssl.create_default_context(),
        "does not trust the authority",
        "the certificate of the other side was refused",
    )
    server, client = contexts(certificates, ssl.TLSVersion.TLSv1_2)
    server.load_verify_locations(certificates.ca)
    server.verify_mode = ssl.CERT_REQUIRED
    yield server, client, "sent no certificate, and one is required", "wants a certificate"


@pytest.mark.parametrize("case", [0, 1, 2])
def test_a_failed_handshake_says_why(certificates: Certificates, case: int) -> None:
    server_context, client_context, at_server, at_client = list(bad_client_cases(certificates))[case]
    tls_server, tls_client = over(*slow_pair(), server_context, client_context)
    texts: dict[str, str] = {}
    for _ in range(4):
        for name, end in (("server", tls_server), ("client", tls_client)):
            if name in texts:
                continue
            try:
                end.fill()
                end.do_handshake()
            except OSError as error:
                texts[name] = str(error)
    assert at_server in texts["server"]
    assert at_client in texts["client"]
    assert texts["server"].startswith("the TLS handshake failed: ")


def test_other_errors_have_a_text_too(both: Any) -> None:
    server, client = slow_pair()
    tls_server, _ = over(server, client, *both[VERSIONS[1]])
    server.inward.data += b"\x16\x03\x01\x00\x05\x99\x99\x99\x99\x99"
    tls_server.fill()
    with pytest.raises(OSError, match="the TLS handshake failed: unexpected message"):
        tls_server.do_handshake()


def test_a_peer_that_does_not_read_the_answers_is_given_up(both: Any) -> None:
    """With renegotiation off, TLS 1.2 answers each request for it with an alert. OpenSSL has no such client here."""
    reader, writer, raw, _ = ends(both)
    raw.takes = lambda: 0
    view = memoryview(bytearray(10))
    reader._outgoing.write(b"an answer")
    writer.send(b"x")
    assert reader.recv_into(view) == 1
    assert reader.unsent == len(b"an answer")
    reader._outgoing.write(bytes(64 * 1024 + 1))
    writer.send(b"x")
    with pytest.raises(OSError, match="does not read the answers"):
        reader.recv_into(view)


def test_answers_leave_without_anything_else_to_send(both: Any) -> None:
    reader, writer, _, _ = ends(both)
    reader._outgoing.write(b"an answer")
    writer.send(b"x")
    assert received(reader) == b"x"
    assert reader.unsent == 0


def test_the_plain_socket_behind_it(both: Any) -> None:
    left, right = socket_pair()
    tls_server, tls_client = over(left, right, *both[VERSIONS[1]])
    with pytest.raises(BlockingIOError):
        tls_server.recv(1, socket.MSG_PEEK)
    shake_hands(tls_server, tls_client)
    assert tls_client.recv(1, socket.MSG_PEEK) == b"\x17"  # a record: a ticket of the session
    assert tls_server.fileno() == left.fileno()
    assert (tls_server.getpeername(), tls_server.getsockname()) == (left.getpeername(), left.getsockname())
    tls_server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    assert left.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == tls_server.getsockopt(
        socket.SOL_SOCKET, socket.SO_KEEPALIVE
    )
    assert (tls_server.version(), tls_server.cipher()) == (tls_client.version(), tls_client.cipher())
    certificate = tls_client.peer_certificate()
    assert certificate is not None
    assert certificate["subject"] == ((("commonName", "localhost"),),)
    tls_server.close()
    assert tls_client.recv_into(memoryview(bytearray(10))) == 0
    tls_client.close()
    assert left.fileno() == right.fileno() == -1


def test_real_sockets_that_are_full(both: Any) -> None:
    left, right = socket_pair()
    tls_server, tls_client = over(left, right, *both[VERSIONS[1]])
    shake_hands(tls_server, tls_client)
    queue = Queue(tls_server)
    queue.chunks = [memoryview(PATTERN)] * 3
    got = bytearray()
    while len(got) < 3 * len(PATTERN):
        queue.flush(several=True)
        got += received(tls_client, 100_000)
    assert got == PATTERN * 3
    assert queue.sent == len(got)
    tls_server.close()
    tls_client.close()


class Silent:
    """Stands for OpenSSL while a peer sends records without content, such as key updates."""

    def __init__(self, end: TlsSocket) -> None:
        self.incoming = end._incoming

    def __call__(self, size: int, view: memoryview) -> int:
        self.incoming.read()
        raise ssl.SSLWantReadError


def test_records_without_content_are_read_in_small_pieces_and_end_the_connection(both: Any) -> None:
    reader, writer, raw, _ = ends(both)
    show_content(writer, reader)
    reader._read = Silent(reader)
    view = memoryview(bytearray(1 << 18))
    size = 1 << 20
    raw.inward.data += bytes(size)
    taken = []
    for _ in range(8):
        with pytest.raises(BlockingIOError):
            reader.recv_into(view)
        taken.append(size - len(raw.inward.data))
        size = len(raw.inward.data)
    assert taken == [32 * 1024, *[4096] * 7]
    with suppress(BlockingIOError):  # 64 KiB, and then more
        reader.recv_into(view)
    with pytest.raises(ConnectionAbortedError, match="without content"):
        reader.recv_into(view)


def test_content_makes_up_for_records_without(both: Any) -> None:
    reader, writer, raw, _ = ends(both)
    genuine = reader._read
    view = memoryview(bytearray(1 << 18))
    for _ in range(10):
        reader._read = Silent(reader)
        raw.inward.data += bytes(20_000)
        while raw.inward.data:
            with suppress(BlockingIOError):
                reader.recv_into(view)
        reader._read = genuine
        writer.send(PATTERN[:1000])
        assert received(reader) == PATTERN[:1000]


@pytest.mark.parametrize("size", [1000, 20_000])
def test_many_bytes_leave_little_memory_behind(both: Any, size: int) -> None:
    reader, writer, _, _ = ends(both)
    most = [0, 0]

    class Counting:
        """A memory BIO that notes the most that was in it: it never gives memory back."""

        def __init__(self, bio: ssl.MemoryBIO, at: int) -> None:
            self.bio, self.at = bio, at

        @property
        def pending(self) -> int:
            return self.bio.pending

        def read(self) -> bytes:
            most[self.at] = max(most[self.at], self.bio.pending)
            return self.bio.read()

        def write(self, data: Any) -> None:
            self.bio.write(data)
            most[self.at] = max(most[self.at], self.bio.pending)

    reader._incoming = Counting(reader._incoming, 0)  # type: ignore[assignment] # has what is used of it
    writer._outgoing = Counting(writer._outgoing, 1)  # type: ignore[assignment] # as above
    sent = sum(writer.sendmsg([PATTERN[:size]] * 20) for _ in range(10))
    assert len(received(reader)) == sent
    assert 0 < most[0] <= 33 * 1024
    assert 0 < most[1] <= 33 * 1024
