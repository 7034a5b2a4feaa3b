"""Reads the tier of a store: the messages that are no longer in its log, from their segments.

The store's ``config/tieredStoreMetadata.json`` says which segments there are, and of which times; the directory that
tieredStoreFilePath names has them. A message is in the log, in the tier, or in both: then the log's record counts. So
of each queue only the messages are read that are in front of those that the log still has.

In the tier a record's log offset is that in the stream of its queue. The original comes from the side file beside each
segment of units. For a message that RocketMQ's broker has uploaded there is none: its row has 2^52 + the stream's
offset, as clients get it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from trimq.pipeline.store.files import DataFile, StoreFiles, StorePathError
from trimq.pipeline.store.heads import Array
from trimq.pipeline.store.options import FAR, StoreOptions
from trimq.pipeline.store.queues import QueueStretch, QueueWalk, first_local, plan_queue
from trimq.pipeline.store.walk import Chunk, Damage
from trimq.protocol.lenient_json import loads
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE
from trimq.protocol.tiered_layout import (
    APACHE_UPLOADED,
    METADATA_FILE,
    PHYSICAL,
    PHYSICAL_SUFFIX,
    UNSET_TIME,
    SegmentType,
    segment_name,
)
from trimq.protocol.topic_rules import is_system_topic

_ENTRY_TYPE: Final = np.dtype([("phy", ">i8"), ("size", ">i4"), ("crc", ">u4")])
_TABLES: Final = {
    SegmentType.COMMIT_LOG: "commitLogFileSegmentTable",
    SegmentType.CONSUME_QUEUE: "consumeQueueFileSegmentTable",
}
_DELETED: Final = 2
"""The status of a segment whose file is being deleted."""


class TierStretch(NamedTuple):
    """A stretch of a queue of the tier, as a part that one task reads.

    ``sides`` are the side files of the stretch's segments of units; ``start`` of one is that of its segment. Records
    with log offsets from ``log_start`` on are left out: the store's log has them.
    """

    queue: QueueStretch
    sides: tuple[DataFile, ...]
    log_start: int


class _Segment(NamedTuple):
    """A segment: its file, and store times (ms) between which those of its messages are; 0 and FAR if not known."""

    file: DataFile
    begin_time: int
    end_time: int


def tier_files(options: StoreOptions) -> StoreFiles:
    """The files of the tier."""
    assert options.tier is not None
    return StoreFiles(options.tier, options.storage_options)


def plan_tier(
    files: StoreFiles, tier: StoreFiles, log: Sequence[DataFile], options: StoreOptions
) -> Iterator[TierStretch]:
    """Plan the read of the tier with these options. Raises StorePathError.

    Topics, queues and times are compared with the metadata, so that of others nothing is read, nor listed.
    """
    tables = _metadata(files)
    log_start = log[0].start if log else FAR
    if options.starting_position >= log_start and options.ending_position <= APACHE_UPLOADED:
        return  # all of it is in the log
    for path in sorted(set(tables[_TABLES[SegmentType.CONSUME_QUEUE]]) & set(tables[_TABLES[SegmentType.COMMIT_LOG]])):
        _, topic, digits = path.rsplit("/", 2)
        if options.wants_topic(topic) and (not options.queue_ids or int(digits) in options.queue_ids):
            yield from _plan_queue(files, tier, tables, path, (topic, int(digits)), log_start, options)


def _metadata(files: StoreFiles) -> dict[str, dict[str, Any]]:
    path = files.join("config", METADATA_FILE)
    try:
        found = loads(files.fs.cat_file(path))
        return {
            name: {key: list(found[name][key].values()) for key in found.get(name, {})} for name in _TABLES.values()
        }
    except FileNotFoundError:
        raise StorePathError(f"{files.path} has no tier: there is no {path}, which lists its segments") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorePathError(f"{path} cannot be read: {error}") from error


def _plan_queue(
    files: StoreFiles,
    tier: StoreFiles,
    tables: dict[str, dict[str, Any]],
    path: str,
    place: tuple[str, int],
    log_start: int,
    options: StoreOptions,
) -> Iterator[TierStretch]:
    records = _in_time(_segments(tables[_TABLES[SegmentType.COMMIT_LOG]][path]), options)
    if not records:
        return
    directory = _directory(tier, path)
    # Units first: a broker that uploads meanwhile writes records before their units.
    units = _files(
        tier, directory, SegmentType.CONSUME_QUEUE, _segments(tables[_TABLES[SegmentType.CONSUME_QUEUE]][path])
    )
    log = _files(tier, directory, SegmentType.COMMIT_LOG, records)
    sides = {name: size for name, size, _ in tier.entries(f"{directory}/{SegmentType.CONSUME_QUEUE.name}")}
    if not log or not units:
        return
    before = first_local(files, *place, log_start)
    for run in _runs(units):
        for stretch in plan_queue(tier, run, tuple(log), *place, options, before=before):
            beside = [
                DataFile(file.path + PHYSICAL_SUFFIX, file.start, _size_of(sides, file)) for file in stretch.files
            ]
            # Where queues say which messages the log has, log offsets do not: the log may have begun anew.
            start = log_start if before is None and not files.topics() else FAR
            part = TierStretch(stretch, tuple(side for side in beside if side.size), start)
            if start < FAR and (count := without_offset(tier, [part])):
                raise StorePathError(
                    f"{files.path} has no queues in consumequeue, and {count} messages of {place[0]}/{place[1]} were "
                    "uploaded by RocketMQ's broker without their log offset: nothing says whether the log has them too"
                )
            yield part


def _runs(units: list[DataFile]) -> Iterator[tuple[DataFile, ...]]:
    """The segments in groups without a gap: messages that were deleted before they were uploaded leave one."""
    begin = 0
    for number in range(1, len(units) + 1):
        if number == len(units) or units[number].start != units[number - 1].end:
            yield tuple(units[begin:number])
            begin = number


def _size_of(sides: dict[str, int], file: DataFile) -> int:
    return sides.get(file.path.rpartition("/")[2] + PHYSICAL_SUFFIX, 0)


def _segments(entries: list[dict[str, Any]]) -> list[_Segment]:
    """The segments of a stream, in its order, as the metadata says."""
    found = [
        _Segment(
            DataFile("", int(entry["baseOffset"]), int(entry["size"])),
            0 if entry["beginTimestamp"] == UNSET_TIME else int(entry["beginTimestamp"]),
            int(entry["endTimestamp"]),
        )
        for entry in entries
        if entry.get("status") != _DELETED
    ]
    return sorted(found, key=lambda segment: segment.file.start)


def _in_time(segments: list[_Segment], options: StoreOptions) -> list[_Segment]:
    """The segments from the first on that can have records of the selected times. The last one may still grow."""
    if segments and segments[0].begin_time > options.ending_time:
        return []
    first = next((n for n, one in enumerate(segments) if one.end_time >= options.starting_time), len(segments) - 1)
    return segments[max(first, 0) :]


def _directory(tier: StoreFiles, path: str) -> str:
    """The directory of a queue, which is in that of the cluster. Raises StorePathError."""
    clusters = [name for name, _, is_directory in tier.entries(tier.root) if is_directory]
    found = [tier.join(name, path) for name in clusters if tier.exists(name, path)]
    if len(found) != 1:
        raise StorePathError(
            f"{tier.path} has {len(found)} directories */{path}: expected tieredStoreFilePath of the store's broker"
            + (", with one cluster" if found else "")
        )
    return found[0]


def _files(tier: StoreFiles, directory: str, type: SegmentType, segments: list[_Segment]) -> list[DataFile]:
    """The files of segments, with their sizes in the metadata; the last one has the size of its file."""
    sizes = {name: size for name, size, _ in tier.entries(f"{directory}/{type.name}")}
    found = []
    for number, segment in enumerate(segments):
        name = segment_name(segment.file.start)
        size = sizes.get(name, 0) if number == len(segments) - 1 else segment.file.size
        if size:
            found.append(DataFile(f"{directory}/{type.name}/{name}", segment.file.start, size))
    return found


def without_offset(tier: StoreFiles, parts: Iterable[object]) -> int:
    """The number of messages in parts of the tier whose offset in the store's log is not known."""
    count = 0
    for part in parts:
        if isinstance(part, TierStretch):
            queue = part.queue
            entries = _entries(tier, part.sides, queue.begin, queue.end)
            units = np.frombuffer(tier.units(queue.files, queue.begin, queue.end), UNIT_TYPE)
            count += int(np.count_nonzero((entries["phy"] < 0) | (entries["size"] != units["size"])))
    return count


