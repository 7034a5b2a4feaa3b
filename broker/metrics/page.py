"""The page for Prometheus: RocketMQ 5's name for each metric that it has too, ``trimq_`` names for all others.

Topics and groups can make many series, so their metrics are written line by line while the page is sent. Each metric
has at most metricsOtelCardinalityLimit series, and the whole page at most ``LARGE`` times that and about 200 more.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client.core import Metric

from trimq.broker.config import BrokerConfig
from trimq.broker.metrics.clients import ClientMetrics
from trimq.broker.metrics.features import FeatureMetrics
from trimq.broker.metrics.limit import SeriesLimit
from trimq.broker.metrics.replication import replication_families
from trimq.broker.metrics.series import SeriesMetrics
from trimq.broker.metrics.services import ServiceMetrics
from trimq.broker.metrics.store import store_families
from trimq.broker.store.disk.disk import DiskSpace
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.native import NATIVE
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.http.health import Health
from trimq.remoting.http.metrics import (
    build_info,
    gauge,
    gauges,
    label,
    loop_families,
    process_families,
    reactor_families,
    text_of,
)
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.runtime.loop_probe import LoopProbe
from trimq.remoting.server.limits import ReactorStats

if TYPE_CHECKING:
    from trimq.broker.metrics.tier import TierMetrics

LARGE: Final = 9
"""Number of metrics whose series grow with topics, groups and clients; those of the tier come on top."""


class BrokerMetrics:
    """Reads counters that exist anyway. Between two scrapes only the loop probe runs, 20 times a second."""

    def __init__(  # noqa: PLR0913 - a part of the page each
        self,
        *,
        configuration: Configuration,
        store: MessageStore,
        services: ServiceMetrics,
        features: FeatureMetrics,
        series: SeriesMetrics,
        clients: ClientMetrics,
        tier: "TierMetrics | None",
        reactor: ReactorStats,
        health: Health,
    ) -> None:
        self._configuration = configuration
        self._store = store
        self._services = services
        self._features = features
        self._series = series
        self._clients = clients
        self._tier = tier
        self._reactor = reactor
        self._health = health
        self.probe = LoopProbe()
        broker = configuration.section(BrokerConfig)
        self._labels = {"cluster": broker.broker_cluster_name, "node_type": "broker", "node_id": broker.broker_name}
        self._text = ",".join([f'{name}="{label(value)}"' for name, value in self._labels.items()])

    async def page(self) -> Iterator[str]:
        """Measure the disk, which has to wait, and return the pieces of the page. They are made while they are sent."""
        disk = self._store.disk
        space = await disk.run(disk.space, self._store.root)
        return self._pieces(space)

    def _pieces(self, space: DiskSpace) -> Iterator[str]:
        for family in self._families(space):
            yield text_of(family)
        limit = SeriesLimit(self._configuration.section(WebConfig).metrics_otel_cardinality_limit)
        yield from self._series.lines(self._text, limit)
        yield from self._clients.lines(self._text, limit)
        if self._tier is not None:
            yield from self._tier.lines(self._text, limit)
        yield text_of(
            gauges(
                "trimq_series_left_out",
                "Series that are not on this page because of metricsOtelCardinalityLimit.",
                ("metric",),
                {(name,): count for name, count in limit.left_out.items()},
            )
        )

    def _families(self, space: DiskSpace) -> Iterator[Metric]:
        """The metrics with a fixed number of series."""
        yield build_info("mqbroker")
        yield gauge("trimq_ready", "1 while /readyz reports no reason.", int(self._health.readiness().ready))
        yield gauges(
            "trimq_native_on",
            "1 while the native extension serves, 0 while Python does; the label runs has which, and why.",
            ("runs",),
            {(NATIVE.status,): int(NATIVE.is_on)},
        )
        yield gauges(
            "rocketmq_broker_permission",
            "What clients may do here: 4 read, 2 write, 6 both.",
            tuple(self._labels),
            {tuple(self._labels.values()): self._configuration.section(BrokerConfig).broker_permission},
        )
        yield from self._services.sizes(self._labels)
        yield from store_families(self._store, space, self._labels)
        yield from replication_families(self._store, self._labels["node_id"])
        yield from self._services.families()
        yield from self._features.families(self._labels)
        if self._tier is not None:
            yield from self._tier.families(self._labels)
        yield from reactor_families(self._reactor)
        yield from loop_families(self.probe)
        yield from process_families()
