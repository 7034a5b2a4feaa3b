"""Which topics were deleted while their records are still in the log.

A topic's queues go at once, its records stay until their files expire. A start that builds queues from the log must not
bring a deleted topic back, nor take the old messages of a topic that was made again for the new one's: this file tells
it how far the log belongs to topics that are gone. It is this broker's own; RocketMQ does not look at it.
"""

from typing import Final

import msgspec
import structlog

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import read_whole, write_durably

_NAME: Final = "topics.dropped"

_log = structlog.get_logger(__name__)


class DeletedTopic(msgspec.Struct, array_like=True, frozen=True):
    """A topic's records below ``position``, stored up to ``wall_ms``, are of a topic that was deleted then."""

    position: int
    wall_ms: int


class DeletedTopics:
    """The file ``topics.dropped`` in a store's directory."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._path = f"{root}/{_NAME}"
        self.topics: dict[str, DeletedTopic] = {}
        self.end = 0
        """No record from this log offset on is of a topic that has been deleted since."""

    def load(self) -> None:
        """Read the file; one that cannot be read counts as none. Blocks."""
        self._take({})
        data = read_whole(self._disk, self._path)
        if data:
            try:
                self._take(msgspec.json.decode(data, type=dict[str, DeletedTopic]))
            except msgspec.DecodeError as error:
                _log.warning("deleted_topics_unreadable", path=self._path, error=str(error))

    def _take(self, topics: dict[str, DeletedTopic]) -> None:
        self.topics = topics
        self.end = max((deleted.position for deleted in topics.values()), default=0)

    def has(self, topic: str, phy: int, store_timestamp: int) -> bool:
        """True where a record is of a topic that has been deleted since."""
        deleted = self.topics.get(topic)
        return deleted is not None and phy < deleted.position and store_timestamp <= deleted.wall_ms

    def note(self, topic: str, position: int, wall_ms: int) -> None:
        """A topic is deleted now that the log ends at ``position``; durable after ``save``."""
        self.topics[topic] = DeletedTopic(position, wall_ms)
        self.end = max(self.end, position)

    async def save(self) -> None:
        """Make the notes durable.

        Where they cannot be written, twice in a row, the topics go all the same: a full disk is no reason to keep what
        somebody deletes.
        """
        data = msgspec.json.encode(self.topics)
        try:
            try:
                await self._disk.run(write_durably, self._disk, self._path, data)
            except OSError:  # the next try makes a new file: nothing of the failed one is relied on
                await self._disk.run(write_durably, self._disk, self._path, data)
        except OSError as error:
            _log.warning("deleted_topic_not_noted", topics=sorted(self.topics), error=str(error))

    def settle(self, log_min: int, log_end: int) -> None:
        """Recovery has found the log to reach from ``log_min`` to ``log_end``. Blocks. Raises OSError.

        What comes behind that end belongs to topics that are there, also where the log had been longer before.
        """
        settled = {
            topic: DeletedTopic(min(deleted.position, log_end), deleted.wall_ms)
            for topic, deleted in self.topics.items()
            if deleted.position > log_min and log_end > log_min
        }
        if settled != self.topics:
            self._take(settled)
            write_durably(self._disk, self._path, msgspec.json.encode(settled))
