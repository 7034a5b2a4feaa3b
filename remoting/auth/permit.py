"""Permit: what a handler asks about topics and groups that only it knows.

Some requests name a record by its offset in the commit log, and a topic beside it that RocketMQ's brokers believe. The
gate has checked the topic that the request names; the record may be of another one. Others are about all topics in
which a group has offsets, and name none; and one creates a group if that is permitted too.
"""

from typing import Any, Final, Protocol

from trimq.protocol.auth.model import Action
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.real_place import waiting_for
from trimq.protocol.record import decode_head
from trimq.protocol.topic_rules import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC
from trimq.remoting.server.connection import Connection

ASKED_LATER: Final = frozenset(
    {
        RequestCode.VIEW_MESSAGE_BY_ID,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.END_TRANSACTION,
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
        RequestCode.RESUME_CHECK_HALF_MESSAGE,
        RequestCode.GET_CONSUME_STATS,
        RequestCode.CLONE_GROUP_OFFSET,
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
    }
)
"""The codes whose handlers ask a Permit. Fast paths do not ask, so they serve these for Supers only."""


class Permit(Protocol):
    """The part of Access that handlers and services use. Two raise RemotingError(NO_PERMISSION)."""

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

    def may_on_group(
        self, connection: Connection, command: RemotingCommand, group: str, actions: tuple[Action, ...]
    ) -> bool:
        """Whether the user of a request may do one of ``actions`` to a consumer group. No refusal is counted."""
        ...

    def checks_records(self, command: RemotingCommand) -> bool:
        """Whether the user of a request may not get every record.

        Then a record has to be read with MessageStore.look_queued: its bytes may be those of a client's body.
        """
        ...

    def user_name(self, command: RemotingCommand) -> str:
        """The name of the user who has signed a request that was let through; empty if it needed no signature."""
        ...

    def may(self, connection: Connection, user_name: str, topic: str, actions: tuple[Action, ...]) -> bool:
        """Whether this user may now do one of ``actions`` to ``topic`` over a connection.

        For what the broker itself sends: a heartbeat says who is to get it, and no request asks for it.
        """
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

    def may_on_group(
        self, _connection: Connection, _command: RemotingCommand, _group: str, _actions: tuple[Action, ...]
    ) -> bool:
        """True."""
        return True

    def checks_records(self, _command: RemotingCommand) -> bool:
        """False."""
        return False

    def user_name(self, _command: RemotingCommand) -> str:
        """No name: requests are not signed."""
        return ""

    def may(self, _connection: Connection, _user_name: str, _topic: str, _actions: tuple[Action, ...]) -> bool:
        """True."""
        return True


OPEN: Final[Permit] = _Open()


def topic_of(record: Any) -> str:
    """The topic of a record; of one that waits for its time or its end, or has expired, the topic that it goes to.

    Raises RecordError.
    """
    head = decode_head(record)
    buffer = memoryview(record)
    topic = bytes(buffer[head.topic_at : head.topic_end]).decode("utf-8", "replace")
    properties = bytes(buffer[head.properties_at : head.properties_end]).decode("utf-8", "replace")
    # An expired half has the properties of a half.
    place = waiting_for(TRANS_HALF_TOPIC if topic == TRANS_CHECK_MAX_TIME_TOPIC else topic, properties)
    return topic if place is None else place.topic
