"""40,000 fuzzed beginnings of connections: each is served, shakes hands, waits, or is closed, and leaves nothing.

The reactor, its TLS and its preambles are real; sockets are in memory, and the clock stands still. What has to follow
is decided by ``foresee``. TRIMQ_FUZZ_SEED gives another seed.
"""

import gc
import itertools
import random
import ssl
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
import trio
import trio.testing

from tests.remoting.fuzz import test_fields as fields
from tests.remoting.fuzz.memory import MemorySelector, MemorySocket, sockets_of
from tests.remoting.fuzz.openings import CODES, FRAMES, MOST, Foreseen, Opening, Openings, foresee
from tests.remoting.fuzz.test_fields import PARTS, SEED
from tests.remoting.harness import echo
from tests.remoting.test_tls_server import Contexts, server_context
from tests.remoting.tls_ends import contexts, over, slow_pair
from tests.tls_certificates import Certificates, certificates
from trimq.protocol.command import RemotingCommand
from trimq.remoting.config.client_limits import ClientLimitsConfig
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.reactor import Connection, HandlerTable, Origins, Outcome, Reactor, ReactorLimits, ServerTls
from trimq.remoting.tls.config import TlsMode
from trimq.remoting.tls.tls_socket import TlsSocket

__all__ = ["certificates"]

CASES: Final = 5_000
"""Of each part."""
BATCH: Final = 50
STEPS: Final = 6
"""Pieces, and flights of a handshake, at most."""
PROXY, CLIENT = ("10.9.9.9", 1), ("192.0.2.1", 1)
WAYS: Final = tuple(itertools.product(("disabled", "permissive", "enforcing", "permissive without"), (False, True)))
"""The mode of TLS, one of them without a certificate, and whether there are trusted proxies."""


class Client:
    """One connection to the reactor."""

    def __init__(self, opening: Opening, conn: Connection, sock: MemorySocket, tls: TlsSocket | None) -> None:
        self.opening = opening
        self.conn = conn
        self.sock = sock
        self.tls = tls
        self._pieces = list(opening.pieces)
        self._asked = False

    def step(self) -> None:
        """Send the next piece, or shake hands."""
        if self._pieces:
            self.sock.inward.data += self._pieces.pop(0)
            if self._pieces or not self.opening.at_once:
                return
        if self.opening.ends == "reset":
            self.sock.is_reset = True
        elif self.opening.ends:
            self.sock.inward.ended = True
        elif self.tls is not None and not self.conn.closed:
            self._shake_hands(self.tls)

    def _shake_hands(self, tls: TlsSocket) -> None:
        if self.sock.outward.data:
            tls.fill()
        if tls.do_handshake() and not self._asked:
            self._asked = True
            tls.send(FRAMES[0])


