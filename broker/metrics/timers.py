"""Metrics of timed messages."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from trimq.broker.services.timer import TimerMessageService
from trimq.remoting.http.metrics import counter, counters, gauges


def timer_families(timer: TimerMessageService, labels: dict[str, str]) -> Iterator[Metric]:
    """All metrics of the timer, RocketMQ's first. ``labels`` are those that RocketMQ puts on each of its metrics."""
    names, values = tuple(labels), tuple(labels.values())
    for name, doc, value in (
        ("enqueue_lag", "Timed messages that are not in the timer wheel yet.", timer.behind_messages),
        ("dequeue_lag", "Timed messages that wait in the timer wheel, less their recalls.", timer.pending),
        ("dequeue_latency", "How long the oldest timed message has been due (ms).", timer.behind_ms),
    ):
        yield gauges(f"rocketmq_timer_{name}", doc, names, {values: value})
    puts = timer.puts
    yield counters(
        "rocketmq_timer_dequeue_total", "Timed messages delivered, or stored again.", names, {values: puts.delivered}
    )
    yield counter("trimq_timer_recalled_total", "Timed messages that were recalled, and not delivered.", puts.cancelled)
    yield counters(
        "trimq_timer_lost_total",
        "Timed messages that could not be delivered: no store can take them, or their records cannot be read any more.",
        ("reason",),
        {("dropped",): puts.dropped, ("deleted",): puts.deleted},
    )
