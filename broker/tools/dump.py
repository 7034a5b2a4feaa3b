"""Records of a log as JSON lines, and what a log consists of."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from trimq.broker.store.log.log_scan import Damage, LogRecord, LogWalk, RecordReader
from trimq.broker.tools.offline_store import OfflineStore
from trimq.protocol.message import StoredMessage, decode_message

Progress = Callable[[int], None]


class Filter(Struct, frozen=True):
    """Which records are wanted; an empty field wants all. Times are ms, ``end`` is the first that is not wanted."""

    topics: frozenset[str] = frozenset()
    queue_id: int | None = None
    key: str | None = None
    begin: int | None = None
    end: int | None = None

    def wants(self, found: LogRecord) -> bool:
        """By what is known without decoding the record."""
        if self.topics and found.topic not in self.topics:
            return False
        if self.queue_id is not None and found.queue_id != self.queue_id:
            return False
        if self.begin is not None and found.store_timestamp < self.begin:
            return False
        if self.end is not None and found.store_timestamp >= self.end:
            return False
        return self.key is None or self.key in found.properties

    def wants_message(self, message: StoredMessage) -> bool:
        """By its keys."""
        return self.key is None or self.key == message.unique_id or self.key in message.keys


def records(store: OfflineStore, progress: Progress) -> Iterator[tuple[LogRecord, memoryview] | Damage]:
    """Every record of the log with the bytes that it begins with, and the damaged places. The log is open."""
    if not store.files:
        return
    reader = RecordReader(store.config.mapped_file_size_commit_log)
    walk = LogWalk(store.disk, store.files, store.log_start, reader)
    while (found := walk.step()) is not None:
        if isinstance(found, LogRecord):
            file = next(file for file in reversed(store.files) if file.start <= found.phy)
            at = found.phy - file.start
            yield found, file.view[at : at + found.size]
            progress(walk.position - store.log_start)
        elif isinstance(found, Damage):
            yield found


def describe(message: StoredMessage, *, body: bool = True) -> dict[str, Any]:
    """A record in the words of RocketMQ's MessageExt; a body that is no text stands in ``bodyBase64``."""
    told: dict[str, Any] = {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "commitLogOffset": message.commit_log_offset,
        "storeSize": message.size,
        "msgId": message.unique_id or message.offset_message_id,
        "offsetMsgId": message.offset_message_id,
        "storeTimestamp": message.store_timestamp,
        "bornTimestamp": message.born_timestamp,
        "bornHost": "{}:{}".format(*message.born_host),
        "storeHost": "{}:{}".format(*message.store_host),
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "bodyCRC": message.body_crc,
        "properties": message.properties,
    }
    if body:
        try:
            told["body"] = str(message.body, "utf-8")
        except UnicodeDecodeError:
            told["bodyBase64"] = base64.b64encode(message.body).decode()
    return told


def lines(store: OfflineStore, wanted: Filter, progress: Progress, *, body: bool) -> Iterator[bytes]:
    """The wanted records, a JSON object each; a damaged place is an object with ``damagedAt``."""
    for found in records(store, progress):
        if isinstance(found, Damage):
            yield msgspec.json.encode({"damagedAt": found.phy, "length": found.length, "why": found.why})
            continue
        head, view = found
        if wanted.wants(head):
            message = decode_message(view)
            if wanted.wants_message(message):
                yield msgspec.json.encode(describe(message, body=body))


class TopicFigures(Struct):
    """What a log has of one topic."""

    queues: int = 0
    messages: int = 0
    bytes: int = 0
    first: int = 0
    last: int = 0


class Figures(Struct):
    """What a log consists of; times are store timestamps in ms."""

    topics: dict[str, TopicFigures]
    damaged: int = 0
    log_end: int = 0


def figures(store: OfflineStore, progress: Progress) -> Figures:
    """Count the records of the log by topic."""
    told = Figures({}, log_end=store.log_start)
    queues: set[tuple[str, int]] = set()
    for found in records(store, progress):
        if isinstance(found, Damage):
            told.damaged += 1
            continue
        head = found[0]
        topic = told.topics.get(head.topic)
        if topic is None:
            topic = told.topics[head.topic] = TopicFigures(first=head.store_timestamp)
        topic.messages += 1
        topic.bytes += head.size
        topic.last = head.store_timestamp
        queues.add((head.topic, head.queue_id))
        told.log_end = head.phy + head.size
    for name, _ in queues:
        told.topics[name].queues += 1
    return told
