"""The reactor receives requests and sends replies, for any split of the bytes and any kind of handler."""

import socket
import struct
import time
from collections.abc import Awaitable

import pytest
import structlog.testing
import trio
import trio.testing

from tests.remoting.harness import ECHO, echo_table, request, serving, until
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import MAX_FRAME, FrameDecoder, encode
from trimq.remoting.errors import RemotingSendError, RemotingTimeoutError
from trimq.remoting.server.intake import BIG_FRAME, MOST_HEAD
from trimq.remoting.server.limits import RECEIVE_BUFFER
from trimq.remoting.server.reactor import DEFERRED, HELD, Connection, HandlerTable, Outcome, ReactorLimits


@pytest.mark.parametrize("encoding", Encoding)
async def test_a_request_is_answered_in_its_own_encoding(encoding: Encoding) -> None:
    async with serving() as server, server.peer() as peer:
        command = request(body=b"hello", encoding=encoding)
        reply = await peer.ask(command)
        assert (reply.code, reply.opaque, bytes(reply.body)) == (0, command.opaque, b"hello")
        assert (reply.is_reply, reply.encoding) == (True, encoding)
        assert server.connection().encoding == encoding
        assert server.connection().peer_text == f"127.0.0.1:{server.connection().peer[1]}"


async def test_byte_by_byte() -> None:
    async with serving() as server, server.peer() as peer:
        data = encode(request(body=b"a")) + encode(request(body=b"b"))
        for count, byte in enumerate(data, 1):
            await peer.send_bytes(bytes([byte]))
            await until(server, f"s.bytes_in == {count}")
        assert bytes((await peer.receive()).body) == b"a"
        assert bytes((await peer.receive()).body) == b"b"


async def test_many_pipelined_frames_of_every_size_come_back_in_order() -> None:
    sizes = [0, 1, 1000, BIG_FRAME - 200, BIG_FRAME, BIG_FRAME + 1, RECEIVE_BUFFER - 50, RECEIVE_BUFFER, 3_000_000, 7]
    bodies = [bytes([number]) * size for number, size in enumerate(sizes * 3)]
    async with serving() as server, server.peer() as peer, trio.open_nursery() as nursery:
        nursery.start_soon(peer.send, *[request(body=body) for body in bodies])
        for body in bodies:
            assert bytes((await peer.receive()).body) == body
        assert server.reactor.stats.frames == len(bodies)


