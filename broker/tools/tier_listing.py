"""What ``mqstore tiered ls`` prints."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from trimq.broker.tools.offline_tier import IndexFile, Segment, Stream, TierQueue, side_file
from trimq.protocol.tiered_layout import UNSET_TIME, SegmentType


def listing(queues: list[TierQueue], index: list[IndexFile]) -> dict[str, Any]:
    """The queues with all segments, and the index files, for JSON. Times are ms, null if they are not set."""
    return {
        "queues": [
            {
                "topic": queue.topic,
                "queueId": queue.queue_id,
                "minOffset": queue.min_offset,
                "maxOffset": queue.max_offset,
                "knownOffsets": queue.known_offsets,
                "commitLog": [_segment(segment) for segment in queue.log.segments],
                "consumeQueue": [_segment(segment) for segment in queue.units.segments],
            }
            for queue in queues
        ],
        "index": [
            {
                "file": str(file.file),
                "state": file.state,
                "size": file.size,
                "entries": None if file.header is None else file.header.items,
                "beginTimestamp": None if file.header is None else file.header.begin_ms,
                "endTimestamp": None if file.header is None else file.header.end_ms,
            }
            for file in index
        ],
    }


def _segment(segment: Segment) -> dict[str, Any]:
    entry = segment.entry
    return {
        "file": str(segment.file),
        "baseOffset": entry.base_offset,
        "size": entry.size,
        "fileSize": None if segment.size < 0 else segment.size,
        "status": entry.status,
        "beginTimestamp": _known(entry.begin_timestamp),
        "endTimestamp": _known(entry.end_timestamp),
    }


def listing_lines(queues: list[TierQueue], index: list[IndexFile], *, segments: bool) -> Iterator[str]:
    """The same for people. Times are UTC. ``segments``: a line for each segment, too."""
    titles = f"{'topic':32} {'queue':>5} {'first':>12} {'end':>12} {'bytes':>15} {'segments':>8}"
    yield f"{titles}  {times_text('oldest', 'newest')}"
    for queue in queues:
        log = queue.log
        times = times_text(time_text(_begin(log)), time_text(_end(log)))
        yield (
            f"{queue.topic:32} {queue.queue_id:5} {queue.min_offset:12} {queue.max_offset:12} {log.size:15} "
            f"{len(log.segments):8}  {times}"
        )
        for segment in [*log.segments, *queue.units.segments] if segments else []:
            yield _segment_line(segment)
    for file in index:
        entries = "a header that cannot be read" if file.header is None else f"{file.header.items} entries"
        yield f"index {file.state:8} {file.size:15} bytes, {entries}  {file.file}"


def _segment_line(segment: Segment) -> str:
    entry = segment.entry
    size = "missing" if segment.size < 0 else str(segment.size)
    more = f"  status {entry.status}" if entry.status else ""
    if entry.type == SegmentType.CONSUME_QUEUE and not side_file(segment).is_file():
        more += "  no log offsets"
    times = times_text(time_text(entry.begin_timestamp), time_text(entry.end_timestamp))
    return f"  {segment.file.parent.name:13} at {entry.base_offset:15} {size:>15} bytes  {times}  {segment.file}{more}"


def _begin(stream: Stream) -> int:
    return next((s.entry.begin_timestamp for s in stream.segments if s.entry.begin_timestamp != UNSET_TIME), UNSET_TIME)


def _end(stream: Stream) -> int:
    ends = [s.entry.end_timestamp for s in stream.segments if s.entry.end_timestamp != UNSET_TIME]
    return max(ends, default=UNSET_TIME)


def _known(time_ms: int) -> int | None:
    return None if time_ms == UNSET_TIME else time_ms


def time_text(time_ms: int | None) -> str:
    """A time in UTC; a dash if it is not known."""
    if time_ms is None or time_ms == UNSET_TIME:
        return "-"
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def times_text(begin: str, end: str) -> str:
    """Two columns."""
    return f"{begin:20} {end:20}"
