"""What cannot be encoded costs one request, or one connection: never another client, and never the server."""

from collections.abc import Awaitable, Callable

import pytest
import structlog.testing
import trio
import trio.testing

from tests.remoting.harness import Peer, Server, echo_table, request, within_seconds
from tests.remoting.test_grouping import ECHO, OTHER, Together, frame
from trimq.broker.services.group_notifier import notify
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.headers.base import Empty
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.grouping import FEW
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.outcomes import Outcomes
from trimq.remoting.server.reactor import DEFERRED, HELD, Connection, Outcome

HALF = "\ud800x"
ODD = 2
BAD: dict[str, Callable[[RemotingCommand], RemotingCommand]] = {
    "remark": lambda command: command.reply(17, f"no route for {HALF}"),
    "field": lambda command: command.reply(0, None, {"group": HALF}),
    "name": lambda command: command.reply(0, None, {HALF: "g"}),
    "type": lambda command: command.reply(0, object()),  # type: ignore[arg-type]
    "body": lambda command: command.reply(body="text"),  # type: ignore[arg-type]
    "large body": lambda command: command.reply(17, HALF, body=bytes(1 << 20)),
}
FIELDS = {
    Encoding.JSON: {},
    Encoding.ROCKETMQ: {"long name": lambda command: command.reply(0, None, {"k" * 70_000: "v"})},
    Encoding.MSGPACK: {"large code": lambda command: command.reply(10**30)},
}
CASES = [
    pytest.param(encoding, make, id=f"{encoding.name}-{name}")
    for encoding in Encoding
    for name, make in {**BAD, **FIELDS[encoding]}.items()
]


def handle_now(connection: Connection, command: RemotingCommand, make: Callable[..., RemotingCommand]) -> Outcome:
    return make(command)


def handle_in_a_task(connection: Connection, command: RemotingCommand, make: Callable[..., RemotingCommand]) -> Outcome:
    async def run() -> Outcome:
        await trio.lowlevel.checkpoint()
        return make(command)

    return run()


def handle_deferred(connection: Connection, command: RemotingCommand, make: Callable[..., RemotingCommand]) -> Outcome:
    trio.lowlevel.current_trio_token().run_sync_soon(lambda: connection.complete(make(command)))
    return DEFERRED


def handle_held(connection: Connection, command: RemotingCommand, make: Callable[..., RemotingCommand]) -> Outcome:
    trio.lowlevel.current_trio_token().run_sync_soon(lambda: connection.settle(command, make(command)))
    return HELD


def handle_refused(connection: Connection, command: RemotingCommand, make: Callable[..., RemotingCommand]) -> Outcome:
    raise RemotingError(ResponseCode.NO_PERMISSION, HALF)


HANDLERS = [handle_now, handle_in_a_task, handle_deferred, handle_held, handle_refused]


async def is_served(server: Server) -> None:
    """Another connection is."""
    async with server.peer() as other:
        assert bytes((await other.ask(request(body=b"x"))).body) == b"x"


def table_of(handle: Callable[..., Outcome], make: Callable[[RemotingCommand], RemotingCommand]) -> HandlerTable:
    table = echo_table()
    table.register(ODD, lambda connection, command: handle(connection, command, make), copy_body=True)
    return table


@pytest.mark.parametrize("handle", HANDLERS, ids=lambda handle: handle.__name__)
@pytest.mark.parametrize(("encoding", "make"), CASES)
async def test_an_error_reply_takes_its_place(
    encoding: Encoding, make: Callable[[RemotingCommand], RemotingCommand], handle: Callable[..., Outcome]
) -> None:
    async with within_seconds(table_of(handle, make)) as server, server.peer() as peer:
        with structlog.testing.capture_logs() as logs:
            command = request(ODD, encoding=encoding)
            reply = await peer.ask(command)
        assert (reply.code, reply.opaque, reply.encoding) == (1, command.opaque, encoding)
        assert reply.remark is not None
        assert reply.remark.startswith("the reply cannot be sent: ")
        assert reply.remark.isascii()
        assert [log["event"] for log in logs if "event" in log] == ["reply_not_encoded"]
        stats = server.reactor.stats
        assert (stats.failures, stats.inflight, stats.held) == (1, 0, 0)
        assert (await peer.ask(request())).code == 0
        await is_served(server)


