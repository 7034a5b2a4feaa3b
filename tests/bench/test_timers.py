"""The benchmark of timed messages, with small numbers: every message is counted, and none comes early."""

import pytest

from bench.processes import our_command
from bench.timers import PRECISION_MS, measure


@pytest.mark.nightly
@pytest.mark.alone
def test_it_measures_what_it_says() -> None:
    found = measure(our_command(), messages=2_000, load=200, seconds=3)
    pending, delivery, lateness = found["pending"], found["delivery"], found["lateness"]
    assert pending["messages"] == delivery["messages"] == 2_000
    assert pending["anonymous_mib_pending"] > pending["anonymous_mib_before"] > 5
    assert min(pending["sends_a_second"], pending["enqueued_a_second"], delivery["delivered_a_second"]) > 100
    assert lateness["messages"] == 200
    assert PRECISION_MS <= lateness["ms_least"] <= lateness["ms_p50"] <= lateness["ms_p99"]
