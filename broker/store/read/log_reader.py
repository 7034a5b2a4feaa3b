"""Reads the records of a part of the log in their order, for services that derive something from it at the start."""

import time
from collections.abc import Callable
from typing import Any, Final

import trio

from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.log_scan import LogRecord, LogWalk, RecordReader

Visit = Callable[[str, int, Any], None]
"""Called with the topic, the sysFlag and the bytes of a record: a view that is valid during the call."""

_SLICE: Final = 0.001
_CLOCK_EVERY: Final = 32


async def read_log(log: CommitLog, start: int, visit: Visit) -> None:
    """Call ``visit`` with each record from the log offset ``start`` on; damaged parts are skipped.

    Works in slices of about a millisecond. Pages are read through the map: no other task may need the loop meanwhile.
    """
    files = log.files
    walk = LogWalk(files.disk, files.files, max(start, log.min_offset), RecordReader(files.size, check_crc=False))
    until = time.perf_counter() + _SLICE
    while True:
        for _ in range(_CLOCK_EVERY):
            # Compared before each step: at the end of the log a step would search the rest of the file for a record.
            found = walk.step() if walk.position < log.max_offset else None
            if found is None:
                return
            if isinstance(found, LogRecord):
                file = files.find(found.phy)
                assert file is not None  # the step has just read it
                at = found.phy - file.start
                visit(found.topic, found.sys_flag, file.view[at : at + found.size])
        if time.perf_counter() >= until:
            await trio.lowlevel.checkpoint()
            until = time.perf_counter() + _SLICE
