"""The checks of an audit that need no Spark: one queue file, the sets of queue and log files, the checkpoint.

The log ends behind its last record. A queue unit or checkpoint that refers to a later offset shows that records are
missing: the log's newest file, or the end of it, was lost.
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
"""The kind of a fault, how many there are, and an example as text."""

CHAIN: Final = "log chain"
RECORD: Final = "damaged record"
LOG_END: Final = "log ends before the checkpoint"
CHECKPOINT: Final = "checkpoint"
QUEUE_FILE: Final = "queue file"
BEHIND: Final = "queue unit behind the log's end"
_OF_LOG: Final = frozenset({CHAIN, RECORD, LOG_END})
_SHOWN: Final = 20


class Verdict(IntEnum):
    """The severity of the faults, as an exit code: the same as that of ``mqstore verify``."""

    SOUND = 0
    REPAIRABLE = 1
    """Queues, index or checkpoint do not match the log, from which they can be built again."""
    DAMAGED = 3
    """Records of the log are damaged, or files of it are missing."""


class LogBounds(NamedTuple):
    """The log offsets at which the first file begins and the last record ends."""

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
    """Compare the units of a file, of which ``begin`` is the first, with the records that have the offsets ``offset``.

    ``held`` are the file's units, ``wanted`` those that the records should have. ``delayed``: a due time in the tag
    slot may be earlier than expected.
    """
    place = offset - begin
    good = held[place] == wanted
    if delayed:
        good |= is_due_earlier(held[place], wanted)
    yield "=units", int(good.sum()), ""
    for at in np.flatnonzero(~good)[:_SHOWN].tolist():
        actual = tuple(int(value) for value in held[place[at]])
        text = f"{name} at {offset[at]}: {actual} for the record at {int(wanted['phy'][at])}"
        yield "queue unit is not the record's", 1, text
    more = int((~good).sum()) - _SHOWN
    if more > 0:
        yield "queue unit is not the record's", more, f"{name}: and more"
    # Units below the log's start lead to records that were deleted in order, and fillers lead to none.
    extra = (held["size"] > 0) & (held["size"] != FILLER_SIZE) & (held["phy"] >= bounds.start)
    extra[place] = False
    behind = extra & (held["phy"] >= bounds.end)
    for kind, found in ("queue unit without record", extra & ~behind), (BEHIND, behind):
        if found.any():
            at = int(np.argmax(found))
            where = f"{name} at {begin + at} leads to {int(held['phy'][at])}"
            yield kind, int(found.sum()), f"{where}, the log ends at {bounds.end}" if found is behind else where


def is_due_earlier(held: Any, wanted: Any) -> Any:
    """Mask of units of delayed messages whose due time is earlier than their record's: the clock was set back then."""
    due = held["tags_code"]
    same = (held["phy"] == wanted["phy"]) & (held["size"] == wanted["size"])
    return same & (due > 0) & (due <= wanted["tags_code"])


def usual_size(queues: Mapping[tuple[str, int], Sequence[DataFile]]) -> int:
    """The size in bytes of the store's queue files: the most frequent one, the larger of two that are as frequent."""
    sizes = Counter(file.size for files in queues.values() for file in files if file.size >= UNIT_SIZE)
    return max(sizes, key=lambda size: (sizes[size], size), default=300_000 * UNIT_SIZE)


def queue_file_faults(queues: Mapping[tuple[str, int], Sequence[DataFile]], size: int) -> Iterator[Finding]:
    """Files of another size, files whose name is no multiple of the size, and gaps between files."""
    for (topic, queue_id), files in queues.items():
        for file in files:
            if file.size != size:
                yield QUEUE_FILE, 1, f"{file.path} has {file.size} bytes, the others have {size}"
            elif file.start % size:
                yield QUEUE_FILE, 1, f"{file.path} does not begin at a multiple of {size} bytes"
        for before, file in pairwise(files):
            if file.start > before.start + size:
                yield QUEUE_FILE, 1, f"the file of {topic}/{queue_id} before {file.path} is missing"


def log_file_faults(log: Sequence[DataFile]) -> Iterator[Finding]:
    """A newest file that was truncated. Gaps between files are found when the log is read."""
    usual = max((file.size for file in log), default=0)
    if log and log[-1].size != usual:
        yield CHAIN, 1, f"{log[-1].path} has {log[-1].size} bytes, the others have {usual}"


def checkpoint_faults(
    path: str, data: bytes | None, log: Sequence[DataFile], log_end: int, newest_ms: int
) -> Iterator[Finding]:
    """A checkpoint that is ahead of the log: by TriMQ's mark if it has one, else by RocketMQ's physicMsgTimestamp.

    ``log_end`` and ``newest_ms`` are the end offset and the store time of the newest record.
    """
    if data is None:
        return
    if len(data) != checkpoint_layout.SIZE:
        yield CHECKPOINT, 1, f"{path} has {len(data)} bytes, expected {checkpoint_layout.SIZE}"
        return
    mark = checkpoint_layout.decode_mark(data)
    known_ms = checkpoint_layout.decode(data).physic_msg_timestamp
    # After the last record of a full file, a broker's next position is the start of the next file, even an empty one.
    ends = {log_end, *(file.end for file in log if file.start <= log_end <= file.end)}
    if mark is not None and mark.position > log_end and mark.position not in ends:
        yield LOG_END, 1, f"the log ends at {log_end}, {path} refers to offset {mark.position}"
    elif mark is None and known_ms > newest_ms:
        yield LOG_END, 1, f"the log's newest record was stored at {newest_ms} ms, {path} refers to one of {known_ms}"


def read_checkpoint(files: StoreFiles) -> bytes | None:
    """The checkpoint's bytes; None if the store has none."""
    return bytes(files.fs.cat_file(files.join("checkpoint"))) if files.exists("checkpoint") else None
