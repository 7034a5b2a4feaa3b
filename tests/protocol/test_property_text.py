"""The readers of property text: each optimized one gives the same results as the simple one."""

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trimq.protocol.message_keys import has_key, index_keys, index_keys_of
from trimq.protocol.property_names import FAST_NAMES, NOT_IN_A_BATCH, SLOW_NAMES, SLOW_PREFIXES
from trimq.protocol.property_text import (
    are_fast,
    closed,
    columns_of,
    decode_properties,
    has_key_for_sure,
    join_properties,
    key_text,
    ordinary,
    pairs,
    property_of,
    spans,
)

ANY = st.text("ab\x01\x02\x03", max_size=14)
RESERVED = st.frozensets(st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "WAIT", "__SHARDINGKEY", "AK"]), max_size=2)
NAMES = st.one_of(
    st.sampled_from(["KEYS", "UNIQ_KEY", "TAGS", "WAIT", *sorted(SLOW_NAMES), *sorted(FAST_NAMES)]),
    st.sampled_from(["__mine", "INNER_x", "POP_", "KEY", "TAGS2"]),
    st.text("AKx_\x01", max_size=4),
)
VALUES = st.one_of(st.sampled_from(["true", "false", "k1 k2", "7F00A1"]), st.text("a\x01 \xe4", max_size=4))
ITEMS = st.lists(st.tuples(NAMES, VALUES), max_size=5)


def plainly(text: str) -> list[tuple[str, str]]:
    """The format as specified, step by step."""
    found = []
    for piece in text.split("\x02"):
        name, separator, value = piece.partition("\x01")
        if separator and name and value:
            found.append((name, value))
    return found


@given(ANY)
@example("\x01b\x01c\x02d\x01e")
def test_every_reader_finds_what_is_there(text: str) -> None:
    expected = plainly(text)
    assert pairs(text) == expected
    assert decode_properties(text) == dict(expected)
    assert [(found.name, found.value) for found in spans(text)] == expected
    assert all(text[found.at :].startswith(found.value) for found in spans(text))
    for name in {"a", "b", *(name for name, _ in expected)}:
        assert property_of(text, name) == dict(expected).get(name, "")
    assert plainly(closed(text)) == expected


def test_a_text_without_pairs_is_not_searched_from_each_of_its_letters() -> None:
    """Quadratic time would be a thousand million steps."""
    assert pairs("a" * 32_767) == []


@given(ITEMS)
def test_keys_of_the_text_are_those_of_the_properties(items: list[tuple[str, str]]) -> None:
    text = "".join(f"{name}\x01{value}\x02" for name, value in items)
    assert index_keys_of(text) == index_keys(decode_properties(text))


@given(ITEMS, st.sampled_from(["", "\x02", "x"]), RESERVED)
def test_what_is_ordinary_means_the_same_piece_by_piece(
    items: list[tuple[str, str]], end: str, reserved: frozenset[str]
) -> None:
    text = "".join(f"{name}\x01{value}\x02" for name, value in items) + end
    match = ordinary(reserved)(text)
    properties = decode_properties(text)
    if match is None:
        well_formed = join_properties(dict(items)) == text and properties == dict(items)
        unique = re.fullmatch("[0-9A-Za-z]*", properties.get("UNIQ_KEY", ""))
        ordinary_values = unique and properties.get("WAIT", "true") == "true"
        assert not (well_formed and ordinary_values and are_fast(properties, reserved)), properties
        return
    assert match.groups() == (properties.get("KEYS"), properties.get("UNIQ_KEY"), properties.get("TAGS"))
    assert are_fast(properties, reserved)
    assert SLOW_NAMES.isdisjoint(properties)
    assert reserved.isdisjoint(properties)
    assert not any(name.startswith(SLOW_PREFIXES) and name not in FAST_NAMES for name in properties)
    assert properties.get("WAIT", "true") == "true"
    assert re.fullmatch("[0-9A-Za-z]*", properties.get("UNIQ_KEY", ""))


def test_a_name_without_a_meaning_is_a_user_property() -> None:
    assert are_fast(["colour", "Delay", "KEYSX"], frozenset())
    assert not are_fast(["INNER_MULTI_DISPATCH"], frozenset())
    assert not are_fast(["__unknown"], frozenset())
    assert are_fast(["__SHARDINGKEY"], frozenset())
    assert not are_fast(["colour"], frozenset({"colour"}))
    assert ordinary(frozenset())("colour\x01red\x02") is not None
    assert ordinary(frozenset({"colour"}))("colour\x01red\x02") is None
    assert ordinary(frozenset({"colour"}))("colours\x01red\x02") is not None


def test_each_slow_name_is_slow() -> None:
    for name in SLOW_NAMES:
        assert not are_fast([name], frozenset())
        assert ordinary(frozenset())(f"{name}\x011\x02") is None
    for name in FAST_NAMES - {"WAIT"}:
        assert are_fast([name], frozenset())
        assert ordinary(frozenset())(f"{name}\x011\x02") is not None


@pytest.mark.alone
def test_a_text_that_does_not_match_costs_no_more_than_its_length() -> None:
    text = "a\x01b\x02" * 8000 + "\x02"
    began = time.process_time()
    assert ordinary(frozenset())(text) is None
    assert time.process_time() - began < 0.1


@given(st.lists(ITEMS, min_size=1, max_size=4), st.booleans())
def test_columns_are_what_each_text_says(messages: list[list[tuple[str, str]]], is_open: bool) -> None:
    texts = ["".join(f"{name}\x01{value}\x02" for name, value in items) for items in messages]
    texts = [text[:-1] if is_open else text for text in texts]
    found = columns_of([text.encode() for text in texts])
    if found is None:
        return
    for text, (unique, tag, words) in zip(texts, found, strict=True):
        properties = decode_properties(text)
        assert (unique, tag, words) == tuple(properties.get(name, "") for name in ("UNIQ_KEY", "TAGS", "KEYS"))
        assert NOT_IN_A_BATCH.isdisjoint(properties)


@given(st.lists(st.tuples(st.sampled_from(["KEYS", "UNIQ_KEY", "aKEYS"]), st.sampled_from(["k", "k j", "jk"]))))
def test_who_has_a_key_for_sure_has_it(items: list[tuple[str, str]]) -> None:
    text = "".join(f"{name}\x01{value}\x02" for name, value in items)
    found = has_key_for_sure(b"head" + text.encode(), 4, key_text("k"))
    has = has_key(decode_properties(text), "k")
    assert has or not found
    if len({name for name, _ in items}) == len(items) and "aKEYS" not in dict(items):
        assert found == has


def test_text_of_properties() -> None:
    assert join_properties({"a": "1", "b": "2"}) == "a\x011\x02b\x012\x02"
    assert (closed(""), closed("a\x011"), closed("a\x011\x02")) == ("", "a\x011\x02", "a\x011\x02")
