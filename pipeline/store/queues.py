"""Reads through consume queues: only the records of the selected queues, offsets and times are accessed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from trimq.pipeline.store.files import ByteSource, DataFile, StoreFiles
from trimq.pipeline.store.heads import Array, check_bodies, read_heads
from trimq.pipeline.store.options import StoreOptions
from trimq.pipeline.store.walk import Chunk, Damage
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE
from trimq.protocol.record import store_time_at

_UNITS_AT_ONCE: Final = 16_384
_BYTES_AT_ONCE: Final = 4 << 20
_NEAR: Final = 64 << 10
"""Remote records with a smaller gap are read by one request, together with the bytes between them."""
_SYS_FLAG_END: Final = 40


class QueueStretch(NamedTuple):
    """Units [begin, end) of one queue, as a part that one task reads.

    ``files`` and ``log`` are only the files that the units need, judged by the first and the last of them: Spark's
    driver has all stretches in memory at the same time. ``log_start`` is the log's first offset.
    """

    topic: str
    queue_id: int
    begin: int
    end: int
    files: tuple[DataFile, ...]
    log: tuple[DataFile, ...]
    log_start: int


def plan_queues(files: StoreFiles, log: Sequence[DataFile], options: StoreOptions) -> Iterator[QueueStretch]:
    """Plan the read of the queues that the options select, in stretches of about ``split_size`` bytes of records."""
    if not log:
        return
    for topic in files.topics():
        if not options.wants_topic(topic):
            continue
        for queue_id in files.queue_ids(topic):
            if not options.queue_ids or queue_id in options.queue_ids:
                queue = tuple(files.queue_files(topic, queue_id))
                yield from plan_queue(files, queue, tuple(log), topic, queue_id, options)


def first_local(files: StoreFiles, topic: str, queue_id: int, log_start: int) -> int | None:
    """The queue offset of the first message of a queue that is in the log; None if the queue has no units."""
    queue = files.queue_files(topic, queue_id)
    if not queue:
        return None
    reader = _UnitReader(files, queue)
    begin, end = queue[0].start // UNIT_SIZE, queue[-1].end // UNIT_SIZE
    end = _first(begin, end, lambda at: reader.unit(at)[1] <= 0)
    if begin == end:
        return None
    return _first(begin, end, lambda at: reader.unit(at)[0] >= log_start and reader.unit(at)[1] != FILLER_SIZE)


def plan_queue(
    files: StoreFiles,
    queue: tuple[DataFile, ...],
    log: tuple[DataFile, ...],
    topic: str,
    queue_id: int,
    options: StoreOptions,
    *,
    before: int | None = None,
) -> Iterator[QueueStretch]:
    """Plan the read of one queue, up to the queue offset ``before`` if it is given."""
    if not queue:
        return
    reader = _UnitReader(files, queue)
    begin, end = queue[0].start // UNIT_SIZE, queue[-1].end // UNIT_SIZE
    end = end if before is None else max(begin, min(end, before))
    # Each bound narrows the range for the next search. Units that are not written yet, and units of deleted records,
    # must be excluded first: their times cannot be read, and the searches by time need ascending ones.
    end = _first(begin, end, lambda at: reader.unit(at)[1] <= 0)
    begin = _first(begin, end, lambda at: reader.unit(at)[0] >= log[0].start and reader.unit(at)[1] != FILLER_SIZE)
    times = _Times(files, log)
    if options.starting_time > 0:
        begin = _first(begin, end, lambda at: times.of(*reader.unit(at)) >= options.starting_time)
    if options.ending_time < 1 << 62:
        end = _first(begin, end, lambda at: times.of(*reader.unit(at)) > options.ending_time)
    begin = max(begin, options.starting_offsets.get((topic, queue_id), begin))
    end = min(end, options.ending_offsets.get((topic, queue_id), end))
    if begin >= end:
        return
    # The size of the first record stands for all. The split size is only a target, and a unit costs a read.
    size = max(1, reader.unit(begin)[1])
    step = max(1, options.split_size // size) if options.split_size else end - begin
    for at in range(begin, end, step):
        stop = min(at + step, end)
        touched = tuple(file for file in queue if file.start < stop * UNIT_SIZE and at * UNIT_SIZE < file.end)
        places = [phy for phy, size in (reader.unit(at), reader.unit(stop - 1)) if size != FILLER_SIZE]
        records = tuple(file for file in log if places and file.start <= max(places) and min(places) < file.end)
        yield QueueStretch(topic, queue_id, at, stop, touched, records, log[0].start)


def _first(low: int, high: int, holds: "Callable[[int], bool]") -> int:
    """The first of [low, high) for which ``holds`` is true, by bisection; ``high`` if there is none."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


class _UnitReader:
    """Reads single units of a queue."""

    def __init__(self, files: StoreFiles, queue: Sequence[DataFile]) -> None:
        self._queue = queue
        self._sources = {file.start: files.source(file) for file in queue}

    def unit(self, offset: int) -> tuple[int, int]:
        """Log offset and size of a unit; zeros if no file has it."""
        at = offset * UNIT_SIZE
        for file in self._queue:
            if file.start <= at < file.end:
                data = self._sources[file.start].read(at - file.start, at - file.start + UNIT_SIZE)
                return int.from_bytes(data[:8], "big", signed=True), int.from_bytes(data[8:12], "big", signed=True)
        return 0, 0


