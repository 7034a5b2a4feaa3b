"""Metrics of connected clients: members of producer and consumer groups by language and version."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from trimq.broker.metrics.limit import SeriesLimit
from trimq.broker.services.client_channel import ClientChannel
from trimq.broker.services.consumers import CONSUME_ACTIVELY, ConsumerManager
from trimq.broker.services.producers import ProducerManager
from trimq.remoting.http.metrics import head, label

PRODUCERS: Final = "rocketmq_producer_connections"
CONSUMERS: Final = "rocketmq_consumer_connections"


class ClientMetrics:
    """Counts the connections of producers and consumers at each scrape."""

    def __init__(self, *, producers: ProducerManager, consumers: ConsumerManager) -> None:
        self._producers = producers
        self._consumers = consumers

    def lines(self, labels: str, limit: SeriesLimit) -> Iterator[str]:
        """The lines of both metrics. An empty piece lets other tasks run: the page is made in slices between pieces."""
        yield from self._producer_lines(labels, limit)
        yield from self._consumer_lines(labels, limit)

    def _producer_lines(self, labels: str, limit: SeriesLimit) -> Iterator[str]:
        """Connections by language and version."""
        kinds: Counter[str] = Counter()
        for group in list(self._producers.table):
            kinds.update(_kind(channel) for channel in self._producers.channels(group))
            yield ""
        yield head(PRODUCERS, "gauge", "Connections of producers; one that is in two groups counts twice.")
        for kind in limit.shown(PRODUCERS, kinds):
            yield f"{PRODUCERS}{{{labels},{kind}}} {kinds[kind]}\n"

    def _consumer_lines(self, labels: str, limit: SeriesLimit) -> Iterator[str]:
        """Connections by group, mode, language and version."""
        yield head(CONSUMERS, "gauge", "Connections of consumers.")
        rows: dict[str, int] = {}
        for group in list(self._consumers.table):
            info = self._consumers.table.get(group)
            if info is None:  # the group's last member left while other tasks ran
                continue
            mode = "pull" if info.consume_type == CONSUME_ACTIVELY else "push"
            where = f'consumer_group="{label(group)}",consume_mode="{mode}"'
            for kind, count in Counter(_kind(channel) for channel in info.channels.values()).items():
                rows[f"{where},{kind}"] = count
            yield ""
        for row in limit.shown(CONSUMERS, rows):
            yield f"{CONSUMERS}{{{labels},{row}}} {rows[row]}\n"


def _kind(channel: ClientChannel) -> str:
    language = getattr(channel.language, "name", None) or str(channel.language)
    return f'language="{label(language.lower())}",version="{channel.version}",protocol_type="remoting"'
