"""Subscriptions by tag: parses ``a || b`` into a set of tag hashes, and filters queue units by them.

Source: RocketMQ's FilterAPI and ExpressionMessageFilter. The broker compares hashes only; consumers compare the text,
so a hash collision costs a transfer and delivers nothing wrong.
"""

from typing import Final

from trimq.protocol.body import SubscriptionData
from trimq.protocol.hashing import string_hash

TAG: Final = "TAG"
ALL: Final = "*"
MAX_TEXT: Final = 32_768
"""Most characters of a subscription. It is limited because each held pull keeps its own in memory."""


class SubscriptionError(ValueError):
    """A subscription text that cannot be parsed."""


class TagFilter:
    """Accepts units whose tag hash is one of ``codes`` (the store's MessageFilter)."""

    __slots__ = ("codes",)

    needs_properties = False
    terms = 0

    def __init__(self, codes: frozenset[int]) -> None:
        self.codes = codes

    def match_tags(self, tags_code: int) -> bool:
        """True if the lower 32 bits of a unit's tags code, read as a signed number, are one of the hashes."""
        if tags_code in self.codes:
            return True
        low = tags_code & 0xFFFFFFFF
        return (low - 0x100000000 if low & 0x80000000 else low) in self.codes

    def match_record(self, properties: bytes) -> bool:  # noqa: ARG002 - the protocol's signature
        """Always True: the unit alone decides."""
        return True


def is_tag_type(expression_type: str | None) -> bool:
    """True for TAG and if no type is given. Any other type is SQL92 or unknown."""
    return not expression_type or expression_type == TAG


def parse_tags(topic: str, text: str | None, version: int = 0) -> SubscriptionData:
    """Parse a subscription. A blank text and ``*`` accept everything.

    Raises SubscriptionError for a text of separators only, such as ``||``, and for one that is too long.
    """
    if not text or text == ALL:
        return SubscriptionData(topic=topic, sub_string=ALL, sub_version=version)
    if len(text) > MAX_TEXT:
        raise SubscriptionError(f"the subscription has {len(text)} characters, the limit is {MAX_TEXT}")
    tags = [tag for tag in (piece.strip() for piece in text.split("||")) if tag]
    if not tags and not text.replace("||", ""):
        raise SubscriptionError(f"the subscription {text[:64]!r} names no tag")
    return SubscriptionData(
        topic=topic,
        sub_string=text,
        tags_set=tags,
        code_set=[string_hash(tag) for tag in tags],
        sub_version=version,
    )


def filter_for(subscription: SubscriptionData) -> TagFilter | None:
    """The store's filter for a subscription; None if it accepts everything."""
    if subscription.sub_string == ALL or not subscription.code_set:
        return None
    return TagFilter(frozenset(subscription.code_set))
