"""The tests of the reactor's replies, memory and paths once more, with TLS on every connection."""

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import ModuleType

import pytest

from tests.remoting import harness, test_fast_path, test_over_the_mark, test_reactor, test_unfinished
from tests.remoting.harness import Peer, Server
from tests.remoting.test_tls_server import tls_of
from tests.tls_certificates import Certificates, certificates
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.reactor import Origins, Reactor, ReactorLimits, ReactorStats, ServerTls
from trimq.remoting.server.selector import Selector

__all__ = ["certificates"]


def _tests_of(*modules: ModuleType) -> Iterator[tuple[str, object]]:
    for module in modules:
        yield from ((name, value) for name, value in vars(module).items() if name.startswith("test_"))


globals().update(_tests_of(test_fast_path, test_over_the_mark, test_reactor, test_unfinished))


@pytest.fixture(scope="module", autouse=True)
def over_tls(certificates: Certificates) -> Iterator[None]:
    """Reactors require TLS, and peers use it."""
    plain_peer = Server.peer
    context = certificates.client_context()

    @asynccontextmanager
    async def peer(self: Server, *, receive_buffer: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
        async with plain_peer(self, receive_buffer=receive_buffer, tls=tls or context) as found:
            yield found

    plain_init = Reactor.__init__
    ours = tls_of(certificates)

    def init(
        self: Reactor,
        limits: ReactorLimits | None = None,
        clock: Clock | None = None,
        selector: Selector | None = None,
        tls: ServerTls | None = None,
        origins: Origins | None = None,
        stats: ReactorStats | None = None,
    ) -> None:
        plain_init(self, limits, clock, selector, tls or ours, origins, stats)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "peer", peer)
        patch.setattr(Reactor, "__init__", init)
        yield


async def test_connections_are_encrypted() -> None:
    """Else the tests above prove nothing."""
    async with harness.within_seconds() as server, server.peer() as peer:
        await peer.ask(harness.request())
        assert server.connection().tls is not None
