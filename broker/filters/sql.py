"""Subscriptions by SQL92 expression: a filter of the store that evaluates the properties of each record.

Source: RocketMQ's ExpressionMessageFilter and ExpressionForRetryMessageFilter, without the bit maps of the consume
queue extension: the properties of each candidate are read, as many as the scan limit of a pull allows.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

from trimq.broker.filters.fair_lock import FairLock
from trimq.broker.filters.tag import SubscriptionError
from trimq.protocol.property_text import property_of
from trimq.protocol.sql92.limits import MAX_LENGTH

SQL92: Final = "SQL92"
_MOST_CHARACTERS: Final = 1 << 18
"""Characters of the expressions in a cache. A compiled one takes some tens of bytes for each of them."""
_OWN: Final = 256
"""What an entry costs besides its text, in characters."""
_SHORT: Final = 128
"""Characters of an expression that is compiled in the event loop, which takes up to a millisecond or two."""
MOST_WAITING: Final = 256
"""Expressions of one client that wait to be compiled."""
_REAL_TOPIC: Final = "RETRY_TOPIC"

Match = Callable[[bytes], bool]
Run = Callable[..., Awaitable[Any]]


class SqlFilter:
    """Accepts the messages that an expression accepts (the store's MessageFilter)."""

    __slots__ = ("match_record", "terms", "text")

    needs_properties = True

    def __init__(self, text: str, match: Match, terms: int) -> None:
        self.text = text
        self.terms = terms
        self.match_record: Match = match
        """Whether the encoded properties of a record fulfil the expression."""

    def match_tags(self, _tags_code: int) -> bool:
        """Always True: the properties decide."""
        return True


class RetrySqlFilter:
    """The filter of a retry topic (filterSupportRetry): a message is filtered by the expression for its real topic.

    ``filters``: the group's, by topic. A message of a topic for which there is none is accepted.
    """

    __slots__ = ("_find", "terms")

    needs_properties = True

    def __init__(self, filters: Mapping[str, SqlFilter]) -> None:
        self._find = filters.get
        self.terms = max((each.terms for each in filters.values()), default=1)
        """The most terms that are evaluated for one message."""

    def match_tags(self, _tags_code: int) -> bool:
        """Always True: the properties decide."""
        return True

    def match_record(self, properties: bytes) -> bool:
        """Whether the properties fulfil the expression of the topic to which the message was sent first."""
        accept = self._find(property_of(str(properties, "utf-8", "replace"), _REAL_TOPIC))
        return accept is None or accept.match_record(properties)


Compiled = Mapping[str, SqlFilter | SubscriptionError]
"""Expressions that were compiled for one request: their filters, or why they cannot be compiled."""
NOTHING: Final[Compiled] = {}


class ExpressionCache:
    """Compiled expressions by text, and why others cannot be compiled; the most recently used ones.

    Heartbeats and pulls repeat their expressions. The size of the texts bounds how many are kept, and nothing relies
    on it that one is kept: ``prepare`` returns what it has compiled, and the request passes that on to ``filter``.
    ``run`` runs a function in a thread.
    """

    def __init__(self, run: Run, most: int = _MOST_CHARACTERS) -> None:
        self._run = run
        self._most = most
        self._size = 0
        self._filters: OrderedDict[str, SqlFilter | SubscriptionError] = OrderedDict()
        self._compiling = FairLock()
        self._waiting: dict[object, int] = {}
        """Expressions that wait to be compiled, by client."""
        self._is_loaded = False

    def is_slow(self, expression_type: str | None, text: str | None) -> bool:
        """Whether ``filter`` would keep the event loop for more than about a millisecond: then ``prepare`` it first."""
        return self.is_new(expression_type, text) and (len(text or "") > _SHORT or not self._is_loaded)

    def is_new(self, expression_type: str | None, text: str | None) -> bool:
        """Whether ``filter`` would compile it. False for what is refused without a look."""
        return expression_type == SQL92 and bool(text) and len(text or "") <= MAX_LENGTH and text not in self._filters

    async def prepare(self, texts: Collection[str], client: object) -> Compiled:
        """Compile expressions in a thread, one at a time for all clients, which take turns after each expression.

        Returns all of ``texts``, or fewer if more than ``MOST_WAITING`` of the client's would wait.
        """
        compiled = {text: self._filters[text] for text in texts if text in self._filters}
        waiting = self._waiting.get(client, 0)
        taken = [text for text in dict.fromkeys(texts) if text not in compiled][: max(0, MOST_WAITING - waiting)]
        left = len(taken)
        self._waiting[client] = waiting + left
        try:
            for text in taken:
                async with self._compiling.turn(client):
                    found = self._filters.get(text)
                    if found is None:
                        found = await self._run(_compiled, text)
                        self._store(text, found)
                    compiled[text] = found
                left -= 1
                self._done(client, 1)
        finally:
            self._done(client, left)
        return compiled

    def _done(self, client: object, count: int) -> None:
        waiting = self._waiting.get(client, 0) - count
        if waiting > 0:
            self._waiting[client] = waiting
        else:
            self._waiting.pop(client, None)

    def filter(self, expression_type: str | None, text: str | None, compiled: Compiled = NOTHING) -> SqlFilter:
        """The filter of an expression. ``compiled``: what was prepared for the request.

        Raises SubscriptionError, with the position in the text and the reason, for one that cannot be compiled, for a
        missing one, and for a type other than SQL92.
        """
        if expression_type != SQL92:
            raise SubscriptionError(f"the expression type {str(expression_type)[:64]!r} is neither TAG nor SQL92")
        if not text:
            raise SubscriptionError("the subscription has no expression")
        found = self._filters.get(text)
        if found is not None:
            self._filters.move_to_end(text)
        else:
            found = compiled.get(text)
            if found is None:
                found = _compiled(text)
                self._store(text, found)
        if isinstance(found, SubscriptionError):
            raise SubscriptionError(str(found))
        return found

    def _store(self, text: str, found: SqlFilter | SubscriptionError) -> None:
        self._is_loaded = True
        cost = len(text) + _OWN
        # A request may have compiled and stored the same text while a thread compiled it for another.
        if cost > self._most or text in self._filters:
            return
        self._filters[text] = found
        self._size += cost
        while self._size > self._most:
            self._size -= len(self._filters.popitem(last=False)[0]) + _OWN


def _compiled(text: str) -> SqlFilter | SubscriptionError:
    # The first use loads the parser, which takes a tenth of a second: brokers without expressions do not need it.
    from trimq.protocol.sql92 import Expression, ExpressionError  # noqa: PLC0415

    try:
        # Not compile_expression, which remembers expressions by number: the cache here is the only one of a broker.
        expression = Expression(text)
    except ExpressionError as error:
        return SubscriptionError(f"the SQL92 expression is not valid at position {error.position}: {error.reason}")
    return SqlFilter(text, expression.matches_text, expression.terms)
