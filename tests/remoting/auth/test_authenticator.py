"""Who a request is from."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remoting.auth.stores import CANARY, filled
from trimq.protocol.auth.model import UserChange, UserStatus
from trimq.protocol.auth.signature import sign
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth import authenticator as module
from trimq.remoting.auth.authenticator import MOST_NAMES, WRONG_SIGNATURE, Authenticator
from trimq.remoting.runtime.clock import ManualClock

HERE, THERE = "10.0.0.1", "10.0.0.2"


def signed(username: str = "me", secret: str = CANARY, body: bytes = b"", **fields: str) -> dict[str, str]:
    fields = {"AccessKey": username} | fields
    return fields | {"Signature": sign(secret, fields, body, 505)}


def refused(who: Authenticator, fields: dict[str, str], body: bytes = b"", address: str = HERE) -> str:
    with pytest.raises(RemotingError) as caught:
        who.verify(fields, body, 505, address, 310)
    assert caught.value.code == 16
    assert CANARY not in repr(caught.value)
    assert fields.get("Signature", "?") not in repr(caught.value)
    return caught.value.remark


async def test_a_signed_request_is_its_users() -> None:
    store, _ = await filled()
    who = Authenticator(store, ManualClock())
    assert who.verify(signed(topic="T", body=b"hello"), b"hello", 505, HERE, 310) is store.user("me")
    assert who.verify(signed("root", "root-" + CANARY), b"", 505, HERE, 310) is store.user("root")
    assert who.verify(signed(topic="T", body=b"hello"), memoryview(b"hello"), 505, HERE, 310) is store.user("me")
    assert (who.failures, who.limited) == (0, 0)


async def test_the_texts_of_refusals() -> None:
    store, _ = await filled()
    who = Authenticator(store, ManualClock())
    assert refused(who, {}) == "username cannot be null."
    assert refused(who, {"AccessKey": ""}) == "username cannot be null."
    wrong = "check signature failed."
    assert refused(who, {"AccessKey": "me"}) == wrong
    assert refused(who, signed(secret="other")) == wrong
    assert refused(who, signed(topic="T") | {"topic": "U"}) == wrong
    assert refused(who, signed(), b"another body") == wrong
    assert refused(who, signed("root")) == wrong
    # A name that no user has cannot be distinguished from one with another secret.
    assert refused(who, signed("unknown")) == wrong
    await store.update_user("me", UserChange(user_status=UserStatus.DISABLE))
    assert refused(who, signed()) == "User:me is disabled."
    assert refused(who, signed(secret="other")) == wrong
    assert who.failures == 10


async def test_an_unknown_user_costs_a_signature_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = await filled()
    who = Authenticator(store, ManualClock())
    compared: list[int] = []

    def same(_: str | None, digest: bytes) -> bool:
        compared.append(len(digest))
        return True

    monkeypatch.setattr(module, "is_same", same)
    # Even if its signature were the one computed with the secret that no user has.
    assert refused(who, signed("unknown")) == "check signature failed."
    assert compared == [20]


async def test_a_change_counts_for_the_next_request() -> None:
    store, _ = await filled()
    who = Authenticator(store, ManualClock())
    who.verify(signed(), b"", 505, HERE, 310)
    await store.update_user("me", UserChange("new"))
    assert refused(who, signed()) == "check signature failed."
    assert who.verify(signed(secret="new"), b"", 505, HERE, 310).password == "new"
    await store.delete_user("me")
    assert refused(who, signed(secret="new")) == "check signature failed."


async def test_a_kept_secret_is_not_used_up() -> None:
    store, _ = await filled()
    who = Authenticator(store, ManualClock())
    for number in range(3):
        who.verify(signed(n=str(number)), b"", 505, HERE, 310)
    assert len(who._macs) == 1


async def test_after_many_wrong_signatures_a_name_is_not_looked_at_from_an_address() -> None:
    store, _ = await filled()
    clock = ManualClock()
    who = Authenticator(store, clock, failures_per_minute=3)
    for _ in range(3):
        assert not who.is_limited(HERE)
        assert refused(who, signed(secret="other")) == WRONG_SIGNATURE
        clock.advance(1)
    limited = (
        "too many requests with this user's name and a wrong signature came from 10.0.0.1: all such are refused for up "
        "to a minute."
    )
    assert refused(who, signed()) == limited
    assert (who.failures, who.limited) == (4, 1)
    assert (who.is_limited(HERE), who.is_limited(THERE)) == (True, False)
    who.verify(signed(), b"", 505, THERE, 310)
    who.verify(signed("root", "root-" + CANARY), b"", 505, HERE, 310)  # another user, behind the same router
    clock.advance(56)
    assert refused(who, signed()) == limited
    clock.advance(1)
    who.verify(signed(), b"", 505, HERE, 310)
    assert not who._limit.addresses


async def test_unknown_names_are_limited_as_those_of_users() -> None:
    """Or the text would say which names there are."""
    store, _ = await filled()
    who = Authenticator(store, ManualClock(), failures_per_minute=2)
    texts = {}
    for name in ("me", "unknown"):
        texts[name] = [refused(who, signed(name, "guess")) for _ in range(3)]
    assert texts["me"] == texts["unknown"]
    for number in range(MOST_NAMES):
        refused(who, signed(f"other{number}", "guess"))
    assert len(who._limit.addresses[HERE].counts) == MOST_NAMES + 1
    assert refused(who, signed("root", "guess")) == refused(who, signed("nowhere", "guess"))
    long = "n" * 300
    assert refused(who, signed(long, "guess"), address=THERE) == WRONG_SIGNATURE
    assert list(who._limit.addresses[THERE].counts) == [""]


async def test_a_network_of_ipv6_is_one_address() -> None:
    store, _ = await filled()
    who = Authenticator(store, ManualClock(), failures_per_minute=3)
    for number in range(3):
        refused(who, signed(secret="other"), address=f"2001:db8::{number}")
    assert "too many" in refused(who, signed(), address="2001:db8::9")
    who.verify(signed(), b"", 505, "2001:db8:0:1::9", 310)


async def test_requests_without_a_signature_limit_no_address() -> None:
    store, _ = await filled()
    who = Authenticator(store, ManualClock(), failures_per_minute=3)
    for _ in range(10):
        refused(who, {})
    who.verify(signed(), b"", 505, HERE, 310)


async def test_the_table_of_addresses_is_bounded() -> None:
    store, _ = await filled()
    who = Authenticator(store, ManualClock(), failures_per_minute=2, most_addresses=10)
    for number in range(1000):
        refused(who, signed(secret="other"), address=HERE)
        refused(who, signed(secret="other"), address=f"10.1.{number // 256}.{number % 256}")
    assert len(who._limit.addresses) == 10
    # The one that fails again and again is not driven out by others.
    assert who.limited == 998


@settings(max_examples=50)
@given(st.dictionaries(st.text(), st.text(), max_size=5), st.binary(max_size=50))
async def test_any_fields_are_refused_or_signed(fields: dict[str, str], body: bytes) -> None:
    store, _ = await filled()
    who = Authenticator(store, ManualClock())
    named = {"AccessKey": "me"} | fields
    refused(who, named | {"AccessKey": "me", "Signature": fields.get("Signature", "x")}, body)
    named = fields | {"AccessKey": "me"}
    assert who.verify(named | {"Signature": sign(CANARY, named, body, 505)}, body, 505, HERE, 310).username == "me"


async def test_the_names_of_all_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_COUNTS", 40)
    store, _ = await filled()
    clock = ManualClock()
    who = Authenticator(store, clock)
    limit = who._limit
    for number in range(20):
        for name in range(10):
            refused(who, signed(f"name{name}", secret="no"), address=f"2001:db8:0:{number:x}::1")
        assert limit.counts == sum(len(found.counts) for found in limit.addresses.values()) <= 40
    assert list(limit.addresses) == [f"2001:db8:0:{number:x}::/64" for number in range(16, 20)]
    clock.advance(60)
    for number in range(16, 20):
        assert not limit.is_over(f"2001:db8:0:{number:x}::2", "name1")
    assert (limit.counts, len(limit.addresses)) == (0, 0)
