"""Requests that arrive several at a time are held and served together; clients see no difference."""

import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

import msgspec
import pytest
import trio
import trio.testing

from tests.remoting.harness import Peer, Server, echo, request, serving
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.headers.base import Empty
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.gate import Feature, Gate, Sees
from trimq.remoting.server.grouping import FEW, GROUP_BYTES, LEAST, LONGEST_REST, MOST
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, Later, Outcome, Served, Span
from trimq.remoting.server.limits import ReactorLimits
from trimq.remoting.server.reactor import Connection

ECHO = 100
OTHER = 101
ALSO = 102
SWITCH = 103


def frame(opaque: int, body: bytes = b"body", code: int = ECHO) -> bytes:
    header = b'{"code":%d,"extFields":{},"flag":0,"opaque":%d}' % (code, opaque)
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def opaque_of(data: memoryview) -> int:
    (head,) = struct.unpack_from(">I", data, 4)
    return int(msgspec.json.decode(data[8 : 8 + head])["opaque"])


class Together:
    """A GroupedServer that answers with the text ``together``; ``calls`` has the number of frames of each span."""

    def __init__(self, code: int = ECHO) -> None:
        self.code = code
        self.calls: list[list[int]] = []
        self.seen: list[int] = []
        self.order: list[int] = []
        """Opaques in the order in which they were served, together or alone."""
        self.passes = False
        self.stops = False
        """Whether it hands back half of every second span."""
        self.error: Exception | None = None
        self.later: list[tuple[Connection, list[int]]] | None = None
        self.alone: list[int] | None = None
        """Opaques of requests that came alone; None: it skips them."""

    def serve_one(self, connection: Connection, frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        if self.error is not None:
            raise self.error
        if self.alone is None:
            return None
        self.alone.append(opaque_of(frame))
        if self.later is not None:
            self.later.append((connection, self.alone[-1:]))
            return DEFERRED
        return answered(self.alone[-1], b"alone")

    def serve(self, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        assert [span.begin for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(frames)
        if self.error is not None:
            self.calls.append([])
            raise self.error
        found: list[tuple[list[int], list[int]]] = []
        for span in spans:
            found.append(self.opaques_of(frames, span, min(most, span.most)))
            most -= len(found[-1][0])
        self.calls.append([len(own) for own, _ in found])
        if self.passes:
            return None
        parts, replies = [], []
        for number, (span, (own, stops)) in enumerate(zip(spans, found, strict=True)):
            count = len(own) // 2 if self.stops and number % 2 else len(own)
            opaques = own[:count]
            self.seen += opaques
            self.order += opaques
            parts.append((count, stops[count]))
            if self.later is not None and opaques:
                self.later.append((span.connection, opaques))
            replies.append(b"".join(answered(opaque, b"together") for opaque in opaques))
        return Served(parts, replies) if self.later is None else Served(parts, deferred=True)

    def opaques_of(self, frames: memoryview, span: Span, most: int) -> tuple[list[int], list[int]]:
        """Opaques of the leading whole frames of its code, and the start of each and of the next frame."""
        found: list[int] = []
        stops = [span.begin]
        while len(found) < most and span.end - stops[-1] >= 8:
            at = stops[-1]
            stop = at + 4 + int.from_bytes(frames[at : at + 4], "big")
            if stop > span.end or frames[at + 8 : at + 20] != frame(1, code=self.code)[8:20]:
                break
            found.append(opaque_of(frames[at:]))
            stops.append(stop)
        return found, stops


def answered(opaque: int, text: bytes) -> bytes:
    return encode(RemotingCommand(ECHO, opaque).reply(body=text))


class Fixture:
    def __init__(self, server: Server, together: Together, single: list[int]) -> None:
        self.server = server
        self.together = together
        self.single = single
        """Opaques of the requests served one by one."""


@asynccontextmanager
async def holding(limits: ReactorLimits | None = None) -> AsyncIterator[Fixture]:
    """A server that serves requests of ECHO together.

    Its turns have no end by default: on a busy machine short ones end early.
    """
    together = Together()
    single: list[int] = []

    def fast(_connection: Connection, request: TypedRequest[Empty]) -> bytes | None:
        single.append(request.opaque)
        together.order.append(single[-1])
        return answered(single[-1], b"single")

    table = HandlerTable()
    table.register(OTHER, echo)
    table.register(ECHO, echo, header=Empty, fast=fast, grouped=together)
    async with serving(table, limits or ReactorLimits(turn=60)) as server:
        fixture = Fixture(server, together, single)
        yield fixture


async def replies_to(peer: Peer, count: int) -> dict[int, bytes]:
    found = [await peer.receive() for _ in range(count)]
    assert len({reply.opaque for reply in found}) == count
    return {reply.opaque: bytes(reply.body) for reply in found}


def raw_socket(peer: Peer) -> socket.socket:
    """The socket of a peer, for sending without running the reactor."""
    raw: socket.socket = peer.stream.socket._sock  # type: ignore[attr-defined]
    return raw


def opaques(begin: int, count: int) -> range:
    return range(begin, begin + count)


async def test_many_of_one_connection_are_served_together() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        numbers = opaques(1000, LEAST)
        await peer.send_bytes(b"".join(map(frame, numbers)))
        assert await replies_to(peer, LEAST) == dict.fromkeys(numbers, b"together")
        assert fixture.together.calls == [[LEAST]]
        assert fixture.together.seen == list(numbers)
        assert fixture.server.reactor.stats.frames == LEAST


async def test_those_of_several_connections_are_served_together() -> None:
    """All requests that have arrived when a round starts are one group; each client gets its own replies."""
    async with holding() as fixture, fixture.server.peer() as one, fixture.server.peer() as two:
        for peer, begin in ((one, 1000), (two, 2000)):
            raw_socket(peer).sendall(b"".join(map(frame, opaques(begin, LEAST - FEW))))
        assert await replies_to(one, LEAST - FEW) == dict.fromkeys(opaques(1000, LEAST - FEW), b"together")
        assert await replies_to(two, LEAST - FEW) == dict.fromkeys(opaques(2000, LEAST - FEW), b"together")
        assert fixture.together.calls == [[LEAST - FEW, LEAST - FEW]]


@pytest.mark.parametrize("count", [1, FEW - 1])
async def test_few_are_served_one_by_one(count: int) -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(b"".join(map(frame, opaques(1000, count))))
        assert await replies_to(peer, count) == dict.fromkeys(opaques(1000, count), b"single")
        assert fixture.single == list(opaques(1000, count))
        assert not fixture.together.calls


async def test_a_frame_that_is_too_long_ends_its_connection_among_many_too() -> None:
    """The length of held frames is not checked, so none is held if the receive buffer has space for longer ones."""
    async with holding(ReactorLimits(max_frame=4096)) as fixture, fixture.server.peer() as peer:
        numbers = opaques(1000, LEAST)
        raw_socket(peer).sendall(b"".join(map(frame, numbers)) + frame(2000, bytes(4096)) + frame(3000))
        assert await replies_to(peer, LEAST) == dict.fromkeys(numbers, b"single")
        assert await peer.stream.receive_some() == b""
        assert not fixture.together.calls


async def one_each(fixture: Fixture, peers: list[Peer], begin: int) -> None:
    """Send a request from each peer; all have arrived when the round starts."""
    for at, peer in enumerate(peers):
        raw_socket(peer).sendall(frame(begin + at))
    for at, peer in enumerate(peers):
        assert (await peer.receive()).opaque == begin + at
    assert fixture.together.order[-len(peers) :] == list(opaques(begin, len(peers)))


async def test_one_that_comes_alone_is_its_server_s_first() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.alone = []
        for opaque in (1, 2):
            await peer.send_bytes(frame(opaque))
            assert await replies_to(peer, 1) == {opaque: b"alone"}
        assert (fixture.together.alone, fixture.single, fixture.together.calls) == ([1, 2], [], [])
        assert fixture.server.reactor.stats.frames == 2
        fixture.together.alone = None  # it skips requests that come alone
        await peer.send_bytes(frame(3))
        assert await replies_to(peer, 1) == {3: b"single"}


async def test_one_that_comes_alone_may_be_answered_later() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.alone = []
        later = fixture.together.later = []
        await peer.send_bytes(frame(1))
        while not later:
            await trio.lowlevel.checkpoint()
        ((connection, _),) = later
        assert (connection.inflight, fixture.server.reactor.stats.inflight) == (1, 1)
        connection.complete(answered(1, b"later"))
        assert await replies_to(peer, 1) == {1: b"later"}
        assert connection.inflight == 0


async def test_what_is_raised_for_one_that_came_alone_is_its_reply() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.error = ValueError("a fault")
        await peer.send_bytes(frame(1))
        reply = await peer.receive()
        assert (reply.opaque, reply.code) == (1, ResponseCode.SYSTEM_ERROR)
        assert "a fault" in (reply.remark or "")
        assert fixture.server.reactor.stats.frames == 1
        assert fixture.single == []


async def test_clients_with_one_at_a_time_where_there_are_many() -> None:
    """Frames are held from the second round on, and no longer after a while of small rounds only."""
    async with holding(ReactorLimits(turn=60)) as fixture, AsyncExitStack() as stack:  # one turn serves a whole round
        peers = [await stack.enter_async_context(fixture.server.peer()) for _ in range(LEAST)]
        await trio.testing.wait_all_tasks_blocked()
        await one_each(fixture, peers, 1000)
        assert not fixture.together.calls
        for turn in range(3):
            await one_each(fixture, peers, 2000 + 100 * turn)
        assert fixture.together.calls == [[1] * LEAST] * 3
        for number in opaques(3000, 16):
            await one_each(fixture, peers[:1], number)
        assert fixture.together.calls[3:] == [[1]] * 16
        fixture.together.calls = fixture.together.calls[:3]
        await one_each(fixture, peers, 4000)
        assert len(fixture.together.calls) == 3
        await one_each(fixture, peers, 5000)
        assert len(fixture.together.calls) == 4


async def test_no_more_than_so_many_at_once() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(b"".join(map(frame, opaques(1000, 3 * MOST))))
        assert len(await replies_to(peer, 3 * MOST)) == 3 * MOST
        assert all(sum(call) <= MOST for call in fixture.together.calls)
        assert sorted(fixture.single + fixture.together.seen) == list(opaques(1000, 3 * MOST))


@pytest.mark.parametrize("cut", [1, 7, 20, len(frame(1000)) - 1])
async def test_what_does_not_end_with_a_frame_is_served_as_far_as_it_goes(cut: int) -> None:
    data = b"".join(map(frame, opaques(1000, LEAST + 1)))
    stop = len(data) - len(frame(1000)) + cut
    async with holding() as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(data[:stop])
        assert len(await replies_to(peer, LEAST)) == LEAST
        await peer.send_bytes(data[stop:])
        assert list(await replies_to(peer, 1)) == [1000 + LEAST]
        assert fixture.together.seen[:LEAST] == list(opaques(1000, LEAST))
        assert fixture.together.order == list(opaques(1000, LEAST + 1))


async def test_lengths_of_all_kinds_are_served_together() -> None:
    frames = [frame(opaque, b"b" * (37 * opaque % 5000)) for opaque in opaques(1000, 3 * LEAST)]
    async with holding() as fixture, fixture.server.peer() as peer:
        await trio.testing.wait_all_tasks_blocked()
        raw_socket(peer).sendall(b"".join(frames))
        assert len(await replies_to(peer, 3 * LEAST)) == 3 * LEAST
        assert fixture.together.order == list(opaques(1000, 3 * LEAST))
        assert len(fixture.together.seen) > LEAST


async def test_what_is_left_of_a_turn_is_held_behind_others() -> None:
    """A frame that ends in the next turn, between two clients whose frames are whole."""
    async with holding(ReactorLimits(turn=60)) as fixture, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(fixture.server.peer()) for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked()
        intake = fixture.server.reactor.intake
        by_port = {connection.peer[1]: connection for connection in fixture.server.reactor.connections.values()}
        connections = [by_port[raw_socket(peer).getsockname()[1]] for peer in peers]
        data = [b"".join(map(frame, opaques(1000 * number, FEW + 1))) for number in (1, 2, 3)]
        intake.turn_end = float("inf")
        raw_socket(peers[1]).sendall(data[1][:-5])
        intake.serve(connections[1])
        intake.grouping.serve()
        assert connections[1].rest
        age = connections[1].frame
        raw_socket(peers[1]).sendall(data[1][-5:] + data[1])
        for peer, part in ((peers[0], data[0]), (peers[2], data[2])):
            raw_socket(peer).sendall(part)
        for connection in connections:
            intake.serve(connection)
        assert intake.grouping.end, "all three are held"
        fixture.server.reactor.wake()
        for peer in (peers[0], peers[2]):
            assert len(await replies_to(peer, FEW + 1)) == FEW + 1
        assert fixture.together.calls == [[FEW], [FEW + 1, FEW + 2, FEW + 1]]
        assert connections[1].frame == age


async def test_a_long_rest_is_not_put_behind_others() -> None:
    """Otherwise there would be no space to receive more."""
    async with holding(ReactorLimits(turn=60)) as fixture, fixture.server.peer() as one, fixture.server.peer() as two:
        await trio.testing.wait_all_tasks_blocked()
        intake = fixture.server.reactor.intake
        by_port = {connection.peer[1]: connection for connection in fixture.server.reactor.connections.values()}
        first, second = (by_port[raw_socket(peer).getsockname()[1]] for peer in (one, two))
        intake.turn_end = float("inf")
        many = (GROUP_BYTES - 1000) // len(frame(1000))
        raw_socket(one).sendall(b"".join(map(frame, opaques(1000, many))))
        intake.serve(first)
        assert intake.grouping.end
        waiting = b"".join(map(frame, opaques(8000, (LONGEST_REST + 1000) // len(frame(8000)))))
        intake._unfinished.keep(second, waiting)
        second.ready = True
        intake.serve(second)
        assert fixture.together.calls
        assert fixture.together.seen[:MOST] == list(opaques(1000, MOST))
        fixture.server.reactor.wake()
        await replies_to(one, many)
        await replies_to(two, len(waiting) // len(frame(8000)))


async def test_a_connection_s_requests_keep_their_order() -> None:
    """Held frames, other ones behind them, and held frames again, in whatever pieces they arrive."""
    async with holding() as fixture, fixture.server.peer() as peer:
        expected: list[int] = []
        data = b""
        for turn in range(40):
            begin = 1000 + 100 * turn
            data += b"".join(map(frame, opaques(begin, 3 * LEAST)))
            data += frame(begin + 3 * LEAST, b"a longer body")
            expected += opaques(begin, 3 * LEAST + 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_in_pieces, fixture.server, peer, data)
            assert len(await replies_to(peer, len(expected))) == len(expected)
        assert fixture.together.order == expected
        assert fixture.together.seen


async def _in_pieces(server: Server, peer: Peer, data: bytes) -> None:
    """Some end with a frame, some within one; each is received before the next is sent."""
    size, at = len(frame(1000)), 0
    while at < len(data):
        for piece in (size * LEAST, size * LEAST + 7, 3 * size - 7, size * (LEAST + 3)):
            await peer.send_bytes(data[at : at + piece])
            at = min(at + piece, len(data))
            while server.reactor.stats.bytes_in < at:
                await trio.lowlevel.checkpoint()


async def test_what_cannot_be_served_together_is_served_one_by_one() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.passes = True
        await peer.send_bytes(b"".join(map(frame, opaques(1000, LEAST))))
        assert await replies_to(peer, LEAST) == dict.fromkeys(opaques(1000, LEAST), b"single")
        assert fixture.together.calls == [[LEAST]]
        assert fixture.single == list(opaques(1000, LEAST))


async def test_what_comes_behind_may_be_anything() -> None:
    other = frame(5000, b"b", OTHER)
    data = b"".join([*map(frame, opaques(1000, FEW)), other, *map(frame, opaques(2000, LEAST))])
    async with holding(ReactorLimits(turn=60)) as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(data)
        assert len(await replies_to(peer, FEW + 1 + LEAST)) == FEW + 1 + LEAST
        assert fixture.together.seen == list(opaques(1000, FEW))
        assert fixture.single == list(opaques(2000, LEAST))


async def test_a_frame_that_goes_on_in_what_comes_next_is_one() -> None:
    """Received twice in a round, the second time with bytes in front that look like a frame's length."""
    size = len(frame(1000))
    tail = struct.pack(">I", size - 4) + bytes(FEW * size - 4)
    cut = frame(5000, b"b" * (size - 3) + tail)
    first = [frame(1000), *map(frame, opaques(1001, FEW))]
    data = b"".join([*first, cut])
    stop = data.index(tail)
    assert stop % size
    first.append(frame(6000, b"b" * (len("body") + size - stop % size)))
    data = b"".join([*first, cut])
    stop = data.index(tail)
    assert not stop % size
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.passes = True
        await trio.testing.wait_all_tasks_blocked()
        connection, intake = fixture.server.connection(), fixture.server.reactor.intake
        for piece in (data[:stop], data[stop:]):  # the reactor does not run in between
            raw_socket(peer).sendall(piece)
            intake.turn_end = float("inf")
            intake.serve(connection)
        fixture.server.reactor.wake()
        assert sorted(await replies_to(peer, FEW + 3)) == [*opaques(1000, FEW + 1), 5000, 6000]
        assert fixture.single == [*opaques(1000, FEW + 1), 6000, 5000]


async def test_what_it_hands_back_is_served_one_by_one_and_nothing_twice() -> None:
    """Half of every second client's frames are served together; the other half gets its replies too, in order."""
    async with holding() as fixture, AsyncExitStack() as stack:
        fixture.together.stops = True
        peers = [await stack.enter_async_context(fixture.server.peer()) for _ in range(4)]
        await trio.testing.wait_all_tasks_blocked()
        owned = [opaques(1000 + 100 * number, LEAST) for number in range(len(peers))]
        for peer, own in zip(peers, owned, strict=True):
            raw_socket(peer).sendall(b"".join(map(frame, own)))
        for number, (peer, own) in enumerate(zip(peers, owned, strict=True)):
            replies = await replies_to(peer, LEAST)
            half = LEAST // 2 if number % 2 else LEAST
            together, single = list(own)[:half], list(own)[half:]
            assert {opaque: replies[opaque] for opaque in together} == dict.fromkeys(together, b"together")
            assert {opaque: replies[opaque] for opaque in single} == dict.fromkeys(single, b"single")
        assert sorted(fixture.together.order) == sorted(opaque for own in owned for opaque in own)
        assert fixture.single == [opaque for own in owned[1::2] for opaque in list(own)[LEAST // 2 :]]
        assert fixture.server.reactor.stats.frames == 4 * LEAST


@pytest.mark.parametrize(
    "served",
    [
        Served([]),
        Served([], deferred=True),
        Served([(1, 5)]),
        Served([(1, 5)] * 2, [b""] * 2),
        Served([(1, 1 << 20)], [b""]),
        Served([(-1, 0)], [b""]),
        Served([(5000, 0)], [b""]),
    ],
)
async def test_a_server_that_leaves_out_a_client_costs_its_round_only(served: Served) -> None:
    async with holding() as fixture, fixture.server.peer() as peer, fixture.server.peer() as other:
        await trio.testing.wait_all_tasks_blocked()
        fixture.together.serve = lambda *_: served  # type: ignore[method-assign]
        raw_socket(peer).sendall(b"".join(map(frame, opaques(1000, LEAST))))
        assert await peer.is_closed_by_server()
        stats = fixture.server.reactor.stats
        assert (stats.failures, stats.inflight) == (1, 0)
        assert (await other.ask(request(OTHER))).code == 0


async def test_a_part_of_what_comes_later_is_in_flight_and_the_rest_is_served() -> None:
    async with holding() as fixture, AsyncExitStack() as stack:
        fixture.together.stops = True
        later = fixture.together.later = []
        peers = [await stack.enter_async_context(fixture.server.peer()) for _ in range(2)]
        await trio.testing.wait_all_tasks_blocked()
        for number, peer in enumerate(peers):
            raw_socket(peer).sendall(b"".join(map(frame, opaques(1000 + 100 * number, LEAST))))
        half = LEAST // 2
        assert set(await replies_to(peers[1], LEAST - half)) == set(list(opaques(1100, LEAST))[half:])
        stats = fixture.server.reactor.stats
        assert stats.inflight == LEAST + half
        for connection, numbers in later:
            connection.complete(b"".join(answered(opaque, b"later") for opaque in numbers), len(numbers))
        assert set(await replies_to(peers[0], LEAST)) == set(opaques(1000, LEAST))
        assert set(await replies_to(peers[1], half)) == set(list(opaques(1100, LEAST))[:half])
        assert stats.inflight == 0


async def test_what_it_raises_is_everybody_s_reply_and_nothing_is_served_twice() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.error = ValueError("broken")
        await peer.send_bytes(b"".join(map(frame, opaques(1000, LEAST))))
        replies = [await peer.receive() for _ in range(LEAST)]
        assert {reply.code for reply in replies} == {ResponseCode.SYSTEM_ERROR}
        assert [reply.opaque for reply in replies] == list(opaques(1000, LEAST))
        assert not fixture.single
        fixture.together.error = None
        await peer.send_bytes(b"".join(map(frame, opaques(2000, LEAST))))
        assert await replies_to(peer, LEAST) == dict.fromkeys(opaques(2000, LEAST), b"together")


async def test_a_header_that_is_broken_ends_its_connection_only_though_the_server_raises() -> None:
    async with holding() as fixture, fixture.server.peer() as broken, fixture.server.peer() as good:
        fixture.together.error = ValueError("broken")
        await trio.testing.wait_all_tasks_blocked()
        cut = frame(1001).replace(b'"flag":0', b'"flag":x')
        raw_socket(broken).sendall(frame(1000) + cut + b"".join(map(frame, opaques(1002, LEAST))))
        raw_socket(good).sendall(b"".join(map(frame, opaques(2000, LEAST))))
        first = await broken.receive()
        assert (first.opaque, first.code) == (1000, ResponseCode.SYSTEM_ERROR)
        assert await broken.is_closed_by_server()
        replies = [await good.receive() for _ in range(LEAST)]
        assert {reply.code for reply in replies} == {ResponseCode.SYSTEM_ERROR}
        assert fixture.server.reactor.stats.broken == 1


async def test_replies_over_the_mark_are_sent_at_once() -> None:
    async with holding(ReactorLimits(high_water=500, low_water=100)) as fixture, fixture.server.peer() as peer:
        await trio.testing.wait_all_tasks_blocked()
        connection, intake = fixture.server.connection(), fixture.server.reactor.intake
        raw_socket(peer).sendall(b"".join(map(frame, opaques(1000, LEAST))))
        intake.turn_end = float("inf")
        intake.serve(connection)
        assert connection.in_group
        intake.grouping.serve()
        assert not connection.out.chunks, "without a round's end"
        assert await replies_to(peer, LEAST) == dict.fromkeys(opaques(1000, LEAST), b"together")


async def test_replies_that_come_later() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        later = fixture.together.later = []
        await peer.send_bytes(b"".join(map(frame, opaques(1000, LEAST))))
        stats = fixture.server.reactor.stats
        while not later:
            await trio.lowlevel.checkpoint()
        assert stats.inflight == LEAST
        ((connection, waiting),) = later
        assert connection.inflight == LEAST
        connection.complete(b"".join(answered(opaque, b"later") for opaque in waiting), LEAST)
        assert (connection.inflight, stats.inflight) == (0, 0)
        assert await replies_to(peer, LEAST) == dict.fromkeys(opaques(1000, LEAST), b"later")


@pytest.mark.parametrize(
    "limits",
    [
        ReactorLimits(max_inflight_per_connection=LEAST - 1),
        ReactorLimits(max_inflight=LEAST - 1),
        ReactorLimits(max_inflight_per_connection=LEAST - 1, turn=0.0),  # the rest is served in later turns
    ],
    ids=["of a connection", "of all", "in short turns"],
)
async def test_more_than_may_be_in_flight_are_answered_busy(limits: ReactorLimits) -> None:
    async with holding(limits) as fixture, fixture.server.peer() as peer:
        later = fixture.together.later = []
        await peer.send_bytes(b"".join(map(frame, opaques(1000, LEAST + 1))))
        replies = [await peer.receive() for _ in range(2)]
        assert {reply.code for reply in replies} == {ResponseCode.SYSTEM_BUSY}
        assert [reply.opaque for reply in replies] == [1000 + LEAST - 1, 1000 + LEAST]
        ((connection, numbers),) = later
        connection.complete(b"".join(answered(opaque, b"later") for opaque in numbers), len(numbers))
        assert set(await replies_to(peer, LEAST - 1)) == set(opaques(1000, LEAST - 1))


async def test_a_client_that_disconnects_immediately_harms_no_other() -> None:
    async with holding() as fixture:
        for _ in range(20):
            async with fixture.server.peer() as peer, fixture.server.peer() as stays:
                await stays.send_bytes(b"".join(map(frame, opaques(3000, LEAST))))
                await peer.send_bytes(b"".join(map(frame, opaques(1000, LEAST))))
                await peer.stream.aclose()
                assert set(await replies_to(stays, LEAST)) == set(opaques(3000, LEAST))


@pytest.mark.parametrize("count", [FEW, LEAST])
async def test_what_was_received_is_served_before_its_connection_is_closed(count: int) -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        await trio.testing.wait_all_tasks_blocked()
        connection, intake = fixture.server.connection(), fixture.server.reactor.intake
        raw_socket(peer).sendall(b"".join(map(frame, opaques(1000, count))))
        intake.turn_end = float("inf")
        intake.serve(connection)
        assert not fixture.together.order
        connection.close("closed by a test")
        assert fixture.together.order == list(opaques(1000, count))
        assert set(await replies_to(peer, count)) == set(opaques(1000, count))


async def test_others_requests_are_not_held() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(b"".join(frame(opaque, b"x", OTHER) for opaque in opaques(1000, LEAST)))
        assert len(await replies_to(peer, LEAST)) == LEAST
        assert not fixture.together.calls


async def test_requests_in_the_binary_form_are_held_too() -> None:
    """In other encodings the request code has another position."""
    commands = [RemotingCommand(ECHO, opaque, ext={}, body=b"b", encoding=Encoding.ROCKETMQ) for opaque in range(FEW)]
    async with holding() as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(b"".join(map(encode, commands)))
        assert await replies_to(peer, FEW) == dict.fromkeys(range(FEW), b"b")
        assert fixture.together.calls == [[0]]
        others = [RemotingCommand(OTHER, opaque, ext={}, encoding=Encoding.ROCKETMQ) for opaque in range(FEW)]
        await peer.send_bytes(b"".join(map(encode, others)))
        assert len(await replies_to(peer, FEW)) == FEW
        assert fixture.together.calls == [[0]]


async def test_a_connection_s_encoding_is_that_of_what_was_served_together() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        command = RemotingCommand(OTHER, 1, ext={}, encoding=Encoding.ROCKETMQ)
        assert (await peer.ask(command)).code == 0
        connection = fixture.server.connection()
        encodings = [connection.encoding]
        await peer.send_bytes(b"".join(map(frame, opaques(1000, LEAST))))
        assert await replies_to(peer, LEAST) == dict.fromkeys(opaques(1000, LEAST), b"together")
        encodings.append(connection.encoding)
        assert encodings == [Encoding.ROCKETMQ, Encoding.JSON]


async def test_what_is_never_served_together_is_not_held_for_a_while() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.passes = True
        for turn in range(60):
            await peer.send_bytes(b"".join(map(frame, opaques(1000 + turn * LEAST, LEAST))))
            assert len(await replies_to(peer, LEAST)) == LEAST
        assert 16 <= len(fixture.together.calls) < 50


class Looks:
    """A feature that sees requests with the codes ECHO and ALSO; ``seen`` has their opaques."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.seen: list[int] = []
        self.known: set[Connection] = set()

    def register(self, sees: Sees = Sees.HEADER) -> None:
        admits = self.known.__contains__ if sees is Sees.IDENTITY else None
        self.gate.register(Feature("looks", self._check, sees, frozenset({ECHO, ALSO}), admits))

    def _check(self, _connection: Connection, command: RemotingCommand) -> None:
        self.seen.append(command.opaque)


@asynccontextmanager
async def two_that_are_served_here(fixture: Fixture) -> AsyncIterator[tuple[list[Peer], list[Connection]]]:
    """Two clients, which the test serves by calling the intake."""
    async with fixture.server.peer() as one, fixture.server.peer() as two:
        await trio.testing.wait_all_tasks_blocked()
        by_port = {connection.peer[1]: connection for connection in fixture.server.reactor.connections.values()}
        fixture.server.reactor.intake.turn_end = float("inf")
        yield [one, two], [by_port[raw_socket(peer).getsockname()[1]] for peer in (one, two)]


def switching(connection: Connection, sees: Sees) -> Looks:
    """A feature that the handler of SWITCH registers."""
    looks = Looks(connection.table.gate)

    def switch(_connection: Connection, _command: RemotingCommand) -> Outcome:
        looks.register(sees)
        return None

    connection.table.register(SWITCH, switch)
    return looks


@pytest.mark.parametrize("sees", [Sees.HEADER, Sees.IDENTITY])
@pytest.mark.parametrize("many", [True, False], ids=["others together", "another alone"])
async def test_a_path_that_is_closed_within_a_round_is_closed_for_the_rest_of_it(many: bool, sees: Sees) -> None:
    """One client's rest is served after another's fast path was found, before its use; it may change the gate."""
    async with (
        holding(ReactorLimits(turn=60)) as fixture,
        two_that_are_served_here(fixture) as ((one, two), (first, second)),
    ):
        intake, also = fixture.server.reactor.intake, Together(ALSO)
        also.alone = []
        looks = switching(first, sees)

        def fast(_connection: Connection, request: TypedRequest[Empty]) -> bytes | None:
            return answered(request.opaque, b"single")

        first.table.register(ALSO, echo, header=Empty, fast=fast, grouped=also)
        raw_socket(one).sendall(b"".join(map(frame, opaques(1000, FEW))) + frame(1500, code=SWITCH))
        intake.serve(first)
        assert intake.grouping.end
        numbers = opaques(2000, LEAST if many else 1)
        raw_socket(two).sendall(b"".join(frame(opaque, code=ALSO) for opaque in numbers))
        intake.serve(second)
        fixture.server.reactor.wake()
        assert await replies_to(two, len(numbers)) == dict.fromkeys(numbers, b"body")
        assert looks.seen == list(numbers)
        assert (also.calls, also.alone) == ([], [])
        assert await replies_to(one, FEW) == dict.fromkeys(opaques(1000, FEW), b"together")


async def test_held_frames_are_looked_at_where_the_gate_has_changed_since() -> None:
    """Another client disconnects while they wait, and a callback of that changes the gate."""
    async with (
        holding(ReactorLimits(turn=60)) as fixture,
        two_that_are_served_here(fixture) as ((one, two), (first, second)),
    ):
        intake = fixture.server.reactor.intake
        looks = Looks(first.table.gate)
        second.on_close.append(lambda _: looks.register())
        raw_socket(one).sendall(b"".join(map(frame, opaques(1000, LEAST))))
        intake.serve(first)
        assert intake.grouping.end
        raw_socket(two).shutdown(socket.SHUT_WR)  # the reactor does not run in between
        intake.serve(second)
        assert second.closed
        assert intake.grouping.end, "still held"
        fixture.server.reactor.wake()
        assert await replies_to(one, LEAST) == dict.fromkeys(opaques(1000, LEAST), b"body")
        assert looks.seen == list(opaques(1000, LEAST))
        assert fixture.together.calls == []


@pytest.mark.parametrize("admitted", [0, 1])
async def test_one_that_is_not_admitted_is_looked_at_among_others_that_are(admitted: int) -> None:
    async with (
        holding(ReactorLimits(turn=60)) as fixture,
        two_that_are_served_here(fixture) as (peers, connections),
    ):
        intake, gate = fixture.server.reactor.intake, connections[0].table.gate
        looks = Looks(gate)
        looks.register(Sees.IDENTITY)
        owned = [opaques(1000, LEAST), opaques(2000, LEAST)]
        looks.known.add(connections[admitted])
        for known in ([connections[admitted]], connections):
            looks.known.update(known)
            assert [gate.admit(connection) for connection in connections] == [one in known for one in connections]
            for peer, connection, own in zip(peers, connections, owned, strict=True):
                raw_socket(peer).sendall(b"".join(map(frame, own)))
                intake.serve(connection)
            assert intake.grouping.end
            fixture.server.reactor.wake()
            found = [await replies_to(peer, LEAST) for peer in peers]
            if len(known) == 1:
                assert found[admitted] == dict.fromkeys(owned[admitted], b"single")
                assert found[1 - admitted] == dict.fromkeys(owned[1 - admitted], b"body")
                assert fixture.together.calls == []
            else:
                assert found == [dict.fromkeys(own, b"together") for own in owned]
                assert fixture.together.calls == [[LEAST, LEAST]]
        assert looks.seen == list(owned[1 - admitted])
