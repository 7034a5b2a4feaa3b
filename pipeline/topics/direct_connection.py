"""Pulling a long range over a connection of its own, as long as everything goes well.

A worker has nothing to do until the next rows are there, so that a socket that blocks is all it needs: the SDK's tasks,
events and deadlines for each request cost several times what the request itself does. Without a filter every offset is
a message, so that several requests are under way; replies may come in another order than requests.

Replies stay where they were received, in one buffer that is used again and again: what becomes columns is copied once.
What one part of the range brings has to wait for the parts in front of it. How much waits is bounded, whatever messages
are like: without room for more only the first part is asked for, and that is given out as it comes.

Anything but the expected reply ends the connection: ``at`` tells where, and whoever reads on from there
(pulling.RangeReader) waits for brokers and tells of missing offsets.
"""

import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from trimq.pipeline.topics.connecting import connect
from trimq.pipeline.topics.planning import Range
from trimq.protocol import sysflag
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand, to_ext
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import MAX_FRAME, decode, encode
from trimq.protocol.headers.pull import PullMessageRequestHeader, PullMessageResponseHeader

MIN_MESSAGES: Final = 64
"""A range of fewer messages is not worth a connection."""
_ASK_FOR: Final = 1024
"""Messages that a pull asks for at most, as the first one does; what replies bring tells how many parts are to have."""
_DEPTH: Final = 32
"""Requests that are under way at most; when half of them are answered, as many go out by one call."""
REPLY_BATCH_BYTES: Final = 4 << 20
"""Bytes of replies that are given out together."""
_SPARE_BYTES: Final = 1 << 20
_MAX_BUFFERED: Final = 4 * REPLY_BATCH_BYTES
"""Bytes in the buffer, and expected, over which nothing is asked for but what can be given out next."""
_ROUND: Final = 4 * _DEPTH
"""Replies after which it is told anew how many messages one brings: sizes of messages change along a queue."""
_WORD: Final = struct.Struct(">I")


class ReplyBatch(NamedTuple):
    """Messages as they came, in the order of their offsets: pieces [begin, end) of ``view``.

    They are there until the next batch is asked for.
    """

    view: memoryview
    pieces: list[tuple[int, int]]


class _Piece(NamedTuple):
    """The messages of one reply, [begin, end) of the buffer; ``following`` is the offset behind them."""

    begin: int
    end: int
    following: int


@dataclass(slots=True)
class _Part:
    """Offsets [at, end) that one of the requests is to bring; ``pieces`` are what has come and has to wait."""

    at: int
    end: int
    pieces: list[_Piece] = field(default_factory=list)


class _UnexpectedReplyError(Exception):
    """Not the expected reply."""


