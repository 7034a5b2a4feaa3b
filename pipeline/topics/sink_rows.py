"""The rows of a sink: the columns that it accepts, and each row as the parts of a message."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from trimq.client.message import RESERVED
from trimq.pipeline.options import OptionError
from trimq.protocol.record import MAX_PROPERTIES
from trimq.protocol.topic_rules import topic_problem

if TYPE_CHECKING:
    from trimq.pipeline.topics.delivery import WriteSettings

COLUMNS: Final = {
    "topic": ("string",),
    "body": ("binary", "string"),
    "tags": ("string",),
    "keys": ("array<string>", "string"),
    "properties": ("map<string,string>",),
    "shardingKey": ("string",),
    "delay": ("int", "bigint", "smallint", "tinyint"),
}
"""The columns that a sink accepts, and their types. ``delay`` is a delay level: 1 to 18."""


BODY_MISSING: Final = "a row's body is null or empty: brokers do not accept that"


class RowError(ValueError):
    """A row that no broker accepts; the text says which part of it is wrong."""


class Row(NamedTuple):
    """A message to send. ``properties`` is the encoded text without an id, ``delay`` the level, 0 for none."""

    topic: str
    body: bytes
    properties: str
    sharding_key: str | None
    delay: int


def check_columns(schema: Any, settings: "WriteSettings") -> None:
    """Raises OptionError for a column that is missing or unknown or has another type than expected."""
    found = {field.name: field.dataType.simpleString() for field in schema.fields}
    known = ", ".join(f"{name} ({' or '.join(kinds)})" for name, kinds in COLUMNS.items())
    for name, kind in found.items():
        if name not in COLUMNS:
            raise OptionError("column", name, f"one of {known}; select the columns to write")
        if kind not in COLUMNS[name]:
            raise OptionError(f"column {name}", kind, " or ".join(COLUMNS[name]))
    if "body" not in found:
        raise OptionError("column body", None, "a body for every message")
    if "topic" not in found and settings.topic is None:
        raise OptionError("topic", None, "the name of a topic, or a column topic")
    if settings.idempotent and "delay" in found:
        raise OptionError("idempotent", "true", "no column delay: a delayed message cannot be queried by its key")


def rows_of(batch: pa.RecordBatch, topic: str | None) -> Iterator[Row]:
    """The rows of a batch; ``topic`` overrides their own topics. Raises RowError."""
    count = batch.num_rows

    def column(name: str) -> list[Any]:
        if name not in batch.schema.names:
            return [None] * count
        values: list[Any] = batch.column(name).to_pylist()
        return values

    topics = [topic] * count if topic is not None else column("topic")
    checked: set[str] = set()
    # Rows mostly differ in their bodies only: topics are checked once, and the texts of tags alone are reused.
    columns = (topics, *(column(name) for name in ("body", "tags", "keys", "properties", "shardingKey", "delay")))
    texts: dict[str | None, str] = {}
    for name, body, tags, keys, properties, sharding_key, delay in zip(*columns, strict=True):
        if name not in checked:
            _check_topic(name)
            checked.add(name)
        if not body:
            raise RowError(BODY_MISSING)
        data = body.encode() if isinstance(body, str) else body
        if keys or properties or sharding_key is not None:
            text = property_text(tags, keys, properties, sharding_key)
        elif (found := texts.get(tags)) is not None:
            text = found
        else:
            text = texts[tags] = property_text(tags, None, None, None)
        yield Row(name, data, text, sharding_key, delay or 0)


def _check_topic(topic: str | None) -> None:
    problem = "the topic is null" if topic is None else topic_problem(topic)
    if problem is not None:
        raise RowError(f"a row cannot be sent: {problem}")


def property_text(tags: str | None, keys: Any, properties: Any, sharding_key: str | None) -> str:
    """The encoded properties of a row. Raises RowError."""
    # Properties with RocketMQ's own names belong to the message that was read; tags and keys have columns.
    parts = {name: value for name, value in properties or () if name not in RESERVED and value is not None}
    if tags:
        parts["TAGS"] = tags
    if keys:
        words = keys.split() if isinstance(keys, str) else keys
        if any(not word or " " in word for word in words):
            raise RowError(f"the keys {words!r}: a key is empty or contains a blank, which separates keys")
        parts["KEYS"] = " ".join(words)
    if sharding_key is not None:
        parts["__SHARDINGKEY"] = sharding_key
    text = "".join([f"{name}\x01{value}\x02" for name, value in parts.items()])
    if text.count("\x01") != len(parts) or text.count("\x02") != len(parts):
        raise RowError("a property's name or value contains the character 1 or 2, which separate properties")
    # UTF-8 has at most four bytes for a character: short texts need not be encoded to be measured.
    if len(text) * 4 > MAX_PROPERTIES and len(text.encode()) > MAX_PROPERTIES:
        raise RowError(f"a row's properties take {len(text.encode())} bytes, the limit is {MAX_PROPERTIES}")
    return text
