"""TopicQueueTable: which topic has how many queues on which broker names (RocketMQ's topicQueueTable).

Pure state. Entries are replaced, never changed in place, so that whoever was given one keeps what it was given.
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
    """Topic to broker name to QueueData, and the static topics' mappings next to it.

    ``on_change`` is told the name of each topic whose route is no longer what it was. ``deletions`` counts what is
    deleted: while it stands still, everything that a broker registered is still here.
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
        """The topic's queues by broker name; empty for a topic that is not known."""
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
        """Set static topics' mappings, each on the broker name it says itself."""
        for topic, mapping in mappings:
            self._mappings.setdefault(topic, {})[mapping.bname] = mapping
            self._on_change(topic)

    def missing(self, broker_name: str, topics: Mapping[str, TopicConfig]) -> list[TopicConfig]:
        """Those of ``topics`` that have no queues on ``broker_name`` here."""
        known = self._topics
        return [config for config in topics.values() if broker_name not in known.get(config.topic_name, ())]

    def topics_of(self, broker_name: str) -> list[str]:
        """The topics that have queues on ``broker_name``."""
        return [topic for topic, brokers in self._topics.items() if broker_name in brokers]

    def delete(self, topic: str, broker_names: Collection[str] | None = None) -> bool:
        """Take a topic away, from all or from the given broker names; False where nothing was there."""
        brokers = self._topics.get(topic)
        if brokers is None:
            return False
        gone = [name for name in brokers if broker_names is None or name in broker_names]
        for name in gone:
            del brokers[name]
            self._mappings.get(topic, {}).pop(name, None)
        if not brokers:
            del self._topics[topic]
            self._mappings.pop(topic, None)
        if gone:
            self.deletions += 1
            self._on_change(topic)
        return bool(gone)

    def delete_broker(self, broker_name: str) -> list[str]:
        """Take away all that ``broker_name`` had; gives back its topics."""
        topics = self.topics_of(broker_name)
        for topic in topics:
            self.delete(topic, (broker_name,))
        return topics

    def wipe_write_perm(self, broker_name: str) -> int:
        """Make all topics of a broker name read-only; gives back how many it has."""
        return self._change_perms(broker_name, lambda perm: perm & ~PERM_WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        """Make all topics of a broker name readable and writable, their other bits kept; gives back how many it has."""
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
        """Topics that units consume."""
        return self._by_flag(lambda flag: bool(flag & UNIT_SUB_FLAG))

    def has_unit_sub_ununit_topics(self) -> Iterator[str | None]:
        """Topics that units consume and that belong to none."""
        return self._by_flag(lambda flag: flag & (UNIT_FLAG | UNIT_SUB_FLAG) == UNIT_SUB_FLAG)

    def _by_flag(self, wanted: Callable[[int], bool]) -> Iterator[str | None]:
        def fits(topic: str) -> bool:
            brokers = self._topics.get(topic)
            return brokers is not None and wanted(next(iter(brokers.values())).topic_sys_flag)

        return in_order(self._topics, fits)


def queue_data(broker_name: str, config: TopicConfig, perm_mask: int = -1) -> QueueData:
    """What a route says of a topic that a broker registered; ``perm_mask`` takes permissions away."""
    return QueueData(
        broker_name=broker_name,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm & perm_mask,
        topic_sys_flag=config.topic_sys_flag,
    )
