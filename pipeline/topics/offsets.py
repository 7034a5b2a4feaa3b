"""The offset of a stream: JSON that Spark writes into its checkpoint and compares as text.

::

    {"v": 1, "t": 1700000000000,
     "q": {"Orders": {"broker-a": {"0": 23}}}, "from": {"Orders": {"broker-a": {"0": 7}}},
     "seen": {"Orders": {"broker-a": {"0": [22, 1700000000123]}}}}

``q``: the end of the batch in each queue.

``from``: the begin of queues that no earlier batch contained (in the first batch all of them, later the new ones), and
of queues that were replaced since the last batch. Spark writes the offset into its checkpoint before it reads a row.
A batch that is run again therefore starts at the same offsets, wherever ``latest`` or ``earliest`` are by then.

``seen``: the offset of one message of a queue and its store time in ms. A queue with another message at this offset was
replaced. Checkpoints of older versions do not have ``seen``, and older versions ignore it.

``t``, optional: the store time in ms from which queues are read that appear later. It is the time at which the stream
started, and absent if the stream reads all messages.

The offset before all others is ``{"v": 1}``. Spark may request it any number of times, and it must always be the same.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from trimq.client.message import MessageQueue

INITIAL: Final[dict[str, Any]] = {"v": 1}

Positions = dict[MessageQueue, int]


class Seen(NamedTuple):
    """A message that a queue has contained: its offset, and its store time in ms."""

    offset: int
    time_ms: int


Sightings = dict[MessageQueue, Seen]


class OffsetFormatError(ValueError):
    """An offset in the checkpoint that this version cannot parse."""


class StreamOffset:
    """An offset of a stream: the end of a batch, the begins of queues that are new in it, a message of each queue.

    ``since_ms`` is the store time from which queues are read that appear later.

    >>> queue = MessageQueue(topic="T", broker_name="b", queue_id=10)
    >>> offset = StreamOffset({queue: 5}, {queue: 2})
    >>> offset.to_json()
    {'v': 1, 'q': {'T': {'b': {'10': 5}}}, 'from': {'T': {'b': {'10': 2}}}}
    >>> StreamOffset.of(offset.to_json()) == offset
    True
    """

    def __init__(
        self,
        ends: Mapping[MessageQueue, int],
        begins: Mapping[MessageQueue, int] | None = None,
        since_ms: int | None = None,
        seen: Mapping[MessageQueue, Seen] | None = None,
    ) -> None:
        self.ends: Positions = dict(ends)
        self.begins: Positions = dict(begins or {})
        self.since_ms = since_ms
        self.seen: Sightings = dict(seen or {})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StreamOffset):
            return False
        mine = self.ends, self.begins, self.since_ms, self.seen
        return mine == (other.ends, other.begins, other.since_ms, other.seen)

    def __hash__(self) -> int:
        return hash((frozenset(self.ends.items()), frozenset(self.begins.items())))

    def __repr__(self) -> str:
        return f"StreamOffset({self.to_json()})"

    @staticmethod
    def of(value: Mapping[str, Any]) -> "StreamOffset":
        """Parse an offset from Spark's JSON. Raises OffsetFormatError."""
        if value.get("v") != 1:
            raise OffsetFormatError(f"the checkpoint was written by another version of this source: {dict(value)}")
        since = value.get("t")
        if since is not None and type(since) is not int:
            raise OffsetFormatError(f"the checkpoint's offset cannot be read: t is {since!r}")
        seen = {queue: _seen(found) for queue, found in _places(value.get("seen", {})).items()}
        return StreamOffset(_positions(value.get("q", {})), _positions(value.get("from", {})), since, seen)

    @property
    def is_initial(self) -> bool:
        """Whether this is the offset before all others."""
        return not self.ends and not self.begins

    def to_json(self) -> dict[str, Any]:
        """The offset as JSON. Equal offsets give the same text, which Spark compares: sorted, without empty tables."""
        value: dict[str, Any] = dict(INITIAL)
        if self.since_ms is not None:
            value["t"] = self.since_ms
        if self.ends:
            value["q"] = _table(self.ends)
        if self.begins:
            value["from"] = _table(self.begins)
        if self.seen:
            value["seen"] = _table({queue: list(found) for queue, found in self.seen.items()})
        return value

    def begin_of(self, queue: MessageQueue, start: "StreamOffset") -> int:
        """The first offset in ``queue`` of a batch from ``start``, which is another offset, to this one."""
        found = self.begins.get(queue)
        return found if found is not None else start.ends.get(queue, 0)


def _table(values: Mapping[MessageQueue, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for queue in sorted(values):
        brokers = table.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker_name, {})[str(queue.queue_id)] = values[queue]
    return table


def _places(table: Any) -> dict[MessageQueue, Any]:
    try:
        return {
            MessageQueue(topic=topic, broker_name=broker, queue_id=int(number)): value
            for topic, brokers in table.items()
            for broker, queues in brokers.items()
            for number, value in queues.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise OffsetFormatError(f"the checkpoint's offset cannot be read: {table!r}") from None


def _positions(table: Any) -> Positions:
    try:
        return {queue: int(offset) for queue, offset in _places(table).items()}
    except (TypeError, ValueError):
        raise OffsetFormatError(f"the checkpoint's offset cannot be read: {table!r}") from None


def _seen(value: Any) -> Seen:
    try:
        offset, time_ms = value
        return Seen(int(offset), int(time_ms))
    except (TypeError, ValueError):
        raise OffsetFormatError(f"the checkpoint's offset cannot be read: seen has {value!r}") from None


def limited(start: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int], most: int) -> Positions:
    """``ends``, moved back so that the batch has at most ``most`` messages; each queue gets a proportional share.

    Each queue with messages gets at least one, if there are enough for all; if not, the queues take turns.

    >>> one, two = (MessageQueue(topic="T", broker_name="b", queue_id=number) for number in (0, 1))
    >>> [end for end in limited({one: 0, two: 10}, {one: 90, two: 20}, 20).values()]
    [18, 12]
    """
    sizes = {queue: end - start.get(queue, 0) for queue, end in ends.items()}
    total = sum(sizes.values())
    if total <= most:
        return dict(ends)
    waiting = sorted(queue for queue, size in sizes.items() if size)
    # The turn is derived from the batch's begin: it changes with each batch, but not when the same batch is planned
    # again, which must give the same result.
    turn = sum(start.get(queue, 0) for queue in ends) % len(waiting)
    waiting = waiting[turn:] + waiting[:turn]
    shares = dict.fromkeys(ends, 0) | dict.fromkeys(waiting[:most], 1)
    # Then the rest in proportion to the messages beyond the first of each queue, rounded down, and what rounding left
    # over one by one.
    spare = max(0, most - len(waiting))
    beyond = max(1, total - len(waiting))
    for queue in waiting:
        shares[queue] += (sizes[queue] - 1) * spare // beyond
    for queue in waiting[: most - sum(shares.values())]:
        shares[queue] += shares[queue] < sizes[queue]
    return {queue: start.get(queue, 0) + shares[queue] for queue in ends}
