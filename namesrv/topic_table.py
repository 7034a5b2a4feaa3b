"""TopicQueueTable: the queues of each topic by broker name (RocketMQ's topicQueueTable).

Pure state. Entries are replaced and never changed in place, so that an entry that a caller holds does not change.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from trimq.protocol.body import PERM_READ, PERM_WRITE, QueueData, TopicConfig, TopicQueueMappingInfo
from trimq.protocol.json_pieces import in_order

UNIT_FLAG: Final = 1
"""topicSysFlag: the topic belongs to a unit."""
UNIT_SUB_FLAG: Final = 2
"""topicSysFlag: the topic is consumed by units."""


class TopicQueueTable:
    """QueueData by topic and broker name, and the mappings of static topics.

    ``on_change`` is called with the name of each topic whose route has changed. ``deletions`` counts deletions: as long
    as it is unchanged, all topics that a broker has registered are still here.
    """

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._mappings: dict[str, dict[str, TopicQueueMappingInfo]] = {}
        self._on_change = on_change
        self.deletions = 0

    def __contains__(self, topic: str) -> bool:
        return topic in self._topics

    def __len__(self) -> int:
        return len(self._topics)

    def queues(self, topic: str) -> Mapping[str, QueueData]:
        """The topic's queues by broker name; empty for an unknown topic."""
        return self._topics.get(topic, {})

    def mappings(self, topic: str) -> Mapping[str, TopicQueueMappingInfo] | None:
        """A static topic's mapping by broker name; None for any other topic."""
        return self._mappings.get(topic)

    def put(self, topic: str, queue_data: QueueData) -> None:
        """Set the topic's queues on one broker name."""
        brokers = self._topics.setdefault(topic, {})
        if brokers.get(queue_data.broker_name) != queue_data:
            brokers[queue_data.broker_name] = queue_data
            self._on_change(topic)

    def put_mappings(self, mappings: Iterable[tuple[str, TopicQueueMappingInfo]]) -> None:
        """Set the mappings of static topics, each for the broker name that it contains."""
        for topic, mapping in mappings:
            self._mappings.setdefault(topic, {})[mapping.bname] = mapping
            self._on_change(topic)

    def missing(self, broker_name: str, topics: Mapping[str, TopicConfig]) -> list[TopicConfig]:
        """The ``topics`` that have no queues on ``broker_name`` here."""
        known = self._topics
        return [config for config in topics.values() if broker_name not in known.get(config.topic_name, ())]

    def topics_of(self, broker_name: str) -> list[str]:
        """The topics that have queues on ``broker_name``."""
        return [topic for topic, brokers in self._topics.items() if broker_name in brokers]

    def delete(self, topic: str, broker_names: Collection[str] | None = None) -> bool:
        """Delete a topic from all or from the given broker names; False if it was on none of them."""
        brokers = self._topics.get(topic)
        if brokers is None:
            return False
        deleted = [name for name in brokers if broker_names is None or name in broker_names]
        for name in deleted:
            del brokers[name]
            self._mappings.get(topic, {}).pop(name, None)
        if not brokers:
            del self._topics[topic]
            self._mappings.pop(topic, None)
        if deleted:
            self.deletions += 1
            self._on_change(topic)
        return bool(deleted)

    def delete_broker(self, broker_name: str) -> list[str]:
        """Delete all topics of ``broker_name``; returns their names."""
        topics = self.topics_of(broker_name)
        for topic in topics:
            self.delete(topic, (broker_name,))
        return topics

    def wipe_write_perm(self, broker_name: str) -> int:
        """Make all topics of a broker name read-only; returns their number."""
        return self._change_perms(broker_name, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        """Make all topics of a broker name readable and writable, other bits unchanged; returns their number."""
        return self._change_perms(broker_name, lambda perm: perm | PERM_READ | PERM_WRITE)

    def _change_perms(self, broker_name: str, change: Callable[[int], int]) -> int:
        topics = self.topics_of(broker_name)
        for topic in topics:
            old = self._topics[topic][broker_name]
            self.put(topic, msgspec.structs.replace(old, perm=change(old.perm)))
        return len(topics)

    def names(self, broker_names: Collection[str] | None = None) -> Iterator[str | None]:
        """All topics, or those with queues on any of the given broker names, sorted. None: see ``in_order``."""
        if broker_names is None:
            return in_order(self._topics)
        wanted = set(broker_names)
        return in_order(self._topics, lambda topic: not wanted.isdisjoint(self._topics.get(topic, ())))

    def unit_topics(self) -> Iterator[str | None]:
        """Topics with the unit flag."""
        return self._by_flag(lambda flag: bool(flag & UNIT_FLAG))

    def has_unit_sub_topics(self) -> Iterator[str | None]:
        """Topics that are consumed by units."""
        return self._by_flag(lambda flag: bool(flag & UNIT_SUB_FLAG))

    def has_unit_sub_ununit_topics(self) -> Iterator[str | None]:
        """Topics that are consumed by units and belong to none."""
        return self._by_flag(lambda flag: flag & (UNIT_FLAG | UNIT_SUB_FLAG) == UNIT_SUB_FLAG)

    def _by_flag(self, wanted: Callable[[int], bool]) -> Iterator[str | None]:
        def fits(topic: str) -> bool:
            brokers = self._topics.get(topic)
            return brokers is not None and wanted(next(iter(brokers.values())).topic_sys_flag)

        return in_order(self._topics, fits)


def queue_data(broker_name: str, config: TopicConfig, perm_mask: int = -1) -> QueueData:
    """The entry of a route for a topic that a broker registered; ``perm_mask`` removes permissions."""
    return QueueData(
        broker_name=broker_name,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm & perm_mask,
        topic_sys_flag=config.topic_sys_flag,
    )
