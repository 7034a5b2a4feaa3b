"""Access in front of the fast paths: who has signed a request, and whether he may do what it asks for.

It lets through a request only if Access would. All others, and those that it cannot judge, go the full path, where
Access refuses or counts them: a user whom it has not seen since the last change of users, a code whose needs are in the
body, a request without a signature, the first one with a stamp of a sender. Signatures are checked for each request, by
the native extension if there is one. Decisions are kept until users or policies change. A stamp is accepted once: it is
looked at here, and recorded when the fast path has served its request.
"""

import os
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from trimq.protocol.auth.model import MOST_RESOURCE_BYTES, User
from trimq.protocol.auth.permissions import TABLE
from trimq.protocol.auth.rules import ByNames
from trimq.protocol.auth.signature import secret_bytes
from trimq.protocol.auth.signers import PythonSigners
from trimq.protocol.auth.stamp import SIGNED_MARK
from trimq.protocol.errors import RemotingError
from trimq.protocol.native import NATIVE, NativeExtension, RawStamp, Signers, StampedFrame
from trimq.protocol.typed_request import HeadedRequest
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.authenticator import Authenticator
from trimq.remoting.auth.authorizer import Authorizer
from trimq.remoting.auth.permit import ASKED_LATER
from trimq.remoting.auth.stamped_frames import StampedFrames
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import Span
from trimq.remoting.server.verifiers import Commit, CommitParts

MOST_DECISIONS: Final = 20_000

_Names = str | tuple[str | None, ...] | None
"""What a request names: one text for a rule with one attribute, else a tuple."""


class _Plan(NamedTuple):
    """How the requests of a code are judged; ``read`` gets the names out of a header."""

    rule: ByNames
    read: Any


