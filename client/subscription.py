"""Subscriptions: which messages of a topic a consumer wants, by tags or by an SQL92 expression over properties."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from trimq.client.errors import UsageError
from trimq.protocol.body import SubscriptionData
from trimq.protocol.hashing import tags_code
from trimq.protocol.topic_rules import topic_problem

ALL: Final = "*"


class Sql(NamedTuple):
    """A subscription by an SQL92 expression over the messages' properties.

    The broker evaluates it, and must be configured with ``enablePropertyFilter=true``. docs/sql92.md describes the
    language.

    >>> Sql("amount > 10 AND region = 'eu'").expression
    "amount > 10 AND region = 'eu'"
    """

    expression: str


class Subscription:
    """A topic with its filter. ``version`` (ms since the epoch) lets the broker recognize the newer of two.

    Raises UsageError for an invalid topic name or tag expression, and for an SQL92 expression that brokers refuse; the
    text has the position and the reason.

    >>> sorted(Subscription("Orders", "paid || refunded", version=1).tags)
    ['paid', 'refunded']
    """

    __slots__ = ("data", "tags", "topic")

    def __init__(self, topic: str, wanted: str | Sql, version: int) -> None:
        problem = topic_problem(topic)
        if problem is not None:
            raise UsageError(problem)
        self.topic: str = topic
        self.data: SubscriptionData
        if isinstance(wanted, Sql):
            check_expression(wanted.expression)
            self.tags: frozenset[str] = frozenset()
            self.data = SubscriptionData(
                topic=topic, sub_string=wanted.expression, sub_version=version, expression_type="SQL92"
            )
            return
        tags = parse_tags(wanted)
        self.tags = frozenset(tags)
        self.data = SubscriptionData(
            topic=topic,
            sub_string=" || ".join(tags) if tags else ALL,
            tags_set=tags,
            code_set=[tags_code(tag) for tag in tags],
            sub_version=version,
        )

    @property
    def is_sql(self) -> bool:
        """Whether it is an SQL92 expression."""
        return self.data.expression_type == "SQL92"


def check_expression(text: str) -> None:
    """Raises UsageError for an SQL92 expression that brokers refuse: they would only answer the pulls with an error.

    >>> check_expression("amount > 10 AND region = 'eu'")
    """
    # Imported here: most consumers filter by tag, or not at all.
    from trimq.protocol.sql92 import ExpressionError, compile_expression  # noqa: PLC0415

    try:
        compile_expression(text)
    except ExpressionError as error:
        raise UsageError(
            f"the SQL92 expression {text[:200]!r} is not valid at position {error.position}: {error.reason}"
        ) from None


def check_filter(wanted: str | Sql) -> None:
    """Raises UsageError for an invalid tag or SQL92 expression.

    >>> check_filter("paid || refunded")
    """
    if isinstance(wanted, Sql):
        check_expression(wanted.expression)
    else:
        parse_tags(wanted)


def parse_tags(expression: str) -> list[str]:
    """The tags of ``a || b``; an empty list, that is no filter, for ``*`` and for an empty text.

    Raises UsageError for an empty tag, as in ``a ||``.

    >>> parse_tags("paid || refunded"), parse_tags("*")
    (['paid', 'refunded'], [])
    """
    if expression.strip() in ("", ALL):
        return []
    tags = [tag.strip() for tag in expression.split("||")]
    if not all(tags):
        raise UsageError(f"the subscription {expression!r} has an empty tag; tags are written as 'a || b'")
    return list(dict.fromkeys(tags))


def parse_subscriptions(wanted: str | Mapping[str, str | Sql], version: int) -> dict[str, Subscription]:
    """Subscriptions by topic, from ``{"Orders": "paid || refunded"}`` or from the name of one topic.

    Raises UsageError if there is no topic, and for an invalid topic name, tag or SQL92 expression.

    >>> parse_subscriptions("Orders", 1)["Orders"].data.sub_string
    '*'
    """
    table = {wanted: ALL} if isinstance(wanted, str) else wanted
    if not table:
        raise UsageError("a consumer needs at least one topic")
    return {topic: Subscription(topic, expression, version) for topic, expression in table.items()}
