"""The SQL92 expressions of consumer groups: consumerFilter.json (RocketMQ's ConsumerFilterManager).

A heartbeat registers the expressions of its group; a pull without a subscription of its own is filtered by the one
that is registered. When a group's last member leaves, its expressions are dead. They stay for filterDataCleanTimeSpan,
so that a group that comes back with the same subscription is served as before.

The file has RocketMQ's format. ``bloomFilterData``, which RocketMQ computes for the consume queue extension, is kept
where it was read and not made for new entries: RocketMQ then starts without the file's entries, and gets them with the
next heartbeats.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
import structlog
import trio

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.filters.sql import ExpressionCache, SqlFilter
from trimq.broker.filters.tag import SubscriptionError, is_tag_type
from trimq.broker.services.consumers import GroupChange
from trimq.broker.services.state_file import PersistentTable, StateFile, StateFileError, unknown_fields, wire_names
from trimq.broker.store.disk.disk import Disk
from trimq.protocol.body import Body, SubscriptionData, encode_json
from trimq.protocol.json_pieces import item_pieces, object_pieces
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget

_log = structlog.get_logger("broker.consumer_filters")

PERSIST_SECONDS: Final = 10.0
"""Time between two writes of the file, and between two searches for expressions that have been dead for long."""
MOST_ENTRIES: Final = 10_000
MOST_CHARACTERS: Final = 1 << 20
"""Limits of all expressions together, since groups are created by their first heartbeat."""
_NEW_AT_ONCE: Final = 4
"""Short expressions of one heartbeat that are compiled in the event loop."""
_DEAD_BEFORE_LOAD_MS: Final = 30_000


class ConsumerFilterData(Body):
    """The expression of a group for a topic. ``client_version``: the version of the newest subscription with it."""

    consumer_group: str
    topic: str
    expression: str
    expression_type: str = "SQL92"
    born_time: int = 0
    client_version: int = 0
    dead_time: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether the group has left, or does not subscribe to the topic any more."""
        return self.dead_time >= self.born_time


_KNOWN: Final = wire_names(ConsumerFilterData) | {"dead"}


