"""The tier of a store that no broker has open, for reading: its metadata, its segments, and what is in them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trimq.broker.config import load_broker
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.tiered.container.index_recovery import DIRECTORY as INDEX_DIRECTORY
from trimq.broker.store.tiered.container.index_store_file import TieredIndexShape
from trimq.broker.store.tiered.driver.metadata import DELETED, DefaultMetadataStore, SegmentMetadata
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.broker.tools.offline_store import NotUsableError, OfflineStore
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.record import AT_QUEUE_OFFSET
from trimq.protocol.tiered_index_layout import HEADER_SIZE, Header
from trimq.protocol.tiered_layout import (
    INDEX_TOPIC,
    METADATA_FILE,
    PHYSICAL,
    PHYSICAL_SUFFIX,
    SegmentType,
    segment_name,
)
from trimq.remoting.config.properties import ConfigError

_HEAD_READ = 128


@dataclass
class Segment:
    """A segment: what the metadata says of it, and its file.

    ``size``: bytes of the file, -1 if there is none. ``used``: those that brokers read, as ``end`` says: what a failed
    upload has left behind a segment that is not the last is not read.
    """

    entry: SegmentMetadata
    file: Path
    size: int
    used: int

    @property
    def begin(self) -> int:
        """Stream position of its first byte."""
        return self.entry.base_offset

    @property
    def end(self) -> int:
        """Stream position behind its last byte."""
        return self.begin + self.used


@dataclass
class Stream:
    """The segments of one type of a queue, in the order of their base offsets.

    ``unknown``: the names of files that are not in the metadata.
    """

    directory: Path
    segments: list[Segment]
    unknown: list[str]

    @property
    def live(self) -> list[Segment]:
        """The segments that are not being deleted."""
        return [segment for segment in self.segments if segment.entry.status != DELETED]

    @property
    def begin(self) -> int:
        """Stream position of the first byte."""
        live = self.live
        return live[0].begin if live else 0

    @property
    def end(self) -> int:
        """Stream position behind the last byte."""
        live = self.live
        return live[-1].end if live else 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(max(0, segment.size) for segment in self.segments)

    def read(self, position: int, length: int) -> bytes:
        """The bytes at a position, over edges of segments; fewer at an end and before a gap."""
        found = b""
        for segment in self.live:
            at = position + len(found)
            if segment.begin <= at < segment.end and len(found) < length:
                with segment.file.open("rb") as file:
                    file.seek(at - segment.begin)
                    found += file.read(min(length - len(found), segment.end - at))
        return found


@dataclass
class TierQueue:
    """A queue in the tier."""

    topic: str
    queue_id: int
    log: Stream
    units: Stream

    @property
    def min_offset(self) -> int:
        """The first message that can be read."""
        first = self.units.begin // UNIT_SIZE
        head = self.log.read(self.log.begin, _HEAD_READ)
        if len(head) < AT_QUEUE_OFFSET + 8:
            return self.max_offset if self.log.begin else first
        return max(first, int.from_bytes(head[AT_QUEUE_OFFSET : AT_QUEUE_OFFSET + 8], "big"))

    @property
    def max_offset(self) -> int:
        """Behind the last message."""
        return self.units.end // UNIT_SIZE

    @property
    def known_offsets(self) -> int:
        """Units that have an entry in a side file: their messages have kept their offset in the log."""
        return sum(
            min(_size(side_file(segment)) // PHYSICAL.size, max(0, segment.size) // UNIT_SIZE)
            for segment in self.units.live
        )


@dataclass
class IndexFile:
    """An index file. ``state``: UNSEALED (takes keys), SEALED (waits for its upload), UPLOAD (compacted, in the tier).

    ``header`` is None if it cannot be read.
    """

    file: Path
    state: str
    size: int
    header: Header | None
    segment: SegmentMetadata | None = None


class OfflineTier:
    """The tier in a directory (tieredStoreFilePath) that belongs to a store."""

    def __init__(self, store: OfflineStore, config: TieredStoreConfig) -> None:
        """Raises NotUsableError if there is no tier, or if its metadata cannot be read."""
        if not config.tiered_store_file_path:
            raise NotUsableError("where is the tier? Pass its directory with --tier, or the configuration with -c")
        self.store = store
        self.directory = directory = Path(config.tiered_store_file_path)
        self.shape = TieredIndexShape(
            config.tiered_store_index_file_max_hash_slot_num, config.tiered_store_index_file_max_index_num
        )
        """The shape of local index files."""
        self.metadata = DefaultMetadataStore(store.disk, store.root, "", lambda: 0)
        self.metadata_file = Path(self.metadata.file)
        if not self.metadata_file.is_file():
            raise NotUsableError(f"{self.store.root} has no tier: there is no config/{METADATA_FILE}")
        try:
            self.metadata.load()
        except StoreLoadError as error:
            raise NotUsableError(str(error)) from error
        if not directory.is_dir():
            raise NotUsableError(f"there is no directory {directory} (tieredStoreFilePath)")
        self._clusters = sorted(path for path in directory.iterdir() if path.is_dir())

    def queues(self, topics: frozenset[str] = frozenset()) -> Iterator[TierQueue]:
        """The queues, by topic and id; of some topics only if there are any in ``topics``."""
        paths: dict[tuple[str, int], str] = {}
        for kind in (SegmentType.COMMIT_LOG, SegmentType.CONSUME_QUEUE):
            for path in self.metadata.paths(kind):
                _, topic, digits = path.rsplit("/", 2)
                paths[topic, int(digits)] = path
        for (topic, queue_id), path in sorted(paths.items()):
            if not topics or topic in topics:
                log, units = self._stream(path, SegmentType.COMMIT_LOG), self._stream(path, SegmentType.CONSUME_QUEUE)
                yield TierQueue(topic, queue_id, log, units)

    def _stream(self, path: str, type: SegmentType) -> Stream:
        directory = self._directory(path) / type.name
        segments = []
        entries = self.metadata.segments(path, type)
        for entry in entries:
            file = directory / segment_name(entry.base_offset)
            size = _size(file, missing=-1)
            used = max(0, size if entry is entries[-1] else min(size, entry.size))
            segments.append(Segment(entry, file, size, used))
        known = {segment.file.name for segment in segments}
        there = sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []
        return Stream(directory, segments, [name for name in there if name.removesuffix(PHYSICAL_SUFFIX) not in known])

    def _directory(self, path: str) -> Path:
        """The directory of a queue or of the index, below that of the cluster."""
        return next((cluster / path for cluster in self._clusters if (cluster / path).is_dir()), self.directory / path)

    def index(self) -> list[IndexFile]:
        """The index files, those of the tier first, the oldest first."""
        found = []
        for path in self.metadata.paths(SegmentType.INDEX):
            if path.split("/")[-2] == INDEX_TOPIC:
                found += [
                    IndexFile(segment.file, "UPLOAD", segment.size, _header(segment.file), segment.entry)
                    for segment in self._stream(path, SegmentType.INDEX).segments
                ]
        directory = Path(self.store.root) / INDEX_DIRECTORY
        there = directory.iterdir() if directory.is_dir() else []
        local = sorted(
            (file for file in there if file.name.isdigit() and file.is_file()), key=lambda file: int(file.name)
        )
        for file in local:
            state = "UNSEALED" if file is local[-1] else "SEALED"
            found.append(IndexFile(file, state, _size(file), _header(file)))
        return found


def find_tier(store: OfflineStore, config_file: str | None, directory: str | None) -> OfflineTier:
    """The tier that a configuration names, or that is in a directory. Raises NotUsableError."""
    flags = {"tieredStoreFilePath": (directory, "--tier")} if directory is not None else {}
    try:
        found = load_broker(config_file, {"storePathRootDir": (store.root, "STORE"), **flags})
    except ConfigError as error:
        raise NotUsableError(f"the configuration cannot be used: {error}") from error
    return OfflineTier(store, found.section(TieredStoreConfig))


def side_file(segment: Segment) -> Path:
    """The file with the log offsets, beside a segment of units."""
    return segment.file.with_name(segment.file.name + PHYSICAL_SUFFIX)


def _size(file: Path, missing: int = 0) -> int:
    return file.stat().st_size if file.is_file() else missing


def _header(file: Path) -> Header | None:
    try:
        with file.open("rb") as opened:
            data = opened.read(HEADER_SIZE)
        return Header.decode(data) if len(data) == HEADER_SIZE else None
    except (OSError, ValueError):
        return None
