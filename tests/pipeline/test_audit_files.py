"""Faults that an audit finds apart from the scan of the log.

In issue 19.4 an audit called a store without its newest log file sound.

These tests need no PySpark; tests/spark/test_job_others.py removes files from complete stores.
"""

import numpy as np
import pytest

from trimq.pipeline.jobs.audit_files import (
    LogBounds,
    Verdict,
    checkpoint_faults,
    compare_units,
    log_file_faults,
    queue_file_faults,
    usual_size,
    verdict,
)
from trimq.pipeline.store.files import DataFile
from trimq.protocol.checkpoint_layout import CheckpointFields, CheckpointMark, encode
from trimq.protocol.queue_unit import FILLER_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE

LOG = [DataFile("/s/commitlog/0", 0, 1000), DataFile("/s/commitlog/1000", 1000, 1000)]


def units(*places: tuple[int, int]) -> np.ndarray:
    return np.array([(phy, size, 7) for phy, size in places], UNIT_TYPE)


def found_in(held: np.ndarray, records: dict[int, tuple[int, int]], bounds: LogBounds) -> dict[str, int]:
    wanted = units(*records.values())
    found = compare_units("T/0", 10, held, np.array(list(records), dtype=np.int64), wanted, bounds)
    return {kind: count for kind, count, _ in found if count}


def test_units_behind_the_logs_end_are_reported() -> None:
    """Also if the log file continues behind its last record, and if no log file exists at all."""
    held = units((100, 50), (150, 50), (900, 50), (1000, 50), (0, 0))
    records = {10: (100, 50), 11: (150, 50)}
    assert found_in(held, {**records, 12: (900, 50), 13: (1000, 50)}, LogBounds(0, 1050)) == {"=units": 4}
    assert found_in(held, records, LogBounds(0, 200)) == {"=units": 2, "queue unit behind the log's end": 2}
    assert found_in(held, {**records, 12: (900, 50)}, LogBounds(0, 1000)) == {
        "=units": 3,
        "queue unit behind the log's end": 1,
    }, "the next record's place has no record yet"
    assert found_in(held, {}, LogBounds(0, 0)) == {"queue unit behind the log's end": 4}
    assert found_in(held, {}, LogBounds(150, 950)) == {
        "queue unit without record": 2,
        "queue unit behind the log's end": 1,
    }, "units in front of the log's start are no fault"


def test_fillers_and_free_units_are_no_faults() -> None:
    held = units((100, 50), (0, FILLER_SIZE), (0, 0))
    assert found_in(held, {10: (100, 50)}, LogBounds(0, 150)) == {"=units": 1}


def test_units_that_are_not_their_records() -> None:
    held = units(*[(0, 0)] * 25)
    records = {10 + number: (number * 50, 50) for number in range(25)}
    assert list(compare_units("T/0", 10, held, np.array(list(records)), units(*records.values()), LogBounds(0, 5000)))[
        -1
    ] == ("queue unit is not the record's", 5, "T/0: and more"), "twenty faults are listed, the rest is counted"


def queue(*files: tuple[int, int]) -> dict[tuple[str, int], list[DataFile]]:
    return {("T", 0): [DataFile(f"/s/consumequeue/T/0/{start:05}", start, size) for start, size in files]}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([(0, 400), (400, 400), (800, 400)], []),
        ([(800, 400), (1200, 400)], []),
        ([(0, 400), (400, 200), (800, 400)], ["/s/consumequeue/T/0/00400 has 200 bytes, the others have 400"]),
        ([(0, 400), (400, 0), (800, 400)], ["/s/consumequeue/T/0/00400 has 0 bytes, the others have 400"]),
        ([(0, 400), (400, 420), (800, 400)], ["/s/consumequeue/T/0/00400 has 420 bytes, the others have 400"]),
        ([(0, 400), (800, 400)], ["the file of T/0 before /s/consumequeue/T/0/00800 is missing"]),
        ([(20, 400)], ["/s/consumequeue/T/0/00020 does not begin at a multiple of 400 bytes"]),
    ],
)
def test_queue_files_that_are_cut_or_missing(files: list[tuple[int, int]], expected: list[str]) -> None:
    found = queue(*files)
    assert usual_size(found) == 400
    assert [text for _, _, text in queue_file_faults(found, 400)] == expected


def test_the_size_of_queue_files_is_that_of_most() -> None:
    assert usual_size(queue((0, 400), (400, 200))) == 400
    assert usual_size(queue((0, 200), (200, 200), (400, 400))) == 200
    assert usual_size({}) == 6_000_000


def test_a_cut_newest_log_file() -> None:
    assert list(log_file_faults(LOG)) == []
    assert list(log_file_faults([])) == []
    ((kind, _, text),) = log_file_faults([LOG[0], LOG[1]._replace(size=10)])
    assert (kind, text) == ("log chain", "/s/commitlog/1000 has 10 bytes, the others have 1000")


def checked(position: int | None, log_end: int, *, time_ms: int = 5, newest_ms: int = 5) -> list[str]:
    mark = None if position is None else CheckpointMark(position=position)
    data = encode(CheckpointFields(physic_msg_timestamp=time_ms), mark)
    return [kind for kind, _, _ in checkpoint_faults("/s/checkpoint", data, LOG, log_end, newest_ms)]


def test_a_checkpoint_of_a_longer_log() -> None:
    assert checked(900, 900) == checked(500, 900) == checked(None, 900) == []
    assert checked(901, 900) == checked(1500, 900) == ["log ends before the checkpoint"]
    assert checked(1000, 900) == [], "the start of the next file, which has no record yet"
    assert checked(None, 900, time_ms=6) == ["log ends before the checkpoint"], "RocketMQ's checkpoint has only times"
    assert checked(900, 900, time_ms=1 << 62) == [], "if there is a mark, the time does not count"
    assert list(checkpoint_faults("/s/checkpoint", None, LOG, 0, 0)) == []
    assert [kind for kind, _, _ in checkpoint_faults("/s/checkpoint", b"x", LOG, 0, 0)] == ["checkpoint"]


def test_the_verdict_is_that_of_mqstore() -> None:
    assert verdict([]) is Verdict.SOUND
    assert verdict(["queue file", "checkpoint", "queue unit behind the log's end"]) is Verdict.REPAIRABLE
    for kind in ("damaged record", "log chain", "log ends before the checkpoint"):
        assert verdict(["queue file", kind]) is Verdict.DAMAGED
    assert [int(each) for each in Verdict] == [0, 1, 3]
