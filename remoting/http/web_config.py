"""Configuration of HTTP: liveness, readiness, and metrics for Prometheus.

The keys of metrics are RocketMQ's (BrokerConfig.metrics*); those of health are TriMQ's.
"""

import enum
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from trimq.remoting.config.options import option

_PORT: Final = 65535
LOOPBACK: Final = "127.0.0.1"


class MetricsExporterType(enum.StrEnum):
    """How metrics are exported."""

    DISABLE = "DISABLE"
    PROM = "PROM"


@dataclass(frozen=True)
class WebConfig:
    """Health and metrics over HTTP. The port of metrics answers /livez and /readyz too."""

    health_port: int | None = option(
        None,
        "Port of /livez and /readyz; the command health sends its request there.",
        minimum=0,
        maximum=_PORT,
        unset="off, or the port of metrics if these are enabled",
        ours=True,
    )
    health_host: str = option(LOOPBACK, "Address that healthPort listens on.", ours=True)
    metrics_exporter_type: MetricsExporterType = option(
        MetricsExporterType.DISABLE, "PROM serves /metrics for Prometheus on metricsPromExporterPort."
    )
    metrics_prom_exporter_port: int = option(5557, "Port of /metrics.", minimum=0, maximum=_PORT)
    metrics_prom_exporter_host: str | None = option(
        None, "Address that metricsPromExporterPort listens on.", unset=f"{LOOPBACK}: only this host can read them"
    )
    metrics_otel_cardinality_limit: int = option(
        50_000,
        "The most series of one metric. The newest beyond it are left out; trimq_series_left_out counts them.",
        minimum=1,
        dynamic=True,
    )

    @property
    def serves_metrics(self) -> bool:
        """Whether /metrics is served."""
        return self.metrics_exporter_type is MetricsExporterType.PROM

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The addresses to listen on, as (host, port); empty if HTTP is off."""
        found: dict[int, str] = {}
        if self.health_port is not None:
            found[self.health_port] = self.health_host
        if self.serves_metrics:
            found[self.metrics_prom_exporter_port] = self.metrics_prom_exporter_host or LOOPBACK
        return [(host, port) for port, host in found.items()]

    def missing(self) -> str:
        """Which modules are not installed, and what to do about it, as text for the terminal; "" if none is missing."""
        keys = ["healthPort"] if self.health_port is not None else []
        modules = ["hypercorn"] if self.addresses else []
        if self.serves_metrics:
            keys.append("metricsExporterType=PROM")
            modules.append("prometheus_client")
        absent = [name for name in modules if find_spec(name) is None]
        if not absent:
            return ""
        return (
            f"{' and '.join(keys)}: {' and '.join(absent)} cannot be imported: install the extra metrics"
            " (pip install 'trimq[metrics]', in a checkout pip install '.[metrics]'), or remove the key from the"
            " configuration"
        )

    @property
    def health_address(self) -> tuple[str, int] | None:
        """The address at which a process on this host can request the readiness; None if HTTP is off."""
        if not self.addresses:
            return None
        host, port = self.addresses[0]
        return {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}.get(host, host), port  # noqa: S104 - compared
