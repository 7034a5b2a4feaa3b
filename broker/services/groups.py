"""The broker's consumer groups: subscriptionGroup.json, creation on first use (RocketMQ's SubscriptionGroupManager)."""

from collections.abc import Collection, Iterator
from typing import Any, Final

import structlog

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.services.state_file import (
    EntryTable,
    PersistentTable,
    StateFile,
    StateFileError,
    encode_pieces,
    load_data_version,
    unknown_fields,
)
from trimq.broker.store.disk.disk import Disk
from trimq.protocol import topic_rules
from trimq.protocol.body import DataVersion, SubscriptionGroupConfig
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("broker.groups")

FORBIDDEN_READ: Final = 2
"""Number of the bit in the forbidden table that forbids a group to read a topic, as among the permission bits."""

_KNOWN: Final = frozenset({"dataVersion", "subscriptionGroupTable", "forbiddenTable"})


def is_system_group(group: str) -> bool:
    """Whether a group belongs to RocketMQ's own tools and services."""
    return group in topic_rules.SYSTEM_GROUPS or group.startswith("CID_RMQ_SYS_")


class SubscriptionGroupManager(PersistentTable):
    """Consumer groups by name.

    ``get`` is a plain dict look-up. ``find`` also creates the group if that is allowed, as every request of a consumer
    does. Such a request does not wait for the disk: after a kill the next one would create the group again. A change by
    an administrator waits for ``persisted()``.
    """

    def __init__(self, configuration: Configuration, disk: Disk, clock: Clock) -> None:
        self._configuration = configuration
        self._clock = clock
        self._groups = EntryTable(SubscriptionGroupConfig)
        self._rest: dict[str, Any] = {}
        self.table: dict[str, SubscriptionGroupConfig] = self._groups.entries
        self.forbidden_table: dict[str, dict[str, int]] = {}
        self.data_version = DataVersion()
        path = configuration.section(MessageStoreConfig).config_path / "subscriptionGroup.json"
        self._file = StateFile(disk, str(path), self.pieces)
        self.get = self.table.get
        self.refused = 0
        """Requests that would have created more groups than maxOffsetGroups."""

    # state file

    async def load(self) -> None:
        """Read subscriptionGroup.json, then add missing groups of RocketMQ's tools. Raises StateFileError."""
        state = await self._file.load()
        if state is not None:
            self._groups.load(state.get("subscriptionGroupTable") or {}, self._file.path, "groupName")
            self.forbidden_table = _load_forbidden(state.get("forbiddenTable") or {}, self._file.path)
            self.data_version = load_data_version(state.get("dataVersion"), self._file.path)
            self._rest = unknown_fields(state, _KNOWN)
        if self._configuration.section(BrokerConfig).enable_create_sys_group:
            missing = [name for name in topic_rules.SYSTEM_GROUPS if name not in self.table]
            for name in missing:
                self.table[name] = SubscriptionGroupConfig(group_name=name)
            if missing:
                self._next_version()

    def begin_epoch(self, epoch: int) -> None:
        """This broker is the master of an epoch now."""
        if self.data_version.state_version != epoch:
            self.data_version = self.data_version.led(epoch, self._clock.wall_ms())
            self._file.changed()

    def follow(self, state: dict[str, Any]) -> None:
        """Take the groups of a slave's master. Those that it lacks go, except the system's. Raises StateFileError."""
        where = "the master's groups"
        version = load_data_version(state.get("dataVersion"), where)
        if version == self.data_version:
            return
        theirs = EntryTable(SubscriptionGroupConfig)
        theirs.load(state.get("subscriptionGroupTable") or {}, where, "groupName")
        forbidden = _load_forbidden(state.get("forbiddenTable") or {}, where)
        for group in [name for name in self.table if name not in theirs.entries and not is_system_group(name)]:
            self.delete(group)
        self.table.update(theirs.entries)
        self.forbidden_table = forbidden
        self.data_version = version
        self._file.changed()

    def pieces(self) -> Iterator[bytes]:
        """The content of subscriptionGroup.json; also the body of GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201)."""
        state = {
            "dataVersion": self.data_version,
            "forbiddenTable": self.forbidden_table,
            "subscriptionGroupTable": self._groups.encodable(),
        }
        return encode_pieces(state | self._rest)

    # queries

    def find(self, group: str) -> SubscriptionGroupConfig | None:
        """The group's configuration, created with the defaults if that is allowed; else None.

        ``missing`` makes the error with the reason.
        """
        known = self.get(group)
        if known is not None:
            return known
        config = self._configuration.section(BrokerConfig)
        if not (config.auto_create_subscription_group or (config.enable_create_sys_group and is_system_group(group))):
            return None
        if topic_rules.group_problem(group) is not None:
            return None
        if len(self.table) >= config.max_offset_groups:
            self.refused += 1
            return None
        created = SubscriptionGroupConfig(group_name=group)
        self.table[group] = created
        _log.info("group_created", group=group)
        self._next_version()
        return created

    def missing(self, group: str) -> RemotingError:
        """The error SUBSCRIPTION_GROUP_NOT_EXIST for a group that ``find`` has not found, with the reason."""
        config = self._configuration.section(BrokerConfig)
        text = f"the consumer group {group} does not exist on this broker"
        problem = topic_rules.group_problem(group)
        if problem is not None:
            text = f"{text}: {problem}"
        elif not config.auto_create_subscription_group:
            text = f"{text}: create it first"
        elif len(self.table) >= config.max_offset_groups:
            text = f"{text} and is not created, because the broker has {len(self.table)} groups (maxOffsetGroups)"
        return RemotingError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, text)

    def check_limit(self, groups: Collection[str]) -> None:
        """Raises SYSTEM_BUSY if creating the new ones among ``groups`` would exceed maxOffsetGroups.

        Changes of existing groups always pass, even if the limit was lowered below their number.
        """
        new = len({group for group in groups if group not in self.table})
        most = self._configuration.section(BrokerConfig).max_offset_groups
        if new and len(self.table) + new > most:
            self.refused += 1
            raise RemotingError(
                ResponseCode.SYSTEM_BUSY,
                f"this broker has {len(self.table)} consumer groups and may have {most} (maxOffsetGroups):"
                f" {new} more cannot be created",
            )

    def forbidden(self, group: str, topic: str) -> int:
        """The bits of what a group may not do with a topic; 0 if nothing is forbidden."""
        topics = self.forbidden_table.get(group)
        return 0 if topics is None else topics.get(topic, 0)

    def may_read(self, group: str, topic: str) -> bool:
        """Whether the forbidden table allows the group to pull from the topic."""
        return not self.forbidden(group, topic) >> FORBIDDEN_READ & 1

    # changing

    def put(self, *configs: SubscriptionGroupConfig) -> None:
        """Create groups or replace their configuration (200, 225). The caller has checked the names."""
        for config in configs:
            self.table[config.group_name] = config
        self._next_version()

    def delete(self, group: str) -> bool:
        """Remove a group and its entries in the forbidden table; False if there was none."""
        forbidden = self.forbidden_table.pop(group, None)
        known = self.table.pop(group, None)
        if known is None and forbidden is None:
            return False
        self._groups.forget(group)
        self._next_version()
        _log.info("group_deleted", group=group)
        return known is not None

    def set_forbidden(self, group: str, topic: str, bit: int, forbidden: bool) -> None:
        """Forbid a group an operation on a topic, or allow it again (353). Both may be created later.

        Raises INVALID_PARAMETER to forbid it to a name that no group or topic can have, and SYSTEM_BUSY if the
        forbidden table has maxOffsetGroups entries.
        """
        if forbidden and not self.forbidden(group, topic):
            problem = topic_rules.group_problem(group) or topic_rules.topic_problem(topic)
            if problem is not None:
                raise RemotingError(ResponseCode.INVALID_PARAMETER, problem)
            entries = sum(map(len, self.forbidden_table.values()))
            most = self._configuration.section(BrokerConfig).max_offset_groups
            if entries >= most:
                raise RemotingError(
                    ResponseCode.SYSTEM_BUSY,
                    f"the forbidden table has {entries} entries and may have {most} (maxOffsetGroups): allow others"
                    " again before",
                )
        topics = self.forbidden_table.setdefault(group, {})
        value = topics.get(topic, 0)
        value = value | 1 << bit if forbidden else value & ~(1 << bit)
        if value:
            topics[topic] = value
        else:
            topics.pop(topic, None)
        if not topics:
            del self.forbidden_table[group]
        self._next_version()

    def _next_version(self) -> None:
        self.data_version = self.data_version.next(self._clock.wall_ms())
        self._file.changed()


def _load_forbidden(raw: Any, where: str) -> dict[str, dict[str, int]]:
    try:
        return {group: {topic: int(bits) for topic, bits in topics.items()} for group, topics in raw.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise StateFileError(f"{where}: forbiddenTable: {error}") from None
