"""The members of consumer groups and their subscriptions, taken from heartbeats.

Source: RocketMQ's ConsumerManager and ConsumerGroupInfo.
"""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final

import structlog
import trio
from msgspec import Struct

from trimq.broker.config import BrokerConfig
from trimq.broker.services.client_channel import ClientChannel, watch
from trimq.broker.services.group_notifier import GroupNotifier
from trimq.protocol.body import SubscriptionData
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection

_log = structlog.get_logger("broker.consumers")

SCAN_SECONDS: Final = 10.0
BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"
CONSUME_ACTIVELY: Final = "CONSUME_ACTIVELY"
CONSUME_PASSIVELY: Final = "CONSUME_PASSIVELY"


class ConsumerGroupInfo(Struct):
    """A consumer group with at least one member. Type, model and start are those of the last heartbeat."""

    group_name: str
    consume_type: str
    message_model: str
    consume_from_where: str
    channels: dict[Connection, ClientChannel] = {}
    subscriptions: dict[str, SubscriptionData] = {}

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member gets all messages."""
        return self.message_model == BROADCASTING

    def client_ids(self) -> list[str]:
        """The ids of the members, without duplicates."""
        return list(dict.fromkeys(channel.client_id for channel in self.channels.values()))

    def find_channel(self, client_id: str) -> ClientChannel | None:
        """The newest connection of a member."""
        found = [channel for channel in self.channels.values() if channel.client_id == client_id]
        return max(found, key=lambda channel: channel.last_update, default=None)


class GroupChange(Enum):
    """What happened to a group: its members or topics changed, or its last member left."""

    CHANGED = "changed"
    EMPTY = "empty"


class ConsumerManager:
    """Groups with members, by name. ``table`` is the look-up of the hot path.

    A change of a group's members or topics makes its members rebalance: ``notifier`` notifies them, and combines
    changes that follow each other quickly. ``listeners`` are called immediately for each change. The number of log
    lines about joins and leaves is limited.
    """

    def __init__(self, configuration: Configuration, clock: Clock) -> None:
        self._configuration = configuration
        self._clock = clock
        self._groups_of: dict[Connection, set[str]] = {}
        self._log_budget = LogBudget(clock)
        self.notifier = GroupNotifier(clock, self._connections)
        self.table: dict[str, ConsumerGroupInfo] = {}
        self.listeners: list[Callable[[str, GroupChange], None]] = []
        self.group = self.table.get

    # heartbeats

    def register(
        self,
        group: str,
        channel: ClientChannel,
        consume_type: str,
        message_model: str,
        consume_from_where: str,
        subscriptions: Iterable[SubscriptionData],
        *,
        notify: bool = True,
        update_subscription: bool = True,
    ) -> bool:
        """Register one group of a heartbeat; True if members or topics changed.

        The group's topics become those of this heartbeat: a topic that only another member subscribed to is removed, as
        in RocketMQ, where all members of a group have to subscribe to the same topics. ``update_subscription`` False (a
        heartbeat without subscriptions) leaves them unchanged. ``notify`` False does not notify the other members.
        """
        info = self.table.get(group)
        if info is None:
            info = self.table[group] = ConsumerGroupInfo(group, consume_type, message_model, consume_from_where)
        info.consume_type, info.message_model = consume_type, message_model
        info.consume_from_where = consume_from_where
        changed = self._update_channel(info, channel)
        if update_subscription:
            changed = _update_subscriptions(info, subscriptions) or changed
        if changed:
            self._changed(info, notify=notify)
        return changed

    def _update_channel(self, info: ConsumerGroupInfo, channel: ClientChannel) -> bool:
        channel.last_update = self._clock.monotonic()
        channel.last_update_timestamp = self._clock.wall_ms()
        before = info.channels.get(channel.connection)
        info.channels[channel.connection] = channel
        if before is None:
            watch(channel.connection, self.client_closed)
            self._groups_of.setdefault(channel.connection, set()).add(info.group_name)
            if self._log_budget.allows():
                _log.info("consumer_joined", group=info.group_name, client=channel.client_id)
            return True
        return before.client_id != channel.client_id

    # leaving

    def unregister(self, group: str, connection: Connection, *, notify: bool = True) -> bool:
        """Remove a client from a group (35); False if it was not a member."""
        info = self.table.get(group)
        channel = info.channels.pop(connection, None) if info is not None else None
        if info is None or channel is None:
            return False
        groups = self._groups_of.get(connection, set())
        groups.discard(group)
        if not groups:
            self._groups_of.pop(connection, None)
        if self._log_budget.allows():
            _log.info("consumer_left", group=group, client=channel.client_id)
        if info.channels:
            self._changed(info, notify=notify)
        else:
            del self.table[group]
            self.notifier.forget(group)
            self._call_listeners(group, GroupChange.EMPTY)
        return True

    def client_closed(self, connection: Connection) -> None:
        """Remove the client of a closed connection from all groups, and notify the other members."""
        for group in list(self._groups_of.get(connection, ())):
            self.unregister(group, connection, notify=self._notify_allowed())

    def remove_expired(self) -> int:
        """Close connections whose client has sent no heartbeat for channelExpiredTimeout. Returns their number."""
        limit = self._clock.monotonic() - self._configuration.section(BrokerConfig).channel_expired_timeout / 1000
        expired: dict[Connection, str] = {}  # collected first: removing members changes the tables
        for info in self.table.values():
            for connection, channel in info.channels.items():
                if channel.last_update < limit:
                    expired[connection] = channel.client_id
        for connection, client_id in expired.items():
            if self._log_budget.allows():
                _log.warning("consumer_expired", client=client_id, peer=connection.peer_text)
            self.client_closed(connection)
            connection.close("its consumer has sent no heartbeat within channelExpiredTimeout")
        return len(expired)

    # queries

    def find_channel(self, group: str, client_id: str) -> ClientChannel | None:
        """The newest connection of a member."""
        info = self.table.get(group)
        return None if info is None else info.find_channel(client_id)

    def find_subscription(self, group: str, topic: str) -> SubscriptionData | None:
        """A group's current subscription to a topic."""
        info = self.table.get(group)
        return None if info is None else info.subscriptions.get(topic)

    def channels(self, group: str) -> list[ClientChannel]:
        """The members of a group."""
        info = self.table.get(group)
        return list(info.channels.values()) if info is not None else []

    def may_consume(self, group: str, topic: str) -> bool:
        """False only if the group is online and does not subscribe to the topic."""
        info = self.table.get(group)
        return info is None or not info.subscriptions or topic in info.subscriptions

    def groups_of(self, topic: str) -> set[str]:
        """The groups whose members subscribe to a topic now."""
        return {name for name, info in self.table.items() if topic in info.subscriptions}

    # notifications

    def _changed(self, info: ConsumerGroupInfo, *, notify: bool) -> None:
        if notify and not info.is_broadcasting and self._notify_allowed():
            self.notifier.changed(info.group_name)
        self._call_listeners(info.group_name, GroupChange.CHANGED)

    def _notify_allowed(self) -> bool:
        return self._configuration.section(BrokerConfig).notify_consumer_ids_changed_enable

    def _call_listeners(self, group: str, change: GroupChange) -> None:
        for listener in self.listeners:
            listener(group, change)

    def _connections(self, group: str) -> Iterable[Connection]:
        info = self.table.get(group)
        return info.channels if info is not None else ()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send notifications when groups change, and remove silent clients every 10 s, forever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.notifier.run)
            task_status.started()
            while True:
                await self._clock.sleep(SCAN_SECONDS)
                self.remove_expired()
                self._log_budget.sum_up()


def _update_subscriptions(info: ConsumerGroupInfo, subscriptions: Iterable[SubscriptionData]) -> bool:
    """Add new topics, replace older versions, remove topics that are missing. True if the set of topics changed."""
    given = {subscription.topic: subscription for subscription in subscriptions}
    changed = given.keys() != info.subscriptions.keys()
    for topic, subscription in given.items():
        known = info.subscriptions.get(topic)
        if known is None or subscription.sub_version > known.sub_version:
            info.subscriptions[topic] = subscription
    for topic in info.subscriptions.keys() - given.keys():
        del info.subscriptions[topic]
    return changed
