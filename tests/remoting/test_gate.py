"""The gate alone: when listeners are notified, what a failing listener leaves open, which features are accepted."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest

from tests.remoting.harness import echo
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.base import Empty
from trimq.protocol.typed_request import HeadedRequest
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature, Readiness, Sees
from trimq.remoting.server.handler_table import HandlerTable, json_front
from trimq.remoting.server.handlers import DEFERRED, Served, Span
from trimq.remoting.server.verifiers import Commit, CommitParts

ECHO = 100
OTHER = 101
PULL = 102


class FakeConnection:
    admission: object = None

    @property
    def real(self) -> Connection:
        return cast("Connection", self)


class Grouped:
    serve = serve_one = None


def tables() -> list[HandlerTable]:
    """The tables of a main port and of a port without PULL."""
    main = HandlerTable()
    vip = main.without(PULL)
    for code in (ECHO, OTHER):
        grouped = cast("Any", Grouped())
        main.register(code, echo, header=Empty, fast=lambda *_: b"", grouped=grouped, offers=Sees.PROPERTIES)
    return [main, vip]


def veto(*_: Any) -> None:
    raise RemotingError(1, "vetoed")


def is_vetoed(table: HandlerTable, code: int = ECHO) -> bool:
    try:
        table.handlers[code](FakeConnection().real, RemotingCommand(code, 1))
    except RemotingError:
        return True
    return False


def looks(sees: Sees = Sees.PROPERTIES, **more: Any) -> Feature:
    return Feature("looks", veto, sees, **(more or {"properties": frozenset({"colour"})}))


def test_all_fast_paths_are_closed_while_listeners_are_notified() -> None:
    both = tables()
    gate = both[0].gate
    notified = []

    def listener() -> None:
        notified.append([(dict(table.fast), dict(table.grouped), is_vetoed(table)) for table in both])

    gate.listeners.append(listener)
    feature = looks()
    gate.register(feature)
    gate.remove(feature)
    assert notified == [[({}, {}, True)] * 2, [({}, {}, False)] * 2]
    assert all(len(table.fast) == 2 and len(table.grouped) == 4 for table in both)


def test_a_listener_that_raises_leaves_nothing_open() -> None:
    """The listener may not have taken the feature into account, so all fast paths stay closed."""
    both = tables()
    gate = both[0].gate
    fails = True

    def listener() -> None:
        if fails:
            raise ValueError("a mistake")

    gate.listeners.append(listener)
    with pytest.raises(ValueError, match="a mistake"):
        gate.register(looks())
    for table in both:
        assert (table.fast, table.grouped, is_vetoed(table)) == ({}, {}, True)
    fails = False
    gate.changed()
    assert all(len(table.fast) == 2 and len(table.grouped) == 4 and is_vetoed(table) for table in both)


def test_who_keeps_something_of_a_table_finds_out_that_it_has_changed() -> None:
    both = tables()
    found = [[table.changes for table in both]]
    both[0].gate.changed()
    found.append([table.changes for table in both])
    both[0].register(OTHER, echo)
    found.append([table.changes for table in both])
    for of_table in zip(*found, strict=True):
        assert all(before < after for before, after in pairwise(of_table))


def test_terms_change_with_all_that_a_look_depends_on() -> None:
    gate = tables()[0].gate
    fake = FakeConnection()
    connection = fake.real
    ready, others = Readiness(), Readiness()
    found = [gate.terms(connection, ECHO)]
    assert gate.terms(connection, ECHO) == found[0]

    def is_new() -> bool:
        """Whether the terms differ from all before; a second call must give the same."""
        found.append(gate.terms(connection, ECHO))
        assert gate.terms(connection, ECHO) == found[-1]
        assert None not in found
        return found[-1] not in found[:-1]

    state = looks(Sees.READINESS, readiness=ready, codes=frozenset({ECHO}))
    gate.register(state)
    assert is_new()
    gate.register(looks(Sees.READINESS, readiness=others, codes=frozenset({OTHER})))
    assert is_new()
    others.is_set = True
    assert not is_new(), "a state that does not concern this code"
    ready.is_set = True
    assert is_new()
    assert gate.admit(connection)
    assert is_new()
    gate.changed()
    assert is_new()
    gate.register(looks(Sees.IDENTITY, admits=lambda _: False))
    assert is_new()
    assert not gate.admit(connection)
    assert is_new()
    gate.remove(state)
    assert is_new()


async def _later(*_: Any) -> Any:
    """A coroutine function, which no caller awaits."""


class Later:
    async def __call__(self, *_: Any) -> Any:
        """Also a coroutine function."""


@pytest.mark.parametrize("function", [_later, partial(_later, 1), Later(), Later().__call__])
def test_a_coroutine_function_is_no_check(function: Any) -> None:
    """No task would await it, so it would refuse no request and admit every client."""
    with pytest.raises(ValueError, match="the feature later has a coroutine function"):
        Feature("later", function)
    with pytest.raises(ValueError, match="the feature later has a coroutine function"):
        Feature("later", veto, Sees.IDENTITY, admits=function)


class Lets:
    """A verifier that lets through frames with a good body, and those that are to be remembered: b"once"."""

    def __init__(self) -> None:
        self.committed: list[Any] = []

    def _verify(self, body: bytes) -> bool | Commit:
        return partial(self.committed.append, body) if body == b"once" else body == b"good"

    def verify(self, _connection: Connection, code: int, request: HeadedRequest[Any]) -> bool | Commit:
        assert code == ECHO
        return bytes(request.head).startswith(b"{") and self._verify(bytes(request.body))

    def verify_frame(self, _connection: Connection, frame: memoryview) -> bool | Commit:
        return self._verify(bytes(frame))

    def verify_spans(
        self, frames: memoryview, spans: Sequence[Span], most: int
    ) -> tuple[Sequence[Span], CommitParts | None]:
        assert most == 9
        found = []
        for span in spans:
            count = len(bytes(frames[span.begin : span.end]).partition(b"bad")[0]) // 4
            found.append(Span(span.connection, span.begin, span.begin + 4 * count, count, span.continues))
        return found, self.committed.append if b"once" in bytes(frames) else None


class Group:
    """A grouped server that serves everything, unless it has another ``answer``, and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.answer: Any = ...

    def serve(self, _frames: memoryview, spans: Sequence[Span], _most: int) -> Served | None:
        self.got.append([(span.begin, span.end, span.most, span.continues) for span in spans])
        served = Served([(span.most, span.end) for span in spans], [b"r" * span.most for span in spans])
        return cast("Served | None", self._answer(served))

    def serve_one(self, _connection: Connection, frame: memoryview) -> bytes | None:
        self.got.append(bytes(frame))
        return cast("bytes | None", self._answer(b"r"))

    def fast(self, _connection: Connection, request: Any) -> bytes | None:
        self.got.append(bytes(request.body))
        return cast("bytes | None", self._answer(b"fast"))

    def _answer(self, usual: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return usual if self.answer is ... else self.answer


def verified(**more: Any) -> tuple[HandlerTable, Group]:
    table, group = HandlerTable(), Group()
    table.register(ECHO, echo, header=Empty, fast=group.fast, grouped=group)
    verifier = more.pop("verifier", None) or Lets()
    table.gate.register(Feature("frame", veto, more.pop("sees", Sees.FRAME), verifier=verifier, **more))
    return table, group


HEAD = b'{"code":100,"extFields":{},"opaque":1}'


def through(table: HandlerTable, body: bytes, connection: Any = None) -> object:
    path = table.fast[json_front(ECHO)]
    request = path.decode(memoryview(HEAD))
    request.body = body
    return path.serve(connection or FakeConnection().real, request)


def test_a_verifier_opens_fast_paths_to_the_requests_that_it_lets_through() -> None:
    table, _ = verified()
    assert through(table, b"good") == b"fast"
    assert through(table, b"bad") is None
    assert is_vetoed(table)  # the full path has the check
    table.gate.remove(table.gate.features[0])
    assert through(table, b"bad") == b"fast"
    assert not isinstance(table.fast[json_front(ECHO)].decode(memoryview(HEAD)), HeadedRequest)


def test_a_verifier_beside_a_readiness_and_another_verifier() -> None:
    ready = Readiness()
    table, group = verified(sees=Sees.FRAME | Sees.READINESS, readiness=ready)
    grouped = table.grouped[json_front(ECHO)]
    connection = FakeConnection().real
    assert (through(table, b"good"), grouped.serve_one(connection, memoryview(b"good"))) == (None, None)
    assert grouped.serve(memoryview(b"good"), [Span(connection, 0, 4, 1)], 9) is None
    ready.is_set = True
    table.gate.register(Feature("frame too", veto, Sees.FRAME, verifier=Lets()))
    grouped = table.grouped[json_front(ECHO)]
    assert (through(table, b"good"), through(table, b"bad")) == (b"fast", None)
    assert grouped.serve_one(connection, memoryview(b"good")) == b"r"
    assert group.got == [b"good", b"good"]


class Broken(Exception):  # noqa: N818 - of a handler
    pass


NOT_VALID = Served([])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("answer", "is_served"),
    [(..., True), (b"", True), (DEFERRED, True), (None, False), (Broken(), True)],
    ids=["reply", "no reply", "later", "declined", "error"],
)
def test_a_commit_is_called_when_a_request_was_served(answer: Any, is_served: bool, count: int) -> None:
    verifiers = [Lets() for _ in range(count)]
    table, group = verified(verifier=verifiers[0])
    for verifier in verifiers[1:]:
        table.gate.register(Feature("frame too", veto, Sees.FRAME, verifier=verifier))
    grouped = table.grouped[json_front(ECHO)]
    connection = FakeConnection().real
    group.answer = answer
    for serve in (partial(through, table), lambda body: grouped.serve_one(connection, memoryview(body))):
        for body in (b"good", b"once", b"bad"):
            with pytest.raises(Broken) if isinstance(answer, Broken) and body != b"bad" else nullcontext():
                serve(body)
        assert group.got == [b"good", b"once"]
        for verifier in verifiers:
            assert verifier.committed == [b"once"] * is_served
            verifier.committed.clear()
        group.got.clear()


