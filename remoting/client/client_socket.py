"""Connecting: from a host and a port to a plain non-blocking socket.

A plain socket, not a stream of the loop: any task that is about to wait for a reply can read it first, on trio and on
asyncio alike, and the data is not copied on the way.
"""

import ipaddress
import os
import socket
from contextlib import ExitStack
from typing import Any, Final, NamedTuple, Protocol

import anyio

from trimq.remoting.client.call import Readable, running_loop

_HEAD_START: Final = 0.25
"""Seconds that an address gets before the next one is tried in parallel (RFC 8305)."""
_PROMPT: Final = 0.25
"""The most seconds to connect to a reachable server: less than the time until TCP retransmits a SYN."""


class ClientNetwork(Protocol):
    """How clients get to servers. Given by the composition root; simulated clusters have one in memory."""

    async def connect(self, host: str, port: int) -> socket.socket:
        """A non-blocking socket connected to (host, port). Raises OSError."""
        ...

    def readable(self, sock: socket.socket) -> Readable:
        """What the task that reads from ``sock`` waits with."""
        ...

    async def wait_writable(self, sock: socket.socket) -> None:
        """Return when ``sock`` takes more bytes, or has failed."""
        ...


class SocketNetwork:
    """The ClientNetwork of the operating system, for the loop that runs the current task."""

    async def connect(self, host: str, port: int) -> socket.socket:
        """As ``connect_socket``. Raises OSError."""
        return await connect_socket(host, port)

    def readable(self, sock: socket.socket) -> Readable:
        """See ClientNetwork."""
        return running_loop().readable(sock)

    async def wait_writable(self, sock: socket.socket) -> None:
        """See ClientNetwork."""
        await anyio.wait_writable(sock)


class _Address(NamedTuple):
    family: int
    kind: int
    protocol: int
    name: str
    socket_address: Any


async def connect_socket(host: str, port: int) -> socket.socket:
    """A connection to the first address of ``host`` that accepts one. Raises OSError.

    If connecting took long, a name is looked up again. Its server may have restarted at another address, and another
    host that has the old address by now (restarted containers swap theirs) may have answered the retransmitted SYN.
    """
    addresses = await _addresses(host, port)
    looked_up = anyio.current_time()
    sock = await _first_to_connect(host, addresses)
    if _family(host) is not None or anyio.current_time() - looked_up <= _PROMPT:
        return sock
    with ExitStack() as unless_kept:
        unless_kept.enter_context(sock)
        addresses = await _addresses(host, port)
        if sock.getpeername() in [address.socket_address for address in addresses]:
            unless_kept.pop_all()
            return sock
    return await _first_to_connect(host, addresses)


async def _first_to_connect(host: str, addresses: list[_Address]) -> socket.socket:
    winner: socket.socket | None = None
    errors: list[OSError] = []

    async def attempt(address: _Address, over: anyio.Event) -> None:
        nonlocal winner
        try:
            sock = await _connected(address)
        except OSError as error:
            errors.append(error)
        else:
            if winner is None:
                winner = sock
                tasks.cancel_scope.cancel()
            else:
                sock.close()  # connected before the cancellation reached it
        finally:
            over.set()

    try:
        async with anyio.create_task_group() as tasks:
            for address in _families_in_turn(addresses):
                over = anyio.Event()
                tasks.start_soon(attempt, address, over)
                # The next address is tried after the head start, or immediately if this one has failed.
                with anyio.move_on_after(_HEAD_START):
                    await over.wait()
    except BaseException:
        # A cancellation from outside: no caller gets the socket, so it is closed here.
        if winner is not None:
            winner.close()
        raise
    if winner is None:
        raise errors[0] if errors else OSError(f"{host} has no address")
    return winner


async def _addresses(host: str, port: int) -> list[_Address]:
    family = _family(host)
    if family is not None:
        return [_Address(family, socket.SOCK_STREAM, 0, "", (host, port))]
    return [_Address(*found) for found in await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _family(host: str) -> int | None:
    """The family of a numeric address; None for a name. Asyncio would start a thread to resolve an address."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    return socket.AF_INET if version == 4 else socket.AF_INET6


def _families_in_turn(addresses: list[_Address]) -> list[_Address]:
    """Put an address of the other family second, if there is one: networks without IPv6, or IPv4, are common."""
    other = next((at for at, address in enumerate(addresses) if address.family != addresses[0].family), None)
    if other is not None:
        addresses.insert(1, addresses.pop(other))
    return addresses


async def _connected(address: _Address) -> socket.socket:
    sock = socket.socket(address.family, address.kind, address.protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.connect(address.socket_address)
        except BlockingIOError:
            await anyio.wait_writable(sock)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error)) from None
        except (TypeError, ValueError) as error:  # a zone of IPv6 may have any character
            raise OSError(f"{address.socket_address[0]!r} is no address: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock
