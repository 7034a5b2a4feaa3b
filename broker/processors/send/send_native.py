"""Sends and ends of transactions of a round, and batches, by the native extension: without an object per message.

It does for all of them what send_fast_path.py, send.py and end_transaction.py do for a single request, by the same
rules. Requests that the extension does not support are handed back before there are side effects. Tests compare the
records, queue units, index entries and replies of both paths.

A half is put into the topic of halves; an end that commits one puts its commit record. The extension reads the half
from the log, and from the table of halves that it is pending; what changes when the record is stored is decided here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from trimq.broker.processors.common import born_host
from trimq.broker.processors.end_transaction import EndTransactionProcessor
from trimq.broker.processors.send.send_batch import SentBatch
from trimq.broker.processors.send.send_fast_path import MEANINGLESS, SendFastPath, SendTopic
from trimq.broker.store.log.message_rows import MessageRows
from trimq.broker.store.message_store import MessageStore, TopicQueue
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.body import DataVersion
from trimq.protocol.codes import VERSION, LanguageCode, RequestCode
from trimq.protocol.command import LANGUAGE, Encoding, RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.native import Messages, NativeExtension, Reader
from trimq.protocol.property_names import (
    FAST_NAMES,
    NOT_IN_A_BATCH,
    PROPERTY_CLUSTER,
    PROPERTY_MSG_REGION,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRACE_ON,
    PROPERTY_TRAN_MSG,
    SLOW_NAMES,
    SLOW_PREFIXES,
)
from trimq.protocol.property_text import closed
from trimq.protocol.record import MAX_PROPERTIES
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import DEFERRED, Later, Served, Span

_OF_HALVES: Final = frozenset(
    {
        PROPERTY_TRAN_MSG,
        PROPERTY_REAL_TOPIC,
        PROPERTY_REAL_QID,
        PROPERTY_MSG_REGION,
        PROPERTY_TRACE_ON,
        PROPERTY_CLUSTER,
    }
)
"""Properties of halves that keep all other messages from the fast paths."""

BatchAnswer = Callable[[SentBatch, PutMessageResult], bytes | RemotingCommand]
"""Counts the messages of a stored batch and makes its reply."""


class NativeSends:
    """The extension's reader for sends, as configuration and features permit it. Call ``configure`` first."""

    def __init__(
        self,
        *,
        native: NativeExtension,
        fast_path: SendFastPath,
        store: MessageStore,
        answer_batch: BatchAnswer,
        most_halves: Callable[[], int],
        ends: EndTransactionProcessor,
    ) -> None:
        """``fast_path`` serves single sends, and finds the topics and queues that can be sent to.

        ``most_halves`` returns how many halves are accepted now; ``ends`` is the full path of their ends.
        """
        self.most_halves = most_halves
        self.ends = ends
        self.fast_path = fast_path
        self.answer_batch = answer_batch
        self.store = store
        self._reader: Reader | None = None
        self._native = native

    @property
    def reader(self) -> Reader | None:
        """The reader; None while the extension is off, whichever module has found the fault."""
        return self._reader if self._native.is_on else None

    def configure(self) -> None:
        """Make the reader again from the current configuration of ``fast_path``."""
        extension, fast_path = self._native.extension, self.fast_path
        if extension is None or not fast_path.usable:
            self._reader = None
            return
        fast = FAST_NAMES - fast_path.reserved
        self._reader = extension.Reader(
            slow=_raw(SLOW_NAMES | fast_path.reserved),
            fast=_raw(name for name in fast if name.startswith(SLOW_PREFIXES)),
            slow_prefixes=_raw(SLOW_PREFIXES),
            not_in_a_batch=_raw(NOT_IN_A_BATCH),
            added=fast_path.added,
            tags=fast_path.tags,
            store_host=fast_path.store_host,
            region=fast_path.region,
            trace=fast_path.trace,
            language=(LANGUAGE, int(LanguageCode[LANGUAGE])),
            version=VERSION,
            half_topic=TRANS_HALF_TOPIC,
            halves=fast_path.reserved.isdisjoint(_OF_HALVES),
        )

    def failed(self, error: Exception) -> None:
        """Handle ``error``, which a call of the extension has raised before anything was written.

        A fault of the extension switches it off for the process. Any other error is raised again.
        """
        if not isinstance(error, self._native.fault):
            raise error
        self._native.turn_off(str(error))


def _raw(names: Any) -> list[bytes]:
    return [name.encode() for name in names]


class _Queues(NamedTuple):
    """The queues that messages of a round go to, a row each: topic, queue, number of messages, and their bytes."""

    topics: Sequence[SendTopic]
    queues: Sequence[TopicQueue]
    counts: Sequence[int]
    sizes: Sequence[int]


class _GroupedPut(NamedTuple):
    """A put of a round's requests, with the data that their replies need. ``commits``: the halves that it commits."""

    spans: Sequence[Span]
    parts: list[tuple[int, int]]
    put: MessageRows
    queues: _Queues
    commits: list[int]


