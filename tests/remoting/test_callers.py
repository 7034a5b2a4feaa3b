"""Requests a second, and who is remembered, with a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.remoting.runtime.address_key import address_key
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.callers import Callers, TokenBucket


def test_a_bucket_has_the_requests_of_a_second() -> None:
    bucket = TokenBucket(10, 0.0)
    assert bucket.room(0.0) == 10
    bucket.take(10)
    assert bucket.room(0.0) == 0
    assert bucket.seconds_to_next() == pytest.approx(0.1)
    assert bucket.room(0.25) == 2
    bucket.take(2)
    bucket.take(-1)
    assert bucket.room(0.25) == 1
    assert bucket.seconds_to_next() == 0
    assert bucket.room(100.0) == 10


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 3), st.integers(0, 2000)), max_size=50))
def test_never_more_than_the_rate_and_one_second(rate: int, steps: list[tuple[float, int]]) -> None:
    now, served = 0.0, 0
    bucket = TokenBucket(rate, now)
    for pause, wanted in steps:
        now += pause
        count = min(wanted, bucket.room(now))
        bucket.take(count)
        served += count
        assert served <= rate * (now + 1) + 1e-6


def test_connections_are_counted_and_a_new_one_is_no_new_allowance() -> None:
    clock = ManualClock()
    callers = Callers(5, clock)
    first = callers.join("a")
    assert callers.join("a") is first
    assert callers.connections("a") == 2
    assert first.bucket is not None
    first.bucket.take(first.bucket.room(clock.monotonic()))
    callers.leave(first)
    callers.leave(first)
    assert callers.connections("a") == 0
    again = callers.join("a")
    assert again.bucket is not None
    assert again.bucket.room(clock.monotonic()) == 0
    clock.advance(1)
    assert again.bucket.room(clock.monotonic()) == 5


def test_who_left_a_second_ago_is_forgotten() -> None:
    clock = ManualClock()
    callers = Callers(5, clock)
    for key in "abc":
        callers.leave(callers.join(key))
    assert len(callers) == 3
    clock.advance(0.9)
    callers.leave(callers.join("b"))
    clock.advance(0.2)
    callers.leave(callers.join("d"))
    assert len(callers) == 2  # b and d


def test_no_more_than_the_most_are_remembered() -> None:
    callers = Callers(5, ManualClock(), most_left=3)
    kept = callers.join("kept")
    for number in range(100):
        callers.leave(callers.join(str(number)))
    assert len(callers) == 4
    assert callers.join("kept") is kept


def test_without_a_rate_nothing_is_remembered() -> None:
    callers = Callers(0, ManualClock())
    caller = callers.join("a")
    assert caller.bucket is None
    callers.leave(caller)
    assert len(callers) == 0


def test_one_refusal_a_minute_is_logged() -> None:
    caller = Callers(0, ManualClock()).join("a")
    assert [caller.may_log(now) for now in (0.0, 1.0, 59.9, 60.0, 61.0)] == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("no:address", "no:address"),
        ("sim-client", "sim-client"),
    ],
)
def test_whom_an_address_belongs_to(address: str, key: str) -> None:
    assert address_key(address) == key
