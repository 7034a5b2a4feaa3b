"""Metrics of the services: topics and groups, held pulls, refusals, name servers."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.long_polling import PullRequestHoldService
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.topics import TopicConfigManager
from trimq.remoting.http.metrics import counter, gauge, gauges


class ServiceMetrics:
    """Reads the totals of each service."""

    def __init__(
        self,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        long_polling: PullRequestHoldService,
        registration: BrokerOuterAPI,
        stats: BrokerStats,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._long_polling = long_polling
        self._registration = registration
        self._stats = stats

    def sizes(self, labels: dict[str, str]) -> Iterator[Metric]:
        """The metrics that RocketMQ has too. ``labels`` are those that RocketMQ puts on each of its metrics."""
        names, values = tuple(labels), tuple(labels.values())
        yield gauges("rocketmq_topic_number", "Topics.", names, {values: len(self._topics.table)})
        yield gauges("rocketmq_consumer_group_number", "Consumer groups.", names, {values: len(self._groups.table)})

    def families(self) -> Iterator[Metric]:
        """The metrics that RocketMQ does not have."""
        yield gauge("trimq_long_polls_held", "Pulls that wait for a message.", self._long_polling.held)
        yield counter(
            "trimq_long_polls_refused_total",
            "Pulls that were not held because maxHeldRequests were held.",
            self._long_polling.refused,
        )
        yield counter(
            "trimq_consumer_groups_refused_total",
            "Requests that were refused because they would have created more consumer groups than maxOffsetGroups.",
            self._groups.refused,
        )
        yield counter(
            "trimq_offset_commits_refused_total",
            "Offset commits that were refused: unknown group, topic or queue, impossible offset, or maxOffsetGroups.",
            self._offsets.refused,
        )
        yield counter("trimq_messages_out_total", "Messages sent to all consumers.", self._stats.get_total)
        yield gauges(
            "trimq_name_server_registered",
            "1 for each name server that knows this broker.",
            ("name_server",),
            {(address,): int(reached) for address, reached in self._registration.reached().items()},
        )
