"""What an audit finds without Spark: in one queue file, among the files of queues and log, in the checkpoint.

The end of the log is where its last record ends. What leads behind it shows that records are missing: the log's newest
file, or the end of it, is gone.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from trimq.pipeline.store.files import DataFile, StoreFiles
from trimq.protocol import checkpoint_layout
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT_SIZE

Finding = tuple[str, int, str]
"""What kind of fault, how many, an example in words."""

CHAIN: Final = "log chain"
RECORD: Final = "damaged record"
LOG_END: Final = "log ends before the checkpoint"
CHECKPOINT: Final = "checkpoint"
QUEUE_FILE: Final = "queue file"
BEHIND: Final = "queue unit behind the log's end"
_OF_LOG: Final = frozenset({CHAIN, RECORD, LOG_END})
_SHOWN: Final = 20


class Verdict(IntEnum):
    """How bad it is: the exit code, as that of ``mqstore verify``."""

    SOUND = 0
    REPAIRABLE = 1
    """Queues, index or checkpoint are not what the log says."""
    DAMAGED = 3
    """Records of the log are damaged, or files of it are missing."""


class LogBounds(NamedTuple):
    """Where the log's first file begins, and where its last record ends."""

    start: int
    end: int


def verdict(kinds: Sequence[str]) -> Verdict:
    """The verdict on faults of these kinds.

    >>> verdict(["queue file", "log chain"]).name
    'DAMAGED'
    """
    if not kinds:
        return Verdict.SOUND
    return Verdict.DAMAGED if _OF_LOG & set(kinds) else Verdict.REPAIRABLE


def compare_units(
    name: str, begin: int, held: Any, offset: Any, wanted: Any, bounds: LogBounds, *, delayed: bool = False
) -> Iterator[Finding]:
    """The units of a file that begins with unit ``begin``, beside those of the records with the offsets ``offset``."""
    place = offset - begin
    good = held[place] == wanted
    if delayed:
        good |= is_due_earlier(held[place], wanted)
    yield "=units", int(good.sum()), ""
    for at in np.flatnonzero(~good)[:_SHOWN].tolist():
        stands = tuple(int(value) for value in held[place[at]])
        text = f"{name} at {offset[at]}: {stands} for the record at {int(wanted['phy'][at])}"
        yield "queue unit is not the record's", 1, text
    more = int((~good).sum()) - _SHOWN
    if more > 0:
        yield "queue unit is not the record's", more, f"{name}: and more"
    extra = (held["size"] > 0) & (held["size"] != FILLER_SIZE) & (held["phy"] >= bounds.start)
    extra[place] = False
    behind = extra & (held["phy"] >= bounds.end)
    for kind, found in ("queue unit without record", extra & ~behind), (BEHIND, behind):
        if found.any():
            at = int(np.argmax(found))
            where = f"{name} at {begin + at} leads to {int(held['phy'][at])}"
            yield kind, int(found.sum()), f"{where}, the log ends at {bounds.end}" if found is behind else where


def is_due_earlier(held: Any, wanted: Any) -> Any:
    """Which units of delayed messages say an earlier time than their records: stored after a clock was set back."""
    due = held["tags_code"]
    same = (held["phy"] == wanted["phy"]) & (held["size"] == wanted["size"])
    return same & (due > 0) & (due <= wanted["tags_code"])


def usual_size(queues: Mapping[tuple[str, int], Sequence[DataFile]]) -> int:
    """The size in bytes that queue files of the store have: that of most, the larger one of two that are as many."""
    sizes = Counter(file.size for files in queues.values() for file in files if file.size >= UNIT_SIZE)
    return max(sizes, key=lambda size: (sizes[size], size), default=300_000 * UNIT_SIZE)


def queue_file_faults(queues: Mapping[tuple[str, int], Sequence[DataFile]], size: int) -> Iterator[Finding]:
    """Files of another size, at a place where none begins, and files that are missing between others."""
    for (topic, queue_id), files in queues.items():
        for file in files:
            if file.size != size:
                yield QUEUE_FILE, 1, f"{file.path} has {file.size} bytes, the others have {size}"
            elif file.start % size:
                yield QUEUE_FILE, 1, f"{file.path} begins where no file of {size} bytes does"
        for before, file in pairwise(files):
            if file.start > before.start + size:
                yield QUEUE_FILE, 1, f"the file of {topic}/{queue_id} before {file.path} is missing"


def log_file_faults(log: Sequence[DataFile]) -> Iterator[Finding]:
    """A newest file that was cut; gaps between files are found where the log is read."""
    usual = max((file.size for file in log), default=0)
    if log and log[-1].size != usual:
        yield CHAIN, 1, f"{log[-1].path} has {log[-1].size} bytes, the others have {usual}"


def checkpoint_faults(
    path: str, data: bytes | None, log: Sequence[DataFile], log_end: int, newest_ms: int
) -> Iterator[Finding]:
    """What the checkpoint knows that the log has not: TriMQ's mark, or the time that every writer puts in front.

    ``newest_ms`` is the store time of the newest record.
    """
    if data is None:
        return
    if len(data) != checkpoint_layout.SIZE:
        yield CHECKPOINT, 1, f"{path} has {len(data)} bytes, {checkpoint_layout.SIZE} are expected"
        return
    mark = checkpoint_layout.decode_mark(data)
    known_ms = checkpoint_layout.decode(data).physic_msg_timestamp
    # Behind the last record of a file that is full comes the next file's begin, whether it has a record or not.
    ends = {log_end, *(file.end for file in log if file.start <= log_end <= file.end)}
    if mark is not None and mark.position > log_end and mark.position not in ends:
        yield LOG_END, 1, f"the log ends at {log_end}, {path} knows it up to {mark.position}"
    elif mark is None and known_ms > newest_ms:
        yield LOG_END, 1, f"the log's newest record is of {newest_ms} ms, {path} knows one of {known_ms}"


def read_checkpoint(files: StoreFiles) -> bytes | None:
    """The checkpoint's bytes; None where there is none."""
    return bytes(files.fs.cat_file(files.join("checkpoint"))) if files.exists("checkpoint") else None
