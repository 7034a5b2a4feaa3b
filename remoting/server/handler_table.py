"""HandlerTable: the handlers of one listening port, by request code."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct

from trimq.protocol.command import RemotingCommand
from trimq.protocol.not_supported import not_supported
from trimq.protocol.typed_request import TypedRequest, decoder, headed_decoder
from trimq.remoting.server.gate import Gate, Sees
from trimq.remoting.server.handlers import FastHandler, GroupedServer, Handler, Outcome, with_copy

if TYPE_CHECKING:
    from trimq.remoting.server.connection import Connection

FRONT: Final = 12
"""Bytes at the start of a JSON header that identify its code, and so its fast handler."""


def json_front(code: int) -> bytes:
    """The first FRONT bytes of a request's JSON header that starts with its code, as all known clients write it.

    Raises ValueError unless the code has two or three digits: the front would not distinguish it from others.
    """
    if not 10 <= code <= 999:
        raise ValueError(f"the code {code} cannot have a fast path: only codes of two or three digits can")
    return (b'{"code":%d,"' % code)[:FRONT]


def binary_front(code: int) -> bytes:
    """The first bytes of a header in RocketMQ's binary form: the code."""
    return code.to_bytes(2, "big")


class FastPath(NamedTuple):
    """The open fast path of a code: ``decode`` decodes the JSON header of a request for ``serve``.

    ``decode`` raises one of typed_request.NOT_DECODED for a header that only the full path can decode.
    """

    code: int
    decode: Callable[[memoryview], TypedRequest[Any]]
    serve: FastHandler


@dataclass(frozen=True)
class Route:
    """The handlers of one request code; replaced as a whole.

    ``full`` serves every request of the code. ``fast`` and ``grouped`` serve the ordinary ones; ``fast`` gets them with
    their header decoded as ``header``. ``offers``: what features can rely on with ``fast`` and ``grouped``, in addition
    to what the gate guards for every fast path.
    """

    full: Handler
    header: type[Struct] | None = None
    fast: FastHandler | None = None
    grouped: GroupedServer | None = None
    offers: Sees = Sees.NOTHING


class HandlerTable:
    """Routes by request code, and the handlers of these that the gate currently opens.

    A request without a route is answered with REQUEST_CODE_NOT_SUPPORTED (3). ``handlers`` holds the full handlers
    behind the features' checks. ``fast`` and ``grouped`` hold the open fast paths by the first FRONT bytes of a JSON
    header, ``grouped`` also by the code of a binary header (``binary_front``). Connections refer to the table, so a
    change applies to their next request. Code that stores a look-up for longer compares ``changes`` before using it.
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
        """Set the handlers of ``code``, on open connections too.

        With ``copy_body``, ``handler`` gets a command with copies of the received bytes, which stays valid after it has
        returned. ``fast`` gets requests with ``header`` decoded. Raises ValueError for ``fast`` without ``header``, and
        for ``fast`` or ``grouped`` unless the code has two or three digits.
        """
        if fast is not None or grouped is not None:
            json_front(code)  # raises for a code that cannot have a fast path
        if fast is not None and header is None:
            raise ValueError(f"the fast handler of the code {code} needs the type of its header")
        full = with_copy(handler) if copy_body or inspect.iscoroutinefunction(handler) else handler
        self.route(int(code), Route(full, header, fast, grouped, offers))

    def route(self, code: int, route: Route) -> None:
        """Set the route of ``code``."""
        self.routes[code] = route
        self._place(code, route)
        for follow in self._followers:
            follow(code, route)

    def without(self, *codes: int) -> "HandlerTable":
        """A table with the same routes, including later changes, except ``codes`` (the VIP port serves no pulls)."""
        table = HandlerTable(self.gate)

        def follow(code: int, route: Route) -> None:
            if code not in codes:
                table.route(code, route)

        for code, route in self.routes.items():
            follow(code, route)
        self._followers.append(follow)
        return table

    def unknown(self, connection: "Connection", command: RemotingCommand) -> Outcome:
        """The handler of requests without a route."""
        self.gate.check(connection, command)
        return not_supported(command)

    def shut(self) -> None:
        """See GatedTable."""
        self.changes += 1
        self.fast.clear()
        self.grouped.clear()
        for code, route in self.routes.items():
            self.handlers[code] = self.gate.checked(code, route.full)

    def open(self) -> None:
        """See GatedTable."""
        for code, route in self.routes.items():
            self._place(code, route)

    def _place(self, code: int, route: Route) -> None:
        gate = self.gate
        self.changes += 1  # before any entry changes: holders of an old look-up compare it
        self.handlers[code] = gate.checked(code, route.full)
        if not 10 <= code <= 999:
            return
        front = json_front(code)
        # Most routes have neither: the gate need not be asked for them.
        is_open = (route.fast is not None or route.grouped is not None) and gate.opens(code, route.offers)
        # Removed first and put back only if open: a route that lost a fast path must not leave the old one behind.
        self.fast.pop(front, None)
        self.grouped.pop(front, None)
        self.grouped.pop(binary_front(code), None)
        if is_open and route.fast is not None and route.header is not None:
            decode = headed_decoder(route.header) if gate.verifies(code) else decoder(route.header)
            self.fast[front] = FastPath(code, decode, gate.guarded(code, route.fast))
        if is_open and route.grouped is not None:
            self.grouped[front] = self.grouped[binary_front(code)] = gate.guarded_group(code, route.grouped)