class Bench:
    """A reactor with sockets in memory. ``served`` counts the requests that were decoded, by connection."""

    def __init__(self, mode: str, certificates: Certificates, proxies: bool, client_context: ssl.SSLContext) -> None:
        self.mode, _, without = mode.partition(" ")
        self.certificate = not without
        self.proxies = proxies
        self.clock = ManualClock()
        self.selector = MemorySelector()
        self.served: Counter[str] = Counter()
        self.client_context = client_context
        stats = ReactorStats()
        origins = (
            Origins(ClientLimitsConfig(proxy_protocol_networks="10.9.9.9/32"), self.clock, stats) if proxies else None
        )
        context = server_context(certificates) if self.certificate else None
        self.reactor = Reactor(
            ReactorLimits(max_frame=MOST, spin=0, spin_many=0, gather=0),
            self.clock,
            self.selector,
            ServerTls(Contexts(TlsMode(self.mode), context)),
            origins,
            stats,
        )
        self.table = HandlerTable()
        for code in CODES:
            self.table.register(code, self._echo)
        self._numbers = itertools.count(1)

    def _echo(self, connection: Connection, command: RemotingCommand) -> Outcome:
        self.served[connection.data["number"]] += 1
        return echo(connection, command)

    def connect(self, opening: Opening, *, behind_proxy: bool) -> Client:
        sock = MemorySocket()
        self.selector.sockets[sock.fileno()] = sock
        conn = self.reactor.adopt(sockets_of(sock), self.table, PROXY if behind_proxy else CLIENT)
        conn.data["number"] = str(next(self._numbers))
        tls = None
        if opening.client:
            tls = TlsSocket(sockets_of(sock.other), self.client_context, server_side=False, server_hostname="localhost")
        return Client(opening, conn, sock, tls)

    async def settle(self) -> None:
        """Return when the reactor has done all there is to do."""
        self.selector.wake()
        await trio.testing.wait_all_tasks_blocked()

    @property
    def shaking_hands(self) -> int:
        return len(self.reactor._handshakes or ())

    def judge(self, client: Client, *, behind_proxy: bool, counts: Counter[str]) -> None:
        """Compare what has become of a connection with what has to."""
        conn, opening = client.conn, client.opening
        want: Foreseen = foresee(opening, mode=self.mode, certificate=self.certificate, behind_proxy=behind_proxy)
        handshakes = self.reactor._handshakes
        shakes_hands = handshakes is not None and conn in handshakes._unfinished
        served = self.served[conn.data["number"]]
        found = f"closed {conn.closed}, shakes hands {shakes_hands}, served {served}, not as foreseen"
        assert want.closed is None or conn.closed == want.closed, found
        assert want.shakes_hands is None or shakes_hands == want.shakes_hands, found
        assert want.least <= served <= want.most, found
        plain = conn.tls is None
        if self.mode == "enforcing" and plain:
            assert not served, "served in plain"
            assert not client.sock.outward.data, "answered in plain"
        counts["served"] += served > 0
        counts["served over TLS"] += served > 0 and not plain
        counts["shakes hands"] += shakes_hands
        counts["TLS"] += not plain
        counts["closed"] += conn.closed
        counts["waits"] += not (served or conn.closed or shakes_hands)
        counts["exactly"] += want.closed is not None

    async def close_all(self, clients: list[Client], *, by_the_clock: bool) -> None:
        """Have all connections end: their clients close them, or the server, since nothing arrives."""
        if by_the_clock:
            self.clock.advance(11)
            await self.settle()
            assert self.shaking_hands == 0
            self.clock.advance(121)
        else:
            for client in clients:
                client.sock.inward.ended = True
        await self.settle()

    def check_nothing_left(self) -> None:
        reactor, stats = self.reactor, self.reactor.stats
        assert not reactor.connections
        assert not self.selector.sockets
        assert (stats.connections, stats.tls_connections, stats.unfinished, stats.inflight, stats.paused) == (0,) * 5
        assert stats.failures == 0
        assert self.shaking_hands == 0
        handshakes = reactor._handshakes
        assert handshakes is None or not (handshakes.queue or handshakes._by_host)
        origins = reactor._origins
        assert origins is None or not any(origins._callers.connections(peer[0]) for peer in (PROXY, CLIENT))


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    async with trio.open_nursery() as nursery:
        await nursery.start(bench.reactor.run)
        yield bench
        nursery.cancel_scope.cancel()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is freed is freed at once."""
    gc.disable()
    yield
    gc.enable()


def hellos(certificates: Certificates) -> list[bytes]:
    """What clients of each version begin with."""
    found = []
    for version in (None, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        server, client = slow_pair()
        over(server, client, *contexts(certificates, version))[1].do_handshake()
        found.append(bytes(server.inward.data))
    return found


async def batch(bench: Bench, openings: Openings, source: random.Random, counts: Counter[str]) -> None:
    """Some connections at the same time."""
    behind = [bench.proxies and source.random() < 0.6 for _ in range(BATCH)]
    clients = [bench.connect(openings.next(behind_proxy=one), behind_proxy=one) for one in behind]
    for _ in range(STEPS):
        for client in clients:
            client.step()
        await bench.settle()
    for client, behind_proxy in zip(clients, behind, strict=True):
        try:
            bench.judge(client, behind_proxy=behind_proxy, counts=counts)
        except Exception as error:
            error.add_note(f"behind a proxy {behind_proxy}: {client.opening}"[:3000])
            raise
        counts["cases"] += 1
    if bench.mode == "enforcing":
        assert bench.reactor.stats.frames == sum(bench.served.values())
    await bench.close_all(clients, by_the_clock=source.random() < 0.5)
    assert all(client.conn.closed and client.sock.closed for client in clients)
    freed = [weakref.ref(client.conn) for client in clients]
    clients.clear()
    del client
    assert not any(conn() for conn in freed), "a closed connection is still referred to"
    bench.check_nothing_left()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("part", range(PARTS))
async def test_fuzzed_first_bytes(certificates: Certificates, part: int) -> None:
    source = random.Random(f"{SEED} first bytes {part}")
    openings = Openings(source, hellos(certificates))
    context = certificates.client_context()
    counts: Counter[str] = Counter()
    for number in range(CASES // BATCH):
        mode, proxies = WAYS[number % len(WAYS)]
        try:
            async with running(Bench(mode, certificates, proxies, context)) as bench:
                await batch(bench, openings, source, counts)
        except BaseException as error:
            error.add_note(f"TRIMQ_FUZZ_SEED={SEED}, part {part}, batch {number}: {mode}, with proxies {proxies}")
            raise
    # Or the test would say nothing.
    assert counts["cases"] == CASES
    shares = {name: count / CASES for name, count in counts.items()}
    assert shares["exactly"] > 0.6, shares
    assert min(shares[name] for name in ("served", "shakes hands", "waits", "TLS")) > 0.04, shares
    assert shares["closed"] > 0.3, shares
    assert shares["served over TLS"] > 0.003, shares


def test_there_are_enough() -> None:
    assert PARTS * (CASES + fields.CASES) >= 100_000
