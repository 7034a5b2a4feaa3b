"""The fast way of many sends at once: those that came in one round and are laid out alike become records by column.

What send_direct.py does for one message is done for all of them: what cannot be done to each of them in the same way
is passed over before anything has happened, and they are served one by one. Tests hold both to the same records and
replies. Needs numpy.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from trimq.broker.processors.common import born_host
from trimq.broker.processors.send.send_direct import HEADERS, DirectSends, SendTopic
from trimq.broker.processors.send.send_layout import NotAlikeError, SendLayout
from trimq.broker.store.log.puts import MessageRows
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.alike_rows import Numbers, PlacedRows
from trimq.protocol.alike_texts import Matrix
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.index_batch_numpy import AlikeKeys
from trimq.protocol.typed_request import decoder
from trimq.remoting.server.handler_table import FRONT, json_front
from trimq.remoting.server.handlers import Served, Span

_HEAD_AT: Final = 8
_HOST: Final = 8
"""Bytes of a host with an IPv4 address."""
_LAYOUTS: Final = 16
"""Layouts known at once: each has room for as many records as are served at once."""


class _Asked(NamedTuple):
    """What the replies need to know."""

    spans: Sequence[Span]
    topic: SendTopic
    layout: SendLayout
    rows: PlacedRows
    columns: Matrix
    numbers: Numbers

    def uniques(self) -> list[bytes]:
        """Each message's unique key."""
        unique = self.layout.keys[0]
        width = unique.stop - unique.start
        text = self.columns[:, unique].tobytes()
        return [text[at : at + width] for at in range(0, len(text), width)]


class AlikeSends:
    """An GroupedServer of ordinary sends. ``lengths``: what is known of the frames of each length."""

    def __init__(self, direct: DirectSends) -> None:
        """``direct`` serves them one by one."""
        self.lengths: dict[int, SendLayout] = {}
        self._direct = direct
        self._decoders = {json_front(code): decoder(header) for code, header in HEADERS.items()}

    def forget(self) -> None:
        """Know nothing any more: what could go this way may not be what can."""
        self.lengths.clear()

    def learn(self, frame: bytes, most: int) -> bool:
        """See GroupedServer."""
        decode = self._decoders.get(frame[_HEAD_AT : _HEAD_AT + FRONT])
        if decode is None:
            return False
        try:
            layout = SendLayout(frame, decode, self._direct.store_host, self._direct.added, most)
        except NotAlikeError:
            return False
        while len(self.lengths) >= _LAYOUTS:
            del self.lengths[next(iter(self.lengths))]
        self.lengths[layout.length] = layout
        return True

    def serve(self, frames: memoryview, spans: Sequence[Span]) -> Served | None:
        """See GroupedServer. Frames of one length only: all of them or none."""
        first = spans[0]
        length = (first.end - first.begin) // first.frames
        layout = self.lengths.get(length)
        if layout is None or any(span.end - span.begin != span.frames * length for span in spans):
            return None
        direct = self._direct
        rows = np.frombuffer(frames, dtype=np.uint8).reshape(-1, length)
        columns = layout.frames.columns(rows)
        topic = direct.topic(layout.topic)
        if columns is None or topic is None:
            del self.lengths[length]
            return None
        numbers = layout.frames.numbers(columns)
        hosts = b"".join(
            [(span.connection.data.get("host") or born_host(span.connection)) * span.frames for span in spans]
        )
        if len(hosts) != _HOST * len(rows):
            return None
        placed = layout.fill(frames, rows, numbers, hosts)
        queues = []
        for queue_id in placed.queue_ids:
            queue = direct.queue(topic, queue_id)
            if queue is None:
                return None
            queues.append(queue)
        keys = AlikeKeys([columns[:, key].copy() for key in layout.keys])
        if layout.tag and direct.tags:
            keys = keys.with_tag(layout.tag)
        put = MessageRows(
            layout.topic, queues, placed, layout.body_length, layout.properties_length, layout.tags_code, keys
        )
        asked = _Asked(spans, topic, layout, placed, columns, numbers)
        if direct.waits:
            return None if direct.put(put, partial(self._durable, asked)) is None else Served(deferred=True)
        result = direct.put(put, None)
        return None if result is None else Served(self._stored(asked, result))

    def _stored(self, asked: _Asked, result: PutMessageResult) -> list[bytes]:
        """Count them; the replies to each connection."""
        count = len(asked.rows)
        for item, value in (
            (asked.topic.nums, count),
            (asked.topic.sizes, result.size),
            (self._direct.broker_put, count),
        ):
            item.value += value
            item.times += count
        layout, rows, columns = asked.layout, asked.rows, asked.columns
        digits = len(str(rows.queue_offsets.max()))
        if digits == len(str(rows.queue_offsets.min())):
            form = layout.replies(self._direct.template, digits)
            unique = columns[:, layout.keys[0]]
            joined = form.joined(rows, columns[:, layout.queue_id], unique, columns[:, layout.opaque])
            return list(_cut(joined, form.size, asked.spans))
        replies = self._direct.replies(
            rows.physical_offsets.tolist(),
            asked.numbers[:, 0].tolist(),
            rows.queue_offsets.tolist(),
            asked.uniques(),
            asked.numbers[:, 2].tolist(),
        )
        return [b"".join(own) for own in _shared(replies, asked.spans)]

    def _durable(self, asked: _Asked, result: PutMessageResult) -> None:
        """The end of sends that have waited for the disk."""
        if result.status:
            self._refuse(asked, result)
            return
        for span, replies in zip(asked.spans, self._stored(asked, result), strict=True):
            span.connection.complete(replies, span.frames)

    def _refuse(self, asked: _Asked, result: PutMessageResult) -> None:
        connections = [span.connection for span in asked.spans for _ in range(span.frames)]
        rows, numbers = asked.rows, asked.numbers
        placed = result.physical_offset >= 0
        size = result.size // len(rows)
        for connection, unique, (queue_id, _, opaque), offset, queue_offset in zip(
            connections,
            asked.uniques(),
            numbers.tolist(),
            rows.physical_offsets.tolist(),
            rows.queue_offsets.tolist(),
            strict=True,
        ):
            command = RemotingCommand(RequestCode.SEND_MESSAGE_V2, opaque)
            own = PutMessageResult(result.status, remark=result.remark)
            if placed:
                own.physical_offset, own.queue_offset = offset, queue_offset
                own.size, own.store_timestamp = size, result.store_timestamp
            topic = asked.topic.config.topic_name
            connection.complete(self._direct.answer(command, topic, queue_id, unique.decode(), own))


def _cut(joined: bytes, size: int, spans: Sequence[Span]) -> Iterator[bytes]:
    at = 0
    for span in spans:
        stop = at + span.frames * size
        yield joined[at:stop]
        at = stop


def _shared(replies: list[bytes], spans: Sequence[Span]) -> Iterator[list[bytes]]:
    at = 0
    for span in spans:
        yield replies[at : at + span.frames]
        at += span.frames
