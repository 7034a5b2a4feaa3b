"""Metrics of what not every program uses: SQL expressions, request-reply, transactions, timed messages, users."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from trimq.broker.metrics.timers import timer_families
from trimq.broker.metrics.transactions import TransactionMetrics
from trimq.broker.services.client_calls import ClientCalls
from trimq.broker.services.consumer_filters import ConsumerFilterManager
from trimq.broker.services.timer import TimerMessageService
from trimq.remoting.auth.users import Users
from trimq.remoting.http.access_metrics import access_families
from trimq.remoting.http.metrics import counter, gauge


class FeatureMetrics:
    """Reads the totals of each feature."""

    def __init__(
        self,
        *,
        filters: ConsumerFilterManager,
        client_calls: ClientCalls,
        transactions: TransactionMetrics,
        timer: TimerMessageService,
        users: Users | None,
    ) -> None:
        self._filters = filters
        self._client_calls = client_calls
        self._transactions = transactions
        self._timer = timer
        self._users = users

    def families(self, labels: dict[str, str]) -> Iterator[Metric]:
        """All of them. ``labels`` are those that RocketMQ puts on each of its metrics."""
        yield from self._transactions.families(labels)
        yield from timer_families(self._timer, labels)
        yield from access_families(self._users)
        yield gauge(
            "trimq_consumer_filters", "SQL92 expressions of consumer groups that are online.", self._filters.alive
        )
        yield counter(
            "trimq_consumer_filters_refused_total",
            "SQL92 expressions in heartbeats that were not registered: not valid, or more than the broker stores.",
            self._filters.refused,
        )
        calls = self._client_calls
        yield gauge(
            "trimq_replies_waiting", "Replies (to requests between clients) that a client has to take.", calls.running
        )
        yield counter("trimq_replies_delivered_total", "Replies that the client which waits for them took.", calls.done)
        yield counter(
            "trimq_replies_not_delivered_total", "Replies that no client could be given, or took in time.", calls.failed
        )
        yield counter(
            "trimq_replies_refused_total", "Replies refused because too many were waiting for clients.", calls.refused
        )
