"""Subscriptions by tag."""

import pytest

from trimq.broker.filters.tag import SubscriptionError, filter_for, is_tag_type, parse_tags
from trimq.protocol.hashing import string_hash


@pytest.mark.parametrize("text", [None, "", "*"])
def test_everything(text: str | None) -> None:
    assert filter_for(parse_tags("T", text)) is None


def test_tags_are_trimmed_and_hashed() -> None:
    subscription = parse_tags("T", " a||b  || ", 7)
    assert subscription.tags_set == ["a", "b"]
    assert subscription.code_set == [97, 98]
    assert subscription.sub_version == 7
    accept = filter_for(subscription)
    assert accept is not None
    assert [accept.match_tags(code) for code in (97, 98, 99, 0)] == [True, True, False, False]


def test_hash_of_an_unsigned_unit() -> None:
    code = string_hash("negative-hash-tag-zz")
    accept = filter_for(parse_tags("T", "negative-hash-tag-zz"))
    assert accept is not None
    assert accept.match_tags(code)
    assert accept.match_tags(code & 0xFFFFFFFF)
    assert accept.match_record(b"")


def test_endless_text() -> None:
    with pytest.raises(SubscriptionError):
        parse_tags("T", "a||" * 20_000)


def test_separators_only() -> None:
    with pytest.raises(SubscriptionError):
        parse_tags("T", "||")


@pytest.mark.parametrize(
    ("kind", "expected"), [(None, True), ("", True), ("TAG", True), ("SQL92", False), ("tag", False)]
)
def test_type(kind: str | None, expected: bool) -> None:
    assert is_tag_type(kind) is expected
