"""The broker's topics: topics.json, the system topics, and creation on first use (RocketMQ's TopicConfigManager)."""

from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import structlog

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.services.state_file import (
    EntryTable,
    PersistentTable,
    StateFile,
    encode_pieces,
    load_data_version,
    unknown_fields,
)
from trimq.broker.store.disk.disk import Disk
from trimq.protocol import topic_rules
from trimq.protocol.body import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    DataVersion,
    TopicConfig,
    TopicConfigAndMappingSerializeWrapper,
)
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("broker.topics")

_READ_WRITE: Final = PERM_READ | PERM_WRITE
_KNOWN: Final = frozenset({"dataVersion", "topicConfigTable"})


def _topic(name: str, queues: int, perm: int = _READ_WRITE) -> TopicConfig:
    return TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)


def system_topic_configs(config: BrokerConfig, delay_levels: int) -> list[TopicConfig]:
    """The topics that a broker creates at its first start."""
    topics = [
        _topic(topic_rules.SELF_TEST_TOPIC, 1),
        _topic(topic_rules.BENCHMARK_TOPIC, 1024),
        _topic(topic_rules.OFFSET_MOVED_EVENT, 1),
        _topic(topic_rules.SCHEDULE_TOPIC, max(18, delay_levels)),
        _topic(topic_rules.TRANS_HALF_TOPIC, 1),
        _topic(topic_rules.TRANS_OP_HALF_TOPIC, 1),
        _topic(topic_rules.TIMER_TOPIC, 1),
        _topic(f"rmq_sys_REVIVE_LOG_{config.broker_cluster_name}", 8),
        _topic(f"rmq_sys_SYNC_BROKER_MEMBER_{config.broker_name}", 1, PERM_INHERIT),
        _topic(f"{config.broker_cluster_name}_REPLY_TOPIC", 1),
        _topic(
            config.broker_cluster_name,
            16,
            PERM_INHERIT | (_READ_WRITE if config.cluster_topic_enable else 0),
        ),
        _topic(
            config.broker_name,
            1,
            PERM_INHERIT | (_READ_WRITE if config.broker_topic_enable else 0),
        ),
    ]
    if config.trace_topic_enable:
        topics.append(_topic(config.msg_trace_topic_name, 1))
    if config.auto_create_topic_enable:
        topics.append(_auto_create_topic(config))
    return topics


def _auto_create_topic(config: BrokerConfig) -> TopicConfig:
    return _topic(topic_rules.AUTO_CREATE_TOPIC, config.default_topic_queue_nums, PERM_INHERIT | _READ_WRITE)


_FOLLOWED: Final = "trimqFollowed"
"""Field of topics.json on a slave. RocketMQ ignores it."""


