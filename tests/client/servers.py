"""Servers for the SDK's tests: TriMQ's or Apache's, as processes of the interop harness."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from tests.interop.harness import probe
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker, NameServer, Peer
from tests.interop.harness.waiting import POLL_INTERVAL
from trimq.client import Admin

PROPERTIES = {
    "recallMessageEnable": "true",
    "enablePropertyFilter": "true",
    "transactionTimeOut": "1000",
    "transactionCheckInterval": "1000",
    # An end must be in an op record before its half is old enough to be checked: Apache's loses sight of it otherwise.
    "transactionOpBatchInterval": "100",
}

#: Features that the SDK supports and TriMQ's broker does not implement yet.
NOT_YET = frozenset({"pop", "ha_status"})


@dataclass(frozen=True)
class Servers:
    """A running name server and a running broker."""

    peer: Peer
    name_server: NameServer
    broker: Broker

    @property
    def namesrv(self) -> str:
        return self.name_server.address

    def create_topic(self, topic: str, queues: int = 4) -> str:
        probe.create_topic(self.broker.address, topic, queues)
        return topic

    async def indexed(self, topic: str, *keys: str, count: int = 1) -> None:
        """Wait until a query finds ``count`` messages of each key: the index is built after a send's reply."""
        async with Admin(self.namesrv) as admin:
            with anyio.fail_after(30):
                for key in keys:
                    while len(await admin.messages_by_key(topic, key)) < count:  # noqa: ASYNC110 - another process
                        await anyio.sleep(POLL_INTERVAL)

    def expect(self, request: pytest.FixtureRequest, feature: str) -> None:
        """Expect the test to fail if this peer does not have a feature."""
        if self.peer == "trimq" and feature in NOT_YET:
            request.applymarker(pytest.mark.xfail(reason=f"our broker has no {feature} yet", strict=True))


@contextmanager
def running_servers(peer: Peer, directory: Path) -> Iterator[Servers]:
    """Servers that are started here and stopped after the test."""
    with ExitStack() as stack:
        name_server = NameServer(peer, directory / "namesrv")
        stack.enter_context(ended_afterwards(name_server.process))
        name_server.start()
        broker = Broker(peer, directory / "broker", [name_server], store=directory / "store", properties=PROPERTIES)
        stack.enter_context(ended_afterwards(broker.process))
        broker.start()
        yield Servers(peer, name_server, broker)
