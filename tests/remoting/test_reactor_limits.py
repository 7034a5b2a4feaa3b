"""Misbehaviour that a reactor does not accept; other clients are not affected."""

import errno
import gc
import resource
import socket
import struct
import weakref
from dataclasses import replace

import pytest
import structlog
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remoting.harness import ECHO, Peer, Server, echo_table, request, serving, until
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.remoting.config.configuration import NettyServerConfig
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.accept import Acceptor
from trimq.remoting.server.reactor import DEFERRED, HELD, Connection, HandlerTable, Outcome, ReactorLimits, listen

KEEP = 2
BUSY = ResponseCode.SYSTEM_BUSY


class Keeper:
    """Handlers that hold requests until the test releases them."""

    def __init__(self) -> None:
        self.kept: list[tuple[Connection, RemotingCommand]] = []
        self.gate = trio.Event()

    def table(self) -> HandlerTable:
        table = echo_table()
        table.register(KEEP, self.defer)
        table.register(KEEP + 1, self.hold)
        table.register(KEEP + 2, self.wait)
        return table

    def defer(self, connection: Connection, command: RemotingCommand) -> Outcome:
        self.kept.append((connection, command))
        return DEFERRED

    def hold(self, connection: Connection, command: RemotingCommand) -> Outcome:
        return HELD

    async def wait(self, connection: Connection, command: RemotingCommand) -> Outcome:
        await self.gate.wait()
        return command.reply()

    def release(self) -> None:
        for connection, command in self.kept:
            connection.complete(command.reply())
        self.kept.clear()


