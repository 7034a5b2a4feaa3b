"""Who is connected: members of groups, by what they are."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from trimq.broker.parts import BrokerParts
from trimq.broker.services.client_channel import ClientChannel
from trimq.broker.services.consumers import CONSUME_ACTIVELY
from trimq.remoting.http.metrics import head, label

PRODUCERS = "rocketmq_producer_connections"
CONSUMERS = "rocketmq_consumer_connections"

_K = TypeVar("_K")
Limit = Callable[[str, Collection[_K]], list[_K]]


def producer_lines(parts: BrokerParts, labels: str, limited: Limit[str]) -> Iterator[str]:
    """Connections of producers by language and version. Empty pieces: a good moment for others to run."""
    kinds: Counter[str] = Counter()
    for group in list(parts.producers.table):
        kinds.update(_kind(channel) for channel in parts.producers.channels(group))
        yield ""
    yield head(PRODUCERS, "gauge", "Connections of producers; one that is in two groups counts twice.")
    for kind in limited(PRODUCERS, kinds):
        yield f"{PRODUCERS}{{{labels},{kind}}} {kinds[kind]}\n"


def consumer_lines(parts: BrokerParts, labels: str, limited: Limit[str]) -> Iterator[str]:
    """Connections of consumers by group, mode, language and version."""
    yield head(CONSUMERS, "gauge", "Connections of consumers.")
    rows: dict[str, int] = {}
    for group in list(parts.consumers.table):
        info = parts.consumers.table.get(group)
        if info is None:
            continue
        mode = "pull" if info.consume_type == CONSUME_ACTIVELY else "push"
        where = f'consumer_group="{label(group)}",consume_mode="{mode}"'
        for kind, count in Counter(_kind(channel) for channel in info.channels.values()).items():
            rows[f"{where},{kind}"] = count
        yield ""
    for row in limited(CONSUMERS, rows):
        yield f"{CONSUMERS}{{{labels},{row}}} {rows[row]}\n"


def _kind(channel: ClientChannel) -> str:
    language = getattr(channel.language, "name", None) or str(channel.language)
    return f'language="{label(language.lower())}",version="{channel.version}",protocol_type="remoting"'