class GroupedSends:
    """The GroupedServer of sends and of ends of transactions."""

    def __init__(self, native: NativeSends, codes: Sequence[int]) -> None:
        """``codes``: SEND_MESSAGE, SEND_MESSAGE_V2, END_TRANSACTION, or some of them."""
        self._native = native
        self._codes = tuple(map(int, codes))
        self._targets: dict[tuple[str, int], tuple[SendTopic, TopicQueue]] = {}
        """Topic and queue by name and queue id, cached while the topics are those of ``_version``."""
        self._version: DataVersion | None = None

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        """See GroupedServer."""
        native = self._native
        reader, fast_path, transactions = native.reader, native.fast_path, native.ends.transactions
        if reader is None:
            return None
        places = [(span.begin, span.end, span.most) for span in spans]
        hosts = [span.connection.data.get("host") or born_host(span.connection) for span in spans]
        limits = native.store.limits
        # Until ``put`` returns a result nothing is stored, and the round can be left to the other paths. The replies
        # are requested from the extension before that: after a later fault the requests would be served a second time.
        try:
            both = (most, native.most_halves())
            messages = reader.read(frames, self._codes, places, hosts, both, limits, transactions.pending())
            queues = self._queues(messages)
            ends = messages.ends()
            commits = [half for half, is_commit in ends if is_commit]
            rollbacks = [half for half, is_commit in ends if not is_commit]
            parts = messages.parts()
            if queues is None:
                if not rollbacks:
                    return None
                replies = messages.replies()
                transactions.rolled_back(rollbacks)
                return Served(parts, replies)
            put = MessageRows(messages, frames, queues.queues, queues.counts)
            grouped = _GroupedPut(spans, parts, put, queues, commits)
        except Exception as error:  # noqa: BLE001 - ``failed`` raises errors that are no fault of the extension
            native.failed(error)
            return None
        # Before the put: no second end may be accepted, and the log's end is still before the commit records.
        transactions.committing(commits)
        result = None
        try:
            result = fast_path.put(put, partial(self._durable, grouped) if fast_path.waits else None)
        except Exception as error:  # noqa: BLE001 - as above
            native.failed(error)
        finally:
            if result is None:
                transactions.not_committed(commits)
        if result is None:
            return None
        transactions.rolled_back(rollbacks)
        if fast_path.waits:
            return Served(parts, deferred=True)
        self._stored(grouped)
        return Served(parts, put.replies)

    def serve_one(self, connection: Connection, frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        """See GroupedServer."""
        native = self._native
        reader, fast_path = native.reader, native.fast_path
        if reader is None:
            return None
        try:
            found = reader.send(frame, self._codes)
        except Exception as error:  # noqa: BLE001 - ``failed`` raises errors that are no fault of the extension
            native.failed(error)
            return None
        if found is None:
            return None
        if found is True:  # a half, or the end of one
            return self._serve_alone(connection, frame)
        name, queue_id, body_at, properties, born, flag, sys_flag, times, tags_code, keys, unique, opaque = found
        topic = fast_path.topic(name)
        if topic is None:
            return None
        body = frame[body_at:]
        return fast_path.store(
            connection, topic, queue_id, body, properties, born, flag, sys_flag, times, tags_code, keys, unique, opaque
        )

    def _serve_alone(self, connection: Connection, frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        """Serve a request as a round of one."""
        served = self.serve(frame, [Span(connection, 0, len(frame), 1)], 1)
        if served is None or not served.parts[0][0]:
            return None
        return DEFERRED if served.deferred else served.replies[0]

    def _queues(self, messages: Messages) -> _Queues | None:
        """Find the queue of each message. Requests without one are left out; None if no message remains."""
        targets = self._targets
        version = self._native.fast_path.topics.data_version
        if version is not self._version:
            targets.clear()
            self._version = version
        # Leaving requests out changes the counts and sizes of the others, so the loop reads them again.
        while True:
            real = [self._is_real(place) for place in messages.real_places()]
            if not len(messages):
                if all(real):
                    return None
                messages.leave_out([], real)  # rollbacks of halves that the full path refuses
                continue
            names, ids, counts, sizes = zip(*messages.queues(), strict=True)
            found = list(map(targets.get, zip(names, ids, strict=True)))  # usually all queues are in the cache
            if None in found or any(target[1].deleted for target in found if target is not None):
                found = list(map(self._target, names, ids))
            known = [target for target in found if target is not None]
            if len(known) == len(found) and all(real):
                topics, queues = zip(*known, strict=True)
                return _Queues(topics, queues, counts, sizes)
            messages.leave_out([target is not None for target in found], real)

    def _target(self, name: str, queue_id: int) -> tuple[SendTopic, TopicQueue] | None:
        fast_path = self._native.fast_path
        if name == TRANS_HALF_TOPIC:  # of halves: the extension leaves sends that name this topic to the full path
            topic: SendTopic | None = fast_path.own_topic(name)
        else:
            topic = fast_path.topic(name)
        queue = None if topic is None else fast_path.queue(topic, queue_id)
        if topic is None or queue is None:
            return None
        target = self._targets[name, queue_id] = (topic, queue)
        return target

    def _is_real(self, place: tuple[str, int]) -> bool:
        """Whether messages may be sent to this topic and queue id: a half's real place.

        A rollback sends nothing, but the full path refuses it too for a place that it would not send to.
        """
        topic = self._native.fast_path.topic(place[0])
        return topic is not None and 0 <= place[1] < topic.config.write_queue_nums

    def _stored(self, grouped: _GroupedPut) -> None:
        """Count the messages, and note the ends of transactions."""
        for topic, count, size in zip(grouped.queues.topics, grouped.queues.counts, grouped.queues.sizes, strict=True):
            nums, volume = topic.nums, topic.sizes
            nums.value += count
            nums.times += count
            volume.value += size
            volume.times += count
        put = self._native.fast_path.broker_put
        count = grouped.put.count
        put.value += count
        put.times += count
        if grouped.commits:
            self._native.ends.transactions.committed(grouped.commits)

    def _durable(self, grouped: _GroupedPut, result: PutMessageResult) -> None:
        """Reply to requests that have waited for the disk."""
        if result.status:
            self._refuse(grouped, result)
            return
        self._stored(grouped)
        for span, (count, _), replies in zip(grouped.spans, grouped.parts, grouped.put.replies, strict=True):
            if count:
                span.connection.complete(replies, count)

    def _refuse(self, grouped: _GroupedPut, failure: PutMessageResult) -> None:
        """Reply to each request of a put that the disk did not confirm; the full paths make and count the replies.

        After a timeout of the sync the records are in the log (FLUSH_DISK_TIMEOUT): the replies name their places.
        """
        fast_path, ends, spans = self._native.fast_path, self._native.ends, grouped.spans
        if grouped.commits:
            (ends.transactions.committed if failure.ok else ends.transactions.not_committed)(grouped.commits)
        try:
            requests = grouped.put.messages.requests()
        except Exception as error:  # noqa: BLE001 - ``failed`` raises errors that are no fault of the extension
            self._native.failed(error)
            for one in spans:  # the opaques of the requests are lost, so none of them can get a reply
                one.connection.close("server error: the native extension has failed")
            return
        for request in requests:
            span, opaque, binary, number, queue_id, unique, physical, in_queue, size, is_end, is_oneway = request
            command = RemotingCommand(0, opaque, encoding=Encoding.ROCKETMQ if binary else Encoding.JSON)
            own = PutMessageResult(failure.status, remark=failure.remark)
            if failure.physical_offset >= 0:
                own.physical_offset, own.queue_offset, own.size = physical, in_queue, size
            reply: bytes | RemotingCommand
            if number < 0:
                reply = command.reply()
            elif is_end:
                reply = ends.answer(command, grouped.queues.queues[number].topic, own)
            else:
                reply = fast_path.answer(command, grouped.queues.queues[number].topic, queue_id, unique, own)
            spans[span].connection.complete(None if is_oneway else reply)


class NativeBatches:
    """The fast path of batches of ordinary messages to an existing topic, if the log has space."""

    def __init__(self, native: NativeSends) -> None:
        self._native = native

    def serve(self, connection: Connection, request: TypedRequest[Any]) -> bytes | Literal[Later.DEFERRED] | None:
        """See FastHandler."""
        native, header = self._native, request.header
        reader, fast_path = native.reader, native.fast_path
        topic = fast_path.topic(header.topic)
        if reader is None or topic is None or request.flag or not header.batch or header.sys_flag & ~MEANINGLESS:
            return None
        unique = None
        text = header.properties
        if text:
            match = fast_path.ordinary(closed(text))
            if match is None or len(text) > MAX_PROPERTIES:
                return None
            unique = match[2]
        queue = fast_path.queue(topic, header.queue_id)
        if queue is None:
            return None
        # As above: until ``put`` returns a result nothing is stored, and ``None`` leaves the batch to the full path.
        host = connection.data.get("host") or born_host(connection)
        stamp = (header.sys_flag, header.born_timestamp, header.reconsume_times or 0)
        try:
            messages = reader.batch(request.body, queue.topic, queue.queue_id, stamp, host, native.store.limits)
            if messages is None:
                return None
            count = len(messages)
            command = RemotingCommand(RequestCode.SEND_BATCH_MESSAGE, request.opaque)
            sent = SentBatch(command, queue.topic, queue.queue_id, count, unique)
            put = MessageRows(messages, request.body, (queue,), (count,), is_batch=True)
            result = fast_path.put(put, partial(self._durable, connection, sent) if fast_path.waits else None)
        except Exception as error:  # noqa: BLE001 - ``failed`` raises errors that are no fault of the extension
            native.failed(error)
            return None
        if result is None:
            return None
        if fast_path.waits:
            return DEFERRED
        reply = native.answer_batch(sent, result)
        return reply if isinstance(reply, bytes) else encode(reply)

    def _durable(self, connection: Connection, sent: SentBatch, result: PutMessageResult) -> None:
        """Reply to a batch that has waited for the disk."""
        connection.complete(self._native.answer_batch(sent, result))
