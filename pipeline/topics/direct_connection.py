"""The fast path for pulling a long range: pipelined pulls over a blocking connection of the task's own.

A worker has nothing to do until the next rows arrive, so a blocking socket is sufficient; the SDK's tasks, events and
deadlines for each request cost several times as much as the request itself. Without a filter every offset is a message.
The range can therefore be divided into parts with one request each, many of them in flight. Replies may arrive in
another order than their requests.

Replies stay where they were received, in one buffer that is reused; the bytes are copied only once, into columns. The
reply for one part has to wait for the replies of the parts in front of it. The bytes that wait are bounded, whatever
the sizes of messages: if there is no space for more, only the first part is requested, whose replies can be returned
immediately.

Any unexpected reply ends the connection. The full path (pulling.RangeReader) then continues at ``at``; it waits for
brokers and reports missing offsets.
"""

import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from trimq.client.signing import Signer
from trimq.pipeline.topics.connecting import connect
from trimq.pipeline.topics.planning import Range
from trimq.pipeline.topics.servers import Servers
from trimq.protocol import sysflag
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand, to_ext
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import MAX_FRAME, decode, encode
from trimq.protocol.headers.pull import PullMessageRequestHeader, PullMessageResponseHeader

MIN_MESSAGES: Final = 64
"""For a range of fewer messages a connection costs more than it saves."""
_ASK_FOR: Final = 1024
"""The most messages that a pull requests. The first pull does, and the size of its reply gives the size of parts."""
_DEPTH: Final = 32
"""The most requests in flight. When half of them are answered, one system call sends as many new ones."""
REPLY_BATCH_BYTES: Final = 4 << 20
"""Bytes of replies that are returned together."""
_SPARE_BYTES: Final = 1 << 20
_MAX_BUFFERED: Final = 4 * REPLY_BATCH_BYTES
"""Bytes, buffered and expected, above which only the first part is requested."""
_ROUND: Final = 4 * _DEPTH
"""Replies after which the size of parts is adapted: the sizes of messages change along a queue."""
_WORD: Final = struct.Struct(">I")


class ReplyBatch(NamedTuple):
    """Encoded messages in the order of their offsets: the pieces [begin, end) of ``view``.

    They are valid until the next batch is requested: then the buffer is reused.
    """

    view: memoryview
    pieces: list[tuple[int, int]]


class _Piece(NamedTuple):
    """The messages of one reply, at [begin, end) of the buffer. ``following`` is the queue offset behind them."""

    begin: int
    end: int
    following: int


@dataclass(slots=True)
class _Part:
    """Offsets [at, end) that are requested together. ``pieces`` have arrived and wait for the parts in front."""

    at: int
    end: int
    pieces: list[_Piece] = field(default_factory=list)


class _UnexpectedReplyError(Exception):
    """The broker sent something else than the expected reply, or closed the connection."""