def possible_losses(
    files: StoreFiles, tier: StoreFiles, log: Sequence[DataFile], options: StoreOptions, begin: int
) -> list[str]:
    """The queues of which messages with log offsets from ``begin`` on may be neither in the tier nor in the log.

    That is so if the messages in front of the log's first one do not begin at queue offset 0 or at a message in front
    of ``begin``, or if some are missing between. It is not known whether the missing ones are older than ``begin``.
    """
    log_start = log[0].start if log else FAR
    parts: dict[tuple[str, int], list[TierStretch]] = {}
    for part in plan_tier(files, tier, log, options):
        parts.setdefault((part.queue.topic, part.queue.queue_id), []).append(part)
    local = {(topic, queue_id) for topic in files.topics() for queue_id in files.queue_ids(topic)}
    found = []
    for place in sorted(local | set(parts)):
        if is_system_topic(place[0]) or not options.wants_topic(place[0]):
            continue
        before = first_local(files, *place, log_start)
        stretches = parts.get(place, [])
        if not stretches:
            first, end = before or 0, before or 0
        else:
            first, end = stretches[0].queue.begin, stretches[-1].queue.end
            if 0 <= int(_entries(tier, stretches[0].sides, first, first + 1)["phy"][0]) < begin:
                first = 0
        is_whole = all(one.queue.end == other.queue.begin for one, other in pairwise(stretches))
        if first > 0 or not is_whole or (before is not None and end != before):
            found.append(f"{place[0]}/{place[1]}")
    return found


