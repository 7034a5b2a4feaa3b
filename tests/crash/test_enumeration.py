"""Cuts and faults at every disk call of the script; enumeration.py and faults.py define the states.

``make crash`` enumerates all cuts of one script, and a third of the errors, CI a share of that (share.py);
``make nightly`` three scripts with more cuts of each recovery, and all errors; ``make test`` a sample.
"""

import sys
from dataclasses import replace
from random import Random

import pytest

from tests.crash import faults
from tests.crash.enumeration import (
    Enumeration,
    Expected,
    State,
    Tally,
    in_processes,
    part_of,
    record,
)
from tests.crash.images import NameChange
from tests.crash.losses import Damage, Loss, Survivor, survivor
from tests.crash.script import Recalling
from tests.crash.share import share

SEED = 1
STRETCHES = 24
PARTS = 24


def _say(capsys: pytest.CaptureFixture[str], text: object) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{text}\n")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_cut_at_any_call_breaks_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    """All cuts, and in every third stretch of the script also one during each recovery.

    States that equal another are not counted.
    """
    whole = Tally()
    calls = [(SEED, part, STRETCHES, int(part % 3 == 0)) for part in share().parts(STRETCHES)]
    for tally in in_processes(part_of, calls):
        whole.add(tally)
    _say(capsys, f"seed {SEED}: {whole}")
    assert sum(whole.operations.values()) >= 60
    assert share().of > 1 or set(whole.by_loss) == {loss.value for loss in Loss}
    assert whole.states - whole.second >= share().least(10_000)
    assert whole.second >= share().least(1_000)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_an_error_at_any_call_breaks_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    """Every third of the errors: two of three calls fail, with EIO and ENOSPC in turn."""
    whole = faults.FaultTally()
    parts = [3 * part for part in share().parts(PARTS // 3)]
    for tally in in_processes(faults.part_of, [(1, part, PARTS) for part in parts]):
        whole.add(tally)
    _say(capsys, whole)
    assert whole.runs == sum(len(faults.Faults(1).all()[part::PARTS]) for part in parts)
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


def test_equal_states_are_checked_once() -> None:
    found = Enumeration(3)
    found.run(200, 800, second=2)
    states, equal = found.tally.states, found.tally.equal
    assert states > found.tally.second > 0
    found.run(200, 800, second=0)
    assert found.tally.states == states
    assert found.tally.equal > equal
    assert sum(found.tally.by_loss.values()) == states - found.tally.second


def test_what_makes_two_states_equal() -> None:
    """The same disk, also on the device; the same promise; no fewer crashes: a timed message may come after each."""
    found = Enumeration(3)
    first = State(3, 200, Loss.ALL)
    second = State(3, 200, Loss.ALL, ((5, Loss.ALL),))
    image = found.recording.images[200]
    lost = survivor(image, Loss.ALL, Random(0))
    killed = survivor(image, Loss.NOTHING, Random(0))
    assert lost is not None
    assert killed is not None
    expected = Expected(image.moment, killed=False)
    assert found._is_new(second, lost, expected)
    assert not found._is_new(second, lost, expected)
    assert found._is_new(first, lost, expected), "it was checked after two crashes, and not after one"
    assert not found._is_new(first, lost, expected)
    assert found._is_new(first, lost, expected._replace(killed=True))
    assert found._is_new(first, lost, expected._replace(damage=(Damage(0, 10),)))
    assert found._is_new(first, lost, expected._replace(damaged=True))
    assert found._is_new(first, killed, expected)
    assert found._is_new(first, Survivor(replace(killed.found, still_up=None)), expected), "all of it is on the device"
    file = next(iter(image.files.values()))
    for up in (
        replace(image, durable_names={}),
        replace(image, pending=(NameChange(("/store/lock",), ()),)),
        replace(image, files={**image.files, file.number: replace(file, durable=file.durable + b"1")}),
        replace(image, files={**image.files, file.number: replace(file, blocks=frozenset({99}))}),
    ):
        assert found._is_new(first, Survivor(replace(killed.found, still_up=up)), expected)
    disk = lost.found
    for number, data in disk.data.items():
        for other in (
            replace(disk, data={**disk.data, number: data + b"1"}),
            replace(disk, blocks={**disk.blocks, number: frozenset({99})}),
            replace(disk, modified_ms={**disk.modified_ms, number: 1}),
        ):
            assert found._is_new(first, Survivor(other), expected)
    assert not found._is_new(second, lost, expected)
    assert found.tally.equal == 3


@pytest.mark.parametrize("text", ["1:300:PAGES", "12:7:ONE_LOST+40:ALL"])
def test_a_state_can_be_named(text: str) -> None:
    assert str(State.parse(text)) == text


def test_tallies_add_up() -> None:
    whole, part = Tally(states=1, second=0, calls=5), Tally(states=2, second=1, calls=5)
    whole.add(part)
    assert (whole.states, whole.second, whole.calls) == (3, 1, 5)
