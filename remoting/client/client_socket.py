"""Connecting: from a host and a port to a plain socket that never blocks.

Not a stream of the loop's: a socket of our own can be read by whoever is about to wait for what it brings, on trio and
on asyncio alike, and nothing is copied on the way.
"""

import ipaddress
import os
import socket
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import anyio

_HEAD_START: Final = 0.25
"""Seconds that an address gets before the next one is tried beside it (RFC 8305)."""
_AT_ONCE: Final = 0.25
"""Seconds that a connection takes to whoever is there; less than until a SYN is sent again."""


class _Address(NamedTuple):
    family: int
    kind: int
    protocol: int
    name: str
    socket_address: Any


async def connect_socket(host: str, port: int) -> socket.socket:
    """A connection to the first address of ``host`` that takes one. Raises OSError.

    A name is looked up again where that took a while. Its server may have been away and be back at another address, and
    whoever has the old one by now (containers that start again swap theirs) has answered a SYN that was sent again.
    """
    addresses = await _addresses(host, port)
    looked_up = anyio.current_time()
    sock = await _first_to_connect(host, addresses)
    if _family(host) is not None or anyio.current_time() - looked_up <= _AT_ONCE:
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
                sock.close()
        finally:
            over.set()

    try:
        async with anyio.create_task_group() as tasks:
            for address in _families_in_turn(addresses):
                over = anyio.Event()
                tasks.start_soon(attempt, address, over)
                with anyio.move_on_after(_HEAD_START):
                    await over.wait()
    except BaseException:
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
    """That of an address; None for a name. Asyncio would start a thread to find that out."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    return socket.AF_INET if version == 4 else socket.AF_INET6


def _families_in_turn(addresses: list[_Address]) -> list[_Address]:
    """The second one is of another family than the first, where there is one: a network that lacks one is common."""
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
    except BaseException:
        sock.close()
        raise
    return sock
