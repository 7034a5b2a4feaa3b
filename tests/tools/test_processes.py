"""What the report of a failed test shows of the processes that it has run."""

from pathlib import Path

import pytest

from tests.interop.harness import processes
from tests.interop.harness.processes import Process, ended_afterwards


@pytest.fixture(autouse=True)
def _no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "started", [])


def waiting(directory: Path, name: str) -> Process:
    process = Process(name, ["sleep", "60"], directory)
    process.start()
    return process


def test_an_error_leaves_its_processes_in_one_report(tmp_path: Path) -> None:
    with ended_afterwards(waiting(tmp_path, "shared")) as shared:
        with pytest.raises(KeyError), ended_afterwards(waiting(tmp_path, "own")) as own:
            raise KeyError
        assert not own.running
        assert processes.reported() == [own, shared]
        assert processes.reported() == [shared]
    assert processes.reported() == []


def test_what_ends_as_it_should_is_in_no_report(tmp_path: Path) -> None:
    with ended_afterwards(waiting(tmp_path, "own"), gracefully=False) as own:
        assert processes.reported() == [own]
    assert processes.reported() == []