class TopicConfigManager(PersistentTable):
    """Topics by name.

    ``table`` is the look-up of the hot path: a plain dict. Changes are made by the methods only: they raise the
    version, wake the writer of topics.json and call ``listeners`` (registration with the name servers, creation of
    queues) or ``delete_listeners``. A reply that promises a change waits for ``persisted()`` first.

    A changed topic is a new TopicConfig, never the old one with new fields: caches compare it by identity.
    """

    def __init__(self, configuration: Configuration, disk: Disk, clock: Clock) -> None:
        self._configuration = configuration
        self._clock = clock
        self._topics = EntryTable(TopicConfig)
        self._rest: dict[str, Any] = {}
        self._followed = False
        """Whether these are the topics of a slave, which may lack the newest ones of its master."""
        self._system: frozenset[str] = frozenset()
        self.table: dict[str, TopicConfig] = self._topics.entries
        self.data_version = DataVersion()
        self.listeners: list[Callable[[list[TopicConfig]], None]] = []
        self.delete_listeners: list[Callable[[str], None]] = []
        self.on_version: list[Callable[[], None]] = []
        """Called after each change."""
        self.replicated: Callable[[], Awaitable[None]] | None = None
        """Returns when slaves have the changes made until now, if that is waited for."""
        self._is_masters = False
        """Whether this is the state of a slave's master with ``data_version``, and nothing else has changed since."""
        path = configuration.section(MessageStoreConfig).config_path / "topics.json"
        self._file = StateFile(disk, str(path), self._pieces)
        self.get = self.table.get
        configuration.listeners.append(self._reconfigured)

    # state file

    async def load(self) -> None:
        """Read topics.json and add missing system topics. Raises StateFileError."""
        state = await self._file.load()
        if state is not None:
            self._topics.load(state.get("topicConfigTable") or {}, self._file.path, "topicName")
            self.data_version = load_data_version(state.get("dataVersion"), self._file.path)
            self._rest = unknown_fields(state, _KNOWN)
            self._followed = bool(self._rest.pop(_FOLLOWED, False))
        config = self._configuration.section(BrokerConfig)
        levels = len(self._configuration.section(MessageStoreConfig).delay_levels_ms) - 1
        system = system_topic_configs(config, levels)
        self._system = frozenset(topic.topic_name for topic in system)
        missing = [topic for topic in system if topic.topic_name not in self.table]
        if missing:
            self._put(missing)

    # a slave's topics

    async def persisted(self) -> None:
        """Return when all changes are on disk, and on the slaves that may become the master.

        Raises StateFileError, and RemotingError if this broker stops first.
        """
        await super().persisted()
        if self.replicated is not None:
            await self.replicated()

    def begin_epoch(self, epoch: int) -> None:
        """This broker is the master of an epoch now."""
        if self.data_version.state_version != epoch:
            self.data_version = self.data_version.led(epoch, self._clock.wall_ms())
            self._file.changed()

    def follow(self, state: dict[str, Any], keep: Container[str] = ()) -> bool:
        """Take the topics of a slave's master. Those that it lacks go, except the system's. Raises StateFileError.

        ``keep``: topics that may be newer than the state. They go with the next one that still lacks them. Returns
        whether there are none: these are the master's topics then.
        """
        where = "the master's topics"
        version = load_data_version(state.get("dataVersion"), where)
        if self._is_masters and version == self.data_version:
            return True
        theirs = EntryTable(TopicConfig)
        theirs.load(state.get("topicConfigTable") or {}, where, "topicName")
        gone = [name for name in self.table if name not in theirs.entries and not self.is_system(name)]
        for topic in gone:
            if topic not in keep:
                self.delete(topic)
        if changed := [config for name, config in theirs.entries.items() if self.table.get(name) != config]:
            self._put(changed)
        self._followed = True
        self._file.changed()
        if any(topic in keep for topic in gone):
            return False  # this state counts as another one than the master's
        self.data_version = version
        self._is_masters = True
        return True

    def follow_queue(self, topic: str, queue_id: int) -> bool:
        """Make sure that a queue whose messages came with the master's log belongs to its topic. False if it does."""
        known = self.table.get(topic)
        if known is not None and queue_id < max(known.read_queue_nums, known.write_queue_nums):
            return False
        self._followed = True
        if known is None:
            self.adopt({topic: queue_id + 1})
        else:
            self._put([msgspec.structs.replace(known, read_queue_nums=queue_id + 1)])
        return True

    def lead(self) -> None:
        """These are the topics of a master from here on."""
        if self._followed:
            self._followed = False
            self._file.changed()

    def queues_of(self, topic: str) -> int | None:
        """The number of queues of a topic; None if it does not exist."""
        config = self.table.get(topic)
        return None if config is None else max(config.read_queue_nums, config.write_queue_nums)

    def encode(self) -> bytes:
        """The content of topics.json."""
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        state = {"dataVersion": self.data_version, "topicConfigTable": self._topics.encodable()}
        followed = {_FOLLOWED: True} if self._followed else {}
        return encode_pieces(state | followed | self._rest)

    def serialize_wrapper(self) -> TopicConfigAndMappingSerializeWrapper:
        """All topics with their version, for GET_ALL_TOPIC_CONFIG (21) and registration."""
        return TopicConfigAndMappingSerializeWrapper(
            data_version=self.data_version,
            topic_config_table=self.table,
            mapping_data_version=DataVersion(timestamp=self.data_version.timestamp),
        )

    # queries

    def is_system(self, topic: str) -> bool:
        """Whether a topic belongs to the broker itself: reserved names, and those made of broker and cluster names."""
        return topic in self._system or topic_rules.is_system_topic(topic)

    def system_topics(self) -> list[str]:
        """The names of the broker's own topics, for GET_SYSTEM_TOPIC_LIST_FROM_BROKER (305)."""
        return sorted(self._system | {topic for topic in self.table if topic_rules.is_system_topic(topic)})

    # creating and changing

    def create_on_send(self, topic: str, default_topic: str, queue_nums: int, sys_flag: int = 0) -> TopicConfig | None:
        """The topic of a send, created with the template ``default_topic`` if it does not exist; None if not allowed.

        The template must have the inherit bit. The new topic gets its permissions without that bit, and at most its
        number of queues.
        """
        known = self.get(topic)
        if known is not None:
            return known
        model = self.get(default_topic)
        if model is None or not model.perm & PERM_INHERIT:
            return None
        automatic = self._configuration.section(BrokerConfig).auto_create_topic_enable
        if default_topic == topic_rules.AUTO_CREATE_TOPIC and not automatic:
            return None
        queues = max(1, min(queue_nums, model.write_queue_nums))
        created = TopicConfig(
            topic_name=topic,
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=model.perm & ~PERM_INHERIT,
            topic_filter_type=model.topic_filter_type,
            topic_sys_flag=sys_flag,
        )
        _log.info("topic_created", topic=topic, queues=queues, model=default_topic)
        self._put([created])
        return created

    def create_on_send_back(self, topic: str, queue_nums: int, perm: int, sys_flag: int = 0) -> TopicConfig:
        """The retry or dead-letter topic of a group, created if it does not exist.

        Queues and permissions of an existing one do not change.
        """
        known = self.get(topic)
        if known is not None:
            if known.topic_sys_flag != sys_flag and sys_flag:
                known = msgspec.structs.replace(known, topic_sys_flag=sys_flag)
                self._put([known])
            return known
        created = msgspec.structs.replace(_topic(topic, max(1, queue_nums), perm), topic_sys_flag=sys_flag)
        self._put([created])
        return created

    def put(self, *configs: TopicConfig) -> None:
        """Create topics or replace them (17, 18). The caller has checked names and attributes."""
        self._put(list(configs))

    def delete(self, topic: str) -> bool:
        """Remove a topic; False if there was none."""
        if self.table.pop(topic, None) is None:
            return False
        self._topics.forget(topic)
        self._next_version()
        _log.info("topic_deleted", topic=topic)
        for listener in self.delete_listeners:
            listener(topic)
        return True

    def update_order(self, table: Mapping[str, str]) -> None:
        """Mark as ordered exactly the topics for which a name server has an order of queues in ``table``."""
        changed = [
            msgspec.structs.replace(topic, order=name in table)
            for name, topic in self.table.items()
            if topic.order != (name in table) and (table or topic.order)
        ]
        if changed:
            self._put(changed)

    def adopt(self, queues: Mapping[str, int]) -> list[str]:
        """Create the topics of queues that the store has and topics.json has not. Returns their names.

        ``queues`` is topic -> number of queues. Such queues exist if the machine crashed before a topic's creation was
        on disk and after its messages were.
        """
        found = [_topic(name, count) for name, count in queues.items() if name not in self.table and count > 0]
        for topic in found:
            _log.warning("topic_adopted", topic=topic.topic_name, queues=topic.read_queue_nums)
        if self._followed:  # the log may have come before the topic did
            for name, count in queues.items():
                known = self.table.get(name)
                if known is not None and known.read_queue_nums < count:
                    _log.warning("topic_adopted", topic=name, queues=count)
                    found.append(msgspec.structs.replace(known, read_queue_nums=count))
        if found:
            self._put(found)
        return [topic.topic_name for topic in found]

    def _put(self, configs: Iterable[TopicConfig]) -> None:
        changed = list(configs)
        for config in changed:
            self.table[config.topic_name] = config
        self._next_version()
        for listener in self.listeners:
            listener(changed)

    def _next_version(self) -> None:
        self.data_version = self.data_version.next(self._clock.wall_ms())
        self._is_masters = False  # a master's next version may have the same numbers
        for listener in self.on_version:
            listener()
        self._file.changed()

    def _reconfigured(self, keys: frozenset[str]) -> None:
        config = self._configuration.section(BrokerConfig)
        if "brokerPermission" in keys:
            self._next_version()  # name servers accept changed permissions only with a newer version
        if "autoCreateTopicEnable" in keys and config.auto_create_topic_enable:
            model = self.get(topic_rules.AUTO_CREATE_TOPIC)
            if model is None or not model.perm & PERM_INHERIT:
                self._system |= {topic_rules.AUTO_CREATE_TOPIC}
                self._put([_auto_create_topic(config)])
