"""The gate: what has to be seen of a request before it is served, and which ways may serve it.

A request can go three ways: to its full handler, which sees all of it; to a fast one, which sees its code's header;
or together with others of its round to a grouped one. A feature says what it has to see. A way that does not offer
that is off, by construction: the author of a feature does not have to know the ways, nor that of a way the features.

What decides is static (the configuration and the features, computed when one of them changes), of the connection
(computed when it authenticates: ``Gate.admit``), or a state (``Readiness``, read for each request). A
feature that is not there costs nothing. What is served later than it was seen, such as a held pull, is served on the
terms on which it was let through (``Gate.terms``), or not at all.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trimq.protocol.command import RemotingCommand
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.handlers import FastHandler, GroupedServer, Handler, Later, Outcome, Served, Span

if TYPE_CHECKING:
    from trimq.remoting.server.connection import Connection


class Sees(Flag):
    """What a feature has to see."""

    NOTHING = 0
    HEADER = auto()
    """All of the request, each field of its header as it came: only full handlers see those that nobody declared."""
    IDENTITY = auto()
    """Who the client is. Other ways are open to connections that have been admitted."""
    READINESS = auto()
    """A state that may change at any time. Other ways are open while it is set."""
    PROPERTIES = auto()
    """Messages that have one of the feature's properties. Other ways are open to messages without, if they can tell."""


class Readiness:
    """A state that requests depend on, such as whether enough replicas are there. Whoever knows it sets ``is_set``."""

    __slots__ = ("is_set",)

    def __init__(self, *, is_set: bool = False) -> None:
        self.is_set = is_set


@dataclass(frozen=True, eq=False)
class Feature:
    """Something that has to see requests before they are served.

    ``check`` is called with each one that goes to a full handler, before it; to refuse it raises RemotingError.
    ``codes``: the request codes that it is about; None for all, those that nobody serves included.
    ``admits``, for IDENTITY: whether what a connection asks for by other ways needs no look, see ``Gate.admit``.
    ``readiness``, for READINESS. ``properties``, for PROPERTIES: their names.

    Raises ValueError where ``sees`` names something that is not given, or does not name what is, and for coroutine
    functions: nobody waits for what they say.
    """

    name: str
    check: Callable[["Connection", RemotingCommand], None]
    sees: Sees = Sees.HEADER
    codes: frozenset[int] | None = None
    admits: Callable[["Connection"], bool] | None = None
    readiness: Readiness | None = None
    properties: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for kind, given in (
            (Sees.IDENTITY, self.admits is not None),
            (Sees.READINESS, self.readiness is not None),
            (Sees.PROPERTIES, bool(self.properties)),
        ):
            if (kind in self.sees) != given:
                raise ValueError(f"the feature {self.name} sees {self.sees}: this does not fit what it gives of {kind}")
        for function in (self.check, self.admits):
            if function is not None and _is_async(function):
                raise ValueError(f"the feature {self.name} has a coroutine function: what it says would never be heard")

    def is_about(self, code: int) -> bool:
        """Whether it has to see requests of this code."""
        return self.codes is None or code in self.codes


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Ways(Protocol):
    """What a gate opens and shuts: a HandlerTable."""

    def shut(self) -> None:
        """Have all requests served by the full handlers, behind the checks of the features as they are now."""
        ...

    def open(self) -> None:
        """Open the other ways again, as far as the features let them be."""
        ...


