"""Stamps: what the SDK signs so that a recorded request is useless."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.auth.model import checked_username
from trimq.protocol.auth.signature import content
from trimq.protocol.auth.stamp import STAMP, Stamp, is_stamped, read_stamp, stamp_text
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.base import Header

SENDER = "Zk3v9Q-_abcdEFGH"
TEXT = stamp_text(310, 1_700_000_000_000, SENDER, 7)
stamps = st.builds(
    Stamp, st.integers(0, 2**31 - 1), st.integers(0, 10**15 - 1), st.just(SENDER.encode()), st.integers(0, 10**18 - 1)
)


@given(stamps, st.binary(max_size=20))
def test_what_is_written_is_read(stamp: Stamp, rest: bytes) -> None:
    # guards that nothing behind a stamp, which an attacker may move, changes how it is read
    signed = stamp_text(stamp.code, stamp.time, stamp.sender.decode(), stamp.number).encode() + rest
    assert is_stamped(signed)
    assert read_stamp(signed) == stamp


@given(st.integers(0, len(TEXT)), st.text("abz", min_size=1, max_size=3), st.text("!-", max_size=2))
def test_a_stamp_is_found_however_its_field_is_named_or_cut(cut: int, name: str, before: str) -> None:
    # guards against fields that are given other names: their values are signed in the same order
    original = {STAMP: TEXT, "AccessKey": "me", "a": "P"}
    renamed = {"!" + before: TEXT[:cut], "!" + before + name: TEXT[cut:], "AccessKey": "me", "b": "P"}
    assert content(renamed, b"x", 505) == content(original, b"x", 505)
    assert read_stamp(content(renamed, b"x", 505)) == Stamp(310, 1_700_000_000_000, SENDER.encode(), 7)


@pytest.mark.parametrize(
    "text", ["tmq1:", TEXT[:-1], TEXT.replace("310", "-1"), TEXT.replace("Z", "+"), TEXT.replace(":7;", ":;")]
)
def test_what_cannot_be_read(text: str) -> None:
    assert is_stamped(text.encode())
    assert read_stamp(text.encode()) is None


def test_the_name_sorts_before_those_of_all_headers() -> None:
    names: set[str] = set()
    kinds = [Header]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        names |= set(getattr(kind, "__struct_encode_fields__", ()))
    assert len(names) > 50
    assert min([*names, "AccessKey", "SecurityToken", "_UNIQUE_KEY_QUERY"]) > STAMP


def test_no_user_has_a_name_that_would_be_taken_for_a_stamp() -> None:
    assert checked_username("tmq") == "tmq"
    with pytest.raises(RemotingError, match="must not begin with tmq1:"):
        checked_username("tmq1:x")
