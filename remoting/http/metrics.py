"""Metrics common to all servers, as prometheus-client's metric families. Imported only if metrics are enabled.

Names, units and types follow Prometheus's conventions: base units, ``_total`` for counters.
"""

import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from trimq.remoting.runtime.durations import Durations
from trimq.remoting.runtime.loop_probe import LoopProbe
from trimq.remoting.server.limits import ReactorStats

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_STARTED: Final = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class _Single(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


def text_of(family: Metric) -> str:
    """A family in Prometheus's text format."""
    return generate_latest(_Single(family)).decode()


def head(name: str, kind: str, doc: str) -> str:
    """The two header lines of a family whose samples are written as text, one by one: some families have many."""
    return f"# HELP {name} {doc}\n# TYPE {name} {kind}\n"


def label(value: str) -> str:
    """The value of a label, escaped for use between quotes."""
    if '"' in value or "\\" in value or "\n" in value:
        return value.translate(_ESCAPES)
    return value


def counter(name: str, doc: str, value: float) -> Metric:
    """A counter without labels."""
    return CounterMetricFamily(name.removesuffix("_total"), doc, value=value)


def gauge(name: str, doc: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, doc, value=value)


def gauges(name: str, doc: str, labels: Sequence[str], rows: Mapping[tuple[str, ...], float]) -> Metric:
    """A gauge with labels."""
    family = GaugeMetricFamily(name, doc, labels=labels)
    for values, value in rows.items():
        family.add_metric(values, value)
    return family


def counters(name: str, doc: str, labels: Sequence[str], rows: Mapping[tuple[str, ...], float]) -> Metric:
    """A counter with labels."""
    family = CounterMetricFamily(name.removesuffix("_total"), doc, labels=labels)
    for values, value in rows.items():
        family.add_metric(values, value)
    return family


def histogram(name: str, doc: str, durations: Durations) -> Metric:
    """A histogram of seconds."""
    return HistogramMetricFamily(name, doc, buckets=_buckets(durations), sum_value=durations.total)


def histograms(
    name: str, doc: str, labels: Sequence[str], rows: Mapping[tuple[str, ...], Durations], *, scale: int = 1
) -> Metric:
    """A histogram with labels. ``scale``: 1000 shows durations in ms; anything else than durations has 1."""
    family = HistogramMetricFamily(name, doc, labels=labels)
    for values, found in rows.items():
        family.add_metric(values, buckets=_buckets(found, scale), sum_value=found.total * scale)
    return family


def _buckets(durations: Durations, scale: int = 1) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    seen = 0
    ends = [str(end) if scale == 1 else str(round(end * scale, 6)) for end in durations.ends]
    for end, count in zip((*ends, "+Inf"), durations.counts, strict=True):
        seen += count
        buckets.append((end, seen))
    return buckets


def build_info(program: str) -> Metric:
    """The program and its version."""
    try:
        found = version("trimq")
    except PackageNotFoundError:
        found = "unknown"
    return InfoMetricFamily("trimq_build", "Program and version.", value={"program": program, "version": found})


def process_families() -> Iterator[Metric]:
    """Resources of the process, under the names that Prometheus's own clients use."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield counter(
        "process_cpu_seconds_total", "User and system CPU time spent.", round(usage.ru_utime + usage.ru_stime, 6)
    )
    size, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
    yield gauge("process_resident_memory_bytes", "Memory in RAM, mapped files included.", int(resident) * _PAGE)
    yield gauge("process_virtual_memory_bytes", "Address space, mapped files included.", int(size) * _PAGE)
    yield gauge("process_open_fds", "Open file descriptors.", open_descriptors())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield gauge("process_max_fds", "Limit of open file descriptors.", soft)
    yield gauge("process_start_time_seconds", "When the process started, since 1970.", _start_time())


def open_descriptors() -> int:
    """The number of open descriptors. Newer kernels report it as the directory's size; for older ones it is listed."""
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # noqa: PTH116, PTH208 - the fastest calls


def _start_time() -> float:
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return round(_STARTED + int(fields[19]) / os.sysconf("SC_CLK_TCK"), 2)


def loop_families(probe: LoopProbe) -> Iterator[Metric]:
    """Delays of the event loop."""
    yield histogram(
        "trimq_event_loop_late_seconds",
        "Delay of the event loop at a timer, measured 20 times a second.",
        probe.lateness,
    )
    yield gauge(
        "trimq_event_loop_stall_seconds", "The longest stall of the event loop in the last minute.", probe.longest
    )


def reactor_families(stats: ReactorStats) -> Iterator[Metric]:
    """Connections, requests and traffic of a server."""
    yield gauge("trimq_connections", "Open connections of clients.", stats.connections)
    yield gauge("trimq_connections_paused", "Connections not read because they do not read replies.", stats.paused)
    yield counter("trimq_connections_accepted_total", "Connections accepted.", stats.accepted)
    yield counter(
        "trimq_connections_refused_total", "Connections closed right after accepting them: too many.", stats.refused
    )
    yield counter("trimq_connections_closed_total", "Connections closed, for any reason.", stats.closed)
    yield counter(
        "trimq_connections_broken_total", "Connections closed because the peer broke the protocol.", stats.broken
    )
    yield counter(
        "trimq_connections_idle_closed_total", "Connections closed because they were idle.", stats.idle_closed
    )
    yield from _tls_families(stats)
    yield from _origin_families(stats)
    yield gauge("trimq_unfinished_frame_bytes", "Memory of incompletely received frames.", stats.unfinished)
    yield counter(
        "trimq_connections_unfinished_closed_total",
        "Connections closed because their unfinished frame was too slow, or the slowest when memory ran short.",
        stats.unfinished_closed,
    )
    yield counter(
        "trimq_requests_total", "Frames received: requests, and replies to requests of the server.", stats.frames
    )
    yield gauge("trimq_requests_in_flight", "Requests in flight, without held pulls.", stats.inflight)
    yield counter("trimq_requests_busy_total", "Requests answered with SYSTEM_BUSY, and dropped one-ways.", stats.busy)
    yield counter("trimq_request_failures_total", "Requests whose handler failed unexpectedly.", stats.failures)
    yield counter("trimq_received_bytes_total", "Bytes received from clients.", stats.bytes_in)
    yield counter("trimq_sent_bytes_total", "Bytes sent to clients.", stats.bytes_out)
    yield counter("trimq_reactor_rounds_total", "Rounds of the reactor.", stats.rounds)


def _origin_families(stats: ReactorStats) -> Iterator[Metric]:
    yield counters(
        "trimq_limited_total",
        "Connections and requests refused by a limit of an address, a user or requests in flight, by that limit's key.",
        ("limit",),
        {(key,): count for key, count in sorted(stats.limited.items())},
    )
    yield counter(
        "trimq_proxied_connections_total",
        "Connections whose client's address came from a PROXY protocol preamble.",
        stats.proxied,
    )
    yield counter(
        "trimq_proxied_without_preamble_total",
        "Connections from proxyProtocolNetworks that began without a preamble.",
        stats.proxied_without_preamble,
    )
    yield counter(
        "trimq_proxy_preambles_refused_total",
        "Connections closed because of a preamble from an address that is not one of proxyProtocolNetworks.",
        stats.preambles_refused,
    )
    yield counter(
        "trimq_admin_requests_refused_total",
        "Requests of administrators refused because they did not come to adminListenAddress.",
        stats.admin_refused,
    )


def _tls_families(stats: ReactorStats) -> Iterator[Metric]:
    yield gauge("trimq_tls_connections", "Open connections with TLS.", stats.tls_connections)
    yield counter("trimq_tls_handshakes_total", "TLS handshakes that were completed.", stats.handshakes)
    yield counter(
        "trimq_tls_handshakes_failed_total",
        "TLS handshakes that failed, or whose client has disconnected.",
        stats.handshakes_failed,
    )
    yield counter(
        "trimq_tls_handshakes_refused_total",
        "Connections closed because too many handshakes were unfinished.",
        stats.handshakes_refused,
    )
    yield counter(
        "trimq_tls_handshakes_timed_out_total", "TLS handshakes that took too long.", stats.handshakes_timed_out
    )
    yield counter(
        "trimq_plain_connections_refused_total",
        "Connections closed because they began without TLS where it is required.",
        stats.plain_refused,
    )
    ends = stats.certificate_ends()
    if ends:
        yield gauges(
            "trimq_tls_certificate_expiry_timestamp_seconds",
            "When a certificate, or one of its chain, ends, since 1970: that of the ports (server), and that shown to "
            "other servers (client).",
            ("side",),
            {(side,): end for side, end in ends.items()},
        )