class ConsumerFilterManager(PersistentTable):
    """Expressions by topic and group.

    An expression that cannot be compiled is not registered. It removes an older one, so that the pulls of the group are
    refused instead of being filtered by what the group no longer asks for.
    """

    def __init__(self, configuration: Configuration, disk: Disk, clock: Clock) -> None:
        self._configuration = configuration
        self._clock = clock
        self._log_budget = LogBudget(clock)
        self._expressions = ExpressionCache(disk.run)
        self._topics_of: dict[str, set[str]] = {}
        self._filters: dict[tuple[str, str], SqlFilter] = {}
        self._rest: dict[str, Any] = {}
        self._more: dict[tuple[str, str], dict[str, Any]] = {}
        self._characters = 0
        self._entries = 0
        self.refused = 0
        """Expressions of heartbeats that were not registered: not valid, or over the limits."""
        self.table: dict[str, dict[str, ConsumerFilterData]] = {}
        self.filter = self._expressions.filter
        """(expression type, text): the filter of a subscription, see ExpressionCache.filter."""
        self.is_slow = self._expressions.is_slow
        self.prepare = self._expressions.prepare
        """Compile an expression for which ``is_slow`` is true, in a thread."""
        path = configuration.section(MessageStoreConfig).config_path / "consumerFilter.json"
        self._file = StateFile(disk, str(path), self.pieces, lambda: PERSIST_SECONDS)

    # state file

    async def load(self) -> None:
        """Read consumerFilter.json. All groups count as dead until they send a heartbeat. Raises StateFileError."""
        state = await self._file.load()
        if state is None:
            return
        self._rest = unknown_fields(state, frozenset({"filterDataByTopic"}))
        now = self._clock.wall_ms()
        for topic, data in _objects(state.get("filterDataByTopic"), self._file.path):
            for group, fields in _objects(data.get("groupFilterData"), f"{self._file.path}: {topic}"):
                entry = self._entry(topic, group, fields)
                if not entry.dead_time:
                    entry.dead_time = max(entry.born_time, now - _DEAD_BEFORE_LOAD_MS)
                self._add(entry)
                if more := unknown_fields(fields, _KNOWN):
                    self._more[topic, group] = more

    def _entry(self, topic: str, group: str, fields: dict[str, Any]) -> ConsumerFilterData:
        given = {"topic": topic, "consumerGroup": group, "expression": ""}
        given |= {name: value for name, value in fields.items() if value is not None and name in _KNOWN}
        try:
            return msgspec.convert(given, ConsumerFilterData, strict=False)
        except msgspec.ValidationError as error:
            raise StateFileError(f"{self._file.path}: {topic}: {group}: {error}") from None

    def pieces(self) -> Iterator[bytes]:
        """The content of consumerFilter.json."""
        table = [(topic, list(groups.values())) for topic, groups in self.table.items()]
        return object_pieces(("filterDataByTopic", item_pieces(self._encodable(table))), *self._rest.items())

    def _encodable(self, table: list[tuple[str, list[ConsumerFilterData]]]) -> Iterator[tuple[str, dict[str, Any]]]:
        for topic, entries in table:
            groups = {entry.consumer_group: self._fields(entry) for entry in entries}
            yield topic, {"groupFilterData": groups, "topic": topic}

    def _fields(self, entry: ConsumerFilterData) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(entry)
        return fields | {"dead": entry.is_dead} | self._more.get((entry.topic, entry.consumer_group), {})

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drop expressions that have been dead for filterDataCleanTimeSpan, and write the file, every 10 s, forever."""
        task_status.started()
        await self._file.run(self._sleep)

    async def _sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._log_budget.sum_up()
        self.clean()

    # heartbeats

    def register(self, group: str, subscriptions: Iterable[SubscriptionData]) -> None:
        """Register the expressions in a heartbeat of a group. Those for topics it does not name any more are dead."""
        topics = set()
        new = 0
        for subscription in subscriptions:
            topics.add(subscription.topic)
            kind, text = subscription.expression_type, subscription.sub_string
            if is_tag_type(kind):
                continue
            new += self._expressions.is_new(kind, text)
            if new <= _NEW_AT_ONCE:
                self._register(group, subscription)
            else:
                self._refuse(group, subscription.topic, "the heartbeat has more expressions than can be compiled")
        for topic in self._topics_of.get(group, set()) - topics:
            self._die(self.table[topic][group])

    def to_prepare(self, subscriptions: Iterable[SubscriptionData]) -> list[str]:
        """The expressions to ``prepare`` before ``register``, so that it does not keep the event loop."""
        new = [each for each in subscriptions if self._expressions.is_new(each.expression_type, each.sub_string)]
        if len(new) <= _NEW_AT_ONCE and not any(self.is_slow(each.expression_type, each.sub_string) for each in new):
            return []
        return [each.sub_string for each in new]

    def group_changed(self, group: str, change: GroupChange) -> None:
        """Make the expressions of a group dead whose last member has left."""
        if change is GroupChange.EMPTY:
            for topic in self._topics_of.get(group, ()):
                self._die(self.table[topic][group])

    def _register(self, group: str, subscription: SubscriptionData) -> None:
        topic, version = subscription.topic, subscription.sub_version
        kind, text = subscription.expression_type or "", subscription.sub_string
        old = self.get(topic, group)
        if old is not None and version <= old.client_version:
            if version == old.client_version and old.is_dead:
                old.dead_time = 0
                self._file.changed()
            return
        if old is not None and (old.expression, old.expression_type) == (text, kind):
            old.client_version = version
            if old.is_dead:
                old.dead_time = 0
            self._file.changed()
            return
        try:
            self.filter(kind, text)
        except SubscriptionError as error:
            if old is not None:
                self._remove(old)
            self._refuse(group, topic, str(error))
            return
        # What other brokers have computed of the names of group and topic holds for the new expression too.
        more = self._more.get((topic, group))
        if old is not None:
            self._remove(old)
        if not self._has_space(len(text)):
            self._refuse(group, topic, f"{self._entries} expressions with {self._characters} characters are registered")
            return
        entry = ConsumerFilterData(
            consumer_group=group,
            topic=topic,
            expression=text,
            expression_type=kind,
            born_time=self._clock.wall_ms(),
            client_version=version,
        )
        self._add(entry)
        if more is not None:
            self._more[topic, group] = more
        self._file.changed()

    def _refuse(self, group: str, topic: str, reason: str) -> None:
        self.refused += 1
        if self._log_budget.allows():
            _log.warning("expression_refused", group=group, topic=topic, reason=reason)

    def _has_space(self, characters: int) -> bool:
        """Whether one more expression fits the limits; those that have been dead for longest make room for it."""
        if self._entries < MOST_ENTRIES and self._characters + characters <= MOST_CHARACTERS:
            return True
        dead = [entry for groups in self.table.values() for entry in groups.values() if entry.is_dead]
        # A tenth at once: the search is not repeated for each expression of a client that sends many.
        dead.sort(key=lambda entry: entry.dead_time)
        for entry in dead[: MOST_ENTRIES // 10]:
            self._remove(entry)
        return self._entries < MOST_ENTRIES and self._characters + characters <= MOST_CHARACTERS

    # look-up

    def get(self, topic: str, group: str) -> ConsumerFilterData | None:
        """The expression of a group for a topic."""
        groups = self.table.get(topic)
        return None if groups is None else groups.get(group)

    def compiled(self, entry: ConsumerFilterData) -> SqlFilter | None:
        """The filter of a registered expression; None if it cannot be compiled, which only one from the file may."""
        key = (entry.topic, entry.consumer_group)
        known = self._filters.get(key)
        if known is not None:
            return known
        try:
            accept = self.filter(entry.expression_type, entry.expression)
        except SubscriptionError as error:
            self._remove(entry)
            _log.warning("expression_refused", group=entry.consumer_group, topic=entry.topic, reason=str(error))
            return None
        self._filters[key] = accept
        return accept

    def is_not_compiled(self, entry: ConsumerFilterData) -> bool:
        """Whether ``compiled`` would keep the event loop: after a start, for one from the file."""
        key = (entry.topic, entry.consumer_group)
        return key not in self._filters and self.is_slow(entry.expression_type, entry.expression)

    def find(self, topic: str, group: str) -> SqlFilter | None:
        """The filter of a group for a topic; None if it has none."""
        entry = self.get(topic, group)
        return None if entry is None else self.compiled(entry)

    def text(self, topic: str, group: str) -> str:
        """The entry as administrators see it: JSON, ``null`` if there is none."""
        entry = self.get(topic, group)
        return encode_json(None if entry is None else self._fields(entry)).decode()

    @property
    def alive(self) -> int:
        """The number of expressions of groups that are online."""
        return sum(not entry.is_dead for groups in self.table.values() for entry in groups.values())

    # expiry

    def clean(self) -> None:
        """Remove expressions that have been dead for filterDataCleanTimeSpan."""
        if not self.table:
            return
        limit = self._clock.wall_ms() - self._configuration.section(BrokerConfig).filter_data_clean_time_span
        for entry in [
            entry
            for groups in self.table.values()
            for entry in groups.values()
            if entry.is_dead and entry.dead_time <= limit
        ]:
            self._remove(entry)

    # entries

    def _die(self, entry: ConsumerFilterData) -> None:
        if not entry.is_dead:
            entry.dead_time = max(self._clock.wall_ms(), entry.born_time)
            self._file.changed()

    def _add(self, entry: ConsumerFilterData) -> None:
        self.table.setdefault(entry.topic, {})[entry.consumer_group] = entry
        self._topics_of.setdefault(entry.consumer_group, set()).add(entry.topic)
        self._characters += len(entry.expression)
        self._entries += 1

    def _remove(self, entry: ConsumerFilterData) -> None:
        topic, group = entry.topic, entry.consumer_group
        del self.table[topic][group]
        if not self.table[topic]:
            del self.table[topic]
        topics = self._topics_of[group]
        topics.discard(topic)
        if not topics:
            del self._topics_of[group]
        self._filters.pop((topic, group), None)
        self._more.pop((topic, group), None)
        self._characters -= len(entry.expression)
        self._entries -= 1
        self._file.changed()


def _objects(raw: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The members of a JSON object that are objects; one that is null counts as missing, as in RocketMQ.

    Raises StateFileError if a member is something else: skipping it would lose it at the next write.
    """
    if not isinstance(raw, dict | None):
        raise StateFileError(f"{where}: not a table")
    for name, value in (raw or {}).items():
        if isinstance(value, dict):
            yield name, value
        elif value is not None:
            raise StateFileError(f"{where}: {name}: not an object")
