"""Builds the broker's processors and gives each the parts it needs. Part of the composition root."""

from trimq.broker.context import BrokerContext
from trimq.broker.processors.admin.auth_admin import AuthAdminProcessor
from trimq.broker.processors.admin.broker_admin import BrokerAdminProcessor
from trimq.broker.processors.admin.client_admin import ClientAdminProcessor
from trimq.broker.processors.admin.config_admin import ConfigAdminProcessor
from trimq.broker.processors.admin.consume_admin import ConsumeAdminProcessor
from trimq.broker.processors.admin.group_admin import GroupAdminProcessor
from trimq.broker.processors.admin.offset_admin import OffsetAdminProcessor
from trimq.broker.processors.admin.queue_admin import QueueAdminProcessor
from trimq.broker.processors.admin.replica_admin import ReplicaAdminProcessor
from trimq.broker.processors.admin.replication_admin import ReplicationAdminProcessor
from trimq.broker.processors.admin.timer_admin import TimerAdminProcessor
from trimq.broker.processors.admin.topic_admin import TopicAdminProcessor
from trimq.broker.processors.assignment import QueryAssignmentProcessor
from trimq.broker.processors.client import ClientProcessor
from trimq.broker.processors.end_transaction import EndTransactionProcessor
from trimq.broker.processors.lock import LockProcessor
from trimq.broker.processors.offset import OffsetProcessor
from trimq.broker.processors.pull.pull import PullMessageProcessor
from trimq.broker.processors.pull.pull_filters import PullFilters
from trimq.broker.processors.query import QueryMessageProcessor
from trimq.broker.processors.recall import RecallMessageProcessor
from trimq.broker.processors.send.send import SendMessageProcessor
from trimq.broker.processors.send.send_back import SendBackProcessor
from trimq.broker.processors.send.send_checks import SendChecks
from trimq.broker.processors.send.send_reply import ReplyMessageProcessor
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.limits import ReactorStats


def register_processors(table: HandlerTable, context: BrokerContext, reactor: ReactorStats) -> PullMessageProcessor:
    """Register the handlers of all processors. Returns the pull processor, which also serves held pulls."""
    pulls = PullMessageProcessor(
        configuration=context.configuration,
        topics=context.topics,
        groups=context.groups,
        filters=PullFilters(context.configuration, context.groups, context.consumers, context.filters),
        offsets=context.offsets,
        long_polling=context.long_polling,
        stats=context.stats,
        store=context.store,
    )
    ends = end_processor(context)
    for processor in (
        send_processor(context, ends),
        send_back_processor(context),
        RecallMessageProcessor(
            configuration=context.configuration,
            topics=context.topics,
            store=context.store,
            stats=context.stats,
            checks=_send_checks(context),
            clock=context.clock,
            store_host=context.store_host,
        ),
        ReplyMessageProcessor(
            configuration=context.configuration,
            identity=context.identity,
            topics=context.topics,
            producers=context.producers,
            calls=context.client_calls,
            store=context.store,
            stats=context.stats,
            checks=_send_checks(context),
            clock=context.clock,
            store_host=context.store_host,
            request_users=context.request_users,
        ),
        pulls,
        QueryMessageProcessor(configuration=context.configuration, store=context.store, permit=_permit(context)),
        OffsetProcessor(
            topics=context.topics,
            groups=context.groups,
            offsets=context.offsets,
            schedule=context.schedule,
            store=context.store,
        ),
        ClientProcessor(
            configuration=context.configuration,
            topics=context.topics,
            groups=context.groups,
            consumers=context.consumers,
            filters=context.filters,
            producers=context.producers,
            registration=context.registration,
            permit=_permit(context),
        ),
        LockProcessor(locks=context.locks),
        QueryAssignmentProcessor(
            configuration=context.configuration,
            topics=context.topics,
            groups=context.groups,
            consumers=context.consumers,
            routes=context.routes,
            modes=context.modes,
        ),
        ends,
    ):
        processor.register(table)
    _register_administration(table, context, reactor)
    return pulls


