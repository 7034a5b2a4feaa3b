"""Cuts and faults at every disk call of the script; enumeration.py and faults.py define the states.

Half of the enumeration is marked slow and runs in ``make crash``, as in CI; ``make test`` checks a sample.
"""

import sys

import pytest

from tests.crash import faults
from tests.crash.enumeration import (
    Enumeration,
    State,
    Tally,
    in_processes,
    part_of,
    record,
)
from tests.crash.losses import Loss
from tests.crash.script import Recalling

PARTS = 8


def _say(capsys: pytest.CaptureFixture[str], text: object) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{text}\n")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_cut_at_any_call_breaks_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    """Every second state of a seed, each with one cut during its recovery. `make nightly` checks all of more seeds."""
    whole = Tally()
    for tally in in_processes(part_of, [(1, part, PARTS, 1) for part in range(0, PARTS, 2)]):
        whole.add(tally)
    _say(capsys, whole)
    assert sum(whole.operations.values()) >= 60
    assert set(whole.by_loss) == {loss.value for loss in Loss}
    assert whole.states >= 4_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_error_at_any_call_breaks_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    whole = faults.FaultTally()
    for tally in in_processes(faults.part_of, [(1, part, PARTS) for part in range(PARTS)]):
        whole.add(tally)
    _say(capsys, whole)
    assert whole.runs == len(faults.Faults(1).all())
    assert whole.read_only
    assert whole.refused_starts


def test_a_sample_of_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    found = Enumeration(3)
    for part in range(0, 800, 150):
        found.run(part, 800, second=1)
    _say(capsys, found.tally)
    assert found.tally.states > 20


def test_a_sample_of_errors() -> None:
    found = faults.Faults(3)
    tally = found.run(5, 100)
    assert tally.runs > 10


def test_the_script_is_the_same_each_time() -> None:
    first, second = record(1), record(1)
    assert [image.call for image in first.images.values()] == [image.call for image in second.images.values()]
    assert first.events == second.events


def test_the_script_does_what_it_is_for() -> None:
    """Files of every kind roll over and are deleted, and the script uses both flush modes."""
    found = record(1)
    calls = [image.call for image in found.images.values()]

    def files(directory: str, call: str = "create") -> set[str]:
        return {name for name in calls if name.startswith(f"{call} /store/{directory}/")}

    assert len(files("commitlog")) > 4
    assert len(files("index")) > 4
    assert len({name for name in calls if name.startswith("rename ") and "/consumequeue/Beta/0/" in name}) > 2
    assert all(
        files(directory, "delete") for directory in ("commitlog", "index", "consumequeue/Beta", "consumequeue/Gamma")
    )
    assert found.operations["restart"] == 4
    assert found.operations["clean stop"] == 5
    assert found.operations["write_state"] >= 5
    assert sum(isinstance(event, Recalling) for event in found.events) >= 3


def test_a_kill_leaves_no_queue_file_without_a_unit() -> None:
    """Apache's recovery would take zeros at the file's front for a unit and shift the queue by one."""
    checked = 0
    for cut, image in record(1).images.items():
        for path, number in image.names.items():
            if path.startswith("/store/consumequeue/") and number is not None:
                checked += 1
                assert any(image.files[number].cache[:20]), f"{path} is empty before call {cut}, {image.call}"
    assert checked > 1000


@pytest.mark.parametrize("text", ["1:300:PAGES", "12:7:ONE_LOST+40:ALL"])
def test_a_state_can_be_named(text: str) -> None:
    assert str(State.parse(text)) == text


def test_tallies_add_up() -> None:
    whole, part = Tally(states=1, second=0, calls=5), Tally(states=2, second=1, calls=5)
    whole.add(part)
    assert (whole.states, whole.second, whole.calls) == (3, 1, 5)
