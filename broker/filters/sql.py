"""Subscriptions by SQL92 expression: a filter of the store that evaluates the properties of each record.

Source: RocketMQ's ExpressionMessageFilter and ExpressionForRetryMessageFilter, without the bit maps of the consume
queue extension: the properties of each candidate are read, as many as the scan limit of a pull allows.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from trimq.broker.filters.tag import SubscriptionError
from trimq.protocol.property_text import property_of
from trimq.protocol.sql92.limits import MAX_LENGTH

SQL92: Final = "SQL92"
_MOST_CHARACTERS: Final = 1 << 18
"""Characters of the expressions in a cache. A compiled one takes some ten bytes for each of them."""
_OWN: Final = 256
"""What an entry costs besides its text, in characters."""
_SHORT: Final = 128
"""Characters of an expression that is compiled in the event loop; each takes some microseconds."""
_REAL_TOPIC: Final = "RETRY_TOPIC"

Match = Callable[[bytes], bool]
Run = Callable[..., Awaitable[Any]]


class SqlFilter:
    """Accepts the messages that an expression accepts (the store's MessageFilter)."""

    __slots__ = ("match_record", "text")

    needs_properties = True

    def __init__(self, text: str, match: Match) -> None:
        self.text = text
        self.match_record: Match = match
        """Whether the encoded properties of a record fulfil the expression."""

    def match_tags(self, _tags_code: int) -> bool:
        """Always True: the properties decide."""
        return True


class RetrySqlFilter:
    """The filter of a retry topic (filterSupportRetry): a message is filtered by the expression for its real topic.

    ``find`` returns the group's filter for a topic. A message of a topic for which it has none is accepted.
    """

    __slots__ = ("_find",)

    needs_properties = True

    def __init__(self, find: Callable[[str], SqlFilter | None]) -> None:
        self._find = find

    def match_tags(self, _tags_code: int) -> bool:
        """Always True: the properties decide."""
        return True

    def match_record(self, properties: bytes) -> bool:
        """Whether the properties fulfil the expression of the topic to which the message was sent first."""
        accept = self._find(property_of(str(properties, "utf-8", "replace"), _REAL_TOPIC))
        return accept is None or accept.match_record(properties)


class ExpressionCache:
    """Compiled expressions by text, and why others cannot be compiled; the most recently used ones.

    Heartbeats and pulls repeat their expressions. The size of the texts bounds how many are kept. ``run`` runs a
    function in a thread.
    """

    def __init__(self, run: Run, most: int = _MOST_CHARACTERS) -> None:
        self._run = run
        self._most = most
        self._size = 0
        self._filters: OrderedDict[str, SqlFilter | SubscriptionError] = OrderedDict()
        self._compiling = trio.Lock()
        self._is_loaded = False

    def is_slow(self, expression_type: str | None, text: str | None) -> bool:
        """Whether ``filter`` would keep the event loop for more than about a millisecond: then ``prepare`` it first."""
        return self.is_new(expression_type, text) and (len(text or "") > _SHORT or not self._is_loaded)

    def is_new(self, expression_type: str | None, text: str | None) -> bool:
        """Whether ``filter`` would compile it. False for what is refused without a look."""
        return expression_type == SQL92 and text is not None and len(text) <= MAX_LENGTH and text not in self._filters

    async def prepare(self, text: str) -> None:
        """Compile an expression in a thread. One at a time: clients with many of them must not take all threads."""
        async with self._compiling:
            if text not in self._filters:
                self._store(text, await self._run(_compiled, text))

    def filter(self, expression_type: str | None, text: str | None) -> SqlFilter:
        """The filter of an expression.

        Raises SubscriptionError, with the position in the text and the reason, for one that cannot be compiled, for a
        missing one, and for a type other than SQL92.
        """
        if expression_type != SQL92:
            raise SubscriptionError(f"the expression type {str(expression_type)[:64]!r} is neither TAG nor SQL92")
        if not text:
            raise SubscriptionError("the subscription has no expression")
        found = self._filters.get(text)
        if found is None:
            found = _compiled(text)
            self._store(text, found)
        else:
            self._filters.move_to_end(text)
        if isinstance(found, SubscriptionError):
            raise SubscriptionError(str(found))
        return found

    def _store(self, text: str, found: SqlFilter | SubscriptionError) -> None:
        self._is_loaded = True
        cost = len(text) + _OWN
        if cost > self._most:
            return
        self._filters[text] = found
        self._size += cost
        while self._size > self._most:
            self._size -= len(self._filters.popitem(last=False)[0]) + _OWN


def _compiled(text: str) -> SqlFilter | SubscriptionError:
    # The first use loads the parser, which takes a tenth of a second: brokers without expressions do not need it.
    from trimq.protocol.sql92 import ExpressionError, compile_expression  # noqa: PLC0415

    try:
        return SqlFilter(text, compile_expression(text).matches_text)
    except ExpressionError as error:
        return SubscriptionError(f"the SQL92 expression is not valid at position {error.position}: {error.reason}")