def send_processor(context: BrokerContext, ends: EndTransactionProcessor) -> SendMessageProcessor:
    """The processor of sends and batches, and of the ends of transactions that are served together with them."""
    return SendMessageProcessor(
        configuration=context.configuration,
        topics=context.topics,
        store=context.store,
        stats=context.stats,
        checks=_send_checks(context),
        unique_ids=context.unique_ids,
        store_host=context.store_host,
        ends=ends,
    )


def end_processor(context: BrokerContext) -> EndTransactionProcessor:
    """The processor of the ends of transactions."""
    return EndTransactionProcessor(
        configuration=context.configuration,
        transactions=context.transactions,
        store=context.store,
        topics=context.topics,
        stats=context.stats,
        clock=context.clock,
        permit=_permit(context),
    )


def send_back_processor(context: BrokerContext) -> SendBackProcessor:
    """The processor of messages that consumers send back."""
    return SendBackProcessor(
        configuration=context.configuration,
        topics=context.topics,
        groups=context.groups,
        store=context.store,
        stats=context.stats,
        checks=_send_checks(context),
        store_host=context.store_host,
        permit=_permit(context),
    )


def _permit(context: BrokerContext) -> Permit:
    return OPEN if context.users is None else context.users.access


def _send_checks(context: BrokerContext) -> SendChecks:
    return SendChecks(
        configuration=context.configuration,
        topics=context.topics,
        groups=context.groups,
        locks=context.locks,
        timer=context.timer,
        clock=context.clock,
        pending_halves=lambda: context.transactions.halves.pending,
    )


def _register_administration(table: HandlerTable, context: BrokerContext, reactor: ReactorStats) -> None:
    """Register the processors that serve mqadmin and consoles."""
    for processor in (
        TopicAdminProcessor(
            configuration=context.configuration,
            topics=context.topics,
            offsets=context.offsets,
            consumers=context.consumers,
            long_polling=context.long_polling,
            registration=context.registration,
            stats=context.stats,
            followers=context.topic_followers,
            store=context.store,
        ),
        QueueAdminProcessor(
            identity=context.identity,
            topics=context.topics,
            consumers=context.consumers,
            filters=context.filters,
            stats=context.stats,
            store=context.store,
        ),
        GroupAdminProcessor(
            identity=context.identity,
            groups=context.groups,
            offsets=context.offsets,
            consumers=context.consumers,
            producers=context.producers,
            stats=context.stats,
            permit=_permit(context),
        ),
        ConsumeAdminProcessor(
            identity=context.identity,
            topics=context.topics,
            groups=context.groups,
            offsets=context.offsets,
            consumers=context.consumers,
            stats=context.stats,
            store=context.store,
            clock=context.clock,
            permit=_permit(context),
        ),
        OffsetAdminProcessor(
            identity=context.identity,
            configuration=context.configuration,
            topics=context.topics,
            groups=context.groups,
            offsets=context.offsets,
            consumers=context.consumers,
            long_polling=context.long_polling,
            store=context.store,
            permit=_permit(context),
        ),
        ClientAdminProcessor(
            identity=context.identity,
            topics=context.topics,
            groups=context.groups,
            consumers=context.consumers,
            store=context.store,
            permit=_permit(context),
        ),
        ConfigAdminProcessor(
            configuration=context.configuration,
            config_file=context.config_file,
            registration=context.registration,
            started_wall_ms=context.started_wall_ms,
        ),
        BrokerAdminProcessor(
            configuration=context.configuration,
            schedule=context.schedule,
            timer=context.timer,
            stats=context.stats,
            store=context.store,
            disk=context.disk,
            reactor=reactor,
        ),
        TimerAdminProcessor(timer=context.timer),
        AuthAdminProcessor(configuration=context.configuration, users=context.users),
        ReplicationAdminProcessor(store=context.store, clock=context.clock),
        ReplicaAdminProcessor(
            store=context.store,
            configuration=context.configuration,
            registration=context.registration,
            assigned=context.replicas,
        ),
    ):
        processor.register(table)
