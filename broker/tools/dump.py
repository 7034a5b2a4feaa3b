"""The records of a log as JSON lines, and counts of its messages by topic."""

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
    """The records to print; an empty field accepts all. Times are in ms, and ``end`` is exclusive."""

    topics: frozenset[str] = frozenset()
    queue_id: int | None = None
    key: str | None = None
    begin: int | None = None
    end: int | None = None

    def wants(self, found: LogRecord) -> bool:
        """Whether the fields that are known without decoding the record match."""
        if self.topics and found.topic not in self.topics:
            return False
        if self.queue_id is not None and found.queue_id != self.queue_id:
            return False
        if self.begin is not None and found.store_timestamp < self.begin:
            return False
        if self.end is not None and found.store_timestamp >= self.end:
            return False
        return self.key is None or self.key in found.properties  # a substring: ``wants_message`` checks the keys

    def wants_message(self, message: StoredMessage) -> bool:
        """Whether the keys of the decoded message match."""
        return self.key is None or self.key == message.unique_id or self.key in message.keys


def records(store: OfflineStore, progress: Progress) -> Iterator[tuple[LogRecord, memoryview] | Damage]:
    """Every record of the log with its bytes, and the damaged places. The log has to be open."""
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
    """A record with the field names of RocketMQ's MessageExt. A body that is not UTF-8 is in ``bodyBase64``."""
    described: dict[str, Any] = {
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
            described["body"] = str(message.body, "utf-8")
        except UnicodeDecodeError:
            described["bodyBase64"] = base64.b64encode(message.body).decode()
    return described


def lines(store: OfflineStore, wanted: Filter, progress: Progress, *, body: bool) -> Iterator[bytes]:
    """The wanted records, one JSON object each. A damaged place is an object with ``damagedAt``."""
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
    """The counts of one topic."""

    queues: int = 0
    messages: int = 0
    bytes: int = 0
    first: int = 0
    last: int = 0


class Figures(Struct):
    """The counts of a log. Times are store timestamps in ms."""

    topics: dict[str, TopicFigures]
    damaged: int = 0
    log_end: int = 0


def figures(store: OfflineStore, progress: Progress) -> Figures:
    """Count the records of the log by topic."""
    counted = Figures({}, log_end=store.log_start)
    queues: set[tuple[str, int]] = set()
    for found in records(store, progress):
        if isinstance(found, Damage):
            counted.damaged += 1
            continue
        head = found[0]
        topic = counted.topics.get(head.topic)
        if topic is None:
            topic = counted.topics[head.topic] = TopicFigures(first=head.store_timestamp)
        topic.messages += 1
        topic.bytes += head.size
        topic.last = head.store_timestamp
        queues.add((head.topic, head.queue_id))
        counted.log_end = head.phy + head.size
    for name, _ in queues:
        counted.topics[name].queues += 1
    return counted
