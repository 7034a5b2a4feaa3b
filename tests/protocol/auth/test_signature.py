"""Signatures of requests, against vectors made with `openssl dgst -sha1 -hmac`."""

import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.auth.signature import content, is_valid, sign

FIELDS = {"topic": "T", "queueId": "3", "AccessKey": "me"}

# printf 'me3T' | openssl dgst -sha1 -hmac 12345678 -binary | base64 (and so on)
VECTORS = [
    ("12345678", FIELDS, b"", 505, "me3T", "TtH2/hLBnJwPlFcjUA+YvuD5L9g="),
    ("12345678", FIELDS, b"hello", 505, "me3Thello", "NdzXtCfE0JvArLSGmQUm0lUZ0Ew="),
    ("12345678", FIELDS | {"SecurityToken": "tok"}, b"", 505, "metok3T", "8mhbT+GwAuFYmTpDLNaO1wv3888="),
    ("12345678", {"AccessKey": "me", "_UNIQUE_KEY_QUERY": "true"}, b"", 394, "metrue", "c2uXFmztSIJnYKwvxyBbUYMQVqo="),
    ("12345678", {"AccessKey": "me", "_UNIQUE_KEY_QUERY": "true"}, b"", 393, "me", "q2PIvNKICsicJCtLrZPbGGYL1JQ="),
    ("gehäim", {"AccessKey": "Jürgen", "topic": "主题"}, b"", 505, "Jürgen主题", "Mc7UvrnrbqauUV8nYmaYnmVMhWw="),
]


@pytest.mark.parametrize(("secret", "fields", "body", "version", "text", "expected"), VECTORS)
def test_vectors(secret: str, fields: dict[str, str], body: bytes, version: int, text: str, expected: str) -> None:
    assert content(fields, body, version) == text.encode()
    assert sign(secret, fields, body, version) == expected
    assert is_valid(secret, expected, fields | {"Signature": expected}, body, version)


def test_keys_are_sorted_by_utf_16_code_units_as_javas() -> None:
    # U+1F600 begins with the code unit D83D, which is less than E000; by code points it is the other way round.
    assert content({"\ue000": "second", "\U0001f600": "first", "a": "zero"}, b"", 505) == b"zerofirstsecond"


def test_halves_of_a_pair_become_what_java_sends() -> None:
    assert content({"a": "x\ud83d", "b": "y"}, b"", 505) == b"x?y"
    assert content({"a": "x\ud83d", "b": "\ude00y"}, b"", 505) == "x\U0001f600y".encode()


def test_the_body_may_be_a_view() -> None:
    assert content(FIELDS, memoryview(b"hello"), 505) == b"me3Thello"
    assert sign("s", FIELDS, memoryview(b"hello"), 505) == sign("s", FIELDS, bytearray(b"hello"), 505)


@pytest.mark.parametrize(
    "signature",
    [
        None,
        "",
        "=",
        "no base64!",
        "ä",
        "\ud800",
        "\0",
        "NdzXtCfE0JvArLSGmQUm0lUZ0Ew= ",
        "NdzXtCfE0JvArLSGmQUm0lUZ0Ew=\n",
        "NdzXtCfE0JvArLSGmQUm0lUZ0Ew=".rstrip("="),
        "NdzXtCfE0JvArLSGmQUm0lUZ0Ew=".lower(),
    ],
)
def test_other_texts_are_no_signature(signature: str | None) -> None:
    assert not is_valid("12345678", signature, FIELDS, b"hello", 505)


@given(
    st.text(min_size=1),
    st.dictionaries(st.text(), st.text()),
    st.binary(),
    st.integers(0, 600),
    st.data(),
)
def test_a_signature_is_of_its_secret_values_and_body_only(
    secret: str, fields: dict[str, str], body: bytes, version: int, data: st.DataObject
) -> None:
    signature = sign(secret, fields, body, version)
    assert len(signature) == 28
    assert is_valid(secret, signature, fields | {"Signature": data.draw(st.text())}, body, version)
    assert not is_valid(secret + "x", signature, fields, body, version)
    assert not is_valid(secret, signature, fields, body + b"x", version)
    # HMAC fills keys with zeros: a secret with a zero behind it is the same key. Every other one is another.
    other = bytearray(base64.b64decode(signature))
    at = data.draw(st.integers(0, 19))
    other[at] ^= data.draw(st.integers(1, 255))
    assert not is_valid(secret, base64.b64encode(other).decode(), fields, body, version)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))), st.binary())
def test_the_order_in_which_fields_arrive_does_not_count(fields: dict[str, str], body: bytes) -> None:
    turned = dict(reversed(fields.items()))
    assert content(turned, body, 505) == content(fields, body, 505)
    reference = "".join(
        fields[key] for key in sorted(fields, key=lambda key: key.encode("utf-16-be")) if key != "Signature"
    )
    assert content(fields, body, 505) == reference.encode() + body
    assert (
        sign("k", fields, body, 505)
        == base64.b64encode(hmac.new(b"k", reference.encode() + body, hashlib.sha1).digest()).decode()
    )


def test_signatures_are_compared_in_a_time_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 8882 of RocketMQ: a comparison that ends at the first byte that differs says how many were right."""
    right = sign("12345678", FIELDS, b"", 505)
    compared: list[tuple[object, object]] = []

    def compare(a: object, b: object) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for given_one in (right, "A" * 28, "", None):
        assert is_valid("12345678", given_one, FIELDS, b"", 505) == (given_one == right)
    assert compared == [(right.encode(), (text or "").encode()) for text in (right, "A" * 28, "", None)]
