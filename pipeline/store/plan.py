"""What has to be read, in parts that can be read at the same time.

Without topics, or where the queues cannot be trusted, parts are stretches of log files: they begin where a record was
found by searching (the newest file's chain is followed from its beginning, because what stands behind the end of the
log may look like records). With topics, parts are stretches of their queues: nothing else of the log is touched.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final, NamedTuple

from trimq.pipeline.store.files import DataFile, StoreFiles
from trimq.pipeline.store.options import FAR, StoreOptions
from trimq.pipeline.store.queues import QueueStretch, plan_queues
from trimq.pipeline.store.scan import Found, find_record, record_at
from trimq.pipeline.store.walk import WINDOW, Damage, LogWalk, Stretch
from trimq.protocol import record

_THREADS: Final = 16


class Plan(NamedTuple):
    """``parts`` in the order of the log or of the queues; ``damages`` were found while planning."""

    parts: list[Stretch | QueueStretch]
    damages: list[Damage]


class _Mark(NamedTuple):
    """A place where a split may begin: ``time`` is the store time of the record there."""

    at: int
    time: int
    floor: int


def plan(files: StoreFiles, options: StoreOptions) -> Plan:
    """The parts of a store that the options ask for. Raises StorePathError."""
    log = files.log_files()
    if _through_queues(files, options):
        return Plan(list(plan_queues(files, log, options)), [])
    return _plan_log(files, log, options)


def _through_queues(files: StoreFiles, options: StoreOptions) -> bool:
    """Queues are read where they narrow down what to read and where they have all records of the log."""
    if options.consume_queues == "never" or options.damage:
        return False
    if options.consume_queues == "always":
        return True
    narrows = options.names_topics or bool(options.starting_offsets or options.ending_offsets)
    if not narrows or options.starting_position or options.ending_position < FAR or not files.stopped_in_order:
        return False
    # queues of other forms (batches, RocksDB) are not read
    return options.topics <= set(files.topics()) and bool(files.topics()) and not files.exists("batchconsumequeue")


def _plan_log(files: StoreFiles, log: Sequence[DataFile], options: StoreOptions) -> Plan:
    written = list(log)
    while len(written) > 1 and not _has_records(files, written[-1]):
        written.pop()  # made ahead, nothing in it yet
    if not written:
        return Plan([], [])
    with ThreadPoolExecutor(_THREADS) as pool:
        marks = list(pool.map(lambda file: _marks(files, file, file is written[-1], options.split_size), written))
    parts: list[Stretch] = []
    times: list[int] = []
    for file, found in zip(written, marks, strict=True):
        newest = file is written[-1]
        ends = [mark.at for mark in found[1:]] + [file.size]
        for mark, stop in zip(found, ends, strict=True):
            last = newest and stop == file.size
            parts.append(Stretch(file, mark.at, stop, mark.floor if newest else 0, newest, not last))
            times.append(mark.time)
    return Plan(list(_wanted(parts, times, options)), list(_gaps(written)))


def _has_records(files: StoreFiles, file: DataFile) -> bool:
    with files.opened(file) as source:
        return any(source.read(0, record.BLANK_SIZE)) or source.next_data(0) < source.size


def _marks(files: StoreFiles, file: DataFile, newest: bool, split_size: int) -> list[_Mark]:
    """Where splits of one file begin; the first at its beginning."""
    with files.opened(file) as source:
        if newest:
            return _marks_of_newest(files, file, split_size)
        first = record_at(source, 0, file.start, check_crc=False)
        time = first.store_timestamp if isinstance(first, Found) else 0
        marks = [_Mark(0, time, 0)]
        at = split_size
        while split_size and at < file.size:
            found = find_record(source, file.start, at, file.size, 0, confirmed=True)
            if found is None:
                break
            time = max(time, found.store_timestamp)
            marks.append(_Mark(found.at, time, 0))
            at = max(at + split_size, found.at + 1)
        return marks


def _marks_of_newest(files: StoreFiles, file: DataFile, split_size: int) -> list[_Mark]:
    """The same for the file that is written to, by its chain of records."""
    marks = [_Mark(0, 0, 0)]
    window = min(WINDOW, split_size) if split_size else WINDOW
    with files.opened(file) as source:
        whole = Stretch(file, 0, file.size, is_newest=True, followed=False)
        walk = LogWalk(source, whole, check_crc=False, window=window)
        floor = 0
        for found in walk:
            if isinstance(found, Damage):
                continue
            heads = found.heads
            at = int(heads.phy[0]) - file.start
            time = int(heads.store_timestamp[0])
            if at == 0:
                marks[0] = _Mark(0, time, 0)
            elif split_size and at - marks[-1].at >= split_size:
                marks.append(_Mark(at, max(time, floor), floor))
            floor = walk.newest
    return marks


def _wanted(parts: list[Stretch], times: list[int], options: StoreOptions) -> Iterator[Stretch]:
    """Those that can have records of the wanted time and positions: store times never decrease along the log."""
    for number, part in enumerate(parts):
        if part.file.start + part.stop <= options.starting_position:
            continue
        if part.file.start + part.begin >= options.ending_position:
            continue
        following = times[number + 1] if number + 1 < len(parts) else options.starting_time
        if not options.damage and (times[number] > options.ending_time or 0 < following < options.starting_time):
            continue
        yield part


def _gaps(log: Sequence[DataFile]) -> Iterator[Damage]:
    """Files that are missing between others, and those that are shorter than they were."""
    usual = max((file.size for file in log), default=0)
    for file, following in pairwise(log):
        if file.end != following.start:
            if file.size < usual and file.start + usual == following.start:
                why = f"the file has {file.size} bytes, the others have {usual}"
            else:
                why = "files are missing"
            yield Damage(file.path, file.end, following.start - file.end, why)
