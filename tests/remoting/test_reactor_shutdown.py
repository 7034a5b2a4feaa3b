"""Shutdown of a reactor: orderly, within its deadline, with nothing left open."""

import gc
from collections.abc import Callable

import pytest
import structlog
import trio
import trio.testing

from tests.remoting.harness import echo_table, request, serving, until
from trimq.protocol.command import RemotingCommand
from trimq.remoting.server.reactor import DEFERRED, Connection, Outcome, Reactor, ReactorLimits, listen


async def test_shutdown_finishes_what_is_in_flight_and_reads_no_more() -> None:
    gate = trio.Event()
    deferred: list[tuple[Connection, RemotingCommand]] = []

    async def slow(connection: Connection, command: RemotingCommand) -> Outcome:
        await gate.wait()
        return command.reply(body=b"slow")

    def defer(connection: Connection, command: RemotingCommand) -> Outcome:
        deferred.append((connection, command))
        return DEFERRED

    table = echo_table()
    table.register(2, slow)
    table.register(3, defer)
    async with serving(table) as server, server.peer() as peer, trio.open_nursery() as nursery:
        await peer.send(request(2), request(3))
        await until(server, "s.inflight == 2")
        nursery.start_soon(server.reactor.shutdown, 60)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(OSError, match=r"refused|connect"):
            await trio.open_tcp_stream(*server.address)
        await peer.send(request())
        await trio.testing.wait_all_tasks_blocked()
        connection, command = deferred[0]
        connection.complete(command.reply(body=b"deferred"))
        assert bytes((await peer.receive()).body) == b"deferred"
        gate.set()
        assert bytes((await peer.receive()).body) == b"slow"
        assert await peer.is_closed_by_server()
        assert server.reactor.stats.frames == 2
        assert server.reactor.stats.connections == 0


async def test_shutdown_flushes_what_a_slow_reader_still_has_to_get() -> None:
    table = echo_table()
    table.register(5, lambda _, command: command.reply(body=bytes(20_000_00)))
    async with serving(table) as server, server.peer(receive_buffer=4096) as peer, trio.open_nursery() as nursery:
        await peer.send(request(5), request(5))
        await until(server, "s.frames == 2")
        nursery.start_soon(server.reactor.shutdown, 60)
        await trio.testing.wait_all_tasks_blocked()
        assert len((await peer.receive()).body) == len((await peer.receive()).body) == 20_000_00
        assert await peer.is_closed_by_server()


async def test_shutdown_ends_at_its_deadline() -> None:
    cancelled = trio.Event()

    async def forever(connection: Connection, command: RemotingCommand) -> Outcome:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    table = echo_table()
    table.register(2, forever)
    async with serving(table) as server, server.peer() as peer:
        await peer.send(request(2))
        await until(server, "s.inflight == 1")
        with structlog.testing.capture_logs() as logs:
            await server.reactor.shutdown(0.01)
        assert cancelled.is_set()
        assert await peer.is_closed_by_server()
        assert logs[0]["event"] == "shutdown_incomplete"
        assert (logs[0]["inflight"], logs[0]["tasks"]) == (1, 1)


async def test_held_polls_and_silent_connections_do_not_delay_it() -> None:
    async with serving() as server, server.peer() as peer:
        await peer.ask(request())
        with trio.fail_after(5):
            await server.reactor.shutdown(60)
        assert await peer.is_closed_by_server()
        with trio.fail_after(5):
            await server.reactor.shutdown(60)  # a second call does nothing


async def test_requests_that_wait_for_a_turn_are_dropped_by_a_shutdown() -> None:
    served = 0

    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        nonlocal served
        served += 1
        return None

    table = echo_table()
    table.register(2, handler)
    async with serving(table, ReactorLimits(turn=0)) as server, server.peer() as peer:
        await peer.send(*[request(2) for _ in range(1000)])
        await until(server, "s.frames > 1")
        await server.reactor.shutdown(5)
        assert served < 1000


async def test_connections_are_closed_when_run_is_cancelled_or_fails() -> None:
    closed: list[Connection] = []

    async def serve(ending: Callable[[], object]) -> None:
        async with serving() as server, server.peer() as peer:
            await peer.ask(request())
            server.connection().on_close.append(closed.append)
            ending()
            await trio.lowlevel.checkpoint()

    with trio.CancelScope() as scope:
        await serve(scope.cancel)
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        await serve(lambda: 1 // 0)
    assert len(closed) == 2
    gc.collect()  # an open socket would be a ResourceWarning, and that an error


async def test_shutdown_before_run() -> None:
    reactor = Reactor()
    reactor.add_listener(listen("127.0.0.1", 0), echo_table())
    with trio.fail_after(10):
        await reactor.shutdown(60)
