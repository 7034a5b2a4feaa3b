"""Conditions of a query that spare reading: on topic, queue id, store time and log offset."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

import msgspec

from pipeline.store.options import StoreOptions

_MICROS: Final = 1000


def narrow(options: StoreOptions, filters: Iterable[Any]) -> StoreOptions:
    """The options with what PySpark's filters (EqualTo, In, GreaterThan ...) allow to leave out.

    All conditions hold at the same time. What is not understood is passed over: Spark looks at every row again.
    """
    for condition in filters:
        column = ".".join(getattr(condition, "attribute", ()))
        kind = type(condition).__name__
        value: Any = getattr(condition, "value", None)
        values: Iterable[Any] = value if kind == "In" else (value,)
        if column == "topic" and kind in ("EqualTo", "In"):
            kept = frozenset(topic for topic in values if isinstance(topic, str) and options.wants_topic(topic))
            # an empty set would mean any topic
            options = msgspec.structs.replace(options, topics=kept or frozenset({""}), topics_pattern="")
        elif column == "queueId" and kind in ("EqualTo", "In"):
            ids = frozenset(values)
            kept_ids = ids & options.queue_ids if options.queue_ids else ids
            options = msgspec.structs.replace(options, queue_ids=kept_ids or frozenset({-1}))
        elif column == "storeTimestamp" and isinstance(value, datetime):
            options = _narrow_time(options, kind, value)
        elif column == "commitLogOffset" and isinstance(value, int):
            options = _narrow_position(options, kind, value)
    return options


def _narrow_time(options: StoreOptions, kind: str, value: datetime) -> StoreOptions:
    micros = round(value.timestamp() * 1_000_000)
    if kind in ("EqualTo", "GreaterThan", "GreaterThanOrEqual"):
        begin = max(options.starting_time, -(-micros // _MICROS))
        options = msgspec.structs.replace(options, starting_time=begin)
    if kind in ("EqualTo", "LessThan", "LessThanOrEqual"):
        options = msgspec.structs.replace(options, ending_time=min(options.ending_time, micros // _MICROS))
    return options


def _narrow_position(options: StoreOptions, kind: str, value: int) -> StoreOptions:
    if kind in ("EqualTo", "GreaterThan", "GreaterThanOrEqual"):
        options = msgspec.structs.replace(options, starting_position=max(options.starting_position, value))
    if kind in ("EqualTo", "LessThan", "LessThanOrEqual"):
        options = msgspec.structs.replace(options, ending_position=min(options.ending_position, value + 1))
    return options
