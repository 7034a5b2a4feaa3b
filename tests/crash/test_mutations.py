"""The enumeration can fail: it detects a disk that breaks one rule, and a wrong list of sent messages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.crash.enumeration import BrokenStateError, Enumeration, Recording, State, record
from tests.crash.images import RecordingDisk
from tests.crash.losses import Loss
from tests.crash.script import Sent, Written
from tests.store.simdisk import _Inode
from trimq.broker.store.disk.disk import MappedPart


class LyingDisk(RecordingDisk):
    """Reports success for syncs that it skips: those of files and directories for whose path ``lies`` returns true."""

    def __init__(self, lies: Callable[[str], bool], **more: Any) -> None:
        super().__init__(**more)
        self._lies = lies

    def _path_of(self, inode: _Inode) -> str:
        return next((path for path, known in self._names.items() if known is inode), "")

    def data_sync(self, fd: int, part: MappedPart | None = None) -> None:
        inode = self._open[fd]
        if self._lies(self._path_of(inode)):
            self._call("data_sync", inode.number)
        else:
            super().data_sync(fd, part)

    def sync_directory(self, path: str) -> None:
        if self._lies(path):
            self._call("sync_directory", path)
        else:
            super().sync_directory(path)


def _enumerate(recording: Recording, step: int = 3) -> None:
    found = Enumeration(1, recording)
    for part in range(0, 100, step):
        found.run(part, 100, second=0, losses=(Loss.ALL, Loss.PAGES, Loss.NAMES))


def test_a_sound_disk_is_not_found_out() -> None:
    _enumerate(record(1), step=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(lambda path: "/commitlog/" in path, id="data of the log"),
        pytest.param(lambda path: path == "/store/commitlog", id="names of the log"),
        pytest.param(lambda path: path == "/store", id="names in the store"),
        pytest.param(lambda path: path.endswith("topics.json.tmp"), id="data of a state file"),
        pytest.param(lambda path: path == "/store/config", id="names of state files"),
        pytest.param(lambda path: "/index/" in path, id="data of the index"),
    ],
)
def test_a_sync_that_is_left_out_is_found(rule: Callable[[str], bool]) -> None:
    recording = record(1, lambda seed: LyingDisk(rule, seed=seed))
    with pytest.raises(BrokenStateError, match=r"python -m tests\.crash --replay 1:"):
        _enumerate(recording)


def test_a_message_that_was_never_sent_is_found() -> None:
    recording = record(1)
    first = next(at for at, event in enumerate(recording.events) if isinstance(event, Sent))
    sent = recording.events[first]
    assert isinstance(sent, Sent)
    recording.events[first] = sent._replace(body=b"another")
    with pytest.raises(BrokenStateError, match="was never sent"):
        _enumerate(recording)


def test_an_older_state_is_found() -> None:
    recording = record(1)
    events = [
        event._replace(value=event.value + 1) if isinstance(event, Written) else event for event in recording.events
    ]
    with pytest.raises(BrokenStateError, match="the state file has"):
        _enumerate(replace(recording, events=events))


def test_what_breaks_can_be_done_again() -> None:
    """The state named by a failure also fails when it is replayed alone, with the same reason."""
    recording = record(1, lambda seed: LyingDisk(lambda path: "/commitlog/" in path, seed=seed))
    with pytest.raises(BrokenStateError) as first:
        _enumerate(recording)
    with pytest.raises(BrokenStateError) as second:
        Enumeration(1, recording).replay(State.parse(first.value.state))
    assert second.value.why.partition("[")[0] == first.value.why.partition("[")[0]
