"""Metrics of the tiered store, with the names of RocketMQ's TieredStoreMetricsManager. Imported only with a tier.

A label of RocketMQ's that makes a series for each file, queue or group without telling more is left out: ``path`` of
the provider's calls, ``topic`` and ``group`` of durations and of fallbacks.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Final

from prometheus_client.core import Metric

from trimq.broker.metrics.limit import SeriesLimit
from trimq.broker.store.tiered.access.tiered_store import TieredStore
from trimq.protocol.tiered_layout import UNSET_TIME
from trimq.remoting.http.metrics import counter, counters, gauge, gauges, head, histograms, label
from trimq.remoting.runtime.durations import Durations

LARGE: Final = 5
"""Number of metrics whose series grow with queues and groups."""
_PREFIX: Final = "rocketmq_tiered_store_"
_SLICE: Final = 100
"""Queues that are looked at for one piece of the page."""
_Queue = tuple[str, int]
_WRITES: Final = ("write", "put")
_READS: Final = ("read", "get")
"""Operations that move bytes, on segments and on objects of a bucket."""
_STORAGE: Final = {"storage_type": "tiered", "storage_medium": "blob"}
"""As RocketMQ labels every provider but its own local store."""


class TierMetrics:
    """Reads the counters of uploads, fetcher, cache and provider."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store

    def families(self, labels: dict[str, str]) -> Iterator[Metric]:
        """The metrics with a fixed number of series. ``labels`` are those that RocketMQ puts on each of its metrics."""
        yield from self._reads({**labels, **_STORAGE})
        yield from self._calls({**labels, **_STORAGE})
        uploads, reads = self._store.tier_uploads, self._store.fetcher.reads
        yield counter(
            "trimq_tiered_store_upload_failures_total", "Uploads that failed; they are repeated.", uploads.failures
        )
        yield counter(
            "trimq_tiered_store_messages_skipped_total",
            "Messages that were deleted locally before they were uploaded: consumers cannot read them.",
            uploads.skipped,
        )
        yield gauge(
            "trimq_tiered_store_reads_hanging",
            "Reads that have not returned within tieredStoreReadTimeout.",
            reads.hanging,
        )
        yield counter("trimq_tiered_store_read_timeouts_total", "Reads that reached this limit.", reads.timeouts)
        yield counter(
            "trimq_tiered_store_reads_refused_total", "Reads that did not begin because others hang.", reads.refused
        )
        if self._store.tier_index is not None:
            yield gauge(
                "trimq_tiered_store_keys_waiting",
                "Keys that wait for space in the index.",
                self._store.tier_index.waiting,
            )

    def _reads(self, labels: dict[str, str]) -> Iterator[Metric]:
        names, values = tuple(labels), tuple(labels.values())
        fetcher = self._store.fetcher
        yield histograms(
            f"{_PREFIX}api_latency",
            "Duration (ms) of reads from the tier.",
            (*names, "operation"),
            {(*values, operation): found for operation, found in fetcher.latency.items()},
            scale=1000,
        )
        yield counters(
            f"{_PREFIX}get_message_fallback_total",
            "Reads that failed, and were left to the local store.",
            names,
            {values: fetcher.fallbacks},
        )
        cache = fetcher.cache
        for name, doc, value in (
            ("count", "Messages in the read-ahead cache.", cache.count),
            ("bytes", "Memory of the read-ahead cache, and of reads under way.", cache.bytes),
        ):
            yield gauges(f"{_PREFIX}read_ahead_cache_{name}", doc, names, {values: value})
        for name, doc, value in (
            ("access", "Pulls for which the cache was asked.", cache.accesses),
            ("hit", "Pulls for which it had messages.", cache.hits),
        ):
            yield counters(f"{_PREFIX}read_ahead_cache_{name}_total", doc, names, {values: value})

    def _calls(self, labels: dict[str, str]) -> Iterator[Metric]:
        """Calls to the provider."""
        names, values = (*labels, "file_type", "operation"), tuple(labels.values())
        latency: dict[tuple[str, ...], Durations] = {}
        sizes: dict[str, dict[tuple[str, ...], Durations]] = {"read": {}, "write": {}}
        for kind, operation, calls in self._store.tier_queues.calls():
            latency[*values, kind, operation, "true"] = calls.succeeded
            latency[*values, kind, operation, "false"] = calls.failed
            if operation in _WRITES or operation in _READS:
                sizes["write" if operation in _WRITES else "read"][*values, kind, operation] = calls.sizes
        yield histograms(
            f"{_PREFIX}provider_rpc_latency",
            "Duration (ms) of requests to what keeps the tier.",
            (*names, "success"),
            latency,
            scale=1000,
        )
        yield histograms(f"{_PREFIX}provider_upload_bytes", "Bytes of each write.", names, sizes["write"])
        yield histograms(f"{_PREFIX}provider_download_bytes", "Bytes of each read.", names, sizes["read"])

    # -- by queue

    def lines(self, labels: str, limit: SeriesLimit) -> Iterator[str]:
        """The lines of the metrics by queue and by group; empty pieces let other tasks run."""
        labels = ",".join([labels, *(f'{name}="{value}"' for name, value in _STORAGE.items())])
        yield from self._backlog_lines(labels, limit)
        yield from self._queue_lines(labels, limit)
        yield from self._group_lines(labels, limit)

    def _backlog_lines(self, labels: str, limit: SeriesLimit) -> Iterator[str]:
        """First the queues with a backlog, then the others, of which there may be many."""
        files = self._store.tier_queues
        behind: dict[_Queue, int] = {}
        latency: dict[_Queue, int] = {}
        total = files.queues
        now = self._store.clock.wall_ms()
        for number, backlog in enumerate(self._store.tier_uploads.backlogs()):
            queue = backlog.topic, backlog.queue_id
            file = files.find(*queue)
            total += file is None
            behind[queue] = backlog.messages
            since = backlog.since
            if not since:
                # It was there at the start: what is known is that it came behind the last one that was uploaded.
                since = UNSET_TIME if file is None else file.newest_ms
            latency[queue] = max(0, now - since) if backlog.messages and since != UNSET_TIME else 0
            if number % _SLICE == 0:
                yield ""
        yield head("trimq_tiered_store_messages_waiting", "gauge", "Messages of all queues that wait for their upload.")
        yield f"trimq_tiered_store_messages_waiting {sum(behind.values())}\n"
        for name, doc, rows in (
            (f"{_PREFIX}dispatch_behind", "Messages that wait for their upload.", behind),
            (f"{_PREFIX}dispatch_latency", "How long the oldest of them has waited (ms), at most.", latency),
        ):
            yield head(name, "gauge", doc)
            others = ((file.topic, file.queue_id) for file in self._files())
            queues = chain(behind, (queue for queue in others if queue not in behind))
            for topic, queue_id in islice(queues, limit.room(name, total)):
                where = f'topic="{label(topic)}",queue_id="{queue_id}",file_type="consume_queue"'
                yield f"{name}{{{labels},{where}}} {rows.get((topic, queue_id), 0)}\n"

    def _files(self) -> Iterator[Any]:
        """Each queue: a TieredQueue, which metrics may not import."""
        files = self._store.tier_queues
        for topic in files.topics():
            yield from files.of_topic(topic)

    def _queue_lines(self, labels: str, limit: SeriesLimit) -> Iterator[str]:
        sizes: Counter[str] = Counter()
        begun = 0
        for number, file in enumerate(self._files()):
            begun += file.oldest_ms != UNSET_TIME
            records, units = file.sizes
            sizes["commit_log"] += records
            sizes["consume_queue"] += units
            if number % _SLICE == 0:
                yield ""
        name = "trimq_tiered_store_size_bytes"
        yield head(name, "gauge", "Bytes of the segments of all queues.")
        for kind, size in sizes.items():
            yield f'{name}{{file_type="{kind}"}} {size}\n'
        name = f"{_PREFIX}messages_dispatch_total"
        yield head(name, "counter", "Messages uploaded.")
        for file in islice(self._files(), limit.room(name, self._store.tier_queues.queues)):
            where = f'topic="{label(file.topic)}",queue_id="{file.queue_id}",file_type="commit_log"'
            yield f"{name}{{{labels},{where}}} {file.uploaded}\n"
        name = "rocketmq_storage_message_reserve_time"
        yield head(name, "gauge", "Age (ms) of the oldest message in the tier.")
        now = self._store.clock.wall_ms()
        most = limit.room(name, begun)
        for number, file in enumerate(self._files()):
            oldest = file.oldest_ms
            if oldest != UNSET_TIME and most:
                most -= 1
                where = f'topic="{label(file.topic)}",queue_id="{file.queue_id}"'
                yield f"{name}{{{labels},{where}}} {max(0, now - oldest)}\n"
            elif number % _SLICE == 0:
                yield ""

    def _group_lines(self, labels: str, limit: SeriesLimit) -> Iterator[str]:
        name = f"{_PREFIX}messages_out_total"
        delivered = dict(self._store.fetcher.delivered)
        yield head(name, "counter", "Messages of the tier sent to consumers.")
        for topic, group in limit.shown(name, delivered):
            where = f'topic="{label(topic)}",group="{label(group)}"'
            yield f"{name}{{{labels},{where}}} {delivered[topic, group]}\n"
