"""The options of ``rocketmq-store``. A wrong one is an error at planning time that says what was expected."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

from trimq.pipeline.names import COLUMNS
from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.store.bucket import BUCKET_OPTIONS, BucketPlace, bucket_of

DEFAULT_SPLIT: Final = 64 << 20
FAR: Final = (1 << 63) - 1
OPTIONS: Final = (
    "path",
    "topics",
    "topicsPattern",
    "queues",
    "sql",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsets",
    "endingOffsets",
    "startingPosition",
    "endingPosition",
    "splitSize",
    "checkCrc",
    "brokerName",
    "consumeQueues",
    "includeProperties",
    "damage",
    "storageOptions",
    "tieredStoreFilePath",
    *BUCKET_OPTIONS,
)
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
_SIZE: Final = re.compile(r"(\d+)\s*([a-z]*)", re.ASCII)
_OFFSETS: Final = '{"Topic": {"0": 17}}: queue offsets by topic and queue id'


class StoreOptions(Struct, frozen=True):
    """What to read. Times are store times in ms. Ends are exclusive, except ``ending_time``, which is inclusive.

    ``columns``: names, in order. ``topics``, ``topics_pattern`` and ``queue_ids``: empty for all. ``sql``: an SQL92
    expression over the properties, empty for all. ``starting_offsets``, ``ending_offsets``: queue offsets by (topic,
    queue id). ``starting_position``, ``ending_position``: log offsets. ``consume_queues``: "auto", "always" or "never"
    read through them.
    """

    path: str
    columns: tuple[str, ...] = COLUMNS
    topics: frozenset[str] = frozenset()
    topics_pattern: str = ""
    queue_ids: frozenset[int] = frozenset()
    sql: str = ""
    starting_time: int = 0
    ending_time: int = FAR
    starting_offsets: Mapping[tuple[str, int], int] = {}
    ending_offsets: Mapping[tuple[str, int], int] = {}
    starting_position: int = 0
    ending_position: int = FAR
    split_size: int = DEFAULT_SPLIT
    check_crc: bool = True
    broker_name: str | None = None
    consume_queues: str = "auto"
    damage: bool = False
    nullable: frozenset[str] = frozenset()
    """Columns that a user's schema allows to be null."""
    storage_options: Mapping[str, Any] = {}
    tier: str | None = None
    """The directory of the tier's segments; None to read the log only."""
    bucket: BucketPlace | None = None
    """The bucket with the tier, which is read instead of files; None if ``path`` is that of files."""

    @property
    def names_topics(self) -> bool:
        """Whether the options select topics."""
        return bool(self.topics or self.topics_pattern)

    def wants_topic(self, topic: str) -> bool:
        """Whether rows of this topic are to be read."""
        if not self.names_topics:
            return True
        return topic in self.topics or bool(self.topics_pattern and re.fullmatch(self.topics_pattern, topic))


def parse(given: Mapping[str, str]) -> StoreOptions:
    """Parse the options as Spark passes them: strings, names in any case. Raises OptionError.

    >>> parse({"path": "/store", "topics": "A,B", "splitSize": "8m"}).split_size
    8388608
    """
    options = Options(given)
    options.check_names(OPTIONS, "rocketmq-store")
    options.at_most_one("topics", "topicsPattern")
    columns = COLUMNS if options.flag("includeProperties", default=True) else COLUMNS[:-1]
    starting_time, ending_time = _time(options, "startingTimestamp", 0), _time(options, "endingTimestamp", FAR)
    if starting_time > ending_time:
        expected = f"a time not after endingTimestamp = {options.text('endingTimestamp')}"
        raise OptionError("startingTimestamp", options.text("startingTimestamp"), expected)
    return StoreOptions(
        path=options.required("path", "the store's directory, or a bucket: load(path) or option('path', ...)"),
        columns=columns,
        topics=frozenset(options.words("topics")),
        topics_pattern=_pattern(options),
        queue_ids=_queue_ids(options),
        sql=_sql(options),
        starting_time=starting_time,
        ending_time=ending_time,
        starting_offsets=_offsets(options, "startingOffsets"),
        ending_offsets=_offsets(options, "endingOffsets"),
        starting_position=options.integer("startingPosition", 0) or 0,
        ending_position=_or_far(options.integer("endingPosition")),
        split_size=_size(options, "splitSize", DEFAULT_SPLIT),
        check_crc=options.flag("checkCrc", default=True),
        broker_name=options.text("brokerName"),
        consume_queues=options.choice("consumeQueues", ("auto", "always", "never"), "auto"),
        damage=options.flag("damage", default=False),
        storage_options=_storage_options(options),
        tier=options.text("tieredStoreFilePath"),
        bucket=bucket_of(options),
    )


def _sql(options: Options) -> str:
    expression = options.sql("sql")
    if expression is None:
        return ""
    if options.flag("damage", default=False):
        # What is damaged may have no properties: a table of damage must not leave it out.
        raise OptionError("sql", expression, "not to be given together with damage")
    return expression


def _or_far(value: int | None) -> int:
    return FAR if value is None else value


def _size(options: Options, name: str, default: int) -> int:
    value = options.text(name, str(default)) or ""
    match = _SIZE.fullmatch(value.lower())
    if match is None or match[2] not in _UNITS:
        raise OptionError(name, value, "bytes, or a number with k, m or g")
    return int(match[1]) * _UNITS[match[2]]


def _pattern(options: Options) -> str:
    value = options.text("topicsPattern", "") or ""
    try:
        re.compile(value)
    except re.error as error:
        raise OptionError("topicsPattern", value, f"a regular expression ({error})") from error
    return value


def _queue_ids(options: Options) -> frozenset[int]:
    names = options.words("queues")
    if not all(name.isascii() and name.isdigit() for name in names):
        raise OptionError("queues", options.text("queues"), "queue ids: 0,1,2")
    return frozenset(map(int, names))


def time_of(name: str, value: str) -> int:
    """A time in ms since 1970, from a number or an ISO 8601 text (UTC if it has no zone). Raises OptionError.

    >>> time_of("startingTimestamp", "2026-01-31T12:00:00")
    1769860800000
    """
    if value.isascii() and value.isdigit():
        return int(value)
    try:
        given = datetime.fromisoformat(value)
    except ValueError as error:
        raise OptionError(name, value, "ms since 1970, or 2026-01-31T12:00:00 (UTC)") from error
    return int((given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp() * 1000)


def _time(options: Options, name: str, default: int) -> int:
    value = options.text(name)
    return default if value is None else time_of(name, value)


def _storage_options(options: Options) -> dict[str, Any]:
    expected = "a JSON object: the file system's settings as fsspec takes them"
    found = options.json("storageOptions", expected)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise OptionError("storageOptions", options.text("storageOptions"), expected)
    return found


def _offsets(options: Options, name: str) -> dict[tuple[str, int], int]:
    given = options.json(name, _OFFSETS)
    found = {}
    wrong = OptionError(name, options.text(name), _OFFSETS)
    if given is not None and not isinstance(given, dict):
        raise wrong
    for topic, queues in (given or {}).items():
        if not isinstance(queues, dict):
            raise wrong
        for queue_id, offset in queues.items():
            if not queue_id.isdigit() or isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
                raise wrong
            found[topic, int(queue_id)] = offset
    return found
