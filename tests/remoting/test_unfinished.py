"""Guards the memory for partly received frames: one total, the slowest sender closed first, some frame progresses."""

import select
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog
import trio
import trio.testing

from tests.remoting.harness import Peer, Server, request, until
from tests.remoting.harness import within_seconds as serving
from trimq.protocol.frame import encode
from trimq.remoting.config.configuration import NettyServerConfig
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.runtime.memory_limit import memory_allowed, unfinished_allowed
from trimq.remoting.server.reactor import Connection, ReactorLimits

MIB = 1 << 20
FRAME = encode(request(body=bytes(2 * MIB)))
LIMITS = ReactorLimits(max_unfinished=4 * MIB)


def taken(connections: Sequence[Connection]) -> int:
    """The memory of partly received frames, counted directly."""
    return sum(len(conn.rest) + (len(conn.big.buffer) if conn.big is not None else 0) for conn in connections)


def check(server: Server) -> None:
    stats = server.reactor.stats
    assert stats.unfinished == taken(list(server.reactor.connections.values()))
    assert stats.unfinished <= LIMITS.max_unfinished


async def seconds(clock: ManualClock, count: int) -> None:
    for _ in range(count):
        clock.advance(1)
        await trio.testing.wait_all_tasks_blocked()


async def begin(server: Server, peer: Peer, size: int) -> None:
    """Send the first ``size`` bytes of FRAME, and wait until the server has received them."""
    before = server.reactor.stats.bytes_in
    await peer.send_bytes(FRAME[:size])
    await until(server, f"s.bytes_in == {before + size}")


async def test_the_slowest_sender_is_closed_when_memory_runs_out_and_the_others_get_on() -> None:
    clock = ManualClock()
    async with serving(limits=LIMITS, clock=clock) as server, server.peer() as stalled, server.peer() as slow:
        await begin(server, stalled, 900_000)
        await begin(server, slow, 300_000)
        for number in range(8):
            await slow.send_bytes(FRAME[300_000 + number * 1000 : 301_000 + number * 1000])
            await seconds(clock, 1)
        async with server.peer() as quick:
            with structlog.testing.capture_logs() as logs:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(quick.send_bytes, FRAME)
                    await seconds(clock, 2)
                assert (await quick.receive()).code == 0
            assert await stalled.is_closed_by_server()
        (event,) = [log for log in logs if log["event"] == "connection_closed" and "slowest" in log["reason"]]
        assert event["reason"] == "it was the slowest sender when memory for unfinished frames ran short"
        assert server.reactor.stats.unfinished_closed == 1
        await slow.send_bytes(FRAME[308_000:])
        assert (await slow.receive()).code == 0
        check(server)
        assert server.reactor.stats.unfinished == 0


async def test_a_quick_new_sender_waits_where_all_are_new_and_is_not_closed() -> None:
    clock = ManualClock()
    async with serving(limits=LIMITS, clock=clock) as server, server.peer() as one, server.peer() as two:
        await begin(server, one, 1_000_000)
        await begin(server, two, 1_000_000)
        async with server.peer() as new:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(new.send_bytes, FRAME)
                await seconds(clock, 3)
                check(server)
                assert server.reactor.stats.unfinished_closed == 0
                async with server.peer() as small:  # it has a share of its own
                    frame = encode(request(body=bytes(20_000)))
                    await small.send_bytes(frame[:9000])
                    await trio.testing.wait_all_tasks_blocked()
                    await small.send_bytes(frame[9000:])
                    assert (await small.receive()).code == 0
                await seconds(clock, 5)
                assert (await new.receive()).code == 0
            assert server.reactor.stats.unfinished_closed >= 1


@pytest.mark.parametrize("size", [20_000, 250_000, 1_000_000])
async def test_the_total_holds_whatever_many_connections_begin(size: int) -> None:
    clock = ManualClock()
    async with serving(limits=LIMITS, clock=clock) as server, server.peer() as good, trio.open_nursery() as nursery:
        count = 6 * MIB // size
        for _ in range(count):
            peer = Peer(await trio.open_tcp_stream(*server.address))
            nursery.start_soon(_send_what_goes, peer, FRAME[:size])
        for _ in range(20):
            await trio.testing.wait_all_tasks_blocked()
            check(server)
            assert (await good.ask(request())).code == 0
            clock.advance(1)
        assert server.reactor.stats.unfinished_closed >= 1
        nursery.cancel_scope.cancel()


async def _send_what_goes(peer: Peer, data: bytes) -> None:
    try:
        await peer.send_bytes(data)
        await peer.is_closed_by_server()
    except trio.BrokenResourceError:
        pass
    finally:
        await trio.aclose_forcefully(peer.stream)


@pytest.mark.parametrize("length", [100, 1000, 2 * MIB])
async def test_a_byte_now_and_then_does_not_keep_a_connection(length: int) -> None:
    clock = ManualClock()
    frame = encode(request(body=bytes(length)))
    async with serving(clock=clock) as server, server.peer() as peer, server.peer() as idle:
        await idle.ask(request())
        for number in range(12):
            await peer.send_bytes(frame[number : number + 1])
            await seconds(clock, 10)
            await idle.ask(request())
        await seconds(clock, 2)
        assert await peer.is_closed_by_server()
        assert server.reactor.stats.unfinished_closed == 1
        check(server)
        assert (await idle.ask(request())).code == 0


