"""Attributes of topics: their names and values, and how requests change them.

Source: RocketMQ's TopicAttributes and AttributeUtil.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple


class Attribute(NamedTuple):
    """``accepts`` returns what a value has to be, "" for a valid one. ``changeable`` after the topic was created."""

    accepts: Callable[[str], str]
    changeable: bool = True


def _one_of(*values: str) -> Callable[[str], str]:
    return lambda value: "" if value in values else "one of " + ", ".join(values)


def _number(value: str) -> str:
    digits = value.removeprefix("-")
    return "" if digits.isascii() and digits.isdigit() and len(digits) < 19 else "a whole number"


ATTRIBUTES: Final = {
    # BatchCQ and COMPACTION need stores that do not exist here: a topic of that kind would not do what it promises.
    "queue.type": Attribute(_one_of("SimpleCQ"), changeable=False),
    "cleanup.policy": Attribute(_one_of("DELETE"), changeable=False),
    "message.type": Attribute(_one_of("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED")),
    "reserve.time": Attribute(_number),
}


def parse_changes(text: str) -> dict[str, str]:
    """Parse ``+a=1,-b`` into {"+a": "1", "-b": ""}. Raises ValueError with the reason."""
    changes: dict[str, str] = {}
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            continue
        name, equals, value = part.partition("=")
        sign, key = name[:1], name[1:].strip()
        if sign not in ("+", "-") or not key:
            raise ValueError(f"{part!r} is neither +name=value nor -name")
        if sign == "+" and not (equals and value.strip()):
            raise ValueError(f"{part!r} has no value")
        if ("+" + key) in changes or ("-" + key) in changes:
            raise ValueError(f"the attribute {key} occurs twice")
        changes[sign + key] = value.strip() if sign == "+" else ""
    return changes


def alter(
    current: Mapping[str, str] | None,
    changes: Mapping[str, str],
    known: Mapping[str, Attribute] = ATTRIBUTES,
) -> dict[str, str]:
    """The attributes after ``changes``. ``current`` None means that the topic (or group) is being created.

    Raises ValueError for an unknown name, an invalid value, a change of an attribute that cannot be changed, or the
    removal of one that is not set.
    """
    result = dict(current or {})
    for name, value in changes.items():
        sign, key = name[:1], name[1:]
        attribute = known.get(key)
        if attribute is None:
            raise ValueError(f"unknown attribute {key}; the known ones are {', '.join(sorted(known))}")
        if sign == "-":
            if current is None or key not in result:
                raise ValueError(f"the attribute {key} is not set, so it cannot be removed")
            if not attribute.changeable:
                raise ValueError(f"the attribute {key} cannot be removed")
            del result[key]
        else:
            if problem := attribute.accepts(value):
                raise ValueError(f"the attribute {key}={value} is not supported: expected {problem}")
            if current is not None and not attribute.changeable and result.get(key, value) != value:
                raise ValueError(f"the attribute {key} cannot be changed")
            result[key] = value
    return result
