"""The parsed options of a topic table: what to read, the start and end, and what to do about lost messages.

Names and meanings follow Spark's Kafka source. The differences are RocketMQ's: brokers have names, and offsets are
given by topic, broker and queue: ``{"Orders": {"broker-a": {"0": 23, "1": -2}}}`` (-2 is earliest, -1 latest).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from trimq.client.errors import UsageError
from trimq.client.message import MessageQueue
from trimq.client.subscription import ALL, Sql, parse_tags
from trimq.pipeline.names import COLUMNS
from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.topics.servers import SERVER_OPTIONS, Servers
from trimq.protocol.topic_rules import group_problem, topic_problem

EARLIEST: Final = -2
LATEST: Final = -1
DEFAULT_GROUP: Final = "spark-rocketmq"
"""The group in requests if the options have none; nothing is committed for it."""

_OFFSETS: Final = 'earliest, latest, or JSON {"topic": {"broker": {"queue": offset}}} (-2 is earliest, -1 latest)'
_QUEUES: Final = 'JSON {"topic": {"broker": [queue, ...]}}'
READ_OPTIONS: Final = (
    *SERVER_OPTIONS,
    "topics",
    "topicsPattern",
    "queues",
    "tags",
    "sql",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "includeProperties",
    "group",
    "pollTimeoutMs",
)

OffsetTable = Mapping[MessageQueue, int]


@dataclass(frozen=True, slots=True)
class Position:
    """Where to begin or end: at the same place in all queues, at a time (ms since the epoch), or by queue.

    >>> Position("earliest").table
    {}
    """

    kind: Literal["earliest", "latest", "time", "table"]
    time_ms: int = 0
    table: OffsetTable = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """The settings of a reader. ``queues`` None means all queues; ``tags`` empty means every message.

    >>> ReadSettings.of(Options({"namesrv": "127.0.0.1:9876", "topics": "Orders"})).start
    Position(kind='earliest', time_ms=0, table={})
    """

    servers: Servers
    topics: tuple[str, ...]
    pattern: str | None
    queues: frozenset[MessageQueue] | None
    wanted: str | Sql
    start: Position
    end: Position
    max_offsets: int | None
    min_partitions: int | None
    fail_on_data_loss: bool
    columns: tuple[str, ...]
    nullable: frozenset[str]
    group: str | None
    poll_timeout: float

    @property
    def tags(self) -> frozenset[str]:
        """The selected tags; empty for all messages, and for an SQL expression."""
        return frozenset() if isinstance(self.wanted, Sql) else frozenset(parse_tags(self.wanted))

    @property
    def is_filtered(self) -> bool:
        """Whether brokers filter the messages, so that offsets without a message are normal."""
        return isinstance(self.wanted, Sql) or bool(self.tags)

    @staticmethod
    def of(options: Options, columns: Mapping[str, bool] | None = None, *, stream: bool = False) -> "ReadSettings":
        """The settings of a batch or stream read. ``columns`` are those of the table's schema: name to nullable.

        Raises OptionError.
        """
        options.check_names(READ_OPTIONS, "the rocketmq source")
        no_path(options, "load")
        topics, pattern = _topics(options)
        if stream:
            for name in ("endingOffsets", "endingTimestamp"):
                if options.has(name):
                    raise OptionError(
                        name, options.text(name), "to be given for a batch read only: a stream has no end"
                    )
        elif options.has("maxOffsetsPerTrigger"):
            value = options.text("maxOffsetsPerTrigger")
            raise OptionError("maxOffsetsPerTrigger", value, "to be given for a stream only")
        start = _position(options, "starting", "latest" if stream else "earliest", not_this="" if stream else "latest")
        end = _position(options, "ending", "latest", not_this="earliest")
        if start.kind == end.kind == "time" and start.time_ms > end.time_ms:
            raise OptionError("startingTimestamp", start.time_ms, f"a time not after endingTimestamp = {end.time_ms}")
        return ReadSettings(
            servers=Servers.of(options),
            topics=topics,
            pattern=pattern,
            queues=_queues(options),
            wanted=_wanted(options),
            start=start,
            end=end,
            max_offsets=options.integer("maxOffsetsPerTrigger", least=1),
            min_partitions=options.integer("minPartitions", least=1),
            fail_on_data_loss=options.flag("failOnDataLoss", default=True),
            columns=_columns(options, columns),
            nullable=frozenset(name for name, nullable in (columns or {}).items() if nullable),
            group=group_of(options),
            poll_timeout=(options.integer("pollTimeoutMs", 120_000, least=1, unit="milliseconds") or 0) / 1000,
        )


def no_path(options: Options, method: str) -> None:
    """Raises OptionError for a topic that was given as a path: it would be ignored.

    A path with a slash is accepted: Spark adds its own to a table of its catalog.
    """
    path = options.text("path")
    if path is not None and "/" not in path:
        raise OptionError("path", path, f"none: call {method}() without a path, topics are options")


def group_of(options: Options) -> str | None:
    """The group, validated; None if none is given. Raises OptionError."""
    group = options.text("group")
    problem = group_problem(group) if group is not None else None
    if problem is not None:
        raise OptionError("group", group, f"a name that brokers accept ({problem})")
    return group


def _columns(options: Options, columns: Iterable[str] | None) -> tuple[str, ...]:
    if columns is None:
        return COLUMNS if options.flag("includeProperties", default=True) else COLUMNS[:-1]
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise OptionError("schema", ", ".join(unknown), f"columns of rocketmq: {', '.join(COLUMNS)}")
    return tuple(columns)


def _topics(options: Options) -> tuple[tuple[str, ...], str | None]:
    options.at_most_one("topics", "topicsPattern")
    pattern = options.text("topicsPattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise OptionError("topicsPattern", pattern, f"a regular expression ({error})") from None
        return (), pattern
    topics = options.words("topics")
    if not topics:
        raise OptionError("topics", options.text("topics"), "names of topics, separated by commas, or topicsPattern")
    for topic in topics:
        problem = topic_problem(topic)
        if problem is not None:
            raise OptionError("topics", options.text("topics"), f"names of topics, separated by commas ({problem})")
    return topics, None


def _wanted(options: Options) -> str | Sql:
    options.at_most_one("tags", "sql")
    expression = options.sql("sql")
    if expression is not None:
        return Sql(expression)
    tags = options.text("tags", ALL) or ALL
    try:
        parse_tags(tags)
    except UsageError:
        raise OptionError("tags", tags, "tags as 'a || b', or *") from None
    return tags


def _position(options: Options, which: str, default: str, *, not_this: str) -> Position:
    offsets, time = f"{which}Offsets", f"{which}Timestamp"
    options.at_most_one(offsets, time)
    moment = options.integer(time, unit="milliseconds since 1970")
    if moment is not None:
        return Position("time", time_ms=moment)
    value = options.text(offsets, default) or default
    word = value.lower()
    if word == not_this:
        raise OptionError(offsets, value, _OFFSETS.replace(f"{not_this}, ", "", 1) + f"; {not_this} reads nothing")
    if word == "earliest":
        return Position("earliest")
    if word == "latest":
        return Position("latest")
    return Position("table", table=_offsets(options.json(offsets, _OFFSETS), offsets, value))


def _offsets(value: Any, option: str, text: str) -> OffsetTable:
    found: dict[MessageQueue, int] = {}
    try:
        for topic, brokers in value.items():
            for broker, queues in brokers.items():
                for queue, offset in queues.items():
                    place = MessageQueue(topic=topic, broker_name=broker, queue_id=int(queue))
                    found[place] = offset
        good = all(type(offset) is int and offset >= EARLIEST for offset in found.values())
    except (AttributeError, TypeError, ValueError):
        good = False
    if not good:
        raise OptionError(option, text, _OFFSETS)
    return found


def _queues(options: Options) -> frozenset[MessageQueue] | None:
    value = options.json("queues", _QUEUES)
    if value is None:
        return None
    wrong = OptionError("queues", options.text("queues"), _QUEUES)
    found = set()
    try:
        for topic, brokers in value.items():
            for broker, queues in brokers.items():
                # A string instead of a list could be iterated too.
                if not isinstance(queues, list) or not all(type(queue) is int and queue >= 0 for queue in queues):
                    raise wrong
                found |= {MessageQueue(topic=topic, broker_name=broker, queue_id=queue) for queue in queues}
    except AttributeError:
        raise wrong from None
    return frozenset(found)
