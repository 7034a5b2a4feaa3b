"""The metrics of a broker, from the services that have them. Imported only if metrics are on."""

from typing import TYPE_CHECKING

from trimq.broker.context import BrokerContext
from trimq.broker.metrics.clients import ClientMetrics
from trimq.broker.metrics.features import FeatureMetrics
from trimq.broker.metrics.page import BrokerMetrics
from trimq.broker.metrics.series import SeriesMetrics
from trimq.broker.metrics.services import ServiceMetrics
from trimq.broker.metrics.transactions import TransactionMetrics
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.remoting.http.health import Health
from trimq.remoting.server.reactor import ReactorStats

if TYPE_CHECKING:
    from trimq.broker.metrics.tier import TierMetrics


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
            users=context.users,
        ),
        series=SeriesMetrics(offsets=context.offsets, stats=context.stats, store=context.store),
        clients=ClientMetrics(producers=context.producers, consumers=context.consumers),
        tier=_tier_metrics(context),
        reactor=reactor,
        health=health,
    )


def _tier_metrics(context: BrokerContext) -> "TierMetrics | None":
    if not context.configuration.section(TieredStoreConfig).is_enabled:
        return None
    # Only then: as in the controller, a broker without a tier imports nothing of it.
    from trimq.broker.metrics.tier import TierMetrics  # noqa: PLC0415
    from trimq.broker.store.tiered.access.tiered_store import TieredStore  # noqa: PLC0415

    store = context.store
    return TierMetrics(store) if isinstance(store, TieredStore) else None