@pytest.mark.parametrize("size", [100, BIG_FRAME + 10, 400_000])
async def test_a_frame_split_anywhere(size: int) -> None:
    data = encode(request(body=b"x" * size))
    async with serving() as server, server.peer() as peer:
        for cut in (1, 3, 4, 5, 8, 9, 50, len(data) // 2, len(data) - 1):
            before = server.reactor.stats.bytes_in
            await peer.send_bytes(data[:cut])
            await until(server, f"s.bytes_in == {before + cut}")
            await peer.send_bytes(data[cut:] + data[:7])
            assert len((await peer.receive()).body) == size
            await peer.send_bytes(data[7:])
            assert len((await peer.receive()).body) == size


async def test_the_largest_frame_there_can_be() -> None:
    table = HandlerTable()
    table.register(ECHO, lambda _, command: command.reply(body=str(len(command.body)).encode()))
    async with serving(table) as server, server.peer() as peer:
        empty = len(encode(request(body=b"", opaque=5)))
        command = request(body=bytes(MAX_FRAME - empty), opaque=5)
        assert bytes((await peer.ask(command)).body) == str(len(command.body)).encode()


@pytest.mark.parametrize("more", [0, 1])
async def test_a_long_header_is_not_decoded(more: int) -> None:
    """Before anything is known of its sender: a language of a million lists takes seconds, and much memory."""
    async with serving() as server, server.peer() as peer:
        head = b'{"code":%d,"opaque":5,"language":[' % ECHO
        head = (head + b"[]]}").ljust(MOST_HEAD + more)
        await peer.send_bytes(struct.pack(">II", 4 + len(head), len(head)) + head)
        if more:
            assert await peer.is_closed_by_server()
        else:
            assert (await peer.receive()).opaque == 5


async def test_a_oneway_request_is_served_and_never_answered() -> None:
    seen: list[bytes] = []

    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        seen.append(bytes(command.body))
        match seen[-1]:
            case b"bytes":
                return encode(command.reply())
            case b"command":
                return command.reply()
            case b"error":
                raise RemotingError(1, "not sent to any client")
            case b"coroutine":
                return coroutine(command)
        return None

    async def coroutine(command: RemotingCommand) -> Outcome:
        return command.reply()

    table = echo_table()
    table.register(7, handler)
    bodies = [b"bytes", b"command", b"error", b"coroutine", b"nothing"]
    async with serving(table) as server, server.peer() as peer:
        await peer.send(*[request(7, body, oneway=True) for body in bodies])
        await peer.send(request(99, oneway=True))
        assert bytes((await peer.ask(request(body=b"end"))).body) == b"end"
        assert seen == bodies
        assert (server.reactor.stats.inflight, server.connection().tasks) == (0, 0)


async def test_replies_may_come_out_of_order() -> None:
    gate = trio.Event()

    async def slow(connection: Connection, command: RemotingCommand) -> Outcome:
        await gate.wait()
        return command.reply(body=b"slow " + command.body)

    table = echo_table()
    table.register(2, slow)
    async with serving(table) as server, server.peer() as peer:
        first, second = request(2, b"one"), request(body=b"two")
        await peer.send(first, second)
        assert (await peer.receive()).opaque == second.opaque
        assert server.reactor.stats.inflight == server.connection().inflight == 1
        gate.set()
        reply = await peer.receive()
        assert (reply.opaque, bytes(reply.body)) == (first.opaque, b"slow one")
        assert server.reactor.stats.inflight == server.connection().inflight == 0


async def test_what_a_coroutine_gets_stays_as_it_was_while_the_buffer_is_used_again() -> None:
    gate = trio.Event()
    table = echo_table()

    def handler(connection: Connection, command: RemotingCommand) -> Awaitable[Outcome]:
        async def rest() -> Outcome:
            await gate.wait()
            return command.reply(header=command.ext_fields(), body=command.body)

        return rest()

    table.register(2, handler, copy_body=True)
    async with serving(table) as server, server.peer() as peer:
        await peer.send(request(2, b"kept", ext={"key": "kept too"}))
        await peer.ask(request(body=b"y" * 1000))
        gate.set()
        reply = await peer.receive()
        assert (bytes(reply.body), reply.ext_fields()) == (b"kept", {"key": "kept too"})


async def test_a_deferred_reply_counts_until_it_is_complete() -> None:
    waiting: list[RemotingCommand] = []

    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        waiting.append(command)
        return DEFERRED

    table = echo_table()
    table.register(2, handler)
    async with serving(table) as server, server.peer() as peer:
        await peer.send(request(2), request(2), request(2))
        await peer.ask(request())
        connection = server.connection()
        assert server.reactor.stats.inflight == connection.inflight == 3
        connection.complete(waiting[0].reply(body=b"0"))
        connection.complete(encode(waiting[1].reply(body=b"1")))
        connection.complete(None)
        assert [bytes((await peer.receive()).body) for _ in range(2)] == [b"0", b"1"]
        assert server.reactor.stats.inflight == connection.inflight == 0


async def test_a_held_poll_does_not_count_and_is_settled_with_any_outcome() -> None:
    held: list[RemotingCommand] = []

    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        held.append(command)
        return HELD

    async def later(command: RemotingCommand) -> Outcome:
        await trio.lowlevel.checkpoint()
        return command.reply(body=b"coroutine")

    table = echo_table()
    table.register(2, handler)
    async with serving(table) as server, server.peer() as peer:
        await peer.send(*[request(2) for _ in range(5)])
        await peer.ask(request())
        connection, stats = server.connection(), server.reactor.stats
        assert (stats.inflight, stats.held, connection.held) == (0, 5, 5)
        connection.settle(held[0], HELD)
        assert stats.held == 5
        connection.settle(held[1], held[1].reply(body=b"command"))
        connection.settle(held[2], encode(held[2].reply(body=b"bytes")))
        connection.settle(held[3], later(held[3]))
        connection.settle(held[4], None)
        assert [bytes((await peer.receive()).body) for _ in range(3)] == [b"command", b"bytes", b"coroutine"]
        assert (stats.inflight, stats.held, connection.held) == (0, 1, 1)
        connection.close("test")
        assert stats.held == 0
        connection.settle(held[0], later(held[0]))  # must not cause a warning that it was never awaited


async def test_errors_of_handlers_become_replies() -> None:
    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        match bytes(command.body):
            case b"known":
                raise RemotingError(ResponseCode.NO_PERMISSION, "not you")
            case b"unknown":
                raise ZeroDivisionError("by zero")
            case b"coroutine":
                return failing()
            case b"long":
                return command.reply(body=bytes(MAX_FRAME))
            case _:
                return 5  # type: ignore[return-value]

    async def failing() -> Outcome:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError("later")

    table = echo_table()
    table.register(2, handler)
    async with serving(table) as server, server.peer() as peer:
        answers = {}
        for body in (b"known", b"unknown", b"coroutine", b"long", b"wrong"):
            reply = await peer.ask(request(2, body))
            answers[body] = (reply.code, reply.remark)
        assert answers[b"known"] == (16, "not you")
        assert answers[b"unknown"] == (1, "ZeroDivisionError: by zero")
        assert answers[b"coroutine"] == (1, "ZeroDivisionError: later")
        assert answers[b"long"][0] == answers[b"wrong"][0] == 1
        reply = await peer.ask(request(12345))
        assert (reply.code, reply.remark) == (3, " request type 12345 not supported")
        assert server.reactor.stats.failures == 4


async def test_listeners_have_tables_of_their_own() -> None:
    table = echo_table()
    async with serving(table) as server, server.peer() as peer:
        assert (await peer.ask(request())).code == 0
        async with serving(table.without(ECHO)) as other, other.peer() as other_peer:
            assert (await other_peer.ask(request())).code == 3


async def test_a_handler_registered_later_serves_connections_that_are_open() -> None:
    table = HandlerTable()
    async with serving(table) as server, server.peer() as peer:
        assert (await peer.ask(request())).code == 3
        table.register(ECHO, lambda _, command: command.reply())
        assert (await peer.ask(request())).code == 0


async def test_hooks_run_once_a_round_before_its_replies_are_sent() -> None:
    events: list[str] = []

    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        events.append("handler")
        assert not connection.out.sent
        return command.reply()

    table = HandlerTable()
    table.register(ECHO, handler)
    async with serving(table, ReactorLimits(turn=1)) as server, server.peer() as peer:
        await until(server, "s.connections == 1")
        connection = server.connection()
        server.reactor.at_round_end.append(lambda: events.append(f"hook {connection.out.sent}"))
        await peer.send(request(), request(), request())
        for _ in range(3):
            await peer.receive()
        first = events.index("hook 0", events.index("handler"))
        assert events[:first].count("handler") == 3


async def test_a_hook_that_fails_is_logged_and_every_client_is_served() -> None:
    ran: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    async with serving() as server, server.peer() as peer:
        server.reactor.at_round_end += [fail, lambda: ran.append(1)]
        with structlog.testing.capture_logs() as logs:
            assert (await peer.ask(request())).code == 0
        assert ran
        assert logs[0]["event"] == "round_end_failed"


async def test_a_client_that_was_answered_alone_leaves_a_moment_for_other_work() -> None:
    called: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    async with serving() as server, server.peer() as peer:
        server.reactor.on_idle += [fail, lambda: called.append(1)]
        with structlog.testing.capture_logs() as logs:
            assert (await peer.ask(request())).code == 0
            await trio.testing.wait_all_tasks_blocked()
        assert called == [1]
        assert logs[0]["event"] == "round_end_failed"


async def test_a_write_from_outside_a_round_is_sent_at_once_and_runs_the_hooks() -> None:
    hooks: list[int] = []
    async with serving() as server, server.peer() as peer:
        await peer.ask(request())
        server.reactor.at_round_end.append(lambda: hooks.append(1))
        server.connection().reply(encode(request(body=b"from outside")))
        assert bytes((await peer.receive()).body) == b"from outside"
        assert hooks
        count = len(hooks)
        server.reactor.wake()
        await trio.testing.wait_all_tasks_blocked()
        assert len(hooks) == count + 1


async def test_owned_buffers_are_released_when_sent_and_when_the_connection_is_gone() -> None:
    memory = bytearray(b"m" * 100_000)
    released: list[str] = []

    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        name = bytes(command.body).decode()
        view = memoryview(memory)
        head = encode(command.reply())
        head = struct.pack(">I", len(head) - 4 + len(view)) + head[4:]
        connection.reply_with([head, view], lambda: released.append(name))
        return None

    table = HandlerTable()
    table.register(ECHO, handler)
    async with serving(table) as server:
        async with server.peer() as peer:
            assert len((await peer.ask(request(body=b"sent"))).body) == 100_000
            assert released == ["sent"]
            connection = server.connection()
        await until(server, "s.connections == 0")
        connection.reply_with([memoryview(memory)], lambda: released.append("closed"))
        assert released == ["sent", "closed"]
    memory.extend(b"no view is left")


async def test_the_server_asks_its_client() -> None:
    async with serving() as server, server.peer() as peer, trio.open_nursery() as nursery:
        await peer.ask(request(encoding=Encoding.ROCKETMQ))
        connection = server.connection()
        replies: list[RemotingCommand] = []

        async def ask(body: bytes) -> None:
            replies.append(await connection.request(RemotingCommand.request(307, {"a": "b"}, body), 5))

        nursery.start_soon(ask, b"1")
        nursery.start_soon(ask, b"2")
        first, second = await peer.receive(), await peer.receive()
        assert first.opaque != second.opaque
        assert (first.code, first.encoding, first.ext_fields()) == (307, Encoding.ROCKETMQ, {"a": "b"})
        await peer.send(second.reply(body=b"to " + bytes(second.body), header={"x": "y"}), request(opaque=first.opaque))
        assert (await peer.receive()).is_reply  # a request of the client with the same opaque is no reply
        await peer.send(first.reply(body=b"to " + bytes(first.body)), first.reply(), request())
        await peer.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(bytes(reply.body) for reply in replies) == [b"to 1", b"to 2"]
        assert replies[0].ext_fields() == {"x": "y"}
        connection.send_oneway(RemotingCommand.request(40, {"consumerGroup": "g"}, oneway=True))
        asked = await peer.receive()
        assert (asked.code, asked.is_oneway, asked.encoding) == (40, True, Encoding.JSON)


async def test_a_client_that_does_not_reply() -> None:
    async with serving() as server, server.peer() as peer:
        await peer.ask(request())
        connection = server.connection()
        with pytest.raises(RemotingTimeoutError) as timeout:
            await connection.request(RemotingCommand.request(307), 0.01)
        assert timeout.value.written
        assert timeout.value.address == connection.peer_text
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(RemotingSendError) as lost:
                    await connection.request(RemotingCommand.request(307), 60)
                assert lost.value.written

            nursery.start_soon(ask)
            await peer.receive()
            await peer.receive()
            await peer.stream.aclose()
        with pytest.raises(RemotingSendError) as closed:
            await connection.request(RemotingCommand.request(307), 60)
        assert not closed.value.written


async def test_on_close_is_called_once_whatever_it_raises() -> None:
    closed_ones: list[Connection] = []

    def fail(connection: Connection) -> None:
        raise ZeroDivisionError

    async with serving() as server:
        async with server.peer() as peer:
            await peer.ask(request())
            connection = server.connection()
            connection.on_close += [closed_ones.append, fail, closed_ones.append]
        await until(server, "s.closed == 1")
        assert closed_ones == [connection, connection]
        connection.close("again")
        connection.reply(b"into the void")
        connection.complete(None)
        assert (len(closed_ones), server.reactor.stats.closed, server.reactor.stats.inflight) == (2, 1, 0)


async def test_a_handler_may_close_its_connection_with_more_requests_waiting() -> None:
    seen: list[int] = []

    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        seen.append(command.opaque)
        connection.reply(encode(command.reply()))
        connection.close("enough")
        return DEFERRED

    table = HandlerTable()
    table.register(ECHO, handler)
    async with serving(table) as server, server.peer() as peer:
        await peer.send(request(), request())
        assert (await peer.receive()).opaque == seen[0]
        assert await peer.is_closed_by_server()
        assert len(seen) == 1
        assert server.reactor.stats.inflight == 0


async def test_long_work_is_cut_into_turns_so_that_others_run() -> None:
    """With turns of zero length every request is a turn of its own, and other tasks run as often as the reactor."""
    log: list[str] = []

    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        log.append("request")
        return encode(command.reply(body=command.body))

    async def other() -> None:
        while True:
            log.append("other")
            await trio.lowlevel.checkpoint()

    table = HandlerTable()
    table.register(ECHO, handler)
    async with (
        serving(table, ReactorLimits(turn=0)) as server,
        server.peer() as one,
        server.peer() as two,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(other)
        await one.send(*[request(body=bytes([n])) for n in range(100)])
        await two.send(*[request(body=bytes([n])) for n in range(100)])
        for peer in (one, two):
            assert [bytes((await peer.receive()).body)[0] for _ in range(100)] == list(range(100))
        nursery.cancel_scope.cancel()
    assert "request request request" not in " ".join(log)  # trio shuffles the tasks of a tick, hence two


@pytest.mark.parametrize("gather", [0, 60])
async def test_a_round_with_several_clients_takes_in_requests_that_arrive_during_it(gather: float) -> None:
    ends = [socket.socketpair() for _ in range(3)]
    table = echo_table()

    def let_the_third_ask(connection: Connection, command: RemotingCommand) -> Outcome:
        ends[2][0].sendall(encode(request(body=b"third")))
        return encode(command.reply(body=b"first"))

    table.register(2, let_the_third_ask)
    async with serving(table, ReactorLimits(gather=gather, turn=60)) as server:
        for _, served in ends:
            server.reactor.adopt(served, table)
        rounds = server.reactor.stats.rounds
        ends[0][0].sendall(encode(request(2)))
        ends[1][0].sendall(encode(request(body=b"second")))
        await until(server, "s.frames == 3")
        for (client, _), body in zip(ends, (b"first", b"second", b"third"), strict=True):
            client.setblocking(True)
            (reply,) = FrameDecoder().feed(client.recv(1 << 16))
            assert bytes(reply.body) == body
            client.close()
        assert server.reactor.stats.rounds - rounds == (1 if gather else 2)


@pytest.mark.parametrize("spin_many", [0, 0.001])
async def test_after_replies_to_several_clients_the_reactor_looks_again_before_it_waits(
    spin_many: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run on a clock that advances by a microsecond each time the reactor reads it."""
    ends = [socket.socketpair() for _ in range(2)]
    now = time.perf_counter()
    answered_at: list[float] = []
    waited_at: list[float] = []
    wait_readable = trio.lowlevel.wait_readable

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    async def counted(fd: int) -> None:
        waited_at.append(now)
        await wait_readable(fd)

    def handler(connection: Connection, command: RemotingCommand) -> Outcome:
        answered_at.append(now)
        return encode(command.reply())

    table = HandlerTable()
    table.register(2, handler)
    async with serving(table, ReactorLimits(turn=60, spin=0, spin_many=spin_many)) as server:
        for client, served in ends:
            client.setblocking(True)
            server.reactor.adopt(served, table)
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr("trimq.remoting.server.reactor.perf_counter", clock)
        monkeypatch.setattr(trio.lowlevel, "wait_readable", counted)
        for client, _ in ends:  # both have arrived when the reactor polls
            client.sendall(encode(request(2)))
        await trio.testing.wait_all_tasks_blocked()
        assert len(answered_at) == 2
        assert (waited_at[0] - answered_at[1] > 0.0009) is bool(spin_many)
        for client, _ in ends:
            assert client.recv(1 << 16)
            client.close()
