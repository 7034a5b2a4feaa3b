"""The queues of the tier. Source: RocketMQ's FlatFileStore."""

from collections.abc import Iterator
from typing import Final

import trio

from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.tiered.container.flat_append_file import FlatAppendFile
from trimq.broker.store.tiered.container.flat_message_file import FlatMessageFile
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.broker.store.tiered.driver.provider_stats import CallStats
from trimq.protocol.tiered_layout import INDEX_TOPIC, SegmentType, queue_path

_AT_ONCE: Final = 64
_HOUR_MS: Final = 3_600_000


class FlatFileStore:
    """All queues of one broker. ``load`` comes first."""

    def __init__(self, factory: FileSegmentFactory, metadata: DefaultMetadataStore, broker_name: str) -> None:
        self.factory = factory
        self.metadata = metadata
        self.config = factory.config
        self._broker_name = broker_name
        self._files: dict[str, dict[int, FlatMessageFile]] = {}

    async def load(self) -> None:
        """Read the metadata and recover each queue. Raises StoreLoadError, OSError."""
        if not self.metadata.load() and self.factory.has_segments(self._broker_name):
            # Uploads would begin anew, over the segments that are there.
            raise StoreLoadError(
                f"{self.metadata.file} is missing, and the tier has segments of {self._broker_name}: restore the file "
                "from a copy, or move the segments away"
            )
        if not self.factory.keeps:
            self.metadata.forget_segments()
        found = [
            self._add(topic, queue_id) for topic in self.metadata.topics for queue_id in self.metadata.queues(topic)
        ]
        turns = trio.Semaphore(_AT_ONCE)

        async def recover(file: FlatMessageFile) -> None:
            async with turns:
                await file.recover()

        try:
            async with trio.open_nursery() as nursery:
                for file in found:
                    nursery.start_soon(recover, file)
        except* OSError as group:
            raise _first(group) from group

    def _add(self, topic: str, queue_id: int) -> FlatMessageFile:
        file = FlatMessageFile(
            self.factory,
            self.metadata,
            self._broker_name,
            topic,
            queue_id,
            check_crc=self.config.tiered_store_crc_check_enable,
        )
        self._files.setdefault(topic, {})[queue_id] = file
        return file

    def find(self, topic: str, queue_id: int) -> FlatMessageFile | None:
        """The queue; None if nothing of it was uploaded, or if its topic was deleted."""
        found = self._files.get(topic, {}).get(queue_id)
        return None if found is None or found.is_destroyed else found

    def find_or_create(self, topic: str, queue_id: int) -> FlatMessageFile:
        """The queue, created (in memory) if it is new."""
        # One that is being deleted too: a new one would write into the same files.
        return self._files.get(topic, {}).get(queue_id) or self._add(topic, queue_id)

    def of_topic(self, topic: str) -> list[FlatMessageFile]:
        """The queues of a topic."""
        return list(self._files.get(topic, {}).values())

    def all(self) -> Iterator[FlatMessageFile]:
        """Every queue."""
        for queues in list(self._files.values()):
            yield from list(queues.values())

    @property
    def queues(self) -> int:
        """The number of queues."""
        return sum(map(len, self._files.values()))

    def calls(self) -> Iterator[tuple[str, str, CallStats]]:
        """See TieredQueues."""
        for kind, files in self.factory.stats.kinds.items():
            yield kind, "read", files.reads
            yield kind, "write", files.writes

    def topics(self) -> list[str]:
        """The topics with queues in the tier."""
        return list(self._files)

    def topic_id(self, topic: str) -> int | None:
        """The number of a topic in the index; None if nothing of it was uploaded."""
        known = self.metadata.topics.get(topic)
        return None if known is None else known.topic_id

    def index_file(self) -> FlatAppendFile:
        """The stream of uploaded index files; it has to be recovered."""
        path = queue_path(self._broker_name, INDEX_TOPIC, 0)
        return FlatAppendFile(self.factory, self.metadata, SegmentType.INDEX, path)

    def reserved_ms(self, topic: str) -> int:
        """How long messages of a topic stay in the tier, in ms."""
        known = self.metadata.topics.get(topic)
        own = known.reserve_time if known is not None else -1
        return (own if own > 0 else self.config.tiered_store_file_reserved_time) * _HOUR_MS

    def drop_topic(self, topic: str) -> None:
        """Neither serve nor upload anything of a topic any more, which is about to be deleted."""
        for file in self.of_topic(topic):
            file.is_destroyed = True

    async def destroy_topic(self, topic: str) -> None:
        """Delete a topic from the tier, durably. Raises OSError."""
        # They stay in the table until their files are gone: a new topic of the name would write into the same ones.
        for file in self.of_topic(topic):
            await file.destroy()
        self._files.pop(topic, None)
        if topic in self.metadata.topics:
            self.metadata.delete_topic(topic)
            await self.metadata.persist()


def _first(group: BaseExceptionGroup[OSError]) -> OSError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, OSError):
        raise TypeError from error
    return error
