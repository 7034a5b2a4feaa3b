"""Pauses between tries at an object store."""

from random import Random

from trimq.broker.store.tiered.bucket.backoff import Backoff


def test_pauses_double_up_to_a_minute_and_begin_again_after_a_success() -> None:
    backoff = Backoff(Random(1))
    lowest = [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    for _ in range(2):
        pauses = [backoff.next() for _ in lowest]
        assert all(low <= pause <= 2 * low for low, pause in zip(lowest, pauses, strict=True))
        assert len(set(pauses)) == len(pauses)
        backoff.reset()


def test_two_brokers_do_not_come_back_together() -> None:
    one, other = Backoff(Random(1)), Backoff(Random(2))
    assert one.next() != other.next()
