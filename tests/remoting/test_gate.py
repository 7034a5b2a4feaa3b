"""The gate alone: when listeners are notified, what a failing listener leaves open, which features are accepted."""

from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest

from tests.remoting.harness import echo
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.base import Empty
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature, Readiness, Sees
from trimq.remoting.server.handler_table import HandlerTable

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
