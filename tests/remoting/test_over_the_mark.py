"""Guards the bound of the bytes queued for a client that does not read, for each kind of reply.

The bound is the high-water mark and one reply of each request that was started. It causes no loss and no duplicates.
"""

from collections import Counter

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from tests.remoting.harness import ECHO, Peer, echo_table, request, until
from tests.remoting.harness import within_seconds as serving
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import MAX_FRAME, encode
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.errors import RemotingSendError
from trimq.remoting.server import large_reply
from trimq.remoting.server.large_reply import LargeReply, in_slices
from trimq.remoting.server.reactor import DEFERRED, HELD, Connection, HandlerTable, Outcome, ReactorLimits

PLAIN, TASK, WAITS, LARGE, DEFER, HOLD, FAST = 5, 6, 7, 8, 9, 10, 11
SIZE = 100_000
HEAD = 400
MARK = 300_000
LIMITS = ReactorLimits(high_water=MARK, low_water=100_000, max_tasks_per_connection=4)


class Fields(Struct):
    word: str


EXT = {"word": "w"}
"""Without these fields a request does not reach the fast handler."""


class Handlers:
    """One handler for each kind of reply, of ``SIZE`` bytes.

    ``begun`` counts requests by code, ``fast_ones`` those that the fast handler has served.
    """

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()
        self.fast_ones = 0
        self.kept: list[tuple[Connection, RemotingCommand]] = []
        self.gate = trio.Event()
        self.done: list[bytes] = []

    def table(self) -> HandlerTable:
        table = echo_table()
        table.register(PLAIN, self.plain)
        table.register(TASK, self.task)
        table.register(WAITS, self.waits)
        table.register(LARGE, self.large)
        table.register(DEFER, self.keep, copy_body=True)
        table.register(HOLD, self.keep, copy_body=True)
        table.register(FAST, self.plain, header=Fields, fast=self.fast)
        return table

    def plain(self, _connection: Connection, command: RemotingCommand) -> Outcome:
        self.begun[command.code] += 1
        return command.reply(body=bytes(SIZE))

    async def task(self, _connection: Connection, command: RemotingCommand) -> Outcome:
        self.begun[TASK] += 1
        await trio.lowlevel.checkpoint()
        return command.reply(body=bytes(SIZE))

    async def waits(self, _connection: Connection, command: RemotingCommand) -> Outcome:
        await self.gate.wait()
        self.done.append(bytes(command.body))
        return command.reply(body=bytes(SIZE))

    async def large(self, connection: Connection, command: RemotingCommand) -> Outcome:
        self.begun[LARGE] += 1
        return await in_slices(connection, command, [bytes(SIZE // 10)] * 10)

    def keep(self, connection: Connection, command: RemotingCommand) -> Outcome:
        self.begun[command.code] += 1
        self.kept.append((connection, command))
        return DEFERRED if command.code == DEFER else HELD

    def fast(self, _connection: Connection, asked: TypedRequest[Fields]) -> bytes:
        self.begun[FAST] += 1
        self.fast_ones += 1
        command = request(FAST, opaque=asked.opaque)
        return encode(command.reply(body=bytes(SIZE)))

    def release(self) -> None:
        kept, self.kept = self.kept, []
        for connection, command in kept:
            reply = command.reply(body=bytes(SIZE))
            if command.code == DEFER:
                connection.complete(reply)
            else:
                connection.settle(command, reply)


@pytest.mark.parametrize("encoding", [Encoding.JSON, Encoding.ROCKETMQ])
@pytest.mark.parametrize(("code", "begun"), [(PLAIN, 1), (TASK, 4), (WAITS, 4), (LARGE, 1)])
async def test_a_client_that_reads_nothing_gets_its_mark_and_what_was_begun(
    code: int, begun: int, encoding: Encoding
) -> None:
    handlers = Handlers()
    handlers.gate.set()
    async with serving(handlers.table(), LIMITS) as server, server.peer(receive_buffer=4096) as peer:
        await peer.send(*[request(code, opaque=number, encoding=encoding) for number in range(200)])
        await until(server, "s.paused")
        await trio.testing.wait_all_tasks_blocked()
        assert server.connection().waiting <= MARK + begun * (SIZE + HEAD)
        async with server.peer() as other:
            assert (await other.ask(request(ECHO))).code == 0
        arrived = [(await peer.receive()).opaque for _ in range(200)]
        assert sorted(arrived) == list(range(200))
        assert server.reactor.stats.inflight == server.reactor.outcomes.tasks == 0


async def test_direct_replies_count_within_a_turn() -> None:
    handlers = Handlers()
    limits = ReactorLimits(high_water=MARK, low_water=100_000, turn=10.0)
    async with serving(handlers.table(), limits) as server, server.peer(receive_buffer=4096) as peer:
        await peer.send(*[request(FAST, opaque=number, ext=EXT) for number in range(300)])
        await until(server, "s.paused")
        await trio.testing.wait_all_tasks_blocked()
        assert server.connection().waiting <= MARK + 16 * (SIZE + HEAD)
        assert [(await peer.receive()).opaque for _ in range(300)] == list(range(300))
        assert handlers.fast_ones == 300


@pytest.mark.parametrize("code", [DEFER, HOLD])
async def test_replies_to_requests_in_flight_keep_the_next_ones_from_being_begun(code: int) -> None:
    handlers = Handlers()
    async with serving(handlers.table(), LIMITS) as server, server.peer(receive_buffer=4096) as peer:
        await peer.send(*[request(code, opaque=number) for number in range(60)])
        await until(server, "s.frames == 60")
        handlers.release()
        await until(server, "s.paused")
        assert server.connection().waiting <= MARK + 60 * (SIZE + HEAD)
        await peer.send(*[request(code, opaque=number) for number in range(60, 70)])
        await trio.testing.wait_all_tasks_blocked()
        assert handlers.begun[code] == 60
        arrived = [(await peer.receive()).opaque for _ in range(60)]
        await until(server, "s.frames == 70")
        handlers.release()
        arrived += [(await peer.receive()).opaque for _ in range(10)]
        assert sorted(arrived) == list(range(70))


async def test_tasks_of_one_connection_wait_for_each_other_and_not_for_those_of_others() -> None:
    handlers = Handlers()
    async with serving(handlers.table(), LIMITS) as server, server.peer() as peer, server.peer() as other:
        await peer.send(*[request(WAITS) for _ in range(10)])
        await until(server, "s.inflight == 10")
        assert (await other.ask(request(TASK))).code == 0
        await peer.send(request(TASK))
        await until(server, "s.inflight == 11")
        await trio.testing.wait_all_tasks_blocked()
        assert handlers.begun[TASK] == 1
        handlers.gate.set()
        for _ in range(11):
            assert (await peer.receive()).code == 0


async def test_one_ways_that_wait_happen_though_their_client_has_gone() -> None:
    handlers = Handlers()
    async with serving(handlers.table(), LIMITS) as server:
        async with server.peer() as peer:
            await peer.send(*[request(WAITS, str(number).encode(), oneway=True) for number in range(10)])
            await until(server, "s.frames == 10")
        await until(server, "s.connections == 0")
        assert handlers.done == []
        handlers.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(handlers.done) == [str(number).encode() for number in range(10)]


async def test_requests_of_a_client_that_has_gone_do_not_begin_any_more() -> None:
    """Guards memory: a client that sends many requests and closes, repeatedly, leaves none of them waiting."""
    handlers = Handlers()
    async with serving(handlers.table(), LIMITS) as server:
        async with server.peer() as peer:
            await peer.send(
                *[request(WAITS, b"%d" % number) for number in range(10)], request(WAITS, b"1w", oneway=True)
            )
            await until(server, "s.frames == 11")
        await until(server, "s.connections == 0")
        begun = LIMITS.max_tasks_per_connection
        assert server.reactor.outcomes.tasks == server.reactor.stats.inflight == begun + 1
        handlers.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(handlers.done) == sorted([*(b"%d" % number for number in range(begun)), b"1w"])
        assert server.reactor.outcomes.tasks == server.reactor.stats.inflight == 0


async def test_only_what_was_counted_as_in_flight_is_taken_off_again() -> None:
    """Guards the limits of requests in flight, which tasks of a closed connection count for until they end."""
    handlers = Handlers()
    async with serving(handlers.table(), LIMITS) as server, server.peer() as peer:
        async with server.peer() as closing:
            await closing.send(*[request(WAITS) for _ in range(3)])
            await until(server, "s.inflight == 3")
            (closed,) = (each for each in server.reactor.connections.values() if each.tasks)
        await until(server, "s.connections == 1")
        assert (server.reactor.stats.inflight, closed.inflight, closed.deferred) == (3, 3, 0)
        await peer.send(*[request(WAITS, oneway=True) for _ in range(5)], request(WAITS))
        await until(server, "s.inflight == 9")
        assert (server.connection().inflight, server.connection().oneways) == (1, 5)
        handlers.gate.set()
        assert (await peer.receive()).code == 0
        await trio.testing.wait_all_tasks_blocked()
        assert (server.reactor.stats.inflight, server.connection().inflight, server.connection().tasks) == (0, 0, 0)
        assert (closed.inflight, closed.tasks, closed.oneways) == (0, 0, 0)


async def test_a_one_way_is_not_lost_for_the_requests_in_flight_beside_it() -> None:
    """One-ways that run as tasks have a limit of their own."""
    handlers = Handlers()
    limits = ReactorLimits(max_inflight_per_connection=5, max_tasks_per_connection=4)
    async with serving(handlers.table(), limits) as server, server.peer() as peer:
        await peer.send(*[request(WAITS) for _ in range(5)], request(WAITS, b"one-way", oneway=True))
        await until(server, "s.frames == 6")
        handlers.gate.set()
        for _ in range(5):
            assert (await peer.receive()).code == 0
        await trio.testing.wait_all_tasks_blocked()
        assert b"one-way" in handlers.done
        assert server.reactor.stats.busy == 0


async def test_tasks_that_wait_when_the_server_stops_are_dropped() -> None:
    handlers = Handlers()
    async with serving(handlers.table(), LIMITS) as server, server.peer() as peer:
        await peer.send(*[request(WAITS) for _ in range(10)])
        await until(server, "s.inflight == 10")
        await server.reactor.shutdown(0)
        assert server.reactor.outcomes.tasks == 0
        assert handlers.done == []


async def test_tasks_of_a_closed_connection_that_wait_when_the_server_stops_are_dropped() -> None:
    """Otherwise their coroutines are never awaited, which is a warning and so a failure here."""
    handlers = Handlers()
    async with serving(handlers.table(), LIMITS) as server:
        async with server.peer() as peer:
            await peer.send(*[request(WAITS, oneway=True) for _ in range(10)])
            await until(server, "s.frames == 10")
        await until(server, "s.connections == 0")
        assert server.reactor.stats.inflight == 10
        await server.reactor.shutdown(0)
        assert server.reactor.outcomes.tasks == server.reactor.stats.inflight == 0
        assert handlers.done == []


async def test_requests_and_notices_of_the_server_wait_until_the_client_has_drained() -> None:
    async with serving(Handlers().table(), LIMITS) as server, server.peer(receive_buffer=4096) as peer:
        await peer.send(*[request(PLAIN) for _ in range(200)])
        await until(server, "s.paused")
        connection = server.connection()
        waiting = connection.waiting
        called: list[int] = []
        assert not connection.send_oneway(RemotingCommand.request(40, oneway=True))
        connection.when_drained("key", lambda: called.append(1))
        connection.when_drained("key", lambda: called.append(2))
        with pytest.raises(RemotingSendError, match="does not read what it was sent; it was not sent") as caught:
            await connection.request(RemotingCommand.request(307), 1)
        assert not caught.value.written
        assert (connection.waiting, called) == (waiting, [])
        for _ in range(200):
            await peer.receive()
        assert called == [2]
        assert connection.send_oneway(RemotingCommand.request(40, oneway=True))
        assert (await peer.receive()).code == 40


async def test_a_long_reply_lets_others_work_after_each_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a millisecond later, so every pause ends a slice. Two replies take turns."""
    now = 0.0
    order: list[int] = []
    begun: set[str] = set()
    both_there = trio.Event()

    def later() -> float:
        nonlocal now
        now += large_reply.SLICE
        return now

    async def make(connection: Connection, command: RemotingCommand) -> Outcome:
        begun.add(connection.peer_text)
        if len(begun) == 2:
            both_there.set()
        await both_there.wait()  # otherwise one reply may be under way when the other request arrives
        async with LargeReply(connection, command) as reply:
            for _ in range(5):
                order.append(command.opaque)
                reply.add(b"x" * 10_000)
                await reply.pause()
            return reply.end()

    monkeypatch.setattr(large_reply, "perf_counter", later)
    table = echo_table()
    table.register(TASK, make)
    async with serving(table) as server, server.peer() as one, server.peer() as two:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.send, request(TASK, opaque=1), request(TASK, opaque=3))
            nursery.start_soon(two.send, request(TASK, opaque=2))
        for peer, count in ((one, 2), (two, 1)):
            for _ in range(count):
                assert bytes((await peer.receive()).body) == b"x" * 50_000
    assert [number for number in order if number != 2] in ([1] * 5 + [3] * 5, [3] * 5 + [1] * 5)  # one at a time
    assert "2, 2" not in str(order[:-2])  # the reply of the other connection is in between


async def test_a_reply_longer_than_a_frame_is_refused() -> None:
    async def make(connection: Connection, command: RemotingCommand) -> Outcome:
        count = int(bytes(command.body))
        return await in_slices(connection, command, [bytes(1 << 20)] * count)

    table = echo_table()
    table.register(TASK, make)
    async with serving(table) as server, server.peer() as peer:
        reply = await peer.ask(request(TASK, b"16"))
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert reply.remark == f"the reply would be longer than a frame may be ({MAX_FRAME} bytes): ask for less"
        assert len((await peer.ask(request(TASK, b"15"))).body) == 15 << 20
        assert server.reactor.stats.failures == 0


async def test_a_long_reply_is_given_up_when_its_client_has_gone() -> None:
    pieces = 0
    table = echo_table()

    async def make(connection: Connection, command: RemotingCommand) -> Outcome:
        nonlocal pieces
        async with LargeReply(connection, command) as reply:
            for _ in range(1_000_000):
                reply.add(b"x")
                pieces += 1
                if pieces == 3:
                    connection.close("gone")
                await trio.lowlevel.checkpoint()
                reply._slice_end = 0
                await reply.pause()
            return reply.end()

    table.register(TASK, make)
    async with serving(table) as server, server.peer() as peer:
        await peer.send(request(TASK))
        assert await peer.is_closed_by_server()
        await trio.testing.wait_all_tasks_blocked()
        assert pieces == 3
        assert server.reactor.outcomes.tasks == 0
        assert not server.reactor.slices.locked()


async def _read_slowly(peer: Peer, count: int, sizes: list[int]) -> list[int]:
    """Read replies a few bytes at a time, ``sizes`` in turn; return their numbers in order of arrival."""
    found: list[int] = []
    at = 0
    while len(found) < count:
        data = await peer.stream.receive_some(sizes[at % len(sizes)])
        assert data
        at += 1
        peer.arrived += peer._decoder.feed(data)
        found += [reply.opaque for reply in peer.arrived]
        assert all(reply.code == 0 for reply in peer.arrived)
        peer.arrived.clear()
    return found


@settings(max_examples=25, deadline=None)
@given(
    codes=st.lists(st.sampled_from([PLAIN, TASK, LARGE, DEFER, HOLD, FAST, ECHO]), min_size=1, max_size=120),
    sizes=st.lists(st.integers(1000, 200_000), min_size=1, max_size=5),
    binary=st.booleans(),
)
def test_an_honest_client_that_reads_slowly_gets_every_reply_once(
    codes: list[int], sizes: list[int], binary: bool
) -> None:
    encoding = Encoding.ROCKETMQ if binary else Encoding.JSON

    async def main() -> None:
        handlers = Handlers()
        async with serving(handlers.table(), LIMITS) as server, server.peer(receive_buffer=4096) as peer:

            async def release() -> None:
                while True:
                    await trio.lowlevel.checkpoint()
                    handlers.release()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(release)
                frames = [request(code, opaque=n, ext=EXT, encoding=encoding) for n, code in enumerate(codes)]
                nursery.start_soon(lambda: peer.send(*frames))
                arrived = await _read_slowly(peer, len(codes), sizes)
                nursery.cancel_scope.cancel()
            assert sorted(arrived) == list(range(len(codes)))
            stats = server.reactor.stats
            assert (stats.inflight, stats.held, stats.paused, stats.busy) == (0, 0, 0, 0)
            assert handlers.fast_ones == (0 if binary else codes.count(FAST))

    trio.run(main)
