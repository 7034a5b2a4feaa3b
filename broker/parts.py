"""What the processors work with: the services and the store, put together once by the controller."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimq.protocol.body import MessageQueue

if TYPE_CHECKING:
    from trimq.broker.services.config_file import ConfigFile
    from trimq.broker.services.consumers import ConsumerManager
    from trimq.broker.services.groups import SubscriptionGroupManager
    from trimq.broker.services.long_polling import PullRequestHoldService
    from trimq.broker.services.offsets import ConsumerOffsetManager
    from trimq.broker.services.producers import ProducerManager
    from trimq.broker.services.rebalance_lock import RebalanceLockManager
    from trimq.broker.services.registration import BrokerOuterAPI
    from trimq.broker.services.schedule import ScheduleMessageService
    from trimq.broker.services.stats import BrokerStats
    from trimq.broker.services.topics import TopicConfigManager
    from trimq.broker.store.disk.disk import Disk
    from trimq.broker.store.message_store import MessageStore
    from trimq.protocol.message_id import UniqueIdGenerator
    from trimq.remoting.config.configuration import Configuration
    from trimq.remoting.runtime.clock import Clock


@dataclass(slots=True)
class BrokerParts:
    """One broker's parts. ``address`` is what clients are told to connect to, ``store_host`` the same packed."""

    configuration: "Configuration"
    config_file: "ConfigFile"
    clock: "Clock"
    disk: "Disk"
    store: "MessageStore"
    topics: "TopicConfigManager"
    groups: "SubscriptionGroupManager"
    offsets: "ConsumerOffsetManager"
    consumers: "ConsumerManager"
    producers: "ProducerManager"
    locks: "RebalanceLockManager"
    long_polling: "PullRequestHoldService"
    schedule: "ScheduleMessageService"
    registration: "BrokerOuterAPI"
    stats: "BrokerStats"
    unique_ids: "UniqueIdGenerator"
    broker_name: str
    address: str
    store_host: bytes
    started_wall_ms: int
    requests_in_flight: Callable[[], int]

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        """A queue of this broker as clients name it."""
        return MessageQueue(topic=topic, broker_name=self.broker_name, queue_id=queue_id)
