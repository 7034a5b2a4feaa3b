"""Plans a read: divides a store into parts that can be read in parallel.

Without topics, or if the queues cannot be trusted, parts are stretches of log files. In a full file they begin at
records that were found by searching. In the newest file the chain of records is followed from its first one instead,
because bytes behind the end of the log may look like records. With topics, parts are stretches of their queues, and
only the records of these are read.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final, NamedTuple

from trimq.pipeline.store.bucket_plan import BucketPart, plan_bucket
from trimq.pipeline.store.files import DataFile, StoreFiles, StorePathError
from trimq.pipeline.store.options import FAR, StoreOptions
from trimq.pipeline.store.queues import QueueStretch, plan_queues
from trimq.pipeline.store.scan import Found, find_record, record_at
from trimq.pipeline.store.tier import TierStretch, plan_tier, tier_files
from trimq.pipeline.store.walk import WINDOW, Damage, LogWalk, Stretch
from trimq.protocol import record

_THREADS: Final = 16


Part = Stretch | QueueStretch | TierStretch | BucketPart
"""What one task reads."""


class Plan(NamedTuple):
    """``parts``: those of the tier, then the others in the order of the log or of the queues.

    ``damages`` are gaps found while planning.
    """

    parts: list[Part]
    damages: list[Damage]


class _Mark(NamedTuple):
    """A position in a file where a split may begin.

    ``time`` is the store time of the record there, ``floor`` the newest store time in front of it.
    """

    at: int
    time: int
    floor: int


def plan_of(options: StoreOptions) -> Plan:
    """Plan the read of the store or bucket that the options name. Raises StorePathError, BucketError, OptionError."""
    if options.bucket is not None:
        return Plan(list(plan_bucket(options)), [])
    return plan(StoreFiles(options.path, options.storage_options), options)


def plan(files: StoreFiles, options: StoreOptions) -> Plan:
    """Plan the read of a store with these options. Raises StorePathError."""
    try:
        log = files.log_files()
    except StorePathError:
        if options.tier is None or not files.exists("config"):
            raise
        log = []  # all that is left of the store is in the tier
    tiered = list(plan_tier(files, tier_files(options), log, options)) if options.tier is not None else []
    if _through_queues(files, options):
        return Plan([*tiered, *plan_queues(files, log, options)], [])
    found = _plan_log(files, log, options)
    return Plan([*tiered, *found.parts], found.damages)


def _through_queues(files: StoreFiles, options: StoreOptions) -> bool:
    """Whether to read through the queues: they must narrow down the read, and contain all records of the log."""
    if options.consume_queues == "never" or options.damage:
        return False
    if options.consume_queues == "always":
        return True
    narrows = options.names_topics or bool(options.starting_offsets or options.ending_offsets)
    if not narrows or options.starting_position or options.ending_position < FAR or not files.stopped_in_order:
        return False
    # Queues in other formats (batch queues, RocksDB) cannot be read, so their records would be missing.
    return options.topics <= set(files.topics()) and bool(files.topics()) and not files.exists("batchconsumequeue")


def _plan_log(files: StoreFiles, log: Sequence[DataFile], options: StoreOptions) -> Plan:
    written = list(log)
    while len(written) > 1 and not _has_records(files, written[-1]):
        written.pop()  # allocated ahead by the broker, without a record yet
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
            # Only the last part of the log may end before its ``stop``. Any other is followed by records, and bytes in
            # it that are no record are damage.
            last = newest and stop == file.size
            parts.append(Stretch(file, mark.at, stop, mark.floor if newest else 0, newest, not last))
            times.append(mark.time)
    return Plan(list(_wanted(parts, times, options)), list(_gaps(written)))


def _has_records(files: StoreFiles, file: DataFile) -> bool:
    with files.opened(file) as source:
        return any(source.read(0, record.BLANK_SIZE)) or source.next_data(0) < source.size


def _marks(files: StoreFiles, file: DataFile, newest: bool, split_size: int) -> list[_Mark]:
    """The positions in one file at which splits begin; the first is 0."""
    with files.opened(file) as source:
        if newest:
            return _marks_of_newest(files, file, split_size)
        first = record_at(source, 0, file.start, check_crc=False)
        time = first.store_timestamp if isinstance(first, Found) else 0
        marks = [_Mark(0, time, 0)]
        at = split_size
        while split_size and at < file.size:
            # Confirmed by the records behind it: the body of a message may contain bytes that look like a record.
            found = find_record(source, file.start, at, file.size, 0, confirmed=True)
            if found is None:
                break
            time = max(time, found.store_timestamp)
            marks.append(_Mark(found.at, time, 0))
            at = max(at + split_size, found.at + 1)
        return marks


def _marks_of_newest(files: StoreFiles, file: DataFile, split_size: int) -> list[_Mark]:
    """As ``_marks``, for the newest file: follows its chain of records, which ends where the log ends."""
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
            # A split must know the newest time in front of it, to recognise records of an earlier use of the file.
            floor = walk.newest
    return marks


def _wanted(parts: list[Stretch], times: list[int], options: StoreOptions) -> Iterator[Stretch]:
    """The parts that can contain records of the selected times and positions. Store times never decrease in the log."""
    for number, part in enumerate(parts):
        if part.file.start + part.stop <= options.starting_position:
            continue
        if part.file.start + part.begin >= options.ending_position:
            continue
        following = times[number + 1] if number + 1 < len(parts) else options.starting_time
        # The time of the next part bounds this one from above. 0 means that its first record could not be read.
        if not options.damage and (times[number] > options.ending_time or 0 < following < options.starting_time):
            continue
        yield part


def _gaps(log: Sequence[DataFile]) -> Iterator[Damage]:
    """Gaps in the log: missing files, and files that are shorter than the others."""
    usual = max((file.size for file in log), default=0)
    for file, following in pairwise(log):
        if file.end != following.start:
            if file.size < usual and file.start + usual == following.start:
                why = f"the file has {file.size} bytes, the others have {usual}"
            else:
                why = "files are missing"
            yield Damage(file.path, file.end, following.start - file.end, why)