def _entries(tier: StoreFiles, sides: Sequence[DataFile], begin: int, end: int) -> Array:
    """The entries of the side files for the units from one queue offset to another; -1 where there is none."""
    entries = np.full(end - begin, -1, _ENTRY_TYPE)
    for side in sides:
        base = side.start // UNIT_SIZE
        low, high = max(begin, base), min(end, base + side.size // PHYSICAL.size)
        if low < high:
            with tier.opened(side) as source:
                data = source.read((low - base) * PHYSICAL.size, (high - base) * PHYSICAL.size)
            known = np.frombuffer(data, _ENTRY_TYPE, count=len(data) // PHYSICAL.size)
            entries[low - begin : low - begin + len(known)] = known
    return entries


class TierWalk:
    """Reads a stretch: as QueueWalk, with the records' offsets in the store's log."""

    def __init__(self, tier: StoreFiles, stretch: TierStretch, *, check_crc: bool = True) -> None:
        self._tier = tier
        self._stretch = stretch
        self._walk = QueueWalk(tier, stretch.queue, check_crc=check_crc, own_log=True)

    def __iter__(self) -> Iterator[Chunk | Damage]:
        """See QueueWalk."""
        for found in self._walk:
            if isinstance(found, Damage):
                yield found
                continue
            heads = replace(found.heads, phy=self._physical(found))
            not_local = (heads.phy < self._stretch.log_start) | (heads.phy >= APACHE_UPLOADED)
            yield Chunk(found.view, heads if not_local.all() else heads.take(np.flatnonzero(not_local)))

    def _physical(self, chunk: Chunk) -> Array:
        """The log offset of each record, from the side files."""
        heads = chunk.heads
        found = APACHE_UPLOADED + heads.phy
        if not len(heads):
            return found
        first = int(heads.queue_offset.min())
        entries = _entries(self._tier, self._stretch.sides, first, int(heads.queue_offset.max()) + 1)
        mine = entries[heads.queue_offset - first]
        # An entry of another message: RocketMQ's broker has uploaded this one.
        own = (mine["phy"] >= 0) & (mine["size"] == heads.size) & (mine["crc"] == heads.crc)
        return np.where(own, mine["phy"].astype(np.int64), found)
