"""Subscriptions by tag: ``a || b`` as a set of tag hashes, and the filter that the store asks for each queue unit.

Source: RocketMQ's FilterAPI and ExpressionMessageFilter. The broker compares hashes only; consumers compare the text.
"""

from typing import Final

from trimq.protocol.body import SubscriptionData
from trimq.protocol.hashing import string_hash

TAG: Final = "TAG"
ALL: Final = "*"
MAX_TEXT: Final = 32_768
"""Characters of a subscription: held pulls keep theirs."""


class SubscriptionError(ValueError):
    """A subscription text that cannot be understood."""


class TagFilter:
    """Lets through units whose tag hash is one of ``codes`` (store's MessageFilter)."""

    __slots__ = ("codes",)

    needs_properties = False

    def __init__(self, codes: frozenset[int]) -> None:
        self.codes = codes

    def match_tags(self, tags_code: int) -> bool:
        """True where the lower 32 bits of a unit's tag code, as a signed number, are one of the hashes."""
        if tags_code in self.codes:
            return True
        low = tags_code & 0xFFFFFFFF
        return (low - 0x100000000 if low & 0x80000000 else low) in self.codes

    def match_record(self, properties: dict[str, str]) -> bool:  # noqa: ARG002 - the protocol's signature
        """Tags need no look at the record."""
        return True


def is_tag_type(expression_type: str | None) -> bool:
    """True for TAG and for none given: what is not is SQL92 or unknown."""
    return not expression_type or expression_type == TAG


def parse_tags(topic: str, text: str | None, version: int = 0) -> SubscriptionData:
    """The subscription that ``text`` means. Blank and ``*`` mean everything.

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
    """The store's filter for a subscription; None where everything is let through."""
    if subscription.sub_string == ALL or not subscription.code_set:
        return None
    return TagFilter(frozenset(subscription.code_set))
