import pytest

from trimq.remoting.runtime.durations import Durations
from trimq.remoting.runtime.loop_probe import LoopProbe


def test_each_duration_is_in_the_first_bucket_that_is_long_enough() -> None:
    durations = Durations((0.1, 1.0))
    for seconds in (0.0, 0.1, 0.5, 1.0, 2.0):
        durations.add(seconds)
    assert durations.counts == [2, 2, 1]
    assert durations.total == pytest.approx(3.6)


def test_the_longest_stop_is_remembered_for_a_while() -> None:
    probe = LoopProbe()
    start = probe._turned
    probe.look(start, start + 0.2)
    assert probe.longest == pytest.approx(0.2)
    probe.look(start + 31, start + 31)
    assert probe.longest == pytest.approx(0.2)
    probe.look(start + 62.5, start + 62.5)
    assert probe.longest == 0
    probe.look(start + 63, start + 62)  # early: not late
    assert probe.longest == 0
    assert sum(probe.lateness.counts) == 4
