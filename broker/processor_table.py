"""Which processors a broker has, and what each of them needs: a part of the composition root."""

from trimq.broker.parts import BrokerParts
from trimq.broker.processors.admin.broker_admin import BrokerAdminProcessor
from trimq.broker.processors.admin.client_admin import ClientAdminProcessor
from trimq.broker.processors.admin.config_admin import ConfigAdminProcessor
from trimq.broker.processors.admin.consume_admin import ConsumeAdminProcessor
from trimq.broker.processors.admin.group_admin import GroupAdminProcessor
from trimq.broker.processors.admin.offset_admin import OffsetAdminProcessor
from trimq.broker.processors.admin.queue_admin import QueueAdminProcessor
from trimq.broker.processors.admin.topic_admin import TopicAdminProcessor
from trimq.broker.processors.client import ClientProcessor
from trimq.broker.processors.lock import LockProcessor
from trimq.broker.processors.offset import OffsetProcessor
from trimq.broker.processors.pull.pull import PullMessageProcessor
from trimq.broker.processors.query import QueryMessageProcessor
from trimq.broker.processors.send.send import SendMessageProcessor
from trimq.broker.processors.send.send_back import SendBackProcessor
from trimq.broker.processors.send.send_checks import SendChecks
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.limits import ReactorStats


def register_processors(table: HandlerTable, parts: BrokerParts, reactor: ReactorStats) -> PullMessageProcessor:
    """Have all of them take their codes. What is returned serves held pulls again, and prepares pulls."""
    pulls = PullMessageProcessor(
        configuration=parts.configuration,
        topics=parts.topics,
        groups=parts.groups,
        consumers=parts.consumers,
        offsets=parts.offsets,
        long_polling=parts.long_polling,
        stats=parts.stats,
        store=parts.store,
    )
    for processor in (
        send_processor(parts),
        send_back_processor(parts),
        pulls,
        QueryMessageProcessor(configuration=parts.configuration, store=parts.store),
        OffsetProcessor(
            topics=parts.topics,
            groups=parts.groups,
            offsets=parts.offsets,
            schedule=parts.schedule,
            store=parts.store,
        ),
        ClientProcessor(
            topics=parts.topics,
            groups=parts.groups,
            consumers=parts.consumers,
            producers=parts.producers,
            registration=parts.registration,
        ),
        LockProcessor(locks=parts.locks),
    ):
        processor.register(table)
    _register_administration(table, parts, reactor)
    return pulls


def send_processor(parts: BrokerParts) -> SendMessageProcessor:
    """Sends and batches."""
    return SendMessageProcessor(
        configuration=parts.configuration,
        topics=parts.topics,
        store=parts.store,
        stats=parts.stats,
        checks=_send_checks(parts),
        unique_ids=parts.unique_ids,
        store_host=parts.store_host,
    )


def send_back_processor(parts: BrokerParts) -> SendBackProcessor:
    """Messages that consumers send back."""
    return SendBackProcessor(
        configuration=parts.configuration,
        topics=parts.topics,
        groups=parts.groups,
        store=parts.store,
        stats=parts.stats,
        checks=_send_checks(parts),
        store_host=parts.store_host,
    )


def _send_checks(parts: BrokerParts) -> SendChecks:
    return SendChecks(
        configuration=parts.configuration,
        topics=parts.topics,
        groups=parts.groups,
        locks=parts.locks,
        clock=parts.clock,
    )


def _register_administration(table: HandlerTable, parts: BrokerParts, reactor: ReactorStats) -> None:
    """What mqadmin and consoles talk to."""
    for processor in (
        TopicAdminProcessor(
            configuration=parts.configuration,
            topics=parts.topics,
            offsets=parts.offsets,
            consumers=parts.consumers,
            long_polling=parts.long_polling,
            registration=parts.registration,
            stats=parts.stats,
            store=parts.store,
        ),
        QueueAdminProcessor(
            identity=parts.identity,
            topics=parts.topics,
            consumers=parts.consumers,
            stats=parts.stats,
            store=parts.store,
        ),
        GroupAdminProcessor(
            identity=parts.identity,
            groups=parts.groups,
            offsets=parts.offsets,
            consumers=parts.consumers,
            producers=parts.producers,
            stats=parts.stats,
        ),
        ConsumeAdminProcessor(
            identity=parts.identity,
            topics=parts.topics,
            groups=parts.groups,
            offsets=parts.offsets,
            consumers=parts.consumers,
            stats=parts.stats,
            store=parts.store,
            clock=parts.clock,
        ),
        OffsetAdminProcessor(
            identity=parts.identity,
            configuration=parts.configuration,
            topics=parts.topics,
            groups=parts.groups,
            offsets=parts.offsets,
            consumers=parts.consumers,
            long_polling=parts.long_polling,
            store=parts.store,
        ),
        ClientAdminProcessor(
            identity=parts.identity,
            topics=parts.topics,
            groups=parts.groups,
            consumers=parts.consumers,
            store=parts.store,
        ),
        ConfigAdminProcessor(
            configuration=parts.configuration,
            config_file=parts.config_file,
            registration=parts.registration,
            started_wall_ms=parts.started_wall_ms,
        ),
        BrokerAdminProcessor(
            configuration=parts.configuration,
            schedule=parts.schedule,
            stats=parts.stats,
            store=parts.store,
            disk=parts.disk,
            reactor=reactor,
        ),
    ):
        processor.register(table)
