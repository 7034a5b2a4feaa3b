"""The gate: what features have to see of a request before it is served, and so which handlers may serve it.

Three kinds of handlers serve requests. A full handler sees the whole request. A fast handler sees the header of its
code only. A grouped server gets many requests of a round together. A feature declares what it has to see, and a fast
path that does not offer that is switched off. So the author of a feature need not know the fast paths, nor the author
of a fast path the features.

The decision has three parts: a static one (configuration and features, computed when one of them changes), one per
connection (computed when the client authenticates, ``Gate.admit``), and one of current state (``Readiness``, read for
each request). A feature that is not registered costs nothing. A request that is served later than it was checked, such
as a held pull, is served on the terms on which it was let through (``Gate.terms``), or not at all.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from trimq.protocol.command import RemotingCommand
from trimq.remoting.server.handlers import FastHandler, GroupedServer, Handler, Outcome
from trimq.remoting.server.meters import Meter, MeteredGroup, metered
from trimq.remoting.server.verifiers import VerifiedGroup, Verifier, verified

if TYPE_CHECKING:
    from trimq.remoting.server.connection import Connection


class Sees(Flag):
    """What a feature has to see of requests; for a route, what its fast paths let features see."""

    NOTHING = 0
    HEADER = auto()
    """The whole request, with every header field as received: only full handlers see fields that no type declares."""
    IDENTITY = auto()
    """Who the client is. Fast paths are open to connections that have been admitted."""
    READINESS = auto()
    """A state that may change at any time. Fast paths are open while it is set."""
    AMOUNT = auto()
    """How many requests a connection sends. Fast paths are open while there is room, and what they serve is counted."""
    PROPERTIES = auto()
    """Messages with one of the feature's properties. Fast paths that check for these are open to all other messages."""
    FRAME = auto()
    """The received bytes of each request. Fast paths are open to requests that the feature's ``verifier`` lets through;
    all others get to ``check``."""


class Readiness:
    """A state that requests depend on, such as enough replicas. The service that knows the state sets ``is_set``."""

    __slots__ = ("is_set",)

    def __init__(self, *, is_set: bool = False) -> None:
        self.is_set = is_set


Follower = Callable[[Outcome], Outcome]
"""Takes the outcome of a request, and returns the outcome to go on with."""


@dataclass(frozen=True, eq=False)
class Feature:
    """A feature that has to see requests before they are served.

    ``check`` is called before the full handler of each request; it refuses one by raising RemotingError. ``codes`` are
    the request codes concerned; None for all codes, including those without a handler. ``admits``, for IDENTITY:
    whether a connection's requests may be served by fast paths without ``check``, see ``Gate.admit``. ``readiness``,
    for READINESS. ``properties``, for PROPERTIES: their names. ``meter``, for AMOUNT: it counts what fast paths serve.
    ``verifier``, for FRAME.

    ``follow`` is called between ``check`` and the full handler of each request: a handler may drop the body and the
    header. What it returns is called with the outcome of the handler, and returns the outcome to go on with.

    Raises ValueError if ``sees`` and the given fields do not match, and for coroutine functions, whose results no task
    would wait for.
    """

    name: str
    check: Callable[["Connection", RemotingCommand], None]
    sees: Sees = Sees.HEADER
    codes: frozenset[int] | None = None
    admits: Callable[["Connection"], bool] | None = None
    readiness: Readiness | None = None
    properties: frozenset[str] = frozenset()
    meter: Meter | None = None
    verifier: Verifier | None = None
    follow: Callable[["Connection", RemotingCommand], Follower] | None = None

    def __post_init__(self) -> None:
        for kind, given in (
            (Sees.IDENTITY, self.admits is not None),
            (Sees.READINESS, self.readiness is not None),
            (Sees.PROPERTIES, bool(self.properties)),
            (Sees.AMOUNT, self.meter is not None),
            (Sees.FRAME, self.verifier is not None),
        ):
            if (kind in self.sees) != given:
                raise ValueError(f"the feature {self.name} sees {self.sees}: this does not match its field for {kind}")
        for function in (self.check, self.admits, self.follow):
            if function is not None and _is_async(function):
                raise ValueError(f"the feature {self.name} has a coroutine function: it would never be awaited")

    def is_about(self, code: int) -> bool:
        """Whether this feature has to see requests of this code."""
        return self.codes is None or code in self.codes


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class GatedTable(Protocol):
    """A table whose fast paths a gate opens and shuts: a HandlerTable."""

    def shut(self) -> None:
        """Let only the full handlers serve, behind the checks of the current features."""
        ...

    def open(self) -> None:
        """Open the fast paths again, as far as the features allow."""
        ...


