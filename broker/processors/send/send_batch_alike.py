"""Batches whose messages are laid out alike, by column: their parts for the full way, and a fast way of their own.

What is unusual is left to send.py before there are side effects; tests hold both to the same records and replies.
Needs numpy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

from trimq.broker.processors.common import born_host
from trimq.broker.processors.send.send_batch import BatchParts, SentBatch
from trimq.broker.processors.send.send_direct import MEANINGLESS, DirectSends
from trimq.broker.store.log.puts import MessageRows
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.alike_texts import Matrix, texts_of
from trimq.protocol.batch_layout import BatchLayout, BatchLayouts
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.hashing import tags_code
from trimq.protocol.index_batch_numpy import AlikeKeys
from trimq.protocol.property_names import NOT_IN_A_BATCH
from trimq.protocol.property_text import are_fast, closed
from trimq.protocol.record import MAX_PROPERTIES, pack_shared
from trimq.protocol.record_batch_numpy import AlikeMessages, BatchRows
from trimq.protocol.topic_rules import MAX_TOPIC_LENGTH
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import DEFERRED, Later

BatchAnswer = Callable[[SentBatch, PutMessageResult], bytes | RemotingCommand]
"""Counts the messages of a batch that was stored, and makes the reply."""

_LONGEST_KEY: Final = 128
"""Longer keys are left to a way that does not make four bytes of each letter of a thousand keys."""
_SPACE: Final = ord(" ")
_HOST: Final = 8
"""Bytes of a host with an IPv4 address."""


class AlikeBatches:
    """Takes batches apart by column, with what is known of their layouts; DirectBatches is the fast way."""

    def __init__(self) -> None:
        self._layouts = BatchLayouts()

    def direct(self, direct: DirectSends, answer: BatchAnswer) -> "DirectBatches":
        """The fast way, which shares what is known of layouts with the full one."""
        return DirectBatches(self, direct, answer)

    def find(self, body: Any) -> tuple[Matrix, BatchLayout, AlikeKeys | None] | None:
        """The messages of a batch, a row for each, and their keys; None where somebody has to look at each."""
        found = self._layouts.find(body)
        if found is None:
            return None
        rows, layout = found
        if not layout.is_plain or not NOT_IN_A_BATCH.isdisjoint(layout.values):
            return None
        unique, words = layout.column(rows, "UNIQ_KEY"), layout.column(rows, "KEYS")
        columns = [column for column in (unique, words) if column is not None]
        if any(column.shape[1] > _LONGEST_KEY for column in columns) or (
            words is not None and bool((words == _SPACE).any())
        ):
            return None
        return rows, layout, AlikeKeys(columns) if columns else None

    def parts_of(self, body: Any, *, tags_too: bool) -> BatchParts | None:
        """See send_batch.parts_of; None for what is to be looked at there."""
        found = self.find(body)
        if found is None:
            return None
        rows, layout, keys = found
        count = len(rows)
        tag = layout.same(rows, "TAGS")
        if tag is not None:
            tags_codes = [tags_code(tag)] * count
            if tags_too:
                keys = AlikeKeys([], tag, count) if keys is None else keys.with_tag(tag)
        elif (tags := layout.column(rows, "TAGS")) is not None:
            if tags_too and tags.shape[1] > _LONGEST_KEY:
                return None
            tags_codes = list(map(tags_code, texts_of(tags)))
            if tags_too:
                keys = AlikeKeys([], count=count).with_tags(tags) if keys is None else keys.with_tags(tags)
        else:
            tags_codes = [0] * count
        return BatchParts(AlikeMessages(rows, layout), tags_codes, [()] * count if keys is None else keys)


class DirectBatches:
    """The fast way: for a batch to a topic that exists, with messages of one tag, where the log has room."""

    def __init__(self, alike: AlikeBatches, direct: DirectSends, answer: BatchAnswer) -> None:
        """``direct`` knows topics and queues that can be sent to."""
        self._alike = alike
        self._direct = direct
        self._answer = answer

    def serve(self, connection: Connection, request: TypedRequest[Any]) -> bytes | Literal[Later.DEFERRED] | None:
        """See FastHandler."""
        header = request.header
        topic = self._direct.topic(header.topic)
        if (
            topic is None
            or request.flag
            or not header.batch
            or header.sys_flag & ~MEANINGLESS
            or len(header.topic) > MAX_TOPIC_LENGTH
        ):
            return None
        unique = None
        text = header.properties
        if text:
            match = self._direct.ordinary(closed(text))
            if match is None or len(text) > MAX_PROPERTIES:
                return None
            unique = match[2]
        found = self._alike.find(request.body)
        queue = self._direct.queue(topic, header.queue_id)
        if found is None or queue is None:
            return None
        rows, layout, keys = found
        tag = layout.same(rows, "TAGS")
        host = connection.data.get("host") or born_host(connection)
        if keys is None or (tag is None and "TAGS" in layout.values) or len(host) != _HOST:
            return None
        if not are_fast(layout.values, self._direct.reserved):
            return None
        if tag and self._direct.tags:
            keys = keys.with_tag(tag)
        count = len(rows)
        shared = partial(
            _shared, header.sys_flag, header.born_timestamp, host, self._direct.store_host, header.reconsume_times or 0
        )
        placed = BatchRows(rows, layout, (queue.magic, queue.queue_id, queue.topic_part), shared)
        put = MessageRows(
            queue.topic,
            (queue,),
            placed,
            layout.body_length,
            layout.text_length,
            tags_code(tag) if tag else 0,
            keys,
            is_batch=True,
        )
        command = RemotingCommand(RequestCode.SEND_BATCH_MESSAGE, request.opaque)
        sent = SentBatch(command, queue.topic, queue.queue_id, count, unique)
        result = self._direct.put(put, partial(self._durable, connection, sent) if self._direct.waits else None)
        if result is None:
            return None
        if self._direct.waits:
            return DEFERRED
        reply = self._answer(sent, result)
        return reply if isinstance(reply, bytes) else encode(reply)

    def _durable(self, connection: Connection, sent: SentBatch, result: PutMessageResult) -> None:
        """The end of a batch that has waited for the disk."""
        connection.complete(self._answer(sent, result))


def _shared(
    sys_flag: int, born_timestamp: int, born: bytes, stored: bytes, reconsume_times: int, store_timestamp: int
) -> bytes:
    return pack_shared(sys_flag, born_timestamp, born, store_timestamp, stored, reconsume_times)
