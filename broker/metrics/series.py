"""Metrics per topic and per group: messages and bytes in and out, and the lag of groups."""

from collections.abc import Iterator, Mapping
from typing import Final

from trimq.broker.metrics.limit import SeriesLimit
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.stats import (
    DLQ_PUT_NUMS,
    GROUP_GET_NUMS,
    GROUP_GET_SIZE,
    SNDBCK_PUT_NUMS,
    TOPIC_PUT_NUMS,
    TOPIC_PUT_SIZE,
    BrokerStats,
)
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.topic_rules import is_system_topic
from trimq.remoting.http.metrics import head, label

_DLQ: Final = "%DLQ%"
_RETRY: Final = "%RETRY%"
_SYSTEM_GROUP: Final = "cid_rmq_sys_"

_OF_TOPICS: Final = (
    ("rocketmq_messages_in_total", TOPIC_PUT_NUMS, "Messages stored."),
    ("rocketmq_throughput_in_total", TOPIC_PUT_SIZE, "Bytes stored."),
)
_OF_GROUPS: Final = (
    ("rocketmq_messages_out_total", GROUP_GET_NUMS, "Messages sent to consumers."),
    ("rocketmq_throughput_out_total", GROUP_GET_SIZE, "Bytes sent to consumers."),
    ("rocketmq_send_to_dlq_messages_total", DLQ_PUT_NUMS, "Messages that became dead letters."),
    ("trimq_messages_sent_back_total", SNDBCK_PUT_NUMS, "Messages that consumers sent back for a retry."),
)


class SeriesMetrics:
    """Lines of metrics whose number of series grows with topics and groups."""

    def __init__(self, *, offsets: ConsumerOffsetManager, stats: BrokerStats, store: MessageStore) -> None:
        self._offsets = offsets
        self._stats = stats
        self._store = store

    def lines(self, labels: str, limit: SeriesLimit) -> Iterator[str]:
        """The lines of all metrics. ``labels`` are on each line."""
        yield from self._topic_lines(labels, limit)
        texts = _Texts()
        yield from self._group_lines(labels, limit, texts)
        yield from self._lag_lines(labels, limit, texts)

    def _topic_lines(self, labels: str, limit: SeriesLimit) -> Iterator[str]:
        for name, table, doc in _OF_TOPICS:
            items = self._stats.items(table)
            yield head(name, "counter", doc)
            for topic in limit.shown(name, items):
                item = items.get(topic)
                if item is not None:
                    system = _is(is_system_topic(topic))
                    yield f'{name}{{{labels},topic="{label(topic)}",is_system="{system}"}} {item.value}\n'

    def _group_lines(self, labels: str, limit: SeriesLimit, texts: "_Texts") -> Iterator[str]:
        for name, table, doc in _OF_GROUPS:
            items = self._stats.items(table)
            yield head(name, "counter", doc)
            for key in limit.shown(name, items):
                item = items.get(key)
                if item is not None:
                    yield f"{name}{{{labels},{texts[key]}}} {item.value}\n"

    def _lag_lines(self, labels: str, limit: SeriesLimit, texts: "_Texts") -> Iterator[str]:
        """The distance from committed offsets to the ends of their queues, in constant time per queue."""
        name = "rocketmq_consumer_lag_messages"
        table = self._offsets.offset_table
        yield head(name, "gauge", "Messages after the group's committed offset, those its filter rejects included.")
        for key in limit.shown(name, table):
            offsets = table.get(key)
            if offsets is not None:
                lag = self._lag_of(key.partition("@")[0], offsets)
                yield f"{name}{{{labels},{texts[key]}}} {lag}\n"

    def _lag_of(self, topic: str, offsets: Mapping[int, int]) -> int:
        end = self._store.peek_max_offset  # a scrape must not open queues that no client uses
        return sum([max(0, end(topic, queue_id) - offset) for queue_id, offset in offsets.items()])


def _is(flag: bool) -> str:
    return "true" if flag else "false"


class _Texts(dict[str, str]):
    """The labels of ``topic@group``, as RocketMQ has them; made once per page."""

    def __missing__(self, key: str) -> str:
        topic, _, group = key.partition("@")
        retry = _is(topic.startswith((_RETRY, _DLQ)))
        system = _is(is_system_topic(topic) or group.lower().startswith(_SYSTEM_GROUP))
        text = f'topic="{label(topic)}",consumer_group="{label(group)}",is_retry="{retry}",is_system="{system}"'
        self[key] = text
        return text