@pytest.mark.parametrize(
    ("answer", "committed"),
    [
        (..., [[(2, 8), (0, 11)]]),
        (Served([(1, 4), (0, 11)], deferred=True), [[(1, 4), (0, 11)]]),
        (None, [[(0, 0), (0, 0)]]),
        (NOT_VALID, [None]),
        (Broken(), [None]),
    ],
    ids=["all", "later", "declined", "not valid", "error"],
)
def test_a_commit_gets_what_was_served_of_a_group(answer: Any, committed: list[Any]) -> None:
    verifier = Lets()
    table, group = verified(verifier=verifier)
    grouped = table.grouped[json_front(ECHO)]
    connection = FakeConnection().real
    frames = memoryview(b"goodoncebadonce")
    spans = [Span(connection, 0, 11, 8), Span(connection, 11, 11, 8)]
    group.answer = answer
    with pytest.raises(Broken) if isinstance(answer, Broken) else nullcontext():
        served = grouped.serve(frames, spans, 9)
        assert (served is not None) == (answer is not None)
    assert verifier.committed == committed
    group.answer = ...
    assert grouped.serve(memoryview(b"good"), [Span(connection, 0, 4, 1)], 9) is not None
    assert verifier.committed == committed


def test_a_verifier_shortens_the_spans_of_a_group() -> None:
    table, group = verified()
    grouped = table.grouped[json_front(ECHO)]
    connection = FakeConnection().real
    assert grouped.serve_one(connection, memoryview(b"bad")) is None
    frames = memoryview(b"goodgoodbadgood" + b"bad" + b"good")
    spans = [Span(connection, 0, 15, 8), Span(connection, 15, 18, 8), Span(connection, 18, 22, 8, continues=True)]
    served = grouped.serve(frames, spans, 9)
    assert served is not None
    assert group.got == [[(0, 8, 2, False), (15, 15, 0, False), (18, 22, 1, True)]]
    assert served.fits(spans)
    assert grouped.serve(frames, spans[1:2], 9) is None  # nothing is left of the only span
    assert len(group.got) == 1


def test_a_feature_that_sees_frames_needs_a_verifier() -> None:
    with pytest.raises(ValueError, match=r"does not match its field for Sees\.FRAME"):
        Feature("frame", veto, Sees.FRAME)
    with pytest.raises(ValueError, match=r"does not match its field for Sees\.FRAME"):
        Feature("frame", veto, Sees.HEADER, verifier=Lets())


def test_a_feature_that_sees_more_than_frames_keeps_fast_paths_closed() -> None:
    table, _ = verified(sees=Sees.FRAME | Sees.HEADER)
    assert (table.fast, table.grouped) == ({}, {})