class FastAccess:
    """A Verifier. ``known`` has to be called for each user whose request Access has let through."""

    def __init__(
        self,
        *,
        store: AuthStore,
        authenticator: Authenticator,
        authorizer: Authorizer | None,
        unsigned: frozenset[int],
        needless: frozenset[int],
        administration: frozenset[int],
        native: NativeExtension = NATIVE,
    ) -> None:
        """``authorizer`` is None while authorization is off.

        Codes: ``unsigned`` need no user, ``needless`` no permission, and those of ``administration`` are never let
        through here.
        """
        self._store = store
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._unsigned = unsigned
        self._needless = needless
        self._guard = authenticator.replay_guard
        self._native = native
        self._plans = {
            code: _Plan(rule, attrgetter(*rule.attributes))
            for code, rule in TABLE.items()
            if isinstance(rule, ByNames) and code not in administration
        }
        self._generation = -1
        self._is_native = False
        self._signers: Signers
        self._users: list[User] = []
        self._names: set[str] = set()
        self._decisions: dict[tuple[int, int, _Names, str], bool] = {}
        self._renew()

    def known(self, user: User) -> None:
        """Let through the requests of ``user`` from now on, until users or policies change."""
        if self._is_old():
            self._renew()
        if user.username in self._names:
            return
        try:
            self._signers.add(user.username, secret_bytes(user.password), self._guard.requires(user))
        except Exception as error:  # noqa: BLE001 - ``_failed`` raises errors that are no fault of the extension
            self._failed(error)
            return
        self._names.add(user.username)
        self._users.append(user)

    def verify(self, connection: Connection, code: int, request: HeadedRequest[Any]) -> bool | Commit:
        """See Verifier."""
        if code in self._unsigned:
            return True
        plan = self._plans.get(code)
        header = request.header
        if plan is None or type(header) is not plan.rule.kind:
            return False
        address = connection.peer[0]
        if self._authenticator.is_limited(address):
            return False
        if self._is_old():
            self._renew()
        try:
            found = self._signers.signer(request.head, request.body)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
            return False
        if found is None:
            return False
        if isinstance(found, int):
            return self._may(found, code, plan.read(header), address)
        number, stamp = found
        return self._may(number, code, plan.read(header), address) and self._once(number, code, stamp)

    def verify_frame(self, connection: Connection, frame: memoryview) -> bool | Commit:
        """See Verifier."""
        address = connection.peer[0]
        if self._authenticator.is_limited(address):
            return False
        if self._is_old():
            self._renew()
        try:
            asked = self._signers.asked(frame)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
            return False
        if asked is None:
            return False
        number, code, topic, stamp = asked
        return self._may(number, code, topic, address) and (stamp is None or self._once(number, code, stamp))

    def verify_spans(
        self, frames: memoryview, spans: Sequence[Span], most: int
    ) -> tuple[Sequence[Span], CommitParts | None]:
        """See Verifier."""
        if self._is_old():
            self._renew()
        if self._authenticator.has_failures:
            limited = self._authenticator.is_limited
            places = [(span.begin, span.end, 0 if limited(span.connection.peer[0]) else span.most) for span in spans]
        else:
            places = [(span.begin, span.end, span.most) for span in spans]
        try:
            found, stamped = self._signers.round(frames, places, most)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
            return [_shortened(span, 0, span.begin) for span in spans], None
        verified = []
        decisions = self._decisions
        for span, (count, stop, asked) in zip(spans, found, strict=True):
            address = span.connection.peer[0]
            for (number, code, topic), count_before, stop_before in asked:
                if not (decisions.get((number, code, topic, address)) or self._may(number, code, topic, address)):
                    count, stop = count_before, stop_before  # noqa: PLW2901 - the frames before it remain
                    break
            whole = stop == span.end  # all of it: the usual case
            verified.append(span if whole else _shortened(span, count, stop))
        return (verified, self._each_once(verified, stamped)) if stamped else (verified, None)

    def _once(self, number: int, code: int, stamp: RawStamp) -> bool | Commit:
        """Whether a stamped request may be served; if so, what records that it was."""
        name = self._users[number].username
        sender = self._guard.look(name, code, stamp)
        return sender is not None and partial(self._guard.record, name, sender, stamp)

    def _each_once(self, spans: list[Span], stamped: list[StampedFrame]) -> CommitParts:
        """The same for the frames of a round: shorten the spans in which one may not be served."""
        once = StampedFrames(self._guard)
        for frame in stamped:
            number, _, begin, user, _, _ = frame
            span = spans[number]
            # A span that ends before it was shortened, for this frame or for one before it.
            if begin < span.end and not once.may(frame, self._users[user].username):
                spans[number] = _shortened(span, frame[1], begin)
        return once.commit

    def _may(self, number: int, code: int, names: _Names, address: str) -> bool:
        """Whether the user of a request may do what it asks for."""
        if self._authorizer is None or code in self._needless:
            return True
        if _is_long(names):  # 20,000 names as long as a frame would be kept otherwise
            return self._decide(self._authorizer, self._users[number], code, names, address)
        key = number, code, names, address
        found = self._decisions.get(key)
        if found is None:
            if len(self._decisions) >= MOST_DECISIONS:
                self._decisions.clear()  # names come from requests: the table must not grow with them
            found = self._decisions[key] = self._decide(self._authorizer, self._users[number], code, names, address)
        return found

    def _decide(self, authorizer: Authorizer, user: User, code: int, names: _Names, address: str) -> bool:
        if user.is_super:
            return True
        # Their handlers ask about what they have read: only the full path does.
        if code in ASKED_LATER:
            return False
        try:
            needs = list(self._plans[code].rule.of(names if isinstance(names, tuple) else (names,)))
        except RemotingError:
            return False
        return all(authorizer.verdict(user.username, *need, address).allowed for need in needs)

    def _is_old(self) -> bool:
        return self._generation != self._store.generation or self._is_native is not self._native.is_on

    def _renew(self) -> None:
        """Forget everything that was derived from users and policies."""
        extension = self._native.extension
        topics = [
            (code, _wire_name(plan.rule))
            for code, plan in self._plans.items()
            if plan.rule.attributes == ("topic",) and code < 1000
        ]
        make = PythonSigners if extension is None else extension.Signers
        self._is_native = extension is not None
        self._signers = make(topics, SIGNED_MARK, os.urandom(20))
        self._users = []
        self._names = set()
        self._decisions = {}
        self._generation = self._store.generation

    def _failed(self, error: Exception) -> None:
        """A fault of the extension switches it off for the process. Any other error is raised again."""
        if not isinstance(error, self._native.fault):
            raise error
        self._native.turn_off(str(error))


def _shortened(span: Span, count: int, end: int) -> Span:
    return Span(span.connection, span.begin, end, count, span.continues)


def _is_long(names: _Names) -> bool:
    """Whether a name is longer than any that is served usually, retry topics included."""
    if isinstance(names, tuple):
        return any(map(_is_long, names))
    return names is not None and len(names) > MOST_RESOURCE_BYTES


def _wire_name(rule: ByNames) -> str:
    return next(field.encode_name for field in msgspec.structs.fields(rule.kind) if field.name == rule.attributes[0])
