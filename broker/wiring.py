"""Connects the parts of a broker: store, services, processors and reactor."""

from collections.abc import Iterable, Iterator
from typing import Final

from trimq.broker.config import MessageStoreConfig, ReplicationConfig
from trimq.broker.context import BrokerContext
from trimq.broker.processor_table import register_processors
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.pending_timers import TIMED_MESSAGES, PendingTimers
from trimq.broker.services.queued_messages import QueuedMessages, QueuePosition
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.slave_timers import SlaveTimers
from trimq.broker.services.timer import TimerMessageService
from trimq.broker.services.transaction.half_queue import HalfQueue
from trimq.broker.services.transaction.held_halves import HALF_MESSAGES, HeldHalves
from trimq.broker.store.message_store import MappedFile, MessageStore
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.body import TopicConfig
from trimq.protocol.topic_rules import SCHEDULE_TOPIC, TIMER_TOPIC, TRANS_HALF_TOPIC
from trimq.protocol.transaction import GROUP, QUEUE
from trimq.remoting.server.gate import Gate
from trimq.remoting.server.reactor import HandlerTable, Reactor

DELAYED_MESSAGES: Final = "delayed messages"
_QUEUES_AT_ONCE: Final = 64
"""A topic with more queues than this does not get them when it is created, but each one with its first message."""


def hold_pending(
    store: MessageStore, schedule: ScheduleMessageService, timer: TimerMessageService, halves: HalfQueue
) -> None:
    """Keep log files with pending messages: once it is known which these are, and before the cleaner looks first."""
    store.hold_log(QueuedMessages(DELAYED_MESSAGES, store, schedule.positions))
    store.hold_log(HeldHalves(store, halves))
    store.hold_log(PendingTimers(store.timer_data))
    store.hold_log(QueuedMessages(TIMED_MESSAGES, store, timer.positions, timer.unread))


def hold_followed(
    store: MessageStore, schedule: ScheduleMessageService, offsets: ConsumerOffsetManager, timers: SlaveTimers
) -> None:
    """The same on a slave: what its master had still to read, as far as the slave knows that.

    Before the master has answered it keeps all half messages and all timed messages.
    """

    def first_half() -> Iterator[QueuePosition]:
        known = offsets.query_all(GROUP, TRANS_HALF_TOPIC) or {}
        yield TRANS_HALF_TOPIC, QUEUE, known.get(QUEUE, 0)

    store.hold_log(QueuedMessages(DELAYED_MESSAGES, store, schedule.positions))
    store.hold_log(QueuedMessages(HALF_MESSAGES, store, first_half))
    store.hold_log(QueuedMessages(TIMED_MESSAGES, store, timers.positions))


def connect(context: BrokerContext, reactor: Reactor, gate: Gate) -> HandlerTable:
    """Connect the parts; returns the handlers of requests. Nothing is served before the reactor runs."""
    table = HandlerTable(gate)
    pulls = register_processors(table, context, reactor.stats)
    holds = context.long_polling
    holds.again = pulls.again
    holds.in_round = lambda: reactor.in_round
    holds.filters.look = context.store.look_properties
    # The order at a round's end matters: under SYNC_FLUSH the store's sync makes messages readable and wakes the
    # pulls that wait for them, then the woken pulls are served in the same round.
    context.store.commit_rounds(reactor.at_round_end, lambda: reactor.in_round)
    reactor.at_round_end.append(holds.serve_woken)
    # A new feature has to see held pulls too: a change wakes them, and each is compared with the gate's terms.
    gate.listeners.append(holds.wake_all)
    reactor.on_idle.append(pulls.prepare)
    context.store.hear_awaited(holds.awaited, holds.notify_arriving)
    context.store.on_overdue.append(lambda file: _close_readers(context, reactor, file))
    _connect_services(context)
    return table


def _connect_services(context: BrokerContext) -> None:
    store, configuration = context.store, context.configuration
    store.keep_unread(context.unread.oldest)
    if not configuration.section(ReplicationConfig).is_slave:  # there these services do not run
        store.add_topic_listener(SCHEDULE_TOPIC, context.schedule.message_arriving)
        store.add_topic_listener(TRANS_HALF_TOPIC, context.transactions.half_arriving)
        store.add_topic_listener(TIMER_TOPIC, context.timer.message_arriving)
    configuration.listeners.append(lambda _: store.set_config(configuration.section(MessageStoreConfig)))
    configuration.listeners.append(lambda _: store.set_tier_config(configuration.section(TieredStoreConfig)))
    context.consumers.listeners.append(context.filters.group_changed)
    # Only for topics that are created from here on: those of the state files were loaded before.
    context.topics.delete_listeners.append(context.timer.metrics.remove)
    context.topics.listeners.append(lambda configs: _create_queues(store, configs))


def _close_readers(context: BrokerContext, reactor: Reactor, file: MappedFile) -> None:
    """Close connections whose unsent replies still hold a deleted file, after destroyMapedFileIntervalForcibly."""
    for connection in list(reactor.connections.values()):
        if any(file.is_released_by(release) for release in connection.out.releases()):
            config = context.configuration.section(MessageStoreConfig)
            seconds = config.destroy_maped_file_interval_forcibly / 1000
            connection.close(f"it still reads a commit log file that was deleted more than {seconds:g} s ago")


def _create_queues(store: MessageStore, configs: Iterable[TopicConfig]) -> None:
    for config in configs:
        if config.write_queue_nums <= _QUEUES_AT_ONCE:
            store.create_queues(config.topic_name, config.write_queue_nums)
