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
from trimq.protocol.codes import RequestCode

PROPERTIES = {
    "recallMessageEnable": "true",
    "enablePropertyFilter": "true",
    # No half is checked but inside Servers.checking(): what ends a half may take its time.
    "transactionTimeOut": "600000",
    "transactionCheckInterval": "1000",
    # The end of a half is in an op record at once. With an interval a thread of Apache's broker would take a core
    # from the first interval without such an end on.
    "transactionOpMsgMaxSize": "1",
    "transactionOpBatchInterval": "3600000",
}

#: Features that the SDK supports and TriMQ's broker does not implement yet.
NOT_YET = frozenset({"pop"})


async def _in_queues(admin: Admin, topic: str) -> int:
    return sum(bounds.max_offset for bounds in (await admin.topic_stats(topic)).values())


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

    async def dispatched(self, topic: str, count: int) -> None:
        """Wait until ``count`` messages of a topic are in its queues: Apache's broker dispatches after its answer.

        Before, a poll may return the first of them alone, and the end of a queue be lower than what was sent.
        """
        async with Admin(self.namesrv) as admin:
            with anyio.fail_after(30):
                while await _in_queues(admin, topic) < count:  # noqa: ASYNC110 - another process
                    await anyio.sleep(POLL_INTERVAL)

    async def indexed(self, topic: str, *keys: str, count: int = 1) -> None:
        """Wait until a query finds ``count`` messages of each key: the index is built after a send's reply."""
        async with Admin(self.namesrv) as admin:
            with anyio.fail_after(30):
                for key in keys:
                    while len(await admin.messages_by_key(topic, key)) < count:  # noqa: ASYNC110 - another process
                        await anyio.sleep(POLL_INTERVAL)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Until the block ends, the broker asks about halves that are older than a second.

        If Apache's broker puts a half back before its end is in an op record, it loses sight of that end: wait for the
        ends that count before this.
        """
        self._configure(transactionTimeOut="1000")
        try:
            yield
        finally:
            self._configure(transactionTimeOut=PROPERTIES["transactionTimeOut"])

    def _configure(self, **properties: str) -> None:
        body = "".join(f"{key}={value}\n" for key, value in properties.items()).encode()
        probe.ask(self.broker.address, RequestCode.UPDATE_BROKER_CONFIG, body=body)

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