async def test_a_slow_link_with_a_long_message_survives() -> None:
    """600 bytes a second are enough for the default of 64 KiB in two minutes."""
    clock = ManualClock()
    frame = encode(request(body=bytes(400_000)))
    async with serving(clock=clock) as server, server.peer() as peer:
        for at in range(0, len(frame), 6000):
            await peer.send_bytes(frame[at : at + 6000])
            await seconds(clock, 10)
        assert (await peer.receive()).code == 0
        assert server.reactor.stats.unfinished == 0


async def test_a_client_that_always_has_a_frame_on_its_way_is_not_slow() -> None:
    """Each check finds an unfinished frame, but never the same one twice."""
    clock = ManualClock()
    frame = encode(request(body=bytes(50)))
    async with serving(clock=clock) as server, server.peer() as peer:
        await peer.send_bytes(frame[:10])
        for _ in range(40):
            await seconds(clock, 10)
            await peer.send_bytes(frame[10:] + frame[:10])
            assert (await peer.receive()).code == 0
        assert server.reactor.stats.unfinished_closed == 0


async def test_whole_frames_of_a_paused_connection_are_not_unfinished() -> None:
    """The server does not read it, so the rest of a frame cannot arrive; its time starts when it is read again."""
    clock = ManualClock()
    limits = ReactorLimits(high_water=100_000, low_water=1000, frame_progress=1000)
    frame = encode(request(body=bytes(30_000)))
    async with (
        serving(limits=limits, clock=clock) as server,
        server.peer(receive_buffer=4096) as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(peer.send_bytes, frame * 400)
        await until(server, "s.paused")
        for _ in range(20):
            await seconds(clock, 10)
            for _ in range(30):  # the client reads a little, so that it is not idle
                await peer.stream.receive_some(20_000)
        assert server.reactor.stats.unfinished_closed == 0
        nursery.cancel_scope.cancel()


def test_the_default_is_a_share_of_the_memory_of_the_control_group(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("2147483648\n")
    assert memory_allowed((limit, tmp_path / "nothing")) <= 2 << 30
    limit.write_text("max\n")
    machine = memory_allowed((limit,))
    assert machine == memory_allowed(()) > 0
    assert unfinished_allowed(2 << 30) == 128 * MIB
    assert unfinished_allowed(1 << 20) == 64 * MIB
    assert unfinished_allowed(1 << 50) == 1024 * MIB


def test_the_total_takes_at_least_two_frames() -> None:
    problem = NettyServerConfig(max_unfinished_frame_bytes=20_000_000).problem()
    assert problem == ("maxUnfinishedFrameBytes", "0, or at least twice frameMaxLength (16777216)")
    config = NettyServerConfig(max_unfinished_frame_bytes=40_000_000, min_frame_progress_bytes=77)
    assert config.problem() is None
    limits = ReactorLimits.of(config)
    assert (limits.max_unfinished, limits.frame_progress) == (40_000_000, 77)


def test_the_default_total_takes_two_frames_however_long_they_may_be() -> None:
    """Otherwise a frame that frameMaxLength allows would never be received."""
    assert ReactorLimits.of(NettyServerConfig(frame_max_length=1024 * MIB)).max_unfinished == 2048 * MIB


async def test_many_that_begin_long_frames_at_once_all_end_and_none_is_closed() -> None:
    """Their frames need three times the memory: none may wait for another that waits itself."""
    clock = ManualClock()
    limits = ReactorLimits(max_unfinished=16 * MIB)
    async with serving(limits=limits, clock=clock) as server:
        ended = 0

        async def ask() -> None:
            nonlocal ended
            async with server.peer() as peer:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(peer.send_bytes, FRAME)
                    assert (await peer.receive()).code == 0
                ended += 1

        async with trio.open_nursery() as nursery:
            for _ in range(24):
                nursery.start_soon(ask)
            while ended < 24:
                await seconds(clock, 1)
        assert server.reactor.stats.unfinished_closed == server.reactor.stats.unfinished == 0


async def test_an_event_of_before_does_not_read_a_connection_that_waits_for_memory() -> None:
    """A round may hold an event from before the wait. Its buffer is full, so a read would look like end of file."""
    clock = ManualClock()
    async with serving(limits=LIMITS, clock=clock) as server, server.peer() as one, server.peer() as two:
        for peer in (one, two):
            await begin(server, peer, 1_000_000)
        async with server.peer() as new, trio.open_nursery() as nursery:
            nursery.start_soon(_send_what_goes, new, FRAME)
            await trio.testing.wait_all_tasks_blocked()
            (waits,) = [conn for conn in server.reactor.connections.values() if conn.aside]
            before = server.reactor.stats.bytes_in
            await server.reactor._round([(waits.sock.fileno(), select.EPOLLIN)])
            assert server.reactor.stats.bytes_in == before
            nursery.cancel_scope.cancel()
