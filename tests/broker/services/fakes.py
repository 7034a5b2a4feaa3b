"""Fakes that the services run on: connections without sockets, a configuration without a file."""

from collections.abc import Callable, Hashable
from typing import Any, cast

from trimq.broker.config import SCHEMA
from trimq.broker.services.client_channel import ClientChannel
from trimq.protocol.command import RemotingCommand
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection


class FakeConnection:
    """The part of Connection that services use. It records what was sent."""

    def __init__(self, name: str = "10.0.0.1:1") -> None:
        self.peer_text = name
        self.closed = False
        self.data: dict[str, Any] = {}
        self.on_close: list[Callable[[Any], None]] = []
        self.sent: list[RemotingCommand] = []
        self.settled: list[tuple[RemotingCommand, Any]] = []
        self.close_reason = ""
        self.over = False
        self.over_again = False
        self.drained: dict[Hashable, Callable[[], object]] = {}

    def send_oneway(self, command: RemotingCommand) -> bool:
        if not self.over:
            self.sent.append(command)
        return not self.over

    def is_over(self) -> bool:
        return self.over

    def when_drained(self, key: Hashable, callback: Callable[[], object]) -> None:
        self.drained[key] = callback

    def drain(self) -> None:
        """The client reads its replies again."""
        self.over = self.over_again
        callbacks, self.drained = self.drained, {}
        for callback in callbacks.values():
            callback()

    def settle(self, command: RemotingCommand, outcome: Any) -> None:
        self.settled.append((command, outcome))

    def close(self, reason: str) -> None:
        if self.closed:
            return
        self.closed, self.close_reason = True, reason
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            callback(self)

    @property
    def real(self) -> Connection:
        return cast("Connection", self)


def channel(connection: FakeConnection, client_id: str = "c") -> ClientChannel:
    return ClientChannel(connection.real, client_id, "JAVA", 479)


def configuration(**values: Any) -> Configuration:
    """A configuration with its store in /store of a simulated disk. Keys are in camel case."""
    made = Configuration(SCHEMA)
    for key, value in ({"storePathRootDir": "/store", "brokerName": "b", "brokerClusterName": "c"} | values).items():
        made.apply(key, str(value).lower() if isinstance(value, bool) else str(value), "test")
    made.check()
    assert not made.warnings
    return made