class _Times:
    """Reads the store times of single records."""

    def __init__(self, files: StoreFiles, log: Sequence[DataFile]) -> None:
        self._files = files
        self._log = log
        self._sources: dict[int, ByteSource] = {}

    def of(self, phy: int, size: int) -> int:
        """The store time of the record at ``phy``; 0 if it was deleted or the unit is a filler."""
        file = _file_of(self._log, phy)
        if file is None or size == FILLER_SIZE:
            return 0
        source = self._sources.get(file.start)
        if source is None:
            source = self._sources[file.start] = self._files.source(file)
        at = phy - file.start
        front = source.read(at, at + 76)
        if len(front) < 76:
            return 0
        place = store_time_at(int.from_bytes(front[36:_SYS_FLAG_END], "big"))
        return int.from_bytes(front[place : place + 8], "big", signed=True)


def _file_of(log: Sequence[DataFile], phy: int) -> DataFile | None:
    return next((file for file in log if file.start <= phy < file.end), None)


class QueueWalk:
    """Reads a stretch of a queue: windows of its records, and as damage the units that lead to no record."""

    def __init__(
        self, files: StoreFiles, stretch: QueueStretch, *, check_crc: bool = True, own_log: bool = False
    ) -> None:
        """``own_log``: the log is that of the queue, in its order. A unit that leads out of it is damaged."""
        self._files = files
        self._stretch = stretch
        self._check_crc = check_crc
        self._own_log = own_log
        self._log = stretch.log

    def __iter__(self) -> Iterator[Chunk | Damage]:
        """Chunks and damages in the order of the queue, except that a chunk comes before the damages of its window."""
        stretch = self._stretch
        for at in range(stretch.begin, stretch.end, _UNITS_AT_ONCE):
            stop = min(at + _UNITS_AT_ONCE, stretch.end)
            units = np.frombuffer(self._files.units(stretch.files, at, stop), UNIT_TYPE)
            phy, size = units["phy"].astype(np.int64), units["size"].astype(np.int64)
            real = (size > 0) & (size != FILLER_SIZE) & (phy >= stretch.log_start)
            yield from self._read(phy[real], size[real], np.arange(at, stop)[real])

    def _read(self, phy: Array, size: Array, offset: Array) -> Iterator[Chunk | Damage]:
        if self._own_log:
            inside = np.zeros(len(phy), dtype=bool)
            if self._log:
                inside = (phy >= self._log[0].start) & (phy + size <= self._log[-1].end)
            yield from self._damages("", phy[~inside], size[~inside], offset[~inside])
            phy, size, offset = phy[inside], size[inside], offset[inside]
        elif len(phy) and not (self._log and self._log[0].start <= phy.min() and phy.max() < self._log[-1].end):
            # The planned files cover the first and the last unit. A queue out of log order may need others.
            self._log = tuple(self._files.log_files())
            if not self._log or phy.min() < self._log[0].start:
                raise FileNotFoundError(f"{self._files.path}: a file of the log was deleted before it was read")
        # A window is cut where the file changes, where it gets too large, and where log offsets do not ascend:
        # gather copies ascending ranges only.
        starts = np.array([file.start for file in self._log])
        number = np.searchsorted(starts, phy, side="right") - 1
        weight = np.cumsum(size) // _BYTES_AT_ONCE
        backwards = np.append(False, phy[1:] < phy[:-1] + size[:-1])
        cuts = np.flatnonzero(np.append(True, (number[1:] != number[:-1]) | (weight[1:] != weight[:-1])) | backwards)
        for begin, end in zip(cuts.tolist(), [*cuts[1:].tolist(), len(phy)], strict=True):
            if begin < end:
                file = self._log[int(number[begin])]
                yield from self._read_file(file, phy[begin:end], size[begin:end], offset[begin:end])

    def _read_file(self, file: DataFile, phy: Array, size: Array, offset: Array) -> Iterator[Chunk | Damage]:
        with self._files.opened(file) as source:
            view, at = self._window(source, phy - file.start, size)
        heads = read_heads(np.frombuffer(view, np.uint8), at, phy)
        good = heads.ok & (heads.size == size)
        whole = np.flatnonzero(good)
        sound = heads.take(whole)
        # A stale unit may lead to a whole record of another queue: the record has to name this queue and offset.
        mine = (sound.queue_id == self._stretch.queue_id) & (sound.queue_offset == offset[whole])
        if self._check_crc:
            mine &= check_bodies(view, sound)
        good[whole[~mine]] = False
        if good.all():
            yield Chunk(view, heads)
            return
        if good.any():
            yield Chunk(view, heads.take(np.flatnonzero(good)))
        yield from self._damages(file.path, phy[~good], size[~good], offset[~good])

    def _damages(self, path: str, phy: Array, size: Array, offset: Array) -> Iterator[Damage]:
        name = f"{self._stretch.topic}/{self._stretch.queue_id}"
        for place, length, at in zip(phy.tolist(), size.tolist(), offset.tolist(), strict=True):
            why = f"the unit of queue {name} at {at} does not lead to a valid record of this queue"
            yield Damage(path, place, length, why)

    def _window(self, source: ByteSource, at: Array, size: Array) -> tuple[memoryview, Array]:
        """Bytes that contain all the records, and the positions of the records in them."""
        end = at + size
        first = int(at[0])
        if self._files.is_local or int(end[-1]) - first < 2 * int(size.sum()):
            return source.read(first, int(end[-1])), at - first
        # Sparse and remote: one request for each group of records that are near each other, joined into one buffer.
        cuts = np.flatnonzero(np.append(True, at[1:] - end[:-1] > _NEAR))
        pieces, moved, length = [], at.copy(), 0
        for begin, stop in zip(cuts.tolist(), [*cuts[1:].tolist(), len(at)], strict=True):
            data = source.read(int(at[begin]), int(end[stop - 1]))
            pieces.append(data)
            moved[begin:stop] += length - int(at[begin])
            length += len(data)
        return memoryview(b"".join(pieces)), moved
