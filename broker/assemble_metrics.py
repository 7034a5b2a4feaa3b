"""The metrics of a broker, from the services that have them. Imported only if metrics are on."""

from trimq.broker.context import BrokerContext
from trimq.broker.metrics.clients import ClientMetrics
from trimq.broker.metrics.features import FeatureMetrics
from trimq.broker.metrics.page import BrokerMetrics
from trimq.broker.metrics.series import SeriesMetrics
from trimq.broker.metrics.services import ServiceMetrics
from trimq.broker.metrics.transactions import TransactionMetrics
from trimq.remoting.http.health import Health
from trimq.remoting.server.reactor import ReactorStats


def broker_metrics(context: BrokerContext, reactor: ReactorStats, health: Health) -> BrokerMetrics:
    """The page of metrics. Its probe has to run."""
    return BrokerMetrics(
        configuration=context.configuration,
        store=context.store,
        services=ServiceMetrics(
            topics=context.topics,
            groups=context.groups,
            offsets=context.offsets,
            long_polling=context.long_polling,
            registration=context.registration,
            stats=context.stats,
        ),
        features=FeatureMetrics(
            filters=context.filters,
            client_calls=context.client_calls,
            transactions=TransactionMetrics(
                transactions=context.transactions, checks=context.transaction_checks, clock=context.clock
            ),
            timer=context.timer,
        ),
        series=SeriesMetrics(offsets=context.offsets, stats=context.stats, store=context.store),
        clients=ClientMetrics(producers=context.producers, consumers=context.consumers),
        reactor=reactor,
        health=health,
    )
