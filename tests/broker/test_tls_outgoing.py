"""Connections between servers with TLS: broker to name server, slave to master, broker to controller and back."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.test_replication import in_sync, pair
from tests.broker.wire_client import WireClient
from tests.client.tls_servers import server_keys
from tests.ports import free_port
from tests.tls_certificates import Certificates, KeyPair
from trimq.broker.replicated_broker import ReplicatedBroker
from trimq.broker.testing import configuration, running_broker
from trimq.client import Admin, ClientOptions, Tls
from trimq.controller.config import load_controller
from trimq.controller.local_kv import LocalKv
from trimq.controller.server import ControllerManager
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController
from trimq.remoting.runtime.clock import SystemClock


async def test_the_embedded_name_server_is_not_verified(tmp_path: Path, certificates: Certificates) -> None:
    """Its address is that of this process, and the certificate is for the address that clients use."""
    keys: dict[str, Any] = server_keys(certificates, "enforcing", certificates.elsewhere, mutual=False)
    async with running_broker(tmp_path, embeddedNamesrvEnable=True, embeddedNamesrvPort=0, **keys) as broker:
        assert broker.namesrv is not None
        assert broker.namesrv.routes.cluster_info().broker_addr_table["broker-a"].broker_addrs == {"0": broker.address}


async def test_the_embedded_name_server_is_never_looked_for_at_the_advertised_address(
    tmp_path: Path, certificates: Certificates
) -> None:
    """It is not verified: who answers at brokerIP1, behind a NAT for example, would be believed."""
    keys: dict[str, Any] = server_keys(certificates, "enforcing", mutual=False)
    port = free_port()
    keys |= {"bindAddress": "127.0.0.1", "brokerIP1": "127.0.0.2", "embeddedNamesrvEnable": True}
    strangers: list[trio.SocketStream] = []

    async def stranger(stream: trio.SocketStream) -> None:
        strangers.append(stream)

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio.serve_tcp, host="127.0.0.2"), stranger, port)
        async with running_broker(tmp_path, embeddedNamesrvPort=port, **keys) as broker:
            assert broker.namesrv is not None
            assert broker.endpoint[0] == "127.0.0.1"
            assert broker.name_servers == [f"127.0.0.1:{port} (in this process)"]
            known = broker.namesrv.routes.cluster_info().broker_addr_table["broker-a"].broker_addrs
            assert known == {"0": broker.address}
            assert broker.address.startswith("127.0.0.2:")
        assert strangers == []
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["elsewhere", "foreign", "expired"])
async def test_another_name_server_is_verified(tmp_path: Path, certificates: Certificates, kind: str) -> None:
    wrong: KeyPair = getattr(certificates, kind)
    flags = {
        "listenPort": "0",
        "bindAddress": "127.0.0.1",
        "tls.server.certPath": str(wrong.cert),
        "tls.server.keyPath": str(wrong.key),
    }
    name_server = NamesrvController(load_namesrv(flags={key: (value, "test") for key, value in flags.items()}))
    async with trio.open_nursery() as nursery:
        host, port = await nursery.start(name_server.run)
        keys: dict[str, Any] = server_keys(certificates, "enforcing", mutual=False)
        with capture_logs() as logs:
            async with running_broker(tmp_path, namesrvAddr=f"{host}:{port}", **keys):
                assert not name_server.routes.cluster_info().broker_addr_table
        assert [line for line in logs if "TlsError: the server's certificate" in str(line)]
        name_server.shutdown()
        await name_server.stopped.wait()


async def test_a_slave_asks_its_master_over_mutual_tls(tmp_path: Path, certificates: Certificates) -> None:
    keys = server_keys(certificates, "enforcing", mutual=True)
    async with pair(tmp_path, keys, **keys) as (master, slave):
        client = certificates.client
        assert master.namesrv is not None
        assert master.namesrv.address is not None
        host, port = master.namesrv.address
        options = ClientOptions(tls=Tls(certificates.ca, client.cert, client.key))
        async with Admin(f"{host}:{port}", options=options) as admin:
            await admin.create_topic("Copied", queues=3, broker=master.address)
        await in_sync(master, slave)
        assert slave.context.topics.table["Copied"].read_queue_nums == 3
        assert master.reactor.stats.tls_connections
        async with WireClient.connect(master.endpoint) as plain:
            with pytest.raises(AssertionError, match="the broker closed the connection"):
                await plain.pull("T")


async def test_a_broker_and_its_controller(tmp_path: Path, certificates: Certificates) -> None:
    keys = server_keys(certificates, "enforcing", mutual=True)
    flags = {"listenPort": "0", "bindAddress": "127.0.0.1"} | keys
    controller = ControllerManager(
        load_controller(flags={key: (value, "test") for key, value in flags.items()}), kv=LocalKv(SystemClock())
    )
    name_server = NamesrvController(
        load_namesrv(flags={key: (value, "test") for key, value in flags.items()}),
    )
    async with trio.open_nursery() as nursery:
        host, port = await nursery.start(controller.run)
        _, names = await nursery.start(name_server.run)
        changes = {
            "enableControllerMode": True,
            "haListenPort": 0,
            "namesrvAddr": f"{host}:{names}",
            "controllerAddr": f"{host}:{port}",
        }
        broker = ReplicatedBroker(configuration(tmp_path, changes | keys))
        await nursery.start(broker.run)
        assert broker.manager.is_master
        assert (await controller.replicas.state("broker-a")).master == broker.manager.broker_id
        for server in (broker, controller, name_server):
            server.shutdown()
            await server.stopped.wait()
