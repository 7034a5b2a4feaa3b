"""Clients of a broker in this process, whose rounds are driven from here, so that their time can be measured.

The measured code is the reactor's when it does not wait: poll the selector, and serve the ready sockets in a round
(``Reactor._round``). The time does not include the clients' side of the sockets. Each wait has a limit.
"""

import select
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import trio

from trimq.broker.controller import BrokerController
from trimq.protocol.frame import decode
from trimq.remoting.server.connection import Connection

LIMIT_SECONDS: Final = 20.0
"""A turn fails if its replies have not arrived after this time."""
_BUFFER: Final = 8 << 20
_RECEIVED: Final = 1 << 20
_length_at = struct.Struct(">I").unpack_from


class RefusedError(RuntimeError):
    """A request got a reply other than success, or none."""


class Turn(NamedTuple):
    """The cost of the requests of a turn.

    ``seconds``: the processor time of the broker's thread. ``requests``: their number. ``waited``: other tasks may have
    served some of them, and their time is not in ``seconds``.
    """

    seconds: float
    requests: int
    waited: bool


class _Client:
    """A client's socket, with the bytes to send and the number of replies to receive."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent = memoryview(b"")
        self.expected = 0
        self._received = bytearray()
        self._waste = bytearray(_RECEIVED)

    def begin(self, frames: bytes) -> int:
        """Set the frames to send; returns their number. Raises ValueError if the last one is incomplete."""
        self.unsent = memoryview(frames)
        count = at = 0
        while at < len(frames):
            at += 4 + _length_at(frames, at)[0]
            count += 1
        if at != len(frames):
            raise ValueError("the last frame is incomplete")
        self.expected = count
        return count

    def push(self) -> bool:
        """Send as many bytes as the socket takes; returns whether it took any."""
        if not self.unsent:
            return False
        try:
            sent = self.sock.send(self.unsent)
        except BlockingIOError:
            return False
        self.unsent = self.unsent[sent:]
        return True

    def take(self) -> bool:
        """Receive what has arrived; returns whether there was anything. Raises RefusedError for an error reply."""
        try:
            count = self.sock.recv_into(self._waste)
        except BlockingIOError:
            return False
        if not count:
            raise RefusedError("the broker has closed the connection")
        received = self._received
        received += self._waste[:count]
        at = 0
        while at + 4 <= len(received):
            stop = at + 4 + _length_at(received, at)[0]
            if stop > len(received):
                break
            reply = decode(memoryview(bytes(received[at + 4 : stop])))
            if reply.code:
                raise RefusedError(f"the broker refuses with {reply.code}: {reply.remark}")
            self.expected -= 1
            at = stop
        del received[:at]
        return True


class Wire:
    """The clients' sockets, and in the same order the broker's connections at their other ends."""

    def __init__(self, broker: BrokerController, clients: list[socket.socket], connections: list[Connection]) -> None:
        """See ``connected``."""
        self.broker = broker
        self.connections = connections
        self._reactor = broker.reactor
        self._clients = [_Client(sock) for sock in clients]
        self._poll = select.epoll()
        for client in self._clients:
            self._poll.register(client.sock.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Close the clients' sockets."""
        self._poll.close()
        for client in self._clients:
            client.sock.close()

    async def turn(self, frames: Sequence[bytes]) -> Turn:
        """Serve one turn. ``frames`` has for each client its whole requests, one after the other.

        Raises RefusedError for a reply other than success, or if one does not arrive in time.
        """
        requests = sum(client.begin(own) for client, own in zip(self._clients, frames, strict=True))
        active = [client for client in self._clients if client.expected]
        seconds = 0.0
        waited = False
        deadline = trio.current_time() + LIMIT_SECONDS
        while active:
            moved = sum(client.push() for client in active)
            took = await self._round()
            seconds += took
            moved += sum(client.take() for client in active)
            active = [client for client in active if client.expected]
            if active and not (moved or took):
                waited = True
                await self._wait(deadline)
            if active and trio.current_time() >= deadline:
                raise RefusedError(f"no reply to {sum(client.expected for client in active)} requests in time")
        return Turn(seconds, requests, waited)

    async def _wait(self, deadline: float) -> None:
        """Wait until a client can continue. The broker's own tasks run during the wait, and may serve requests too."""
        unsent = [client for client in self._clients if client.unsent]
        for client in unsent:
            self._poll.modify(client.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        with trio.move_on_at(deadline):
            await trio.lowlevel.wait_readable(self._poll.fileno())
        for client in unsent:
            self._poll.modify(client.sock.fileno(), select.EPOLLIN)

    async def _round(self) -> float:
        """Run one round of the reactor; returns its seconds, 0 if no socket was ready."""
        reactor = self._reactor
        began = time.thread_time()
        events = reactor._selector.poll(0)  # noqa: SLF001 - the reactor's loop is driven from here
        if not (events or reactor._sender.ready):  # noqa: SLF001 - as above
            return 0.0
        reactor.intake.turn_end = float("inf")  # no end of the turn: other tasks would run, and be in the time
        await reactor._round(events)  # noqa: SLF001 - as above
        return time.thread_time() - began


@asynccontextmanager
async def connected(broker: BrokerController, count: int = 1) -> AsyncIterator[Wire]:
    """Connect ``count`` clients and wait until the reactor has accepted them."""
    clients: list[socket.socket] = []
    by_peer: dict[tuple[str, int], Connection] = {}
    try:
        while len(clients) < count:
            for _ in range(min(50, count - len(clients))):
                clients.append(client := socket.socket())
                client.settimeout(LIMIT_SECONDS)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
                client.connect(broker.endpoint)
            by_peer = await _accepted(broker, clients)
        for client in clients:
            client.setblocking(False)
        connections = [by_peer[client.getsockname()] for client in clients]
        if count == 1:
            connections[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            connections[0].sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        wire = Wire(broker, clients, connections)
        try:
            yield wire
        finally:
            wire.close()
            with trio.fail_after(LIMIT_SECONDS):
                while any(not connection.closed for connection in connections):  # noqa: ASYNC110 - closing sets no event
                    await trio.sleep(0.001)
    finally:
        for client in clients:
            client.close()


async def _accepted(broker: BrokerController, clients: list[socket.socket]) -> dict[tuple[str, int], Connection]:
    with trio.fail_after(LIMIT_SECONDS):
        while True:
            by_peer = {connection.peer: connection for connection in broker.reactor.connections.values()}
            if all(client.getsockname() in by_peer for client in clients):
                return by_peer
            await trio.sleep(0.001)
