"""Which topics were deleted while their records are still in the log.

The queues of a topic are deleted immediately, its records stay until their files expire. A start that builds queues
from the log must not restore a deleted topic, nor take its old messages for those of a new topic of the same name: this
file says up to where the log belongs to deleted topics. It is specific to this broker; RocketMQ does not read it.
"""

from typing import Final

import msgspec
import structlog

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import read_whole, write_durably

_NAME: Final = "topics.dropped"

_log = structlog.get_logger(__name__)


class DeletedTopic(msgspec.Struct, array_like=True, frozen=True):
    """Records of a topic below ``position``, stored up to ``wall_ms``, belong to the topic deleted at that time."""

    position: int
    wall_ms: int


class DeletedTopics:
    """The file ``topics.dropped`` in a store's directory."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._path = f"{root}/{_NAME}"
        self.topics: dict[str, DeletedTopic] = {}
        self.end = 0
        """No record from this log offset on belongs to a topic that has been deleted since."""

    def load(self) -> None:
        """Read the file; an unreadable file counts as empty. Blocks."""
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
        """True if a record belongs to a topic that has been deleted since."""
        deleted = self.topics.get(topic)
        return deleted is not None and phy < deleted.position and store_timestamp <= deleted.wall_ms

    def note(self, topic: str, position: int, wall_ms: int) -> None:
        """Note that a topic is deleted while the log ends at ``position``. Durable after ``save``."""
        self.topics[topic] = DeletedTopic(position, wall_ms)
        self.end = max(self.end, position)

    async def save(self) -> None:
        """Make the notes durable.

        If they cannot be written, twice in a row, the topics are deleted all the same: a full disk must not prevent a
        deletion.
        """
        data = msgspec.json.encode(self.topics)
        try:
            try:
                await self._disk.run(write_durably, self._disk, self._path, data)
            except OSError:  # the second attempt writes a new file: it does not rely on the failed one
                await self._disk.run(write_durably, self._disk, self._path, data)
        except OSError as error:
            _log.warning("deleted_topic_not_noted", topics=sorted(self.topics), error=str(error))

    def settle(self, log_min: int, log_end: int) -> None:
        """Called when recovery has found that the log reaches from ``log_min`` to ``log_end``. Blocks. Raises OSError.

        Records behind ``log_end`` will belong to existing topics, even if the log was longer before.
        """
        settled = {
            topic: DeletedTopic(min(deleted.position, log_end), deleted.wall_ms)
            for topic, deleted in self.topics.items()
            if deleted.position > log_min and log_end > log_min
        }
        if settled != self.topics:
            self._take(settled)
            write_durably(self._disk, self._path, msgspec.json.encode(settled))
