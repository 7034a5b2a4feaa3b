"""What is known of topics, queues and segments of the tier: config/tieredStoreMetadata.json.

Source: RocketMQ's DefaultMetadataStore, which replaces the file at each change. Here several changes that come while
it is written share the next write; the text of a stream that has not changed is not encoded again.

RocketMQ's broker renames the file to ``.bak`` before it writes a new one, and reads that one if the file is missing.
Here the file is replaced at once, and a ``.bak``, which would then be older, is deleted.
"""

import os
from collections.abc import Callable
from typing import Any, Final

import msgspec
import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import delete_durably, make_durable_directory, read_whole, write_beside
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.tiered.driver.file_segment import FileSegment
from trimq.protocol.lenient_json import loads
from trimq.protocol.tiered_layout import METADATA_FILE, UNSET_TIME, SegmentType

_TABLES: Final = ("commitLogFileSegmentTable", "consumeQueueFileSegmentTable", "indexFileSegmentTable")
_BACKUP: Final = ".bak"
DELETED: Final = 2
"""The status of a segment whose file is being deleted."""
_encode: Final = msgspec.json.encode
_log = structlog.get_logger(__name__)


class SegmentMetadata(msgspec.Struct, rename="camel"):
    """What is known of a segment. Times in ms; ``status`` 0 new, 1 sealed, 2 deleted (always 0 in practice)."""

    path: str
    type: int
    base_offset: int
    status: int = 0
    size: int = 0
    create_timestamp: int = 0
    begin_timestamp: int = UNSET_TIME
    end_timestamp: int = UNSET_TIME
    seal_timestamp: int = 0


class TopicMetadata(msgspec.Struct, rename="camel"):
    """A topic of the tier. ``reserve_time``: hours that its messages stay there, -1 for the configured time."""

    topic_id: int
    topic: str
    status: int = 0
    reserve_time: int = -1
    update_timestamp: int = 0


class _Queue(msgspec.Struct, rename="camel"):
    broker_name: str
    queue_id: int
    topic: str


class QueueMetadata(msgspec.Struct, rename="camel"):
    """A queue of the tier. RocketMQ leaves both offsets at -1."""

    queue: _Queue
    min_offset: int = -1
    max_offset: int = -1
    update_timestamp: int = 0