class Gate:
    """The features of a server, and the ``tables`` of its ports.

    ``listeners`` are called when the features have changed, before the next request is served. Fast paths are shut
    during these calls. If a listener raises, they stay shut: that listener may not have taken a feature into account.
    """

    def __init__(self) -> None:
        self.features: list[Feature] = []
        self.tables: list[GatedTable] = []
        self.listeners: list[Callable[[], None]] = []
        self._admission = object()
        # Weak: tables get new servers whenever the configuration changes, and nothing tells which are gone.
        self._groups: WeakValueDictionary[tuple[GroupedServer, Sequence[Feature]], GroupedServer]
        self._groups = WeakValueDictionary()

    def register(self, feature: Feature) -> None:
        """Let ``feature`` see every request from the next one on, on open connections too."""
        self.features.append(feature)
        self.changed()

    def remove(self, feature: Feature) -> None:
        """Remove a feature: it sees no more requests."""
        self.features.remove(feature)
        self.changed()

    def changed(self) -> None:
        """Invalidate all admissions, because the features or their answers changed. Connections need a new one."""
        self._admission = object()
        self.reconfigure()

    def reconfigure(self) -> None:
        """Rebuild all routes after a change of anything but the features. Connections stay admitted."""
        # All are shut before the first listener runs, and opened after the last: no request may be served on a fast
        # path by rules of which only some listeners know.
        for table in self.tables:
            table.shut()
        self._groups.clear()
        for listener in list(self.listeners):
            listener()
        for table in self.tables:
            table.open()

    def admit(self, connection: "Connection") -> bool:
        """Ask the features whether fast paths may serve ``connection``. To be called when it has authenticated.

        The answer holds until the features or their answers change (``changed``).
        """
        admitted = all(feature.admits is None or feature.admits(connection) for feature in self.features)
        connection.admission = self._admission if admitted else None
        return admitted

    def terms(self, connection: "Connection", code: int) -> object:
        """The terms on which a checked request of ``code`` is let through now; never None.

        Code that serves a request later stores the terms with it, and does not serve it if the current ones differ.
        """
        if not self.features:
            return self._admission
        states = [feature.readiness for feature in self.features if feature.is_about(code)]
        return self._admission, connection.admission, [state.is_set for state in states if state is not None]

    @property
    def properties(self) -> frozenset[str]:
        """Property names of all features: a fast path that offers PROPERTIES leaves messages with one of them alone."""
        return frozenset().union(*(feature.properties for feature in self.features))

    def checked(self, code: int, handler: Handler) -> Handler:
        """``handler`` preceded by the checks of the features."""
        features = self.about(code)
        if not features:
            return handler
        checks = [feature.check for feature in features]
        followers = [feature.follow for feature in features if feature.follow is not None]

        def serve(connection: "Connection", command: RemotingCommand) -> Outcome:
            for check in checks:
                check(connection, command)
            return handler(connection, command)

        if not followers:
            return serve

        def serve_followed(connection: "Connection", command: RemotingCommand) -> Outcome:
            for check in checks:
                check(connection, command)
            following = [follow(connection, command) for follow in followers]
            outcome = handler(connection, command)
            for goes_on in following:
                outcome = goes_on(outcome)
            return outcome

        return serve_followed

    def check(self, connection: "Connection", command: RemotingCommand) -> None:
        """Run the features' checks on a request without a handler. Raises RemotingError if one refuses it."""
        for feature in self.features:
            if feature.is_about(command.code):
                feature.check(connection, command)

    def opens(self, code: int, offers: Sees) -> bool:
        """Whether a fast path that offers ``offers`` may serve requests of ``code`` at all."""
        # Every fast path has these: its guards look at them for each request.
        offers |= Sees.IDENTITY | Sees.READINESS | Sees.AMOUNT | Sees.FRAME
        return all(feature.sees in offers for feature in self.features if feature.is_about(code))

    def guarded(self, code: int, fast: FastHandler) -> FastHandler:
        """``fast`` behind a guard: None for a connection that is not admitted, and while a readiness is not set.

        None also for requests that a verifier does not let through, and without room (Sees.AMOUNT). If there is a
        verifier (``verifies``), the requests have to be HeadedRequests.
        """
        guarded = verified(code, fast, self._guard(code), self._verifiers(code))
        # Before the other guards, since it costs less than what they may look at.
        for meter in self._meters(code):
            guarded = metered(meter, guarded)
        return guarded

    def guarded_group(self, code: int, server: GroupedServer) -> GroupedServer:
        """The same for a grouped server. Of a server of several codes it is one object, if ``about`` is the same."""
        guard, verifiers, meters = self._guard(code), self._verifiers(code), self._meters(code)
        if guard is None and not verifiers and not meters:
            return server
        guarded = server if guard is None and not verifiers else VerifiedGroup(server, guard, verifiers)
        for meter in meters:
            guarded = MeteredGroup(meter, guarded)
        return self._groups.setdefault((server, self.about(code)), guarded)

    def verifies(self, code: int) -> bool:
        """Whether fast handlers of ``code`` need the header of a request as received."""
        return bool(self._verifiers(code))

    def _verifiers(self, code: int) -> list[Verifier]:
        return [feature.verifier for feature in self.about(code) if feature.verifier is not None]

    def about(self, code: int) -> tuple[Feature, ...]:
        """The features that have to see requests of ``code``. Codes with the same ones may be served together."""
        return tuple(feature for feature in self.features if feature.is_about(code))

    def _meters(self, code: int) -> list[Meter]:
        return [feature.meter for feature in self.about(code) if feature.meter is not None]

    def _guard(self, code: int) -> Callable[["Connection"], bool] | None:
        features = self.about(code)
        states = [feature.readiness for feature in features if feature.readiness is not None]
        admission = self._admission if any(feature.admits for feature in features) else None
        if admission is None and not states:
            return None

        def guard(connection: "Connection") -> bool:
            return (admission is None or connection.admission is admission) and all(state.is_set for state in states)

        return guard
