"""Permit: what a handler asks that learns the topic of a request only when it has read a record.

Some requests name a record by its offset in the commit log, and a topic beside it that RocketMQ's brokers believe. The
gate has checked the topic that the request names; the record may be of another one.
"""

from typing import Any, Final, Protocol

from trimq.protocol.auth.model import Action
from trimq.protocol.command import RemotingCommand
from trimq.protocol.real_place import waiting_for
from trimq.protocol.record import decode_head
from trimq.remoting.server.connection import Connection


class Permit(Protocol):
    """The part of Access that handlers use. Both raise RemotingError(NO_PERMISSION)."""

    def require_topic(
        self, connection: Connection, command: RemotingCommand, topic: str, actions: tuple[Action, ...]
    ) -> None:
        """Return if the user of a request may do one of ``actions`` to ``topic``."""
        ...

    def require_record(
        self, connection: Connection, command: RemotingCommand, record: Any, actions: tuple[Action, ...]
    ) -> None:
        """The same for the topic of a record, or the topic that it waits for."""
        ...


class _Open:
    """Permits everything: authorization is off."""

    def require_topic(
        self, _connection: Connection, _command: RemotingCommand, _topic: str, _actions: tuple[Action, ...]
    ) -> None:
        """Return."""

    def require_record(
        self, _connection: Connection, _command: RemotingCommand, _record: Any, _actions: tuple[Action, ...]
    ) -> None:
        """Return."""


OPEN: Final[Permit] = _Open()


def topic_of(record: Any) -> str:
    """The topic of a record; of one that waits for its time or its end, the topic that it goes to.

    Raises RecordError.
    """
    head = decode_head(record)
    buffer = memoryview(record)
    topic = bytes(buffer[head.topic_at : head.topic_end]).decode("utf-8", "replace")
    properties = bytes(buffer[head.properties_at : head.properties_end]).decode("utf-8", "replace")
    place = waiting_for(topic, properties)
    return topic if place is None else place.topic
