"""The fast path of the sink: sends a task's requests over blocking connections of its own.

Several requests are in flight on each connection, so that a broker always has one to store while the worker encodes the
next, and neither waits for the other. As for reading (see direct_connection), it is sufficient to wait for one socket
at a time. Replies are received also while a request cannot be sent: a broker with a full out-buffer does not read until
its replies are taken.

Any unexpected reply ends the sender. Requests without a reply may have been stored or not: ``take_back`` returns them
to the full path (delivery), which sends them again until they are acknowledged or its time is over.
"""

import random
import select
from collections.abc import Sequence
from typing import Final

from trimq.client.message import MessageQueue
from trimq.client.sending import STATUS, send_command
from trimq.client.signing import Signer
from trimq.pipeline.topics.connecting import connect
from trimq.pipeline.topics.rows_fast_path import Request
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import FrameDecoder, encode_head

_UNDER_WAY: Final = 4 << 20
"""The most bytes in flight on a connection."""
_REQUESTS: Final = 32
"""The most requests in flight on a connection: with short bodies, replies have as many bytes as requests."""
_RECEIVE: Final = 64 * 1024


class ConnectionEndedError(Exception):
    """The broker sent an unexpected reply, or none in time, or closed the connection."""


class _BrokerConnection:
    """The connection to one broker. ``waiting`` are requests without a reply, ``refused`` those with an error reply."""

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
        """Whether a reply has to arrive before another request may be sent."""
        return len(self.waiting) >= _REQUESTS or (
            bool(self.waiting) and sum(len(request.body) for request in self.waiting.values()) >= _UNDER_WAY
        )

    def send(self, head: bytes, request: Request, opaque: int) -> None:
        """Send a request; receives replies while the socket does not accept more bytes.

        Raises ConnectionEndedError, OSError and FrameError. ``end`` returns the request in these cases too.
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
            # The request is incomplete. A broker neither stores nor answers it, so ``end`` must not wait for a reply.
            self.waiting.pop(opaque, None)
            self.refused[opaque] = request
            raise
        except OSError:
            self._works = False
            raise

    def _wait(self, events: int) -> int:
        """Wait for ``events``; returns those that are ready. Raises TimeoutError."""
        self._poll.modify(self._socket, events)
        ready = self._poll.poll(self._timeout * 1000)
        if not ready:
            raise TimeoutError
        return ready[0][1]

    def take_replies(self) -> None:
        """Receive the replies that have arrived; waits if there is none.

        Raises ConnectionEndedError for an error reply or a closed connection, OSError and FrameError.
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
        # Only after all replies are counted: what was acknowledged must not be sent again.
        self._works = self._works and bool(data)
        if self.refused or not self._works:
            raise ConnectionEndedError

    def end(self) -> dict[int, Request]:
        """Close the connection; returns the requests that are not known to be stored, by their opaque."""
        if not self._works:
            self._timeout = 0  # replies that arrived before the connection broke still count, but none will follow
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
        """Close the connection."""
        self._socket.close()


class DirectSender:
    """Sends requests to the queues of one topic in turn. ``places`` are the queues with the addresses of their brokers.

    ``signer`` signs the requests. ``send`` and ``finish`` raise ConnectionEndedError when a connection fails; only
    ``take_back`` may follow.
    """

    def __init__(
        self, group: str, places: Sequence[tuple[MessageQueue, str]], timeout: float, signer: Signer | None = None
    ) -> None:
        self.topic = places[0][0].topic
        self._group = group
        self._signer = signer
        self._places = places
        self._turn = random.randrange(len(places))  # noqa: S311 - not for security: tasks start at different queues
        self._timeout = timeout
        self._opaque = 0
        self._connections: dict[str, _BrokerConnection] = {}
        self._unsent: list[Request] = []

    @property
    def stored(self) -> int:
        """Rows that brokers have acknowledged."""
        return sum(connection.stored for connection in self._connections.values())

    def send(self, request: Request) -> None:
        """Send a request as soon as the connection has space for it."""
        self._unsent = [request]  # until the connection has taken it over: ``take_back`` must find it in one place
        self._turn = (self._turn + 1) % len(self._places)
        queue, address = self._places[self._turn]
        try:
            connection = self._connections.get(address)
            if connection is None:
                connection = self._connections[address] = _BrokerConnection(address, self._timeout)
            while connection.is_full:
                connection.take_replies()
            signer = self._signer
            command = send_command(self._group, request.prepared(b"" if signer is None else bytes(request.body)), queue)
            command.opaque = self._opaque = self._opaque + 1
            if signer is not None:
                command = signer.signed(command)
            head = encode_head(command, len(request.body))
            self._unsent = []
            connection.send(head, request, self._opaque)
        except (OSError, FrameError) as error:
            raise ConnectionEndedError from error

    def finish(self) -> None:
        """Wait for all replies."""
        try:
            for connection in self._connections.values():
                while connection.waiting:
                    connection.take_replies()
        except (OSError, FrameError) as error:
            raise ConnectionEndedError from error

    def take_back(self) -> list[Request]:
        """End the sender; returns the requests that are not known to be stored, in the order of sending."""
        unknown: dict[int, Request] = {}
        for connection in self._connections.values():
            unknown |= connection.end()
        return [*(unknown[opaque] for opaque in sorted(unknown)), *self._unsent]

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
