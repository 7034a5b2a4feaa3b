"""A name server and a broker with TLS, in a trio loop in a thread: the tests run on both loops, and block."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from tests.tls_certificates import Certificates, KeyPair
from trimq.broker.controller import BrokerController
from trimq.broker.testing import configuration
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController


@dataclass(frozen=True)
class TlsServers:
    """The addresses of a running name server and a running broker."""

    namesrv: str
    broker: str


def server_keys(certificates: Certificates, mode: str, pair: KeyPair | None = None, *, mutual: bool) -> dict[str, str]:
    """The keys of TLS of a server. Servers verify each other, and name servers get a broker's certificate."""
    pair = pair or certificates.server
    keys = {
        "tls.server.mode": mode,
        "tls.server.certPath": str(pair.cert),
        "tls.server.keyPath": str(pair.key),
        "tls.client.trustCertPath": str(certificates.ca),
    }
    if mutual:
        keys |= {
            "tls.server.need.client.auth": "require",
            "tls.server.authClient": "true",
            "tls.server.trustCertPath": str(certificates.ca),
            "tls.client.certPath": str(certificates.client.cert),
            "tls.client.keyPath": str(certificates.client.key),
        }
    return keys


@contextmanager
def tls_servers(directory: Path, keys: dict[str, str]) -> Iterator[TlsServers]:
    """Servers that are registered with each other while the block runs."""
    found: queue.SimpleQueue[TlsServers | BaseException] = queue.SimpleQueue()
    stopping: list[tuple[trio.lowlevel.TrioToken, trio.Event]] = []

    async def run() -> None:
        stop = trio.Event()
        stopping.append((trio.lowlevel.current_trio_token(), stop))
        files = {"kvConfigPath": str(directory / "kv.json"), "configStorePath": str(directory / "namesrv.properties")}
        flags = {"listenPort": "0", "bindAddress": "127.0.0.1"} | files | keys
        name_server = NamesrvController(load_namesrv(flags={key: (value, "test") for key, value in flags.items()}))
        async with trio.open_nursery() as nursery:
            host, port = await nursery.start(name_server.run)
            settings = configuration(directory / "store", {"namesrvAddr": f"{host}:{port}"} | keys)
            broker = BrokerController(settings)
            await nursery.start(broker.run)
            await broker.context.registration.registered(10)
            found.put(TlsServers(f"{host}:{port}", broker.address))
            await stop.wait()
            broker.shutdown()
            await broker.stopped.wait()
            name_server.shutdown()
            await name_server.stopped.wait()

    def thread() -> None:
        try:
            trio.run(run)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            found.put(error)

    running = threading.Thread(target=thread)
    running.start()
    try:
        servers = found.get(timeout=30)
        if isinstance(servers, BaseException):
            raise servers
        yield servers
    finally:
        for token, stop in stopping:
            try:
                token.run_sync_soon(stop.set)
            except trio.RunFinishedError:
                pass
        running.join(30)
        assert not running.is_alive()
