"""Part of the composition root: the services that have state files, and the order in which a start reads them."""

from typing import NamedTuple

from trimq.broker.config import BrokerConfig
from trimq.broker.services.consumer_filters import ConsumerFilterManager
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.message_request_mode import MessageRequestModeManager
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.slave_timers import SlaveTimers
from trimq.broker.services.state_file import StateFileError
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.timer import TimerMessageService
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.services.transaction.read_back import read_back
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.broker.start_error import StartError
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.message_store import MessageStore
from trimq.broker.wiring import hold_followed, hold_pending
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock


class StateServices(NamedTuple):
    """They are read in the order of ``load``. ``stats`` has no file; the timer's is the store's."""

    topics: TopicConfigManager
    groups: SubscriptionGroupManager
    offsets: ConsumerOffsetManager
    schedule: ScheduleMessageService
    modes: MessageRequestModeManager
    filters: ConsumerFilterManager
    transactions: TransactionalMessageService
    timer: TimerMessageService
    stats: BrokerStats

    async def load(self, store: MessageStore, slave_timers: SlaveTimers | None) -> None:
        """Read the state files, and register what the log is kept for. Raises StartError.

        ``slave_timers`` is what a slave knows of its master's timed messages; None on a master.
        """
        await self._read_files(store)
        # Before read_back, which may take longer than the time until the first cleaning of the log.
        try:
            if store.replication.is_slave:
                assert slave_timers is not None
                hold_followed(store, self.schedule, self.offsets, slave_timers)
            else:
                hold_pending(store, self.schedule, self.timer, self.transactions.halves)
                await read_back(self.transactions, store, self.offsets)
        except StateFileError as error:
            raise StartError(f"the damaged op queue cannot be rebuilt: {error}") from error
        except OSError as error:
            raise StartError(f"the transactions cannot be read: {error}") from error

    async def _read_files(self, store: MessageStore) -> None:
        """Read the files, then restore the topics of queues that topics.json does not have."""
        topics, offsets = self.topics, self.offsets
        try:
            for service in (
                topics,
                self.groups,
                offsets,
                self.schedule,
                self.modes,
                self.filters,
                self.transactions,
            ):
                await service.load()
        except StateFileError as error:
            raise StartError(f"a state file cannot be read: {error}") from error
        topics.adopt(store.needed_queues())
        if not store.replication.is_slave:
            topics.lead()
            offsets.cap(
                lambda topic, queue: store.next_offset(topic, queue) if store.queue_exists(topic, queue) else None
            )
            if (leadership := store.replication.leadership) is not None:
                for table in (topics, self.groups, offsets):
                    table.begin_epoch(leadership.epoch)


def make_services(
    configuration: Configuration, store: MessageStore, disk: Disk, clock: Clock, store_host: bytes
) -> StateServices:
    """Make the services. ``store_host`` is the broker's address in the packed form that records hold."""
    topics = TopicConfigManager(configuration, disk, clock)
    offsets = ConsumerOffsetManager(configuration, disk, clock)
    stats = BrokerStats(clock, configuration.section(BrokerConfig).broker_cluster_name)
    return StateServices(
        topics=topics,
        groups=SubscriptionGroupManager(configuration, disk, clock),
        offsets=offsets,
        schedule=ScheduleMessageService(configuration, store, disk, clock, store_host),
        modes=MessageRequestModeManager(configuration, disk, clock),
        filters=ConsumerFilterManager(configuration, disk, clock),
        transactions=TransactionalMessageService(
            configuration=configuration, store=store, offsets=offsets, disk=disk, clock=clock, store_host=store_host
        ),
        timer=TimerMessageService(configuration, store, disk, clock, stats, store_host, topics.queues_of),
        stats=stats,
    )