class DirectConnection:
    """One range of a queue. After ``reply_batches`` everything before ``at`` has been given out."""

    def __init__(self, address: str, group: str, span: Range, timeout: float) -> None:
        self.at = span.begin
        self._address = address
        self._span = span
        self._timeout = timeout
        self._opaque = 0
        self._asked: dict[int, _Part] = {}
        self._parts: deque[_Part] = deque()
        self._incomplete: list[_Part] = []
        """Parts that were not brought whole and are not asked for at present."""
        self._ready: list[_Piece] = []
        self._waiting = 0
        """Bytes of the pieces of parts that are not the first."""
        self._largest = 0
        """Bytes that a reply has to be expected to bring, from those of late."""
        self._most = 0
        """The most messages that a reply of this round brought."""
        self._replies = 0
        self._buffer = memoryview(bytearray(REPLY_BATCH_BYTES + _SPARE_BYTES))
        self._received = 0
        self._looked_at = 0
        header = PullMessageRequestHeader(
            consumer_group=group,
            topic=span.queue.topic,
            queue_id=span.queue.queue_id,
            queue_offset=0,
            max_msg_nums=0,
            sys_flag=sysflag.PULL_SUBSCRIPTION,
            commit_offset=0,
            suspend_timeout_millis=0,
            sub_version=0,
            subscription="*",
            expression_type="TAG",
        )
        self._fields = to_ext(header)

    def reply_batches(self) -> Iterator[ReplyBatch]:
        """What replies bring, in the order of offsets, up to the end of the range or of the connection."""
        with (
            suppress(OSError, FrameError, RemotingError, _UnexpectedReplyError),
            connect(self._address, self._timeout) as connection,
        ):
            yield from self._pulled(connection)
        yield from self._give()

    def _pulled(self, connection: socket.socket) -> Iterator[ReplyBatch]:
        """All but the last batch."""
        end = self._span.end
        first = _Part(self.at, end)
        self._parts.append(first)
        connection.sendall(self._request(first))
        self._receive_reply(connection)
        # the rest of the range is another part's
        self._incomplete.clear()
        planned = first.end = first.at
        step = longer = self._most
        while True:
            while self._parts and self._parts[0].at == self._parts[0].end:
                self._pop_part()
            requests = self._follow_up_requests() if self._incomplete else []
            if self._replies >= _ROUND:
                # One part is longer, to find out whether replies can bring more by now.
                step, longer = self._most, 2 * self._most
                self._replies = self._most = 0
                self._largest //= 2
            if planned < end and len(self._parts) <= _DEPTH // 2:
                while planned < end and len(self._parts) < _DEPTH and (not self._parts or self._has_room()):
                    part = _Part(planned, min(end, planned + longer))
                    planned, longer = part.end, step
                    self._parts.append(part)
                    requests.append(self._request(part))
            if requests:
                connection.sendall(b"".join(requests))
            if not self._parts:
                return
            if self._looked_at - self._waiting >= REPLY_BATCH_BYTES:
                yield from self._give()
            self._receive_reply(connection)

    def _pop_part(self) -> None:
        """The first part is whole: what has come of the next one is ready."""
        self._parts.popleft()
        if self._parts and (pieces := self._parts[0].pieces):
            self._ready += pieces
            self._waiting -= sum(piece.end - piece.begin for piece in pieces)
            pieces.clear()

    def _follow_up_requests(self) -> list[bytes]:
        """Requests for the rest of parts: of the first one always, of later ones as far as there is room."""
        requests = []
        self._incomplete.sort(key=lambda part: -part.at)
        while self._incomplete and (self._incomplete[-1] is self._parts[0] or self._has_room()):
            requests.append(self._request(self._incomplete.pop()))
        return requests

    def _has_room(self) -> bool:
        return self._looked_at + (len(self._asked) + 1) * self._largest <= _MAX_BUFFERED

    def _give(self) -> Iterator[ReplyBatch]:
        """What is ready. What is not moves to the front of the buffer afterwards."""
        ready, self._ready = self._ready, []
        if not ready:
            return
        yield ReplyBatch(self._buffer, [(piece.begin, piece.end) for piece in ready])
        self.at = ready[-1].following
        waiting = [(piece, part, number) for part in self._parts for number, piece in enumerate(part.pieces)]
        # Of a buffer that grew no more stays than four times of what is needed.
        room = max(REPLY_BATCH_BYTES + _SPARE_BYTES, 2 * self._received)
        old, at = self._buffer, 0
        buffer = self._buffer = memoryview(bytearray(room)) if 2 * room <= len(old) else old
        for piece, part, number in sorted(waiting, key=lambda item: item[0].begin):
            end = at + piece.end - piece.begin
            buffer[at:end] = old[piece.begin : piece.end]
            part.pieces[number] = _Piece(at, end, piece.following)
            at = end
        begun = self._received - self._looked_at
        buffer[at : at + begun] = old[self._looked_at : self._received]
        self._looked_at, self._received = at, at + begun

    def _request(self, part: _Part) -> bytes:
        """Asks for what is missing of a part."""
        self._opaque += 1
        self._asked[self._opaque] = part
        self._fields["queueOffset"], self._fields["maxMsgNums"] = str(part.at), str(min(_ASK_FOR, part.end - part.at))
        command = RemotingCommand.request(RequestCode.PULL_MESSAGE, self._fields)
        command.opaque = self._opaque
        return encode(command)

    def _receive_reply(self, connection: socket.socket) -> None:
        """One reply."""
        frame = self._frame(connection)
        reply = decode(self._buffer[slice(*frame)])
        part = self._asked.pop(reply.opaque, None)
        if part is None or reply.code != ResponseCode.SUCCESS:
            raise _UnexpectedReplyError
        answer = reply.header(PullMessageResponseHeader)
        if answer.min_offset > part.at or not part.at < answer.next_begin_offset <= part.end:
            raise _UnexpectedReplyError
        begin, end = frame
        size, count = len(reply.body), answer.next_begin_offset - part.at
        part.at += count
        piece = _Piece(end - size, end, part.at)
        if part is self._parts[0]:
            self._ready.append(piece)
        else:
            part.pieces.append(piece)
            self._waiting += size
        self._replies += 1
        self._most = max(self._most, count)
        self._largest = max(self._largest, end - begin)
        if part.at < part.end:
            self._incomplete.append(part)

    def _frame(self, connection: socket.socket) -> tuple[int, int]:
        """Where in the buffer the next frame is, without its length."""
        begin = self._looked_at + _WORD.size
        self._receive(connection, begin)
        end = begin + _WORD.unpack_from(self._buffer, self._looked_at)[0]
        if end - self._looked_at > MAX_FRAME:
            raise _UnexpectedReplyError
        self._receive(connection, end)
        self._looked_at = end
        return begin, end

    def _receive(self, connection: socket.socket, end: int) -> None:
        """Waits until the buffer is filled up to ``end``."""
        if end > len(self._buffer):
            # at least doubled, so that what is moved stays in proportion to what comes
            buffer = memoryview(bytearray(max(end, 2 * len(self._buffer))))
            buffer[: self._received] = self._buffer[: self._received]
            self._buffer = buffer
        while self._received < end:
            count = connection.recv_into(self._buffer[self._received :])
            if not count:
                raise _UnexpectedReplyError
            self._received += count
