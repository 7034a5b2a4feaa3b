"""The SQL92 expressions of consumer groups: consumerFilter.json (RocketMQ's ConsumerFilterManager).

A heartbeat registers the expressions of its group; a pull without a subscription of its own is filtered by the one
that is registered. When a group's last member leaves, its expressions are dead. They stay for filterDataCleanTimeSpan,
so that a group that comes back with the same subscription is served as before.

The file has RocketMQ's format. ``bloomFilterData`` serves RocketMQ's consume queue extension: it is written
for the sake of RocketMQ, which otherwise ignores the file's entries, and kept as it was read, whatever its size.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
import structlog
import trio

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.filters.sql import NOTHING, SQL92, Compiled, ExpressionCache, RetrySqlFilter, SqlFilter
from trimq.broker.filters.tag import SubscriptionError, is_tag_type
from trimq.broker.services.consumers import GroupChange
from trimq.broker.services.state_file import PersistentTable, StateFile, StateFileError, unknown_fields, wire_names
from trimq.broker.store.disk.disk import Disk
from trimq.protocol.bloom_filter import bloom_filter_data
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
SHARE: Final = 8
"""One group may have this part of each limit: 1/8."""
MOST_NEW: Final = 64
"""Expressions that are compiled for one heartbeat. What it has beyond them is refused."""
_NEW_AT_ONCE: Final = 4
"""Short expressions of one heartbeat that are compiled in the event loop."""
_TOO_MANY: Final = f"the heartbeat has more than {MOST_NEW} new expressions, or too many of its client's wait already"
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


_BLOOM: Final = "bloomFilterData"
_KNOWN: Final = wire_names(ConsumerFilterData) | {"dead"}


class ConsumerFilterManager(PersistentTable):
    """Expressions by topic and group.

    An expression that cannot be compiled is not registered, nor is one beyond the limits. It removes an older one, so
    that the pulls of the group are refused instead of being filtered by what the group no longer asks for.
    """

    def __init__(self, configuration: Configuration, disk: Disk, clock: Clock) -> None:
        self._configuration = configuration
        self._clock = clock
        self._log_budget = LogBudget(clock)
        self._expressions = ExpressionCache(disk.run)
        self._topics_of: dict[str, dict[str, None]] = {}
        self._filters: dict[tuple[str, str], SqlFilter] = {}
        self._retry_filters: dict[str, RetrySqlFilter] = {}
        """By group, until one of its expressions changes: a held pull continues only with the filter that it had."""
        self._dead: OrderedDict[tuple[str, str], ConsumerFilterData] = OrderedDict()
        """Dead entries by topic and group, the one that has been dead for longest first."""
        self._characters_of: dict[str, int] = {}
        self._rest: dict[str, Any] = {}
        self._more: dict[tuple[str, str], dict[str, Any]] = {}
        """By topic and group, fields that are not read: the bits of the bloom filter, and unknown ones."""
        self._characters = 0
        self._entries = 0
        self.refused = 0
        """Expressions of heartbeats that were not registered: not valid, or over the limits."""
        self.table: dict[str, dict[str, ConsumerFilterData]] = {}
        self.filter = self._expressions.filter
        """(expression type, text, compiled): the filter of a subscription, see ExpressionCache.filter."""
        self.is_slow = self._expressions.is_slow
        self.prepare = self._expressions.prepare
        """(texts, client): compile those for which ``is_slow`` is true in a thread, see ExpressionCache.prepare."""
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
        entries = []
        for topic, data in _objects(state.get("filterDataByTopic"), self._file.path):
            for group, fields in _objects(data.get("groupFilterData"), f"{self._file.path}: {topic}"):
                entry = self._entry(topic, group, fields)
                if not entry.dead_time:
                    entry.dead_time = max(entry.born_time, now - _DEAD_BEFORE_LOAD_MS)
                entries.append(entry)
                more = unknown_fields(fields, _KNOWN)
                if more.get(_BLOOM) is None:
                    more[_BLOOM] = bloom_filter_data(group, topic)
                self._more[topic, group] = more
        entries.sort(key=lambda entry: entry.dead_time)
        for entry in entries:
            self._add(entry)

    def _entry(self, topic: str, group: str, fields: dict[str, Any]) -> ConsumerFilterData:
        given = {name: value for name, value in fields.items() if value is not None and name in _KNOWN}
        # RocketMQ finds an entry by its place too, whatever its fields say.
        given = {"expression": ""} | given | {"topic": topic, "consumerGroup": group}
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
        return fields | {"dead": entry.is_dead} | self._more_of(entry.topic, entry.consumer_group)

    def _more_of(self, topic: str, group: str) -> dict[str, Any]:
        # Not of a new entry, nor of one that was removed while the file is written. Apache's broker ignores a file in
        # which one entry has no bits.
        return self._more.get((topic, group)) or {_BLOOM: bloom_filter_data(group, topic)}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drop expressions that have been dead for filterDataCleanTimeSpan, and write the file, every 10 s, forever."""
        task_status.started()
        await self._file.run(self._sleep)

    async def _sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._log_budget.sum_up()
        self.clean()

    # heartbeats

    def register(self, group: str, subscriptions: Iterable[SubscriptionData], compiled: Compiled | None = None) -> None:
        """Register the expressions in a heartbeat of a group. Those for topics it does not name any more are dead.

        ``compiled``: what was prepared for the heartbeat; None if ``prepare_first`` had nothing. After the first
        expression for which there is no space, the other new ones of the group are refused without a look.
        """
        topics = set()
        refused: dict[str, list[str]] = {}
        full = ""
        for subscription in subscriptions:
            topic = subscription.topic
            topics.add(topic)
            if is_tag_type(subscription.expression_type) or self._is_known(group, subscription):
                continue
            reason = full
            if not reason:
                try:
                    accept = self._filter_of(subscription, compiled)
                except SubscriptionError as error:
                    reason = str(error)
                else:
                    reason = full = self._replace(group, subscription, accept)
            if reason:
                old = self.get(topic, group)
                if old is not None:
                    self._remove(old)
                refused.setdefault(reason, []).append(topic)
        for reason, names in refused.items():
            self._refuse(group, names, reason)
        for topic in self._topics_of.get(group, {}).keys() - topics:
            self._die(self.table[topic][group])

    def to_prepare(self, group: str, subscriptions: Iterable[SubscriptionData]) -> dict[str, None]:
        """The texts that ``register`` needs as filters, for ``prepare_first``: it gets those of the whole heartbeat."""
        return {
            each.sub_string: None
            for each in subscriptions
            if each.expression_type == SQL92 and not self._is_registered(self.get(each.topic, group), each)
        }

    def prepare_first(self, texts: Iterable[str]) -> list[str]:
        """Those of a heartbeat's expressions to ``prepare`` before ``register``; none if it may compile all."""
        known: list[str] = []
        new: list[str] = []
        for text in texts:
            (new if self._expressions.is_new(SQL92, text) else known).append(text)
        if len(new) <= _NEW_AT_ONCE and not any(self.is_slow(SQL92, text) for text in new):
            return []
        return [*known, *new[:MOST_NEW]]

    def group_changed(self, group: str, change: GroupChange) -> None:
        """Make the expressions of a group dead whose last member has left."""
        if change is GroupChange.EMPTY:
            for topic in self._topics_of.get(group, ()):
                self._die(self.table[topic][group])

    @staticmethod
    def _is_registered(old: ConsumerFilterData | None, subscription: SubscriptionData) -> bool:
        """Whether ``register`` keeps the entry, because the subscription is older or has the same expression."""
        return old is not None and (
            subscription.sub_version <= old.client_version
            or (old.expression, old.expression_type) == (subscription.sub_string, subscription.expression_type or "")
        )

    def _is_known(self, group: str, subscription: SubscriptionData) -> bool:
        """As ``_is_registered``. Then the entry gets the newer version, and is alive again."""
        old = self.get(subscription.topic, group)
        if old is None or not self._is_registered(old, subscription):
            return False
        version = subscription.sub_version
        if version > old.client_version or (version == old.client_version and old.is_dead):
            old.client_version = version
            old.dead_time = 0
            self._dead.pop((old.topic, group), None)
            self._file.changed()
        return True

    def _filter_of(self, subscription: SubscriptionData, compiled: Compiled | None) -> SqlFilter:
        """Raises SubscriptionError, also for an expression that was not compiled with the others of its heartbeat."""
        kind, text = subscription.expression_type, subscription.sub_string
        if compiled is not None and text not in compiled and self._expressions.is_new(kind, text):
            raise SubscriptionError(_TOO_MANY)
        return self.filter(kind, text, compiled or NOTHING)

    def _replace(self, group: str, subscription: SubscriptionData, accept: SqlFilter) -> str:
        """Put an expression in the place of the older one. Returns why not: there is no space for it; else ""."""
        topic, text = subscription.topic, subscription.sub_string
        # The bits, also those that another broker has computed, are of the names: they hold for the new expression too.
        more = self._more_of(topic, group)
        old = self.get(topic, group)
        if old is not None:
            self._remove(old)
        if problem := self._space_problem(group, len(text)):
            return problem
        self._add(
            ConsumerFilterData(
                consumer_group=group,
                topic=topic,
                expression=text,
                expression_type=subscription.expression_type or "",
                born_time=self._clock.wall_ms(),
                client_version=subscription.sub_version,
            )
        )
        self._filters[topic, group] = accept
        self._more[topic, group] = more
        self._file.changed()
        return ""

    def _refuse(self, group: str, topics: list[str], reason: str) -> None:
        self.refused += len(topics)
        if self._log_budget.allows():
            _log.warning("expression_refused", group=group, topic=topics[0], topics=len(topics), reason=reason)

    def _space_problem(self, group: str, characters: int) -> str:
        """Why one more expression exceeds the limits, or "". Those that have been dead for longest make room for it."""
        entries, size = len(self._topics_of.get(group, ())), self._characters_of.get(group, 0)
        if (entries + 1) * SHARE > MOST_ENTRIES or (size + characters) * SHARE > MOST_CHARACTERS:
            return f"the group has {entries} expressions with {size} characters"
        while self._entries >= MOST_ENTRIES or self._characters + characters > MOST_CHARACTERS:
            if not self._dead:
                return f"{self._entries} expressions with {self._characters} characters are registered"
            self._remove(next(iter(self._dead.values())))
        return ""

    # look-up

    def get(self, topic: str, group: str) -> ConsumerFilterData | None:
        """The expression of a group for a topic."""
        groups = self.table.get(topic)
        return None if groups is None else groups.get(group)

    def compiled(self, entry: ConsumerFilterData, compiled: Compiled = NOTHING) -> SqlFilter | None:
        """The filter of a registered expression; None if it cannot be compiled, which only one from the file may.

        ``compiled``: what was prepared for the request.
        """
        key = (entry.topic, entry.consumer_group)
        known = self._filters.get(key)
        if known is not None:
            return known
        try:
            accept = self.filter(entry.expression_type, entry.expression, compiled)
        except SubscriptionError as error:
            self._remove(entry)
            self._refuse(entry.consumer_group, [entry.topic], str(error))
            return None
        self._filters[key] = accept
        return accept

    def is_not_compiled(self, entry: ConsumerFilterData) -> bool:
        """Whether ``compiled`` would keep the event loop: after a start, for one from the file."""
        key = (entry.topic, entry.consumer_group)
        return key not in self._filters and self.is_slow(entry.expression_type, entry.expression)

    def not_compiled(self, group: str, compiled: Compiled = NOTHING) -> list[str]:
        """The group's expressions to ``prepare`` before ``retry_filter``, which does not keep the event loop then.

        Those in ``compiled`` are kept: a group from the file may have more than are compiled for one request.
        """
        if group in self._retry_filters:
            return []
        new = []
        for topic in list(self._topics_of.get(group, ())):
            entry = self.table[topic][group]
            if entry.expression in compiled:
                self.compiled(entry, compiled)
            elif (topic, group) not in self._filters and self._expressions.is_new(
                entry.expression_type, entry.expression
            ):
                new.append(entry.expression)
        return new if len(new) > _NEW_AT_ONCE or any(self.is_slow(SQL92, text) for text in new) else []

    def retry_filter(self, group: str, compiled: Compiled = NOTHING) -> RetrySqlFilter:
        """The filter of the group's retry topic; the same one until an expression of the group changes."""
        found = self._retry_filters.get(group)
        if found is None:
            topics = list(self._topics_of.get(group, ()))
            filters = {topic: self.compiled(self.table[topic][group], compiled) for topic in topics}
            known = {topic: accept for topic, accept in filters.items() if accept is not None}
            if not known:
                return _ALL
            found = self._retry_filters[group] = RetrySqlFilter(known)
        return found

    def text(self, topic: str, group: str) -> str:
        """The entry as administrators see it: JSON, ``null`` if there is none."""
        entry = self.get(topic, group)
        return encode_json(None if entry is None else self._fields(entry)).decode()

    @property
    def alive(self) -> int:
        """The number of expressions of groups that are online."""
        return self._entries - len(self._dead)

    # expiry

    def clean(self) -> None:
        """Remove expressions that have been dead for filterDataCleanTimeSpan."""
        limit = self._clock.wall_ms() - self._configuration.section(BrokerConfig).filter_data_clean_time_span
        for entry in [entry for entry in self._dead.values() if entry.dead_time <= limit]:
            self._remove(entry)

    # entries

    def _die(self, entry: ConsumerFilterData) -> None:
        if not entry.is_dead:
            entry.dead_time = max(self._clock.wall_ms(), entry.born_time)
            self._dead[entry.topic, entry.consumer_group] = entry
            self._file.changed()

    def _add(self, entry: ConsumerFilterData) -> None:
        topic, group, size = entry.topic, entry.consumer_group, len(entry.expression)
        self.table.setdefault(topic, {})[group] = entry
        self._topics_of.setdefault(group, {})[topic] = None
        if entry.is_dead:
            self._dead[topic, group] = entry
        self._retry_filters.pop(group, None)
        self._characters_of[group] = self._characters_of.get(group, 0) + size
        self._characters += size
        self._entries += 1

    def _remove(self, entry: ConsumerFilterData) -> None:
        topic, group = entry.topic, entry.consumer_group
        del self.table[topic][group]
        if not self.table[topic]:
            del self.table[topic]
        topics = self._topics_of[group]
        del topics[topic]
        self._characters_of[group] -= len(entry.expression)
        if not topics:
            del self._topics_of[group], self._characters_of[group]
        self._dead.pop((topic, group), None)
        self._retry_filters.pop(group, None)
        self._filters.pop((topic, group), None)
        self._more.pop((topic, group), None)
        self._characters -= len(entry.expression)
        self._entries -= 1
        self._file.changed()


_ALL: Final = RetrySqlFilter({})
"""For a group without expressions."""


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