BROKEN = {
    "length 0": b"\0\0\0\0",
    "length 3": b"\0\0\0\3abc",
    "over the limit": struct.pack(">I", 16 * 1024 * 1024 - 3),
    "negative length": b"\xff\xff\xff\xff",
    "header longer than the frame": struct.pack(">II", 10, 7) + b"x" * 6,
    "unknown encoding": struct.pack(">II", 6, 9 << 24 | 2) + b"{}",
    "no JSON": struct.pack(">II", 6, 2) + b"x}",
    "JSON without a code": struct.pack(">II", 6, 2) + b"{}",
    "deep JSON": struct.pack(">II", 50_004, 50_000) + b"[" * 50_000,
    "binary header too short": struct.pack(">II", 6, 1 << 24 | 2) + b"ab",
    "not msgpack": struct.pack(">II", 6, 2 << 24 | 2) + b"\xc1\xc1",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_frame_ends_its_connection_and_no_other(name: str) -> None:
    async with serving() as server, server.peer() as good, server.peer() as bad:
        with structlog.testing.capture_logs() as logs:
            await bad.send(request(body=b"before"))
            assert bytes((await bad.receive()).body) == b"before"
            await bad.send_bytes(BROKEN[name] + encode(request(body=b"after")))
            assert await bad.is_closed_by_server()
        (event,) = [log for log in logs if log["event"] == "connection_broken"]
        assert event["reason"].startswith("broken frame: ")
        assert event["log_level"] == "warning"
        assert server.reactor.stats.broken == 1
        assert bytes((await good.ask(request(body=b"fine"))).body) == b"fine"


async def test_requests_before_a_broken_frame_are_answered() -> None:
    async with serving() as server, server.peer() as peer:
        await peer.send_bytes(encode(request(body=b"1")) + encode(request(body=b"2")) + b"\0\0\0\0")
        assert bytes((await peer.receive()).body) == b"1"
        assert bytes((await peer.receive()).body) == b"2"
        assert await peer.is_closed_by_server()


@pytest.mark.parametrize(
    ("first", "word"),
    [(b"\x16\x03\x01\x02\x00\x01\x00", "TLS"), (b"GET / HTTP/1.1\r\n\r\n", "HTTP"), (b"PROXY TCP4 1.2", "proxy")],
)
async def test_other_protocols_are_recognized(first: bytes, word: str) -> None:
    async with serving() as server, server.peer() as peer:
        with structlog.testing.capture_logs() as logs:
            await peer.send_bytes(first)
            assert await peer.is_closed_by_server()
        assert word in logs[0]["reason"]


async def test_an_announced_length_costs_no_memory() -> None:
    async with serving() as server, server.peer() as peer:
        await peer.send_bytes(struct.pack(">II", 16_000_000, 100))
        await until(server, "s.bytes_in == 8")
        big = server.connection().big
        assert big is not None
        assert len(big.buffer) <= 256 * 1024


async def test_long_frames_share_their_buffers() -> None:
    """One after the other, at the same time, with one that disconnects in the middle: each gets its own bytes."""
    async with serving() as server, server.peer() as first, server.peer() as second:
        for size in (40_000, 300_000, 1_000_000, 1_200_000, 50_000, 40_001):
            bodies = [bytes([number]) * (size + number) for number in (1, 2)]
            frames = [encode(request(body=body)) for body in bodies]
            for peer, frame in ((first, frames[0]), (second, frames[1])):
                await peer.send_bytes(frame[: size // 2])
            async with server.peer() as third:
                await third.send_bytes(frames[0][:-1])
            for peer, frame, body in ((second, frames[1], bodies[1]), (first, frames[0], bodies[0])):
                await peer.send_bytes(frame[size // 2 :])
                assert bytes((await peer.receive()).body) == body


async def test_warnings_of_strangers_are_limited() -> None:
    clock = ManualClock()
    async with serving(clock=clock) as server:
        with structlog.testing.capture_logs() as logs:
            for _ in range(50):
                async with server.peer() as peer:
                    await peer.send_bytes(b"\0\0\0\0")
                    assert await peer.is_closed_by_server()
            assert sum(log["event"] == "connection_broken" for log in logs) == 20
            clock.advance(1)
            async with server.peer() as peer:
                await peer.send_bytes(b"\0\0\0\0")
                assert await peer.is_closed_by_server()
        assert {"event": "events_left_out", "count": 30, "log_level": "warning"} in logs


@settings(max_examples=200)
@given(
    junk=st.binary(max_size=300),
    position=st.integers(0, 200),
    change=st.binary(min_size=1, max_size=4),
    cut=st.integers(0, 200),
)
def test_no_bytes_whatever_stop_the_server(junk: bytes, position: int, change: bytes, cut: int) -> None:
    good = encode(request(body=b"body", ext={"key": "value"}))
    mutated = good[:position] + change + good[position + len(change) :]

    async def main() -> None:
        table = echo_table()
        reactor_limits = ReactorLimits(max_frame=1 << 20)
        async with serving(table, reactor_limits) as server, server.peer() as peer, server.peer() as other:
            await other.ask(request())
            for data in (junk, mutated, good[:cut] + junk):
                async with server.peer() as bad:
                    await bad.send_bytes(data)
            await peer.ask(request())
            assert bytes((await other.ask(request(body=b"ok"))).body) == b"ok"
            assert server.reactor.stats.failures == 0

    trio.run(main)


async def test_beyond_the_limit_of_a_connection_the_answer_is_system_busy() -> None:
    keeper = Keeper()
    limits = ReactorLimits(max_inflight_per_connection=3)
    async with serving(keeper.table(), limits) as server, server.peer() as peer, server.peer() as other:
        await peer.send(*[request(KEEP) for _ in range(4)])
        reply = await peer.receive()
        assert reply.code == ResponseCode.SYSTEM_BUSY
        assert reply.remark == (
            "system busy: maxRequestsInFlightPerConnection=3: 3 requests are in flight on this connection; "
            "wait for their replies"
        )
        assert (await peer.ask(request())).code == ResponseCode.SYSTEM_BUSY
        assert (await other.ask(request())).code == 0
        assert server.reactor.stats.busy == 2
        assert server.reactor.stats.limited == {"maxRequestsInFlightPerConnection": 2}
        keeper.release()
        assert [(await peer.receive()).code for _ in range(3)] == [0, 0, 0]
        assert (await peer.ask(request())).code == 0


async def test_the_limit_of_the_server_counts_all_connections_and_coroutines() -> None:
    keeper = Keeper()
    async with serving(keeper.table(), ReactorLimits(max_inflight=2)) as server, server.peer() as one:
        async with server.peer() as two:
            await one.send(request(KEEP + 2))
            await two.send(request(KEEP))
            await until(server, "s.inflight == 2")
            reply = await one.ask(request())
            assert reply.code == ResponseCode.SYSTEM_BUSY
            assert reply.remark == (
                "system busy: maxRequestsInFlight=2: 2 requests are in flight on this server; try again in a moment"
            )
            assert server.reactor.stats.limited == {"maxRequestsInFlight": 1}
        await until(server, "s.inflight == 1")  # deferred requests of the lost connection no longer count as in flight
        keeper.release()  # a reply that comes then takes off nothing
        assert server.reactor.stats.inflight == 1
        assert (await one.ask(request())).code == 0
        keeper.gate.set()
        assert (await one.receive()).code == 0
        assert server.reactor.stats.inflight == 0


async def test_tasks_of_closed_connections_count_for_the_limit_of_the_server() -> None:
    """Otherwise a client that reconnects for each request has as many tasks, and bodies, as it likes."""
    keeper = Keeper()
    async with serving(keeper.table(), ReactorLimits(max_inflight=4)) as server, server.peer() as other:
        stats = server.reactor.stats
        for number in range(1, 5):
            async with server.peer() as peer:
                await peer.send(request(KEEP + 2, oneway=number % 2 == 0))
                await until(server, f"s.frames == {number}")
            await until(server, "s.connections == 1")
        assert (stats.inflight, server.reactor.outcomes.tasks, stats.busy) == (4, 4, 0)
        async with server.peer() as peer:
            await peer.send(request(KEEP + 2, oneway=True), request(ECHO, oneway=True))
            reply = await peer.ask(request(KEEP + 2))
            assert (reply.code, "maxRequestsInFlight=4: 4 requests" in (reply.remark or "")) == (BUSY, True)
        assert (stats.inflight, server.reactor.outcomes.tasks, stats.busy) == (4, 4, 2)
        assert stats.limited == {"maxRequestsInFlight": 2}
        keeper.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (stats.inflight, server.reactor.outcomes.tasks) == (0, 0)
        assert (await other.ask(request())).code == 0


@pytest.mark.parametrize("oneway", [False, True])
async def test_tasks_of_closed_connections_that_fail_or_are_cancelled_count_no_longer(oneway: bool) -> None:
    fails = trio.Event()

    async def task(_connection: Connection, command: RemotingCommand) -> Outcome:
        if not command.body:
            await trio.sleep_forever()
        await fails.wait()
        raise ValueError("test")

    table = echo_table()
    table.register(KEEP, task)
    async with serving(table) as server:
        stats = server.reactor.stats
        async with server.peer() as peer:
            await peer.send(request(KEEP, b"fails", oneway=oneway), request(KEEP, oneway=oneway))
            await until(server, "s.frames == 2")
        await until(server, "s.connections == 0")
        assert stats.inflight == 2
        with structlog.testing.capture_logs():
            fails.set()
            await trio.testing.wait_all_tasks_blocked()
        assert (stats.inflight, stats.failures) == (1, 1)
        with structlog.testing.capture_logs() as logs:
            await server.reactor.shutdown(0)
        assert [(log["event"], log["inflight"]) for log in logs] == [("shutdown_incomplete", 1)]
        assert (stats.inflight, server.reactor.outcomes.tasks) == (0, 0)


async def test_long_polls_do_not_count_and_oneways_not_for_their_connection() -> None:
    keeper = Keeper()
    limits = ReactorLimits(max_inflight_per_connection=2)
    async with serving(keeper.table(), limits) as server, server.peer() as peer:
        await peer.send(*[request(KEEP + 1) for _ in range(5)])
        await peer.send(*[request(KEEP + 2, oneway=True) for _ in range(5)])
        assert (await peer.ask(request())).code == 0
        stats = server.reactor.stats
        assert (stats.inflight, stats.held, stats.busy) == (2, 5, 3)  # one-ways over the limit of tasks are dropped
        assert stats.limited == {"maxRequestsInFlightPerConnection": 3}
        keeper.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (server.connection().tasks, stats.inflight) == (0, 0)


async def fill(server: Server, peer: Peer, reply_size: int) -> int:
    """Send requests and read no reply until the server has stopped reading; return the number of requests sent."""
    sent = 0
    while not server.reactor.stats.paused:
        await peer.send(request(5, str(reply_size).encode()))
        sent += 1
        await trio.testing.wait_all_tasks_blocked()
        assert sent < 10_000
    return sent


def big_replies() -> HandlerTable:
    table = echo_table()
    table.register(5, lambda _, command: command.reply(body=bytes(int(bytes(command.body)))))
    return table


async def test_a_slow_reader_is_not_read_until_it_has_drained() -> None:
    limits = ReactorLimits(high_water=1_000_000, low_water=200_000)
    async with serving(big_replies(), limits) as server, server.peer(receive_buffer=4096) as peer:
        sent = await fill(server, peer, 100_000)
        connection = server.connection()
        frames = server.reactor.stats.frames
        assert 1_000_000 <= connection.waiting < 1_200_000
        await peer.send(*[request(5, b"1") for _ in range(50)])
        async with server.peer() as other:
            for _ in range(3):
                await other.ask(request())
        assert server.reactor.stats.frames == frames + 3
        for _ in range(sent):
            assert len((await peer.receive()).body) == 100_000
        for _ in range(50):
            assert len((await peer.receive()).body) == 1
        assert (server.reactor.stats.paused, connection.waiting) == (0, 0)


async def test_requests_received_before_the_pause_wait_and_none_is_lost() -> None:
    """One read brings many requests; the replies of the first few fill the out-buffer."""
    limits = ReactorLimits(high_water=300_000, low_water=100_000)
    async with serving(big_replies(), limits) as server, server.peer(receive_buffer=4096) as peer:
        await peer.send(*[request(5, b"200000", opaque=n) for n in range(200)])
        await until(server, "s.paused")
        assert server.connection().ready
        assert server.connection().waiting < 600_000
        assert [(await peer.receive()).opaque for _ in range(200)] == list(range(200))


async def test_a_paused_connection_that_breaks_is_closed() -> None:
    limits = ReactorLimits(high_water=100_000, low_water=1000)
    async with serving(big_replies(), limits) as server:
        async with server.peer(receive_buffer=4096) as peer:
            await fill(server, peer, 100_000)
            assert isinstance(peer.stream, trio.SocketStream)
            peer.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(server, "s.connections == 0")
        assert server.reactor.stats.paused == 0


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    clock = ManualClock()
    async with serving(clock=clock) as server, server.peer() as idle, server.peer() as busy:
        await idle.ask(request())
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(119):
            clock.advance(1)
            await trio.testing.wait_all_tasks_blocked()
            await busy.ask(request())
        assert server.reactor.stats.connections == 2
        with structlog.testing.capture_logs() as logs:
            clock.advance(2)
            assert await idle.is_closed_by_server()
        assert logs[0]["reason"] == "neither sent nor received for 120 s"
        assert (await busy.ask(request())).code == 0
        assert (server.reactor.stats.idle_closed, server.reactor.stats.connections) == (1, 1)


async def test_an_idle_connection_is_freed_when_it_is_closed() -> None:
    clock = ManualClock()
    async with serving(clock=clock) as server, server.peer() as idle:
        await idle.ask(request())
        freed = weakref.ref(server.connection())
        await trio.testing.wait_all_tasks_blocked()
        gc.disable()
        try:
            clock.advance(121)
            assert await idle.is_closed_by_server()
            await trio.testing.wait_all_tasks_blocked()
            assert freed() is None
        finally:
            gc.enable()


async def test_writing_alone_keeps_a_connection() -> None:
    clock = ManualClock()
    async with serving(clock=clock) as server, server.peer() as peer:
        await peer.ask(request())
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            clock.advance(100)
            await trio.testing.wait_all_tasks_blocked()
            server.connection().send_oneway(RemotingCommand.request(40, oneway=True))
            assert (await peer.receive()).code == 40


async def test_a_slow_reader_that_takes_nothing_is_idle() -> None:
    clock = ManualClock()
    limits = ReactorLimits(high_water=100_000, low_water=1000)
    async with serving(big_replies(), limits, clock) as server, server.peer(receive_buffer=4096) as peer:
        await fill(server, peer, 1_000_000)
        clock.advance(1)
        await trio.testing.wait_all_tasks_blocked()
        clock.advance(121)
        await until(server, "s.connections == 0")
        assert server.reactor.stats.idle_closed == 1


async def test_more_connections_than_allowed_are_refused() -> None:
    async with serving(limits=ReactorLimits(max_connections=2)) as server:
        async with server.peer() as one, server.peer() as two:
            await one.ask(request())
            await two.ask(request())
            async with server.peer() as three:
                assert await three.is_closed_by_server()
            assert server.reactor.stats.refused == 1
        await until(server, "s.connections == 0")
        async with server.peer() as four:
            assert (await four.ask(request())).code == 0


class StarvedSocket(socket.socket):
    """A listening socket of a process with no descriptor left, except the acceptor's reserved one."""

    starved = False
    acceptor: Acceptor
    reserve_helps = True

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.starved and (self.acceptor._reserve >= 0 or not self.reserve_helps):
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def starving(server: Server) -> StarvedSocket:
    plain = listen("127.0.0.1", 0)
    sock = StarvedSocket(fileno=plain.detach())
    sock.acceptor = server.reactor._acceptor
    server.reactor.add_listener(sock, echo_table())
    return sock


async def test_without_descriptors_clients_are_turned_away_and_the_others_served() -> None:
    async with serving() as server, server.peer() as good:
        sock = starving(server)
        await good.ask(request())
        sock.starved = True
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                async with await trio.open_tcp_stream(*sock.getsockname()) as client:
                    assert await Peer(client).is_closed_by_server()
            assert (await good.ask(request())).code == 0
        assert server.reactor.stats.refused == 3
        assert logs[0]["event"] == "no_descriptor_left"
        sock.starved = False
        async with await trio.open_tcp_stream(*sock.getsockname()) as client:
            assert (await Peer(client).ask(request())).code == 0


async def test_where_even_the_reserve_does_not_help_the_listener_rests_until_the_next_scan() -> None:
    clock = ManualClock()
    async with serving(clock=clock) as server, server.peer() as good:
        sock = starving(server)
        sock.starved, sock.reserve_helps = True, False
        async with await trio.open_tcp_stream(*sock.getsockname()) as client:
            await trio.testing.wait_all_tasks_blocked()
            rounds = server.reactor.stats.rounds
            assert (await good.ask(request())).code == 0
            assert server.reactor.stats.rounds <= rounds + 5
            sock.starved = False
            clock.advance(1)
            assert (await Peer(client).ask(request())).code == 0


def test_limits_come_from_the_configuration() -> None:
    config = NettyServerConfig(
        frame_max_length=5000,
        write_buffer_high_water_mark=70_000,
        write_buffer_low_water_mark=3,
        max_requests_in_flight=4,
        max_requests_in_flight_per_connection=2,
        max_connections=9,
        server_channel_max_idle_time_seconds=7,
    )
    assert ReactorLimits.of(config) == ReactorLimits(5000, 70_000, 3, 4, 2, 9, 7)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 0 < ReactorLimits.of(replace(config, max_connections=0)).max_connections < max(soft, 1_000_001)


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as sock, pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:"):
        listen("127.0.0.1", sock.getsockname()[1])


def test_socket_buffers_are_set_where_asked_for() -> None:
    config = NettyServerConfig(server_socket_rcv_buf_size=100_000, server_socket_snd_buf_size=50_000)
    with listen("127.0.0.1", 0, config) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 200_000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 100_000


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
async def test_an_ipv4_client_of_a_dual_listener_has_its_plain_address() -> None:
    table = echo_table()
    try:
        sock = listen("::", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    async with serving(table) as server:
        server.reactor.add_listener(sock, table)
        stream = await trio.open_tcp_stream("127.0.0.1", sock.getsockname()[1])
        async with stream:
            await Peer(stream).ask(request(ECHO))
            assert server.connection().peer[0] == "127.0.0.1"
