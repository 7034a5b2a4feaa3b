"""BrokerContext: all parts of a running broker, for the composition root and for the owner of a controller.

Other modules do not take it. Their constructors name the parts they need.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimq.broker.auth.request_users import RequestUsers
    from trimq.broker.identity import BrokerIdentity
    from trimq.broker.replicas.replicas_manager import ReplicasManager
    from trimq.broker.services.client_calls import ClientCalls
    from trimq.broker.services.config_file import ConfigFile
    from trimq.broker.services.consumer_filters import ConsumerFilterManager
    from trimq.broker.services.consumers import ConsumerManager
    from trimq.broker.services.groups import SubscriptionGroupManager
    from trimq.broker.services.long_polling import PullRequestHoldService
    from trimq.broker.services.message_request_mode import MessageRequestModeManager
    from trimq.broker.services.offsets import ConsumerOffsetManager
    from trimq.broker.services.producers import ProducerManager
    from trimq.broker.services.rebalance_lock import RebalanceLockManager
    from trimq.broker.services.registration import BrokerOuterAPI
    from trimq.broker.services.schedule import ScheduleMessageService
    from trimq.broker.services.stats import BrokerStats
    from trimq.broker.services.timer import TimerMessageService
    from trimq.broker.services.topic_followers import TopicFollowers
    from trimq.broker.services.topic_routes import TopicRouteInfoManager
    from trimq.broker.services.topics import TopicConfigManager
    from trimq.broker.services.transaction.check import TransactionalMessageCheckService
    from trimq.broker.services.transaction.service import TransactionalMessageService
    from trimq.broker.services.unread import UnreadPositions
    from trimq.broker.store.disk.disk import Disk
    from trimq.broker.store.message_store import MessageStore
    from trimq.protocol.message_id import UniqueIdGenerator
    from trimq.remoting.auth.users import Users
    from trimq.remoting.config.configuration import Configuration
    from trimq.remoting.runtime.clock import Clock


@dataclass(slots=True)
class BrokerContext:
    """The parts of one broker. ``store_host`` is ``identity.address`` in the packed form that records hold."""

    identity: "BrokerIdentity"
    configuration: "Configuration"
    config_file: "ConfigFile"
    clock: "Clock"
    disk: "Disk"
    store: "MessageStore"
    topics: "TopicConfigManager"
    topic_followers: "TopicFollowers"
    groups: "SubscriptionGroupManager"
    offsets: "ConsumerOffsetManager"
    consumers: "ConsumerManager"
    filters: "ConsumerFilterManager"
    producers: "ProducerManager"
    client_calls: "ClientCalls"
    locks: "RebalanceLockManager"
    long_polling: "PullRequestHoldService"
    schedule: "ScheduleMessageService"
    timer: "TimerMessageService"
    transactions: "TransactionalMessageService"
    transaction_checks: "TransactionalMessageCheckService"
    registration: "BrokerOuterAPI"
    routes: "TopicRouteInfoManager"
    modes: "MessageRequestModeManager"
    stats: "BrokerStats"
    unread: "UnreadPositions"
    unique_ids: "UniqueIdGenerator"
    store_host: bytes
    started_wall_ms: int
    replicas: "ReplicasManager | None" = None
    """In controller mode."""
    users: "Users | None" = None
    """While authentication is on."""
    request_users: "RequestUsers | None" = None
    """While heartbeats have to be signed."""