class DefaultMetadataStore:
    """The metadata, in memory and in its file. Changes are durable when ``persist`` returns."""

    def __init__(self, disk: Disk, root: str, broker_name: str, wall_ms: Callable[[], int]) -> None:
        """``root`` is the store's directory."""
        self._disk = disk
        self._broker_name = broker_name
        self._wall_ms = wall_ms
        self.file = f"{root}/config/{METADATA_FILE}"
        self.topics: dict[str, TopicMetadata] = {}
        self._last_id = -1
        self._queues: dict[str, dict[int, QueueMetadata]] = {}
        self._segments: tuple[dict[str, dict[int, SegmentMetadata]], ...] = ({}, {}, {})
        self._texts: dict[tuple[str, str], bytes] = {}
        """The encoded entries of tables, by table and key, as far as they have not changed."""
        self._changed = 0
        self._written = 0
        self._lock = trio.Lock()

    # -- reading

    def load(self) -> bool:
        """Read the file, or its ``.bak`` if it is missing or empty. Returns False if there is none. Blocks.

        Raises StoreLoadError if it cannot be understood, OSError.
        """
        file = self.file
        data = read_whole(self._disk, file)
        if not data:
            file += _BACKUP
            data = read_whole(self._disk, file)
            if not data:
                return False
            _log.warning("state_file_from_backup", path=file, problems=[f"{self.file}: missing or empty"])
        try:
            self._take(loads(data))
        except (ValueError, TypeError, KeyError, AttributeError, msgspec.ValidationError) as error:
            raise StoreLoadError(
                f"{file} is damaged ({error}), and it lists what the tier holds: restore it from a copy"
            ) from error
        return True

    def _take(self, tables: dict[str, Any]) -> None:
        self._last_id = int(tables.get("topicSerialNumber", -1))
        for topic, value in tables.get("topicMetadataTable", {}).items():
            self.topics[topic] = msgspec.convert(value, TopicMetadata)
            self._last_id = max(self._last_id, self.topics[topic].topic_id)
        for topic, queues in tables.get("queueMetadataTable", {}).items():
            self._queues[topic] = {int(key): msgspec.convert(value, QueueMetadata) for key, value in queues.items()}
        for name, table in zip(_TABLES, self._segments, strict=True):
            for path, segments in tables.get(name, {}).items():
                table[path] = {int(base): msgspec.convert(value, SegmentMetadata) for base, value in segments.items()}

    def queues(self, topic: str) -> list[int]:
        """The ids of a topic's queues."""
        return list(self._queues.get(topic, ()))

    def paths(self, type: SegmentType) -> list[str]:
        """The paths of the queues that have segments of a type."""
        return list(self._segments[type])

    def segments(self, path: str, type: SegmentType) -> list[SegmentMetadata]:
        """The segments of a stream, in the order of their base offsets."""
        return sorted(self._segments[type].get(path, {}).values(), key=lambda segment: segment.base_offset)

    # -- changing

    def topic_id(self, topic: str) -> int:
        """The number of a topic, which index entries carry; a new one is given to a new topic."""
        known = self.topics.get(topic)
        if known is None:
            self._last_id += 1
            known = self.topics[topic] = TopicMetadata(self._last_id, topic, update_timestamp=self._wall_ms())
            self._touch("topicMetadataTable", topic)
        return known.topic_id

    def add_queue(self, topic: str, queue_id: int) -> None:
        """Note a queue of a topic, if it is new."""
        queues = self._queues.setdefault(topic, {})
        if queue_id not in queues:
            queue = _Queue(self._broker_name, queue_id, topic)
            queues[queue_id] = QueueMetadata(queue, update_timestamp=self._wall_ms())
            self._touch("queueMetadataTable", topic)

    def delete_queue(self, topic: str, queue_id: int) -> None:
        """Forget a queue; its topic is forgotten with its last queue by ``delete_topic`` only."""
        if self._queues.get(topic, {}).pop(queue_id, None) is not None:
            self._touch("queueMetadataTable", topic)

    def delete_topic(self, topic: str) -> None:
        """Forget a topic and its queues. A new topic of its name gets another number."""
        self.topics.pop(topic, None)
        self._queues.pop(topic, None)
        self._touch("topicMetadataTable", topic)
        self._touch("queueMetadataTable", topic)

    def update_segment(self, segment: FileSegment) -> None:
        """Note the size and the times of a segment, new or known."""
        table = self._segments[segment.type].setdefault(segment.path, {})
        known = table.get(segment.base_offset)
        if known is None:
            known = SegmentMetadata(
                segment.path, int(segment.type), segment.base_offset, create_timestamp=self._wall_ms()
            )
            table[segment.base_offset] = known
        known.size = segment.commit_position
        known.begin_timestamp, known.end_timestamp = segment.min_timestamp, segment.max_timestamp
        self._touch(_TABLES[segment.type], segment.path)

    def mark_deleted(self, path: str, type: SegmentType, base_offset: int, *, undo: bool = False) -> None:
        """Note that a segment's file is being deleted, or not any more. RocketMQ's broker ignores the mark."""
        known = self._segments[type].get(path, {}).get(base_offset)
        if known is not None:
            known.status = 0 if undo else DELETED
            self._touch(_TABLES[type], path)

    def forget_segments(self) -> None:
        """Forget all segments: the provider has lost them."""
        for table in self._segments:
            table.clear()
        self._texts.clear()
        self._changed += 1

    def delete_segment(self, path: str, type: SegmentType, base_offset: int) -> None:
        """Forget a segment."""
        table = self._segments[type].get(path, {})
        if table.pop(base_offset, None) is not None:
            if not table:
                del self._segments[type][path]
            self._touch(_TABLES[type], path)

    def _touch(self, table: str, key: str) -> None:
        self._texts.pop((table, key), None)
        self._changed += 1

    # -- writing

    async def persist(self) -> None:
        """Return when all changes made so far are durable. Raises OSError."""
        wanted = self._changed
        async with self._lock:
            if self._written >= wanted:
                return
            number, pieces = self._changed, self._encoded()
            await self._disk.run(_replace, self._disk, self.file, pieces)
            self._written = number

    def _encoded(self) -> list[bytes]:
        # 64-bit offsets as keys: with quotes, which is plain JSON; RocketMQ reads both forms and writes the bare one.
        tables: list[tuple[str, dict[str, Any]]] = [
            ("topicMetadataTable", self.topics),
            ("queueMetadataTable", self._queues),
            *zip(_TABLES, self._segments, strict=True),
        ]
        pieces = [b'{"topicSerialNumber":%d' % self._last_id]
        for name, table in tables:
            entries = [self._entry(name, key, value) for key, value in table.items()]
            pieces += [b',"', name.encode(), b'":{', b",".join(entries), b"}"]
        return [b"".join([*pieces, b"}"])]

    def _entry(self, table: str, key: str, value: Any) -> bytes:
        text = self._texts.get((table, key))
        if text is None:
            text = self._texts[table, key] = _encode(key) + b":" + _encode(value)
        return text


def _replace(disk: Disk, file: str, pieces: list[bytes]) -> None:
    directory = os.path.dirname(file)
    make_durable_directory(disk, directory)
    disk.rename(write_beside(disk, file, *pieces), file)
    disk.sync_directory(directory)
    if disk.stat(file + _BACKUP) is not None:
        delete_durably(disk, file + _BACKUP)
