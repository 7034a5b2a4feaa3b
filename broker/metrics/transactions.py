"""Metrics of transactions: halves that wait for their end, ends, and checks."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from trimq.broker.services.transaction.check import TransactionalMessageCheckService
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.remoting.http.metrics import counter, counters, gauge, gauges
from trimq.remoting.runtime.clock import Clock


class TransactionMetrics:
    """Reads the totals of the transaction services."""

    def __init__(
        self,
        *,
        transactions: TransactionalMessageService,
        checks: TransactionalMessageCheckService,
        clock: Clock,
    ) -> None:
        self._transactions = transactions
        self._checks = checks
        self._clock = clock

    def families(self, labels: dict[str, str]) -> Iterator[Metric]:
        """All of them. ``labels`` are those that RocketMQ puts on each of its metrics."""
        names, values = tuple(labels), tuple(labels.values())
        totals = self._transactions.counters
        pending = self._transactions.halves.pending
        yield gauges("rocketmq_half_messages", "Half messages that wait for their end.", names, {values: pending})
        yield counters("rocketmq_commit_messages_total", "Committed half messages.", names, {values: totals.commits})
        yield counters(
            "rocketmq_rollback_messages_total",
            "Half messages that were rolled back.",
            names,
            {values: totals.rollbacks},
        )
        oldest = self._transactions.oldest_ms if pending else 0
        age = max(0, self._clock.wall_ms() - oldest) / 1000 if oldest else 0
        yield gauge(
            "trimq_half_messages_oldest_seconds",
            "Age of the oldest half message that waited at the start or in the last round of checks, without unreadable"
            " ones; 0 if none does.",
            age,
        )
        yield counter("trimq_transaction_checks_total", "Checks sent to producers.", totals.checks)
        yield counter(
            "trimq_transaction_checks_without_producer_total",
            "Half messages due for a check while no producer of their group was connected.",
            totals.unanswered,
        )
        yield counter(
            "trimq_half_messages_not_checked_total",
            "Half messages that were not checked in a round because of a fault of the broker.",
            totals.failed,
        )
        yield counter("trimq_half_messages_again_total", "Half messages stored again.", totals.moved)
        yield counter(
            "trimq_half_messages_expired_total", "Half messages moved to TRANS_CHECK_MAX_TIME_TOPIC.", totals.expired
        )
        yield counter(
            "trimq_half_messages_lost_total",
            "Half messages deleted with their log file, or damaged, before they were ended.",
            totals.lost,
        )
        yield gauge(
            "trimq_half_messages_unreadable",
            "Half messages that the device does not give; they wait, and are neither checked nor ended.",
            self._checks.unreadable,
        )
        yield counter(
            "trimq_transaction_ends_refused_total", "Ends of half messages that were not pending.", totals.refused
        )
