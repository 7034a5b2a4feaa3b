"""Pulling a long range over a connection of its own, as long as everything goes well.

A worker has nothing to do until the next rows are there, so that a socket that blocks is all it needs: the SDK's tasks,
events and deadlines for each request cost several times what the request itself does. Without a filter every offset is
a message, so that several requests are under way; replies may come in another order than requests.

Anything but the expected reply ends the lane: ``at`` tells where, and whoever reads on from there (pulling.RangeReader)
waits for brokers and tells losses.
"""

import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from pipeline.topics.planning import Range
from protocol import sysflag
from protocol.codes import RequestCode, ResponseCode
from protocol.command import RemotingCommand, to_ext
from protocol.errors import FrameError, RemotingError
from protocol.frame import MAX_FRAME, decode, encode
from protocol.headers.pull import PullMessageRequestHeader, PullMessageResponseHeader

WORTH_IT: Final = 64
"""A range of fewer messages is not worth a connection."""
_ASK_FOR: Final = 1024
"""Messages that the first pull asks for; how many the broker gives tells what to ask for from then on."""
_DEPTH: Final = 8
_RECEIVE: Final = 64 * 1024
"""From 128 KiB on each buffer is a mapping of its own, which costs more than the bytes."""
_WORD: Final = struct.Struct(">I")


@dataclass(slots=True)
class _Part:
    """Offsets [at, end) that one of the requests is to bring; ``bodies`` are what has come, and where each ends."""

    at: int
    end: int
    bodies: list[tuple[memoryview, int]] = field(default_factory=list)


class _EndOfLaneError(Exception):
    """Not the expected reply."""


class Lane:
    """One range of a queue. After ``bodies`` everything before ``at`` has been given out."""

    def __init__(self, address: str, group: str, span: Range, timeout: float) -> None:
        self.at = span.begin
        self._address = address
        self._span = span
        self._timeout = timeout
        self._opaque = 0
        self._parts: dict[int, _Part] = {}
        self._buffer = bytearray()
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

    def bodies(self) -> Iterator[memoryview]:
        """Bodies of replies in the order of their offsets, up to the end of the range or of the lane."""
        host, _, port = self._address.rpartition(":")
        with (
            suppress(OSError, FrameError, RemotingError, _EndOfLaneError),
            socket.create_connection((host.strip("[]"), int(port)), self._timeout) as connection,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield from self._pulled(connection)

    def _pulled(self, connection: socket.socket) -> Iterator[memoryview]:
        end = self._span.end
        first = _Part(self.at, end)
        self._ask(connection, first, _ASK_FOR)
        self._take_one(connection)
        step = first.at - self.at
        planned = first.end = first.at
        parts = deque([first])
        while parts:
            while planned < end and len(parts) < _DEPTH:
                part = _Part(planned, min(end, planned + step))
                planned = part.end
                parts.append(part)
                self._ask(connection, part, part.end - part.at)
            while parts[0].at < parts[0].end:
                self._take_one(connection)
            for body, following in parts.popleft().bodies:
                yield body
                self.at = following

    def _ask(self, connection: socket.socket, part: _Part, count: int) -> None:
        self._opaque += 1
        self._parts[self._opaque] = part
        self._fields["queueOffset"], self._fields["maxMsgNums"] = str(part.at), str(min(count, part.end - part.at))
        command = RemotingCommand.request(RequestCode.PULL_MESSAGE, self._fields)
        command.opaque = self._opaque
        connection.sendall(encode(command))

    def _take_one(self, connection: socket.socket) -> None:
        """One reply; where it brings less than it was asked for, the rest is asked for."""
        reply = decode(memoryview(self._frame(connection)))
        part = self._parts.pop(reply.opaque, None)
        if part is None or reply.code != ResponseCode.SUCCESS:
            raise _EndOfLaneError
        answer = reply.header(PullMessageResponseHeader)
        if answer.min_offset > part.at or not part.at < answer.next_begin_offset <= part.end:
            raise _EndOfLaneError
        part.at = answer.next_begin_offset
        part.bodies.append((reply.body, part.at))
        if part.at < part.end and self._opaque > 1:
            self._ask(connection, part, part.end - part.at)

    def _frame(self, connection: socket.socket) -> bytes:
        """The next frame without its length."""
        buffer = self._buffer
        while True:
            if len(buffer) >= _WORD.size:
                total = _WORD.unpack_from(buffer)[0]
                if total + _WORD.size > MAX_FRAME:
                    raise _EndOfLaneError
                if len(buffer) >= total + _WORD.size:
                    frame = bytes(memoryview(buffer)[_WORD.size : total + _WORD.size])
                    del buffer[: total + _WORD.size]
                    return frame
            data = connection.recv(_RECEIVE)
            if not data:
                raise _EndOfLaneError
            buffer += data
