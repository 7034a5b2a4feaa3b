"""HandlerTable: the routes of what one listening port can do."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct

from trimq.protocol.command import RemotingCommand
from trimq.protocol.not_supported import not_supported
from trimq.protocol.typed_request import TypedRequest, decoder
from trimq.remoting.server.gate import Gate, Sees
from trimq.remoting.server.handlers import FastHandler, GroupedServer, Handler, Outcome, with_copy

if TYPE_CHECKING:
    from trimq.remoting.server.connection import Connection

FRONT: Final = 12
"""Bytes of a JSON header by which a fast handler is found."""


def json_front(code: int) -> bytes:
    """How the JSON header of a request begins where its code stands in front, as all known clients write it.

    Raises ValueError for a code of other than two or three digits: its front would not tell it from others.
    """
    if not 10 <= code <= 999:
        raise ValueError(f"no fast handler can be found for the code {code}")
    return (b'{"code":%d,"' % code)[:FRONT]


def binary_front(code: int) -> bytes:
    """How a header in RocketMQ's binary form begins: with its code."""
    return code.to_bytes(2, "big")


class FastPath(NamedTuple):
    """What is open of a route: ``decode`` takes the JSON header of a request of ``code`` for ``serve``.

    It raises one of typed_request.NOT_DECODED where a header has to be decoded whole.
    """

    code: int
    decode: Callable[[memoryview], TypedRequest[Any]]
    serve: FastHandler


@dataclass(frozen=True)
class Route:
    """The ways of one request code; replaced as a whole.

    ``full`` knows all of its requests. ``fast`` and ``grouped`` know the ordinary ones; ``header`` is what ``fast``
    gets of each. ``offers`` says what features may count on with them, beyond what the gate does for every way.
    """

    full: Handler
    header: type[Struct] | None = None
    fast: FastHandler | None = None
    grouped: GroupedServer | None = None
    offers: Sees = Sees.NOTHING


class HandlerTable:
    """Routes by request code, and what the gate lets be used of them now. A code without a route is answered with 3.

    ``handlers`` has the full handlers behind the features' checks; ``fast`` and ``grouped`` have what is open, by the
    first FRONT bytes of a JSON header, ``grouped`` by the code of a binary one (``binary_front``) too. Connections hold
    the table: what changes is so for their next request. Who keeps something of it for longer compares ``changes``.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate or Gate()
        self.routes: dict[int, Route] = {}
        self.handlers: dict[int, Handler] = {}
        self.fast: dict[bytes, FastPath] = {}
        self.grouped: dict[bytes, GroupedServer] = {}
        self.changes = 0
        self._followers: list[Callable[[int, Route], None]] = []
        self.gate.tables.append(self)

    def register(
        self,
        code: int,
        handler: Handler,
        *,
        copy_body: bool = False,
        header: type[Struct] | None = None,
        fast: FastHandler | None = None,
        grouped: GroupedServer | None = None,
        offers: Sees = Sees.NOTHING,
    ) -> None:
        """Make these the ways of ``code`` from now on, on open connections too.

        ``copy_body`` gives ``handler`` a command of its own bytes, that stays valid after it has returned. ``fast``
        gets requests with ``header``. Raises ValueError for a fast or grouped way of a code of other than two or three
        digits, and for a fast one without a header.
        """
        if fast is not None or grouped is not None:
            json_front(code)
        if fast is not None and header is None:
            raise ValueError(f"the fast handler of the code {code} needs the type of its header")
        full = with_copy(handler) if copy_body or inspect.iscoroutinefunction(handler) else handler
        self.route(int(code), Route(full, header, fast, grouped, offers))

    def route(self, code: int, route: Route) -> None:
        """Make ``route`` that of ``code``."""
        self.routes[code] = route
        self._place(code, route)
        for follow in self._followers:
            follow(code, route)

    def without(self, *codes: int) -> "HandlerTable":
        """A table of the same routes, now and later, but for ``codes`` (the VIP port serves no pulls)."""
        table = HandlerTable(self.gate)

        def follow(code: int, route: Route) -> None:
            if code not in codes:
                table.route(code, route)

        for code, route in self.routes.items():
            follow(code, route)
        self._followers.append(follow)
        return table

    def unknown(self, connection: "Connection", command: RemotingCommand) -> Outcome:
        """Serves what has no route."""
        self.gate.check(connection, command)
        return not_supported(command)

    def shut(self) -> None:
        """See Ways."""
        self.changes += 1
        self.fast.clear()
        self.grouped.clear()
        for code, route in self.routes.items():
            self.handlers[code] = self.gate.checked(code, route.full)

    def open(self) -> None:
        """See Ways."""
        for code, route in self.routes.items():
            self._place(code, route)

    def _place(self, code: int, route: Route) -> None:
        gate = self.gate
        self.changes += 1
        self.handlers[code] = gate.checked(code, route.full)
        if not 10 <= code <= 999:
            return
        front = json_front(code)
        is_open = gate.opens(code, route.offers)
        self.fast.pop(front, None)
        self.grouped.pop(front, None)
        self.grouped.pop(binary_front(code), None)
        if is_open and route.fast is not None and route.header is not None:
            self.fast[front] = FastPath(code, decoder(route.header), gate.guarded(code, route.fast))
        if is_open and route.grouped is not None:
            self.grouped[front] = self.grouped[binary_front(code)] = gate.guarded_group(code, route.grouped)
