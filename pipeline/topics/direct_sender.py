"""Sending a task's requests over connections of its own, as long as everything goes well.

Several requests are under way on each connection, so that a broker always has one to store while a worker encodes the
next: neither waits for the other. As with reading (see direct_connection), waiting for one socket at a time is all that
this needs; replies are also taken while a request does not get out, as a broker may read on only when it is rid of
them.

Anything but the expected reply ends the sender. What has no reply then may be stored or not: ``take_back`` gives it to
whoever sends it again (delivery), with patience and as often as it takes.
"""

import random
import select
from collections.abc import Sequence
from typing import Final

from trimq.client.message import MessageQueue
from trimq.client.sending import STATUS, send_command
from trimq.pipeline.topics.connecting import connect
from trimq.pipeline.topics.rows_fast_path import Request
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import FrameDecoder, encode_head

_UNDER_WAY: Final = 4 << 20
"""Bytes that may be under way on a connection."""
_REQUESTS: Final = 32
"""Requests that may be under way on a connection: replies are long where bodies are short."""
_RECEIVE: Final = 64 * 1024


class ConnectionEndedError(Exception):
    """Something else than the expected reply has come, or nothing."""


class _BrokerConnection:
    """One broker's connection. ``waiting`` are requests without a reply, ``refused`` those with a bad one."""

    def __init__(self, address: str, timeout: float) -> None:
        self._socket = connect(address, timeout)
        self._socket.setblocking(False)
        self._timeout = timeout
        self._poll = select.poll()
        self._poll.register(self._socket)
        self._decoder = FrameDecoder()
        self._works = True
        self.waiting: dict[int, Request] = {}
        self.refused: dict[int, Request] = {}
        self.stored = 0

    @property
    def is_full(self) -> bool:
        """Whether a reply has to come before another request is sent."""
        return len(self.waiting) >= _REQUESTS or (
            bool(self.waiting) and sum(len(request.body) for request in self.waiting.values()) >= _UNDER_WAY
        )

    def send(self, head: bytes, request: Request, opaque: int) -> None:
        """Takes replies while the request does not get out.

        Raises ConnectionEndedError, OSError and FrameError; ``end`` gives the request back then too.
        """
        self.waiting[opaque] = request
        sent, size = 0, len(head) + len(request.body)
        try:
            while sent < size:
                if self._wait(select.POLLIN | select.POLLOUT) & select.POLLOUT:
                    sent += self._socket.sendmsg((head[sent:], request.body[max(0, sent - len(head)) :]))
                else:
                    self.take_replies()
        except ConnectionEndedError:
            # No broker stores a part of a request, or answers it: nobody is to wait for that.
            self.waiting.pop(opaque, None)
            self.refused[opaque] = request
            raise
        except OSError:
            self._works = False
            raise

    def _wait(self, events: int) -> int:
        """What the socket is ready for. Raises TimeoutError where it takes too long."""
        self._poll.modify(self._socket, events)
        ready = self._poll.poll(self._timeout * 1000)
        if not ready:
            raise TimeoutError
        return ready[0][1]

    def take_replies(self) -> None:
        """Takes the replies that are there, waits for one where there is none.

        Raises ConnectionEndedError and OSError.
        """
        try:
            self._wait(select.POLLIN)
            data = self._socket.recv(_RECEIVE)
            replies = self._decoder.feed(data)
        except (OSError, FrameError):
            self._works = False
            raise
        for reply in replies:
            request = self.waiting.pop(reply.opaque, None)
            if request is None:
                self._works = False
            elif reply.code in STATUS:
                self.stored += request.rows
            else:
                self.refused[reply.opaque] = request
        self._works = self._works and bool(data)
        if self.refused or not self._works:
            raise ConnectionEndedError

    def end(self) -> dict[int, Request]:
        """Hangs up; what was not stored, as far as is known."""
        if not self._works:
            self._timeout = 0  # what a broker said before it went away counts
        while self.waiting:
            try:
                self.take_replies()
            except ConnectionEndedError:
                if not self._works:
                    break
            except (OSError, FrameError):
                break
        self.close()
        return self.waiting | self.refused

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()


class DirectSender:
    """The queues of one topic, by turns; ``places`` are the queues and the addresses of their brokers.

    ``send`` and ``finish`` raise ConnectionEndedError where the sender is at its end.
    """

    def __init__(self, group: str, places: Sequence[tuple[MessageQueue, str]], timeout: float) -> None:
        self.topic = places[0][0].topic
        self._group = group
        self._places = places
        self._turn = random.randrange(len(places))  # noqa: S311 - tasks begin with different queues
        self._timeout = timeout
        self._opaque = 0
        self._connections: dict[str, _BrokerConnection] = {}
        self._unsent: list[Request] = []

    @property
    def stored(self) -> int:
        """Rows that brokers have acknowledged."""
        return sum(connection.stored for connection in self._connections.values())

    def send(self, request: Request) -> None:
        """Sends one, once there is room for it."""
        self._unsent = [request]
        self._turn = (self._turn + 1) % len(self._places)
        queue, address = self._places[self._turn]
        try:
            connection = self._connections.get(address)
            if connection is None:
                connection = self._connections[address] = _BrokerConnection(address, self._timeout)
            while connection.is_full:
                connection.take_replies()
            command = send_command(self._group, request.prepared(), queue)
            command.opaque = self._opaque = self._opaque + 1
            head = encode_head(command, len(request.body))
            self._unsent = []
            connection.send(head, request, self._opaque)
        except (OSError, FrameError) as error:
            raise ConnectionEndedError from error

    def finish(self) -> None:
        """Waits for all replies."""
        try:
            for connection in self._connections.values():
                while connection.waiting:
                    connection.take_replies()
        except (OSError, FrameError) as error:
            raise ConnectionEndedError from error

    def take_back(self) -> list[Request]:
        """Ends the sender: what was given to it and is not known to be stored, in the order in which it was sent."""
        left: dict[int, Request] = {}
        for connection in self._connections.values():
            left |= connection.end()
        return [*(left[opaque] for opaque in sorted(left)), *self._unsent]

    def close(self) -> None:
        """Hangs up."""
        for connection in self._connections.values():
            connection.close()