class DirectConnection:
    """Reads one range of a queue. When ``reply_batches`` ends, everything before ``at`` has been returned."""

    def __init__(self, address: str, group: str, span: Range, timeout: float, servers: Servers) -> None:
        credentials = servers.credentials()
        self._encode = encode if credentials is None else Signer(credentials).encode
        self.at = span.begin
        self._address = address
        self._span = span
        self._timeout = timeout
        self._tls = servers.tls
        self._opaque = 0
        self._asked: dict[int, _Part] = {}
        self._parts: deque[_Part] = deque()
        self._incomplete: list[_Part] = []
        """Parts of which messages are missing and no request is in flight."""
        self._ready: list[_Piece] = []
        self._waiting = 0
        """Bytes of the pieces in parts other than the first."""
        self._largest = 0
        """The size in bytes to expect of a reply: the largest of late."""
        self._most = 0
        """The most messages in one reply of this round."""
        self._replies = 0
        self._buffer = memoryview(bytearray(REPLY_BATCH_BYTES + _SPARE_BYTES))
        self._received = 0
        """Bytes of the buffer that are filled."""
        self._parsed = 0
        """Bytes of the buffer that are whole frames."""
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
        """The messages in the order of their offsets, up to the end of the range or of the connection."""
        with (
            suppress(OSError, FrameError, RemotingError, _UnexpectedReplyError),
            connect(self._address, self._timeout, self._tls) as connection,
        ):
            yield from self._pulled(connection)
        # After an error too: the pieces that are ready follow ``at`` without a gap.
        yield from self._take_ready()

    def _pulled(self, connection: socket.socket) -> Iterator[ReplyBatch]:
        """All batches but the last."""
        end = self._span.end
        first = _Part(self.at, end)
        self._parts.append(first)
        connection.sendall(self._request(first))
        self._receive_reply(connection)
        # The first part had the whole range, to see how many messages a reply contains. It ends where the reply does,
        # and parts of that size are planned behind it.
        self._incomplete.clear()
        planned = first.end = first.at
        step = longer = self._most
        while True:
            # Complete parts first: a part that becomes the first one makes its pieces ready and frees space.
            while self._parts and self._parts[0].at == self._parts[0].end:
                self._pop_part()
            requests = self._follow_up_requests() if self._incomplete else []
            if self._replies >= _ROUND:
                # One part is longer, to find out whether replies could contain more messages by now.
                step, longer = self._most, 2 * self._most
                self._replies = self._most = 0
                self._largest //= 2
            if planned < end and len(self._parts) <= _DEPTH // 2:
                while planned < end and len(self._parts) < _DEPTH and (not self._parts or self._has_space()):
                    part = _Part(planned, min(end, planned + longer))
                    planned, longer = part.end, step
                    self._parts.append(part)
                    requests.append(self._request(part))
            if requests:
                connection.sendall(b"".join(requests))
            if not self._parts:
                return
            # After the requests are sent: the broker works on them while the caller makes columns of the batch.
            if self._parsed - self._waiting >= REPLY_BATCH_BYTES:
                yield from self._take_ready()
            self._receive_reply(connection)

    def _pop_part(self) -> None:
        """Remove the first part, which is complete. The pieces of the next one become ready."""
        self._parts.popleft()
        if self._parts and (pieces := self._parts[0].pieces):
            self._ready += pieces
            self._waiting -= sum(piece.end - piece.begin for piece in pieces)
            pieces.clear()

    def _follow_up_requests(self) -> list[bytes]:
        """Requests for the missing messages of parts: always for the first part, for later ones if there is space."""
        requests = []
        self._incomplete.sort(key=lambda part: -part.at)
        # The first part is exempt from the limit: only its replies can be returned, so without it nothing would move.
        while self._incomplete and (self._incomplete[-1] is self._parts[0] or self._has_space()):
            requests.append(self._request(self._incomplete.pop()))
        return requests

    def _has_space(self) -> bool:
        """Whether the reply to one more request fits, if all replies in flight are as large as the largest."""
        return self._parsed + (len(self._asked) + 1) * self._largest <= _MAX_BUFFERED

    def _take_ready(self) -> Iterator[ReplyBatch]:
        """The pieces that are ready, as one batch. Afterwards the others are moved to the front of the buffer."""
        ready, self._ready = self._ready, []
        if not ready:
            return
        yield ReplyBatch(self._buffer, [(piece.begin, piece.end) for piece in ready])
        # The caller has asked for more: it does not need the batch any more, and its bytes may be overwritten.
        self.at = ready[-1].following
        waiting = [(piece, part, number) for part in self._parts for number, piece in enumerate(part.pieces)]
        # A buffer that grew is replaced by a smaller one when it has four times the size needed.
        size = max(REPLY_BATCH_BYTES + _SPARE_BYTES, 2 * self._received)
        old, at = self._buffer, 0
        buffer = self._buffer = memoryview(bytearray(size)) if 2 * size <= len(old) else old
        # In the order of their positions: each piece moves towards the front and overwrites none that is still to move.
        for piece, part, number in sorted(waiting, key=lambda item: item[0].begin):
            end = at + piece.end - piece.begin
            buffer[at:end] = old[piece.begin : piece.end]
            part.pieces[number] = _Piece(at, end, piece.following)
            at = end
        unparsed = self._received - self._parsed  # the frame that has only partly arrived
        buffer[at : at + unparsed] = old[self._parsed : self._received]
        self._parsed, self._received = at, at + unparsed

    def _request(self, part: _Part) -> bytes:
        """The frame of a pull for the missing messages of a part."""
        self._opaque += 1
        self._asked[self._opaque] = part
        self._fields["queueOffset"], self._fields["maxMsgNums"] = str(part.at), str(min(_ASK_FOR, part.end - part.at))
        command = RemotingCommand.request(RequestCode.PULL_MESSAGE, self._fields)
        command.opaque = self._opaque
        return self._encode(command)

    def _receive_reply(self, connection: socket.socket) -> None:
        """Receive one reply and add its messages to its part. Raises _UnexpectedReplyError."""
        frame = self._frame(connection)
        reply = decode(self._buffer[slice(*frame)])
        part = self._asked.pop(reply.opaque, None)
        if part is None or reply.code != ResponseCode.SUCCESS:
            raise _UnexpectedReplyError
        answer = reply.header(PullMessageResponseHeader)
        # Messages that were deleted, and offsets without a message, are left to the full path, which reports them.
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
        """Receive a frame; returns its position [begin, end) in the buffer, without the length word."""
        begin = self._parsed + _WORD.size
        self._receive(connection, begin)
        end = begin + _WORD.unpack_from(self._buffer, self._parsed)[0]
        if end - self._parsed > MAX_FRAME:
            raise _UnexpectedReplyError
        self._receive(connection, end)
        self._parsed = end
        return begin, end

    def _receive(self, connection: socket.socket, end: int) -> None:
        """Wait until the buffer is filled up to ``end``. Raises OSError, or _UnexpectedReplyError at the end."""
        if end > len(self._buffer):
            # At least doubled, so that the bytes moved stay proportional to the bytes received.
            buffer = memoryview(bytearray(max(end, 2 * len(self._buffer))))
            buffer[: self._received] = self._buffer[: self._received]
            self._buffer = buffer
        while self._received < end:
            count = connection.recv_into(self._buffer[self._received :])
            if not count:
                raise _UnexpectedReplyError
            self._received += count
