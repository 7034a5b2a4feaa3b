"""The members of producer groups, taken from heartbeats (RocketMQ's ProducerManager)."""

import itertools
from collections.abc import Collection
from typing import Final

import structlog
import trio

from trimq.broker.config import BrokerConfig
from trimq.broker.services.client_channel import ClientChannel, watch
from trimq.protocol.auth.rules import PUB
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.topic_rules import MAX_GROUP_LENGTH
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection

_log = structlog.get_logger("broker.producers")

SCAN_SECONDS: Final = 10.0
MOST_GROUPS: Final = 1_000
"""Producer groups of a connection. To be in one needs no permission, and each takes memory until the client leaves."""


class ProducerManager:
    """Producer groups that have members: group -> connection -> client."""

    def __init__(self, configuration: Configuration, clock: Clock, permit: Permit = OPEN) -> None:
        self._permit = permit
        self._configuration = configuration
        self._clock = clock
        self._groups_of: dict[Connection, set[str]] = {}
        self._clients: dict[str, dict[Connection, str]] = {}
        """The connections of each client id, the oldest first, with the users of their heartbeats."""
        self._log_budget = LogBudget(clock)
        self._turns: dict[str, itertools.count[int]] = {}
        self.table: dict[str, dict[Connection, ClientChannel]] = {}

    def check_limit(self, connection: Connection, groups: Collection[str]) -> None:
        """Raises RemotingError if a connection would be in too many groups, or if one of their names is too long."""
        own = self._groups_of.get(connection, ())
        if len(own) + len(groups) > MOST_GROUPS and len({*own, *groups}) > MOST_GROUPS:
            raise RemotingError(ResponseCode.SYSTEM_BUSY, f"a connection may be in {MOST_GROUPS} producer groups")
        if any(len(group) > MAX_GROUP_LENGTH for group in groups):
            raise RemotingError(
                ResponseCode.INVALID_PARAMETER,
                f"the name of a producer group has at most {MAX_GROUP_LENGTH} characters",
            )

    def register(self, group: str, channel: ClientChannel) -> bool:
        """Register one group of a heartbeat; True for a new member."""
        if not self._configuration.section(BrokerConfig).enable_register_producer:
            return False
        channel.last_update = self._clock.monotonic()
        channel.last_update_timestamp = self._clock.wall_ms()
        members = self.table.setdefault(group, {})
        before = members.get(channel.connection)
        new = before is None
        if before is not None and before.client_id != channel.client_id:
            self._forget_client(before)
        members[channel.connection] = channel
        self._clients.setdefault(channel.client_id, {})[channel.connection] = channel.user
        if new:
            watch(channel.connection, self.client_closed)
            self._groups_of.setdefault(channel.connection, set()).add(group)
            if self._log_budget.allows():
                _log.info("producer_joined", group=group, client=channel.client_id)
        return new

    def unregister(self, group: str, connection: Connection) -> bool:
        """Remove a client from a group (35); False if it was not a member."""
        members = self.table.get(group, {})
        channel = members.pop(connection, None)
        if channel is None:
            return False
        if not members:
            del self.table[group]
            self._turns.pop(group, None)
        groups = self._groups_of.get(connection, set())
        groups.discard(group)
        if not groups:
            self._groups_of.pop(connection, None)
            self._forget_client(channel)
        if self._log_budget.allows():
            _log.info("producer_left", group=group, client=channel.client_id)
        return True

    def _forget_client(self, channel: ClientChannel) -> None:
        connections = self._clients.get(channel.client_id, {})
        connections.pop(channel.connection, None)
        if not connections:
            self._clients.pop(channel.client_id, None)

    def client_closed(self, connection: Connection) -> None:
        """Remove the client of a closed connection from all groups."""
        for group in list(self._groups_of.get(connection, ())):
            self.unregister(group, connection)

    def remove_expired(self) -> int:
        """Close connections whose client has sent no heartbeat for channelExpiredTimeout. Returns their number."""
        limit = self._clock.monotonic() - self._configuration.section(BrokerConfig).channel_expired_timeout / 1000
        expired = {
            connection: channel.client_id
            for members in self.table.values()
            for connection, channel in members.items()
            if channel.last_update < limit
        }
        for connection, client_id in expired.items():
            if self._log_budget.allows():
                _log.warning("producer_expired", client=client_id, peer=connection.peer_text)
            self.client_closed(connection)
            connection.close("its producer has sent no heartbeat within channelExpiredTimeout")
        return len(expired)

    def channels(self, group: str) -> list[ClientChannel]:
        """The members of a group."""
        return list(self.table.get(group, {}).values())

    def senders(self, group: str, topic: str) -> list[ClientChannel]:
        """The members of a group who may send to a topic. Every user may be a member: that needs no permission."""
        permit = self._permit
        return [one for one in self.channels(group) if permit.may(one.connection, one.user, topic, PUB)]

    def available_channel(self, group: str) -> ClientChannel | None:
        """A connected member of a group. Successive calls return the members in turn."""
        members = [channel for channel in self.channels(group) if not channel.connection.closed]
        if not members:
            return None
        turn = next(self._turns.setdefault(group, itertools.count()))
        return members[turn % len(members)]

    def find_by_client_id(self, client_id: str) -> Connection | None:
        """The newest connection of a client."""
        connections = self._clients.get(client_id)
        return next(reversed(connections)) if connections else None

    def find_of_user(self, client_id: str, user: str | None) -> Connection | None:
        """The newest connection of a client that a user has; with None, of the only user who has the client's id.

        A client chooses its own id. So if it is not known who is meant, and several users have the id, this is None.
        """
        connections = self._clients.get(client_id)
        if not connections:
            return None
        if user is None:
            users = set(connections.values())
            return next(reversed(connections)) if len(users) == 1 else None
        return next((one for one in reversed(connections) if connections[one] == user), None)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Remove silent clients every 10 s, forever."""
        task_status.started()
        while True:
            await self._clock.sleep(SCAN_SECONDS)
            self.remove_expired()
            self._log_budget.sum_up()
