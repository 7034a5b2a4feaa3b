"""The page for Prometheus: RocketMQ 5's metric names where it has one, ``trimq_`` for the rest.

Metrics of topics and groups can be many, so they are written line by line as the page is sent. Each of them has at most
metricsOtelCardinalityLimit series; the page as a whole at most ``LARGE`` times that, and some 200 more.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Final

from prometheus_client.core import Metric

from trimq.broker.config import BrokerConfig
from trimq.broker.metrics.clients import consumer_lines, producer_lines
from trimq.broker.metrics.store import store_families
from trimq.broker.parts import BrokerParts
from trimq.broker.services.stats import (
    DLQ_PUT_NUMS,
    GROUP_GET_NUMS,
    GROUP_GET_SIZE,
    SNDBCK_PUT_NUMS,
    TOPIC_PUT_NUMS,
    TOPIC_PUT_SIZE,
)
from trimq.broker.store.disk.disk import DiskSpace
from trimq.protocol.topic_rules import is_system_topic
from trimq.remoting.http.health import Health
from trimq.remoting.http.metrics import (
    build_info,
    counter,
    gauge,
    gauges,
    head,
    label,
    loop_families,
    process_families,
    reactor_families,
    text_of,
)
from trimq.remoting.http.web_config import WebConfig
from trimq.remoting.runtime.loop_probe import LoopProbe
from trimq.remoting.server.limits import ReactorStats

LARGE: Final = 9
"""Metrics whose number of series depends on the number of topics, groups and clients."""
_DLQ: Final = "%DLQ%"
_RETRY: Final = "%RETRY%"
_SYSTEM_GROUP: Final = "cid_rmq_sys_"

_OF_TOPICS: Final = (
    ("rocketmq_messages_in_total", TOPIC_PUT_NUMS, "Messages stored."),
    ("rocketmq_throughput_in_total", TOPIC_PUT_SIZE, "Bytes stored."),
)
_OF_GROUPS: Final = (
    ("rocketmq_messages_out_total", GROUP_GET_NUMS, "Messages handed to consumers."),
    ("rocketmq_throughput_out_total", GROUP_GET_SIZE, "Bytes handed to consumers."),
    ("rocketmq_send_to_dlq_messages_total", DLQ_PUT_NUMS, "Messages that became dead letters."),
    ("trimq_messages_sent_back_total", SNDBCK_PUT_NUMS, "Messages that consumers gave back for a retry."),
)


class BrokerMetrics:
    """Reads what the parts count anyway; costs nothing between two scrapes but the probe's 20 looks a second."""

    def __init__(self, parts: BrokerParts, reactor: ReactorStats, health: Health) -> None:
        self._parts = parts
        self._reactor = reactor
        self._health = health
        self.probe = LoopProbe()
        broker = parts.configuration.section(BrokerConfig)
        self._labels = {"cluster": broker.broker_cluster_name, "node_type": "broker", "node_id": broker.broker_name}
        self._text = ",".join([f'{name}="{label(value)}"' for name, value in self._labels.items()])
        self._left_out: dict[str, int] = {}

    async def page(self) -> Iterator[str]:
        """Look at what has to be waited for; the pieces that it gives back are made while they are sent."""
        store, disk = self._parts.store, self._parts.disk
        space = await disk.run(disk.space, store.root)
        return self._pieces(space)

    def _pieces(self, space: DiskSpace) -> Iterator[str]:
        for family in self._families(space):
            yield text_of(family)
        self._left_out = {}
        yield from self._topics()
        texts = _Texts()
        yield from self._groups(texts)
        yield from self._lag(texts)
        yield from producer_lines(self._parts, self._text, self._limited)
        yield from consumer_lines(self._parts, self._text, self._limited)
        yield text_of(
            gauges(
                "trimq_series_left_out",
                "Series that are not on this page because of metricsOtelCardinalityLimit.",
                ("metric",),
                {(name,): count for name, count in self._left_out.items()},
            )
        )

    # -- what is there once

    def _families(self, space: DiskSpace) -> Iterator[Metric]:
        parts, labels = self._parts, self._labels
        yield build_info("mqbroker")
        yield gauge("trimq_ready", "1 where /readyz has no reason against it.", int(self._health.readiness().ready))
        names, values = tuple(labels), tuple(labels.values())
        permission = parts.configuration.section(BrokerConfig).broker_permission
        for name, doc, value in (
            ("rocketmq_broker_permission", "What clients may do here: 4 read, 2 write, 6 both.", permission),
            ("rocketmq_topic_number", "Topics.", len(parts.topics.table)),
            ("rocketmq_consumer_group_number", "Consumer groups.", len(parts.groups.table)),
        ):
            yield gauges(name, doc, names, {values: value})
        yield from store_families(parts.store, space, labels)
        yield gauge("trimq_long_polls_held", "Pulls that wait for a message.", parts.long_polling.held)
        yield counter(
            "trimq_long_polls_refused_total", "Pulls that were not held: too many.", parts.long_polling.refused
        )
        yield counter(
            "trimq_consumer_groups_refused_total",
            "Requests that would have made a consumer group more than maxOffsetGroups.",
            parts.groups.refused,
        )
        yield counter(
            "trimq_offset_commits_refused_total",
            "Offsets that were not taken: of no group, topic or queue, no number of a message, or maxOffsetGroups.",
            parts.offsets.refused,
        )
        yield counter("trimq_messages_out_total", "Messages handed to consumers in all.", parts.stats.get_total)
        yield gauges(
            "trimq_name_server_registered",
            "1 for each name server that knows this broker.",
            ("name_server",),
            {(address,): int(reached) for address, reached in parts.registration.reached().items()},
        )
        yield from reactor_families(self._reactor)
        yield from loop_families(self.probe)
        yield from process_families()

    # -- what is there for each topic or group

    def _limited(self, name: str, keys: Collection[str]) -> list[str]:
        """As many of the keys as the limit allows, the oldest ones."""
        limit = self._parts.configuration.section(WebConfig).metrics_otel_cardinality_limit
        self._left_out[name] = max(0, len(keys) - limit)
        return list(islice(keys, limit))

    def _topics(self) -> Iterator[str]:
        for name, table, doc in _OF_TOPICS:
            items = self._parts.stats.items(table)
            yield head(name, "counter", doc)
            for topic in self._limited(name, items):
                item = items.get(topic)
                if item is not None:
                    system = _is(is_system_topic(topic))
                    yield f'{name}{{{self._text},topic="{label(topic)}",is_system="{system}"}} {item.value}\n'

    def _groups(self, texts: "_Texts") -> Iterator[str]:
        for name, table, doc in _OF_GROUPS:
            items = self._parts.stats.items(table)
            yield head(name, "counter", doc)
            for key in self._limited(name, items):
                item = items.get(key)
                if item is not None:
                    yield f"{name}{{{self._text},{texts[key]}}} {item.value}\n"

    def _lag(self, texts: "_Texts") -> Iterator[str]:
        """Committed offsets against the ends of their queues: constant time for each queue."""
        name = "rocketmq_consumer_lag_messages"
        table = self._parts.offsets.offset_table
        yield head(name, "gauge", "Messages behind the group's committed offset, whatever its filter.")
        for key in self._limited(name, table):
            offsets = table.get(key)
            if offsets is not None:
                lag = self._lag_of(key.partition("@")[0], offsets)
                yield f"{name}{{{self._text},{texts[key]}}} {lag}\n"

    def _lag_of(self, topic: str, offsets: Mapping[int, int]) -> int:
        end = self._parts.store.peek_max_offset
        return sum([max(0, end(topic, queue_id) - offset) for queue_id, offset in offsets.items()])


def _is(flag: bool) -> str:
    return "true" if flag else "false"


class _Texts(dict[str, str]):
    """The labels of ``topic@group``, as RocketMQ has them; made once a page."""

    def __missing__(self, key: str) -> str:
        topic, _, group = key.partition("@")
        retry = _is(topic.startswith((_RETRY, _DLQ)))
        system = _is(is_system_topic(topic) or group.lower().startswith(_SYSTEM_GROUP))
        text = f'topic="{label(topic)}",consumer_group="{label(group)}",is_retry="{retry}",is_system="{system}"'
        self[key] = text
        return text