class Gate:
    """The features of a server, and the ``tables`` of its ports.

    ``listeners`` are called when the features have changed, before the next request is served. No way but the full one
    is open then; where a listener raises they stay shut, since nobody knows whether it would have seen to a feature.
    """

    def __init__(self) -> None:
        self.features: list[Feature] = []
        self.tables: list[Ways] = []
        self.listeners: list[Callable[[], None]] = []
        self._admission = object()

    def register(self, feature: Feature) -> None:
        """``feature`` sees every request from the next one on, on open connections too."""
        self.features.append(feature)
        self.changed()

    def remove(self, feature: Feature) -> None:
        """It need not see requests any more."""
        self.features.remove(feature)
        self.changed()

    def changed(self) -> None:
        """What the features say of connections is not what it was: each has to be admitted again."""
        self._admission = object()
        self.reconfigure()

    def reconfigure(self) -> None:
        """Have all routes made again, as other things than features have changed: connections stay admitted."""
        for table in self.tables:
            table.shut()
        for listener in list(self.listeners):
            listener()
        for table in self.tables:
            table.open()

    def admit(self, connection: "Connection") -> bool:
        """Ask the features whether ``connection`` may go all ways: to be called when it has authenticated.

        It holds until the features, or what they say (``changed``), become others.
        """
        admitted = all(feature.admits is None or feature.admits(connection) for feature in self.features)
        connection.admission = self._admission if admitted else None
        return admitted

    def terms(self, connection: "Connection", code: int) -> object:
        """On what a request of ``code`` that the features have seen is let through now; never None.

        Who serves it later than that keeps this beside it, and does not serve it once the terms are not equal to it.
        """
        if not self.features:
            return self._admission
        states = [feature.readiness for feature in self.features if feature.is_about(code)]
        return self._admission, connection.admission, [state.is_set for state in states if state is not None]

    @property
    def properties(self) -> frozenset[str]:
        """Names of properties: a way that offers PROPERTIES leaves messages that have one of them to the full path."""
        return frozenset().union(*(feature.properties for feature in self.features))

    def checked(self, code: int, handler: Handler) -> Handler:
        """A full handler behind the checks of the features."""
        checks = [feature.check for feature in self.features if feature.is_about(code)]
        if not checks:
            return handler

        def serve(connection: "Connection", command: RemotingCommand) -> Outcome:
            for check in checks:
                check(connection, command)
            return handler(connection, command)

        return serve

    def check(self, connection: "Connection", command: RemotingCommand) -> None:
        """Have the features look at a request that nobody serves. Raises RemotingError."""
        for feature in self.features:
            if feature.is_about(command.code):
                feature.check(connection, command)

    def opens(self, code: int, offers: Sees) -> bool:
        """Whether a way that offers so much may serve requests of ``code`` at all."""
        offers |= Sees.IDENTITY | Sees.READINESS  # the guard's
        return all(feature.sees in offers for feature in self.features if feature.is_about(code))

    def guarded(self, code: int, fast: FastHandler) -> FastHandler:
        """A fast handler that passes over what has to be seen in its place."""
        guard = self._guard(code)
        if guard is None:
            return fast

        def serve(connection: "Connection", request: TypedRequest[Any]) -> bytes | Literal[Later.DEFERRED] | None:
            return fast(connection, request) if guard(connection) else None

        return serve

    def guarded_group(self, code: int, server: GroupedServer) -> GroupedServer:
        """The same for one that serves many together."""
        guard = self._guard(code)
        return server if guard is None else _GuardedGroup(server, guard)

    def _guard(self, code: int) -> Callable[["Connection"], bool] | None:
        features = [feature for feature in self.features if feature.is_about(code)]
        states = [feature.readiness for feature in features if feature.readiness is not None]
        admission = self._admission if any(feature.admits for feature in features) else None
        if admission is None and not states:
            return None

        def guard(connection: "Connection") -> bool:
            return (admission is None or connection.admission is admission) and all(state.is_set for state in states)

        return guard


class _GuardedGroup:
    """A GroupedServer in front of which the connection of each span is looked at."""

    def __init__(self, server: GroupedServer, guard: Callable[["Connection"], bool]) -> None:
        self._server = server
        self._guard = guard

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        if not all(self._guard(span.connection) for span in spans):
            return None
        return self._server.serve(frames, spans, most)

    def serve_one(self, connection: "Connection", frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        return self._server.serve_one(connection, frame) if self._guard(connection) else None