@pytest.mark.parametrize("handle", HANDLERS[:4], ids=lambda handle: handle.__name__)
async def test_without_an_error_reply_the_connection_is_closed(handle: Callable[..., Outcome]) -> None:
    """The opaque of a reply has to be that of the request; with one that cannot be encoded there is no reply."""

    def make(command: RemotingCommand) -> RemotingCommand:
        found = command.reply(17, HALF)
        found.opaque = 10**30
        return found

    async with within_seconds(table_of(handle, make)) as server, server.peer() as peer:
        with structlog.testing.capture_logs() as logs:
            await peer.send(request(ODD, encoding=Encoding.MSGPACK))
            assert await peer.is_closed_by_server()
        assert [log["event"] for log in logs] == ["reply_not_encoded", "connection_closed"]
        await is_served(server)
        stats = server.reactor.stats
        assert (stats.inflight, stats.held, server.reactor.outcomes.tasks) == (0, 0, 0)


async def test_lines_are_limited() -> None:
    clock = ManualClock()
    async with within_seconds(table_of(handle_now, BAD["remark"]), clock=clock) as server, server.peer() as peer:
        with structlog.testing.capture_logs() as logs:
            await peer.send(*[request(ODD) for _ in range(200)])
            for _ in range(200):
                await peer.receive()
        assert len(logs) == 20
        assert server.reactor.stats.failures == 200


async def test_an_error_of_a_fast_handler_or_of_a_group_that_cannot_be_encoded() -> None:
    error = ValueError(HALF)

    def fast(connection: Connection, request_: TypedRequest[Empty]) -> bytes | None:
        raise error

    table = HandlerTable()
    together = Together()
    table.register(ECHO, lambda connection, command: command.reply(), grouped=together)
    table.register(OTHER, lambda connection, command: command.reply(), header=Empty, fast=fast)
    async with within_seconds(table) as server, server.peer() as peer:
        together.error = error
        await peer.send_bytes(b"".join(frame(number) for number in range(1, FEW + 2)))
        replies = [await peer.receive() for _ in range(FEW + 1)]
        assert [(reply.code, reply.opaque) for reply in replies] == [(1, number) for number in range(1, FEW + 2)]
        assert together.calls == [[]]
        await peer.send_bytes(frame(9))  # alone
        assert (await peer.receive()).remark == replies[0].remark
        await peer.send_bytes(frame(9, code=OTHER))
        assert (await peer.receive()).remark == replies[0].remark
        together.error = None
        async with server.peer() as other:
            assert (await other.ask(request(ECHO))).code == 0


@pytest.mark.parametrize("is_task", [False, True])
async def test_a_fault_in_acting_on_an_outcome_ends_one_connection(
    monkeypatch: pytest.MonkeyPatch, is_task: bool
) -> None:
    """Whatever it is: those that call ``conclude`` serve all connections."""

    def fail(self: Outcomes, conn: Connection, command: RemotingCommand, awaitable: Awaitable[Outcome]) -> None:
        getattr(awaitable, "close", lambda: None)()
        raise ZeroDivisionError

    def handle(connection: Connection, command: RemotingCommand, make: object) -> Outcome:
        return handle_in_a_task(connection, command, later)

    def later(command: RemotingCommand) -> RemotingCommand:
        # The outcome of the task is another awaitable: the fault is in ``_run``.
        monkeypatch.setattr(Outcomes, "_add", fail)
        return handle_in_a_task(None, command, RemotingCommand.reply)  # type: ignore[arg-type, return-value]

    if not is_task:
        monkeypatch.setattr(Outcomes, "_add", fail)
    async with within_seconds(table_of(handle, RemotingCommand.reply)) as server, server.peer() as peer:
        with structlog.testing.capture_logs() as logs:
            await peer.send(request(ODD))
            assert await peer.is_closed_by_server()
        assert [log["event"] for log in logs] == ["outcome_failed", "connection_closed"]
        stats = server.reactor.stats
        assert (stats.failures, stats.inflight, server.reactor.outcomes.tasks) == (1, 0, 0)
        await is_served(server)


async def _opened(server: Server, peer: Peer) -> Connection:
    await peer.ask(request())
    return server.connection()


async def test_a_request_of_the_server_that_cannot_be_encoded() -> None:
    async with within_seconds() as server, server.peer() as peer:
        connection = await _opened(server, peer)
        with structlog.testing.capture_logs() as logs:
            notify(connection, HALF)
            assert not connection.send_oneway(RemotingCommand.request(220, {"group": HALF}, oneway=True))
            assert not connection.send_oneway(RemotingCommand.request(220, object(), oneway=True))  # type: ignore[arg-type]
        assert [log["event"] for log in logs] == ["reply_not_encoded"] * 3
        assert not connection.put_off.callbacks
        with pytest.raises(FrameError):
            await connection.request(RemotingCommand.request(307, {"clientId": HALF}), 1)
        assert not connection._pending
        assert (await peer.ask(request())).code == 0
