"""The store's metrics: whether it is writable, how far flush and dispatch are behind, how long waits take."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from trimq.broker.store.disk.disk import DiskSpace
from trimq.broker.store.message_store import Flag, MessageStore
from trimq.remoting.http.metrics import counter, counters, gauge, gauges, histogram


def store_families(store: MessageStore, space: DiskSpace, labels: dict[str, str]) -> Iterator[Metric]:
    """All metrics of the store, RocketMQ's first. ``labels`` are those that RocketMQ puts on each of its metrics."""
    names = (*labels, "storage_type", "storage_medium")
    values = (*labels.values(), "local", "disk")
    log_end = store.max_phy_offset
    for name, doc, value in (
        ("rocketmq_storage_size", "Bytes of the commit log that can be read.", log_end - store.min_phy_offset),
        (
            "rocketmq_storage_flush_behind_bytes",
            "Bytes of the commit log not yet synced to the device.",
            log_end - store.flushed_offset,
        ),
        (
            "rocketmq_storage_dispatch_behind_bytes",
            "Bytes of the commit log that are readable but not yet in their queues.",
            store.dispatch_behind_bytes,
        ),
    ):
        yield gauges(name, doc, names, {values: value})
    yield from _state(store, space)
    yield from _waits(store)
    yield from _counts(store)


def _state(store: MessageStore, space: DiskSpace) -> Iterator[Metric]:
    yield gauge("trimq_store_writable", "1 while messages can be stored.", int(store.is_writable))
    yield gauges(
        "trimq_store_refusal",
        "1 for each reason why the store refuses reads or writes now (see the broker's log).",
        ("reason",),
        {(str(flag.name).lower(),): int(store.refuses(flag)) for flag in Flag},
    )
    yield gauge(
        "trimq_store_disk_size_bytes",
        "Size of the store's file system without the part reserved for root.",
        space.total,
    )
    yield gauge("trimq_store_disk_free_bytes", "Free bytes of the store's file system.", space.free)
    yield counter("trimq_commit_log_position_bytes_total", "End offset of the commit log.", store.max_phy_offset)
    yield gauge(
        "trimq_commit_log_files_held",
        "Expired files of the commit log that are kept: their messages are pending, or their end is not durable yet.",
        store.log_holds.files_held,
    )
    yield counters(
        "trimq_pending_messages_deleted_total",
        "Pending messages deleted with their file, because the disk was too full (diskSpaceCleanForciblyRatio).",
        ("what",),
        {(name.replace(" ", "_"),): count for name, count in store.log_holds.deleted.items()},
    )
    if store.recovered is not None:
        yield gauge("trimq_recovery_duration_seconds", "Duration of the last recovery.", store.recovered.seconds)


def _waits(store: MessageStore) -> Iterator[Metric]:
    waits = store.waits
    yield histogram("trimq_commit_log_sync_duration_seconds", "Duration of data syncs of the commit log.", waits.syncs)
    yield histogram(
        "trimq_put_flush_wait_seconds",
        "Time that a reply waited for the sync (SYNC_FLUSH).",
        store.stats.flush_waits,
    )
    yield histogram(
        "trimq_append_lock_wait_seconds",
        "Time that an append waited for space in the log; appends that did not wait are not counted.",
        waits.appends,
    )
    yield gauge("trimq_append_lock_held_seconds", "Time that the oldest waiting append has waited so far.", waits.held)
    yield gauge("trimq_append_lock_queue", "Appends that wait for space in the log.", waits.queue)
    yield counter("trimq_page_cache_busy_total", "Appends refused because they had waited too long.", waits.busy)


def _counts(store: MessageStore) -> Iterator[Metric]:
    stats = store.stats
    yield counter("trimq_put_messages_total", "Messages stored.", stats.put_message_times_total)
    yield counter("trimq_put_bytes_total", "Bytes of the records stored.", stats.put_message_size_total)
    yield counter("trimq_put_failures_total", "Puts that were refused.", stats.put_message_failed_times)
    yield counters(
        "trimq_gets_total",
        "Reads of a queue, by whether they found a message.",
        ("result",),
        {("found",): stats.found_times_total, ("nothing",): stats.missed_times_total},
    )
