"""BackOff: bounded, growing, random."""

import random

from trimq.remoting.client.back_off import BackOff


def test_the_first_attempt_is_free() -> None:
    assert BackOff().delay(5.0) == 0


def test_the_bound_doubles_up_to_the_most_and_the_delay_is_anywhere_below() -> None:
    back_off = BackOff(0.1, 1.0, random.Random(1).uniform)
    for bound in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        samples = []
        for seed in range(200):
            one = BackOff(0.1, 1.0, random.Random(seed).uniform)
            one.failures = back_off.failures
            one.failed(100.0)
            samples.append(one.delay(100.0))
        assert max(samples) <= bound
        assert max(samples) > 0.9 * bound
        assert min(samples) < 0.1 * bound
        back_off.failed(100.0)


def test_it_shrinks_with_time_and_starts_again_after_a_success() -> None:
    back_off = BackOff(1.0, 1.0)
    back_off.failed(100.0)
    delay = back_off.delay(100.0)
    assert back_off.delay(100.0 + delay / 2) < delay
    assert back_off.delay(102.0) == 0
    back_off.failed(102.0)
    back_off.succeeded()
    assert (back_off.delay(102.0), back_off.failures) == (0, 0)


def test_very_many_failures_do_not_overflow() -> None:
    back_off = BackOff(most=10)
    for _ in range(5000):
        back_off.failed(0.0)
    assert back_off.delay(0.0) <= 10
