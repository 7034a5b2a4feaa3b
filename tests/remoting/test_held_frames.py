"""Requests of one length that a client sends several at a time: held, served together, and nobody sees a difference."""

import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from tests.remoting.harness import Peer, Server, echo, request, serving
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.headers.base import Empty
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Served, Span
from trimq.remoting.server.held_frames import FEW, LEAST, LONGEST, MOST
from trimq.remoting.server.limits import RECEIVE_BUFFER, ReactorLimits
from trimq.remoting.server.reactor import Connection

ECHO = 100
OTHER = 101


def frame(opaque: int, body: bytes = b"body", code: int = ECHO) -> bytes:
    header = b'{"code":%d,"extFields":{},"flag":0,"opaque":%d}' % (code, opaque)
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def opaque_of(data: memoryview) -> int:
    (head,) = struct.unpack_from(">I", data, 4)
    return int(msgspec.json.decode(data[8 : 8 + head])["opaque"])


class Together:
    """An GroupedServer that answers with the text ``together``; ``calls`` says how many frames each owner had."""

    def __init__(self) -> None:
        self.lengths: set[int] = set()
        self.calls: list[list[int]] = []
        self.learnt: list[bytes] = []
        self.seen: list[int] = []
        self.order: list[int] = []
        """Opaques in the order in which they were served, in either way."""
        self.passes = False
        self.stops = False
        """Whether it hands back a half of every second span."""
        self.error: Exception | None = None
        self.later: list[tuple[Connection, list[int]]] | None = None

    def learn(self, frame: bytes, most: int) -> bool:
        assert most == min(MOST, RECEIVE_BUFFER // len(frame))
        if self.error is not None:
            raise self.error
        self.learnt.append(frame)
        self.lengths.add(len(frame))
        return True

    def serve(self, frames: memoryview, spans: Sequence[Span]) -> Served | None:
        self.calls.append([span.frames for span in spans])
        assert [span.begin for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(frames)
        if self.error is not None:
            raise self.error
        length = spans[0].end // spans[0].frames
        if self.passes or any(frames[at : at + 8] != frames[:8] for at in range(0, len(frames), length)):
            return None
        served, replies = [], []
        for number, span in enumerate(spans):
            most = max(1, span.frames // 2) if self.stops and number % 2 else span.frames
            opaques = [opaque_of(frames[span.begin + n * length :]) for n in range(most)]
            self.seen += opaques
            self.order += opaques
            served.append(most)
            if self.later is not None:
                self.later.append((span.connection, opaques))
            replies.append(b"".join(answered(opaque, b"together") for opaque in opaques))
        parts = [(most, span.begin + most * length) for span, most in zip(spans, served, strict=True)]
        partly = parts if self.stops else None
        return Served(replies, parts=partly) if self.later is None else Served(deferred=True, parts=partly)


def answered(opaque: int, text: bytes) -> bytes:
    return encode(RemotingCommand(ECHO, opaque).reply(body=text))


class Fixture:
    def __init__(self, server: Server, together: Together, single: list[int]) -> None:
        self.server = server
        self.together = together
        self.single = single
        """Opaques of what was served one by one."""
        self.fails = False
        self.leaves = False
        """Whether the fast handler leaves everything to the full one."""


@asynccontextmanager
async def holding(limits: ReactorLimits | None = None) -> AsyncIterator[Fixture]:
    """A server that knows the length of ``frame(1000)``."""
    together = Together()
    single: list[int] = []

    def direct(_connection: Connection, request: TypedRequest[Empty]) -> bytes | None:
        if fixture.fails:
            raise ValueError
        if fixture.leaves:
            return None
        single.append(request.opaque)
        together.order.append(single[-1])
        return answered(single[-1], b"single")

    table = HandlerTable()
    table.register(OTHER, echo)
    table.register(ECHO, echo, header=Empty, fast=direct, grouped=together)
    together.lengths.add(len(frame(1000)))
    async with serving(table, limits) as server:
        fixture = Fixture(server, together, single)
        yield fixture


async def replies_to(peer: Peer, count: int) -> dict[int, bytes]:
    found = [await peer.receive() for _ in range(count)]
    assert len({reply.opaque for reply in found}) == count
    return {reply.opaque: bytes(reply.body) for reply in found}


def raw_socket(peer: Peer) -> socket.socket:
    """To send without giving the reactor the loop."""
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
    """What lies ready when a round begins is one group; each gets the replies to its own."""
    async with holding() as fixture, fixture.server.peer() as one, fixture.server.peer() as two:
        for peer, begin in ((one, 1000), (two, 2000)):
            raw_socket(peer).sendall(b"".join(map(frame, opaques(begin, LEAST - FEW))))
        assert await replies_to(one, LEAST - FEW) == dict.fromkeys(opaques(1000, LEAST - FEW), b"together")
        assert await replies_to(two, LEAST - FEW) == dict.fromkeys(opaques(2000, LEAST - FEW), b"together")
        assert fixture.together.calls == [[LEAST - FEW, LEAST - FEW]]


@pytest.mark.parametrize("count", [1, FEW - 1, FEW, LEAST - 1])
async def test_few_are_served_one_by_one(count: int) -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(b"".join(map(frame, opaques(1000, count))))
        assert await replies_to(peer, count) == dict.fromkeys(opaques(1000, count), b"single")
        assert fixture.single == list(opaques(1000, count))
        assert not fixture.together.calls


async def one_each(fixture: Fixture, peers: list[Peer], begin: int) -> None:
    """A request of each, all of which are there when the round begins."""
    for at, peer in enumerate(peers):
        raw_socket(peer).sendall(frame(begin + at))
    for at, peer in enumerate(peers):
        assert (await peer.receive()).opaque == begin + at
    assert fixture.together.order[-len(peers) :] == list(opaques(begin, len(peers)))


async def test_clients_with_one_at_a_time_where_there_are_many() -> None:
    """From the second round on; no longer once there have been only small rounds for a while."""
    async with holding(ReactorLimits(turn=60)) as fixture, AsyncExitStack() as stack:  # no round is cut in two
        peers = [await stack.enter_async_context(fixture.server.peer()) for _ in range(LEAST)]
        await trio.testing.wait_all_tasks_blocked()
        await one_each(fixture, peers, 1000)
        assert not fixture.together.calls
        for turn in range(3):
            await one_each(fixture, peers, 2000 + 100 * turn)
        assert fixture.together.calls == [[1] * LEAST] * 3
        for number in opaques(3000, 16):
            await one_each(fixture, peers[:1], number)
        await one_each(fixture, peers, 4000)
        assert len(fixture.together.calls) == 3
        for turn in range(20):  # not at once: what was held last could not be served together
            await one_each(fixture, peers, 5000 + 100 * turn)
        assert len(fixture.together.calls) > 3


async def test_clients_with_one_at_a_time_are_learnt_from_too() -> None:
    async with holding() as fixture, AsyncExitStack() as stack:
        fixture.together.lengths.clear()
        peers = [await stack.enter_async_context(fixture.server.peer()) for _ in range(LEAST)]
        await trio.testing.wait_all_tasks_blocked()
        for turn in range(3):
            await one_each(fixture, peers, 1000 + 100 * turn)
        assert len(fixture.together.learnt) == 1
        assert fixture.together.calls


async def test_no_more_than_so_many_at_once() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(b"".join(map(frame, opaques(1000, 3 * MOST))))
        assert len(await replies_to(peer, 3 * MOST)) == 3 * MOST
        assert all(sum(call) <= MOST for call in fixture.together.calls)
        assert sorted(fixture.single + fixture.together.seen) == list(opaques(1000, 3 * MOST))


@pytest.mark.parametrize("cut", [1, 7, 20, len(frame(1000)) - 1])
async def test_what_does_not_end_with_a_frame_is_served_as_it_comes(cut: int) -> None:
    data = b"".join(map(frame, opaques(1000, LEAST + 1)))
    stop = len(data) - len(frame(1000)) + cut
    async with holding() as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(data[:stop])
        assert len(await replies_to(peer, LEAST)) == LEAST
        await peer.send_bytes(data[stop:])
        assert list(await replies_to(peer, 1)) == [1000 + LEAST]
        assert fixture.single == list(opaques(1000, LEAST + 1))


async def test_a_connection_s_requests_keep_their_order() -> None:
    """Held ones, others behind them, and held ones again: whatever pieces arrive together."""
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


async def test_frames_of_that_length_may_be_anything() -> None:
    """Only the first frame's length is looked at: what follows may end elsewhere, and is served for what it is."""
    short = frame(5000, b"b")
    long = frame(5001, b"long body"[: 2 * len("body") - 1])
    assert len(short) + len(long) == 2 * len(frame(1000))
    data = b"".join([frame(1000), short, long, *map(frame, opaques(1001, LEAST))])
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.passes = True
        await peer.send_bytes(data)
        assert len(await replies_to(peer, LEAST + 3)) == LEAST + 3
        assert fixture.single == [1000, 5000, 5001, *opaques(1001, LEAST)]


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
        for piece in (data[:stop], data[stop:]):  # the reactor does not get the loop meanwhile
            raw_socket(peer).sendall(piece)
            intake.turn_end = float("inf")
            intake.serve(connection)
        fixture.server.reactor.wake()
        assert sorted(await replies_to(peer, FEW + 3)) == [*opaques(1000, FEW + 1), 5000, 6000]
        assert fixture.single == [*opaques(1000, FEW + 1), 6000, 5000]


async def test_what_it_hands_back_is_served_one_by_one_and_nothing_twice() -> None:
    """Every second client's frames are served to the half: the other half has its replies too, in their order."""
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
    "served", [Served(), Served([b""] * 3), Served([b""], parts=[]), Served(deferred=True, parts=[])]
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
        assert await broken.is_closed_by_server()
        replies = [await good.receive() for _ in range(LEAST)]
        assert {reply.code for reply in replies} == {ResponseCode.SYSTEM_ERROR}
        assert fixture.server.reactor.stats.broken == 1


async def test_replies_over_the_mark_are_sent_at_once() -> None:
    async with holding(ReactorLimits(high_water=1000, low_water=100)) as fixture, fixture.server.peer() as peer:
        await trio.testing.wait_all_tasks_blocked()
        connection, intake = fixture.server.connection(), fixture.server.reactor.intake
        raw_socket(peer).sendall(b"".join(map(frame, opaques(1000, LEAST))))
        intake.turn_end = float("inf")
        intake.serve(connection)
        assert connection.held_back
        intake.held.serve()
        assert not connection.out.chunks, "without a round's end"
        assert await replies_to(peer, LEAST) == dict.fromkeys(opaques(1000, LEAST), b"together")


@pytest.mark.parametrize("known", [True, False])
async def test_frames_of_another_length_end_the_holding(known: bool) -> None:
    longer = [frame(opaque, b"a longer body") for opaque in opaques(3000, LEAST)]
    async with holding() as fixture, fixture.server.peer() as first, fixture.server.peer() as second:
        if known:
            fixture.together.lengths.add(len(longer[0]))
        await trio.testing.wait_all_tasks_blocked()
        connections = list(fixture.server.reactor.connections.values())
        raw_socket(first).sendall(b"".join(map(frame, opaques(1000, LEAST))))
        raw_socket(second).sendall(b"".join(longer))
        intake = fixture.server.reactor.intake
        intake.turn_end = float("inf")
        by_port = {connection.peer[1]: connection for connection in connections}
        for peer in (first, second):
            intake.serve(by_port[raw_socket(peer).getsockname()[1]])
        assert fixture.together.calls == [[LEAST]]
        fixture.server.reactor.wake()
        assert await replies_to(first, LEAST) == dict.fromkeys(opaques(1000, LEAST), b"together")
        answer = b"together" if known else b"single"
        assert await replies_to(second, LEAST) == dict.fromkeys(opaques(3000, LEAST), answer)


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
    [ReactorLimits(max_inflight_per_connection=LEAST - 1), ReactorLimits(max_inflight=LEAST - 1)],
    ids=["of a connection", "of all"],
)
async def test_more_than_may_be_in_flight_are_served_one_by_one(limits: ReactorLimits) -> None:
    """There those beyond the limit are answered SYSTEM_BUSY where replies come later; here they do not."""
    async with holding(limits) as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(b"".join(map(frame, opaques(1000, LEAST))))
        assert len(await replies_to(peer, LEAST)) == LEAST
        assert not fixture.together.calls


async def test_a_client_that_goes_at_once_harms_nobody() -> None:
    async with holding() as fixture:
        for _ in range(20):
            async with fixture.server.peer() as peer, fixture.server.peer() as stays:
                await stays.send_bytes(b"".join(map(frame, opaques(3000, LEAST))))
                await peer.send_bytes(b"".join(map(frame, opaques(1000, LEAST))))
                await peer.stream.aclose()
                assert set(await replies_to(stays, LEAST)) == set(opaques(3000, LEAST))


async def test_an_unknown_length_is_learnt_once_its_frames_were_served() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.lengths.clear()
        await peer.send_bytes(b"".join(map(frame, opaques(1000, FEW))))
        assert await replies_to(peer, FEW) == dict.fromkeys(opaques(1000, FEW), b"single")
        assert fixture.together.learnt == [frame(1000)]
        await peer.send_bytes(b"".join(map(frame, opaques(2000, LEAST))))
        assert await replies_to(peer, LEAST) == dict.fromkeys(opaques(2000, LEAST), b"together")


async def test_long_frames_are_not_learnt() -> None:
    """Too few of them fit into the receive buffer."""
    around = len(frame(1000, b""))
    async with holding() as fixture, fixture.server.peer() as peer:
        for size in (LONGEST + 1, LONGEST):
            await peer.send_bytes(b"".join(frame(opaque, bytes(size - around)) for opaque in opaques(1000, FEW)))
            assert len(await replies_to(peer, FEW)) == FEW
        assert [len(one) for one in fixture.together.learnt] == [LONGEST]


async def test_a_fault_in_learning_ends_nothing() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.lengths.clear()
        fixture.together.error = ValueError("broken")
        await peer.send_bytes(b"".join(map(frame, opaques(1000, FEW))))
        assert await replies_to(peer, FEW) == dict.fromkeys(opaques(1000, FEW), b"single")
        assert fixture.server.reactor.stats.failures == 1


async def test_what_fails_by_itself_is_not_learnt() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.lengths.clear()
        fixture.fails = True
        await peer.send_bytes(b"".join(map(frame, opaques(1000, FEW))))
        assert {(await peer.receive()).code for _ in range(FEW)} == {ResponseCode.SYSTEM_ERROR}
        assert not fixture.together.learnt
        fixture.fails = False
        await peer.send_bytes(b"".join(map(frame, opaques(2000, FEW))))
        assert len(await replies_to(peer, FEW)) == FEW
        assert fixture.together.learnt == [frame(2000)]


async def test_what_the_full_handler_has_served_is_not_learnt() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.lengths.clear()
        fixture.leaves = True
        await peer.send_bytes(b"".join(map(frame, opaques(1000, FEW))))
        assert await replies_to(peer, FEW) == dict.fromkeys(opaques(1000, FEW), b"body")
        assert not fixture.together.learnt
        fixture.leaves = False
        await peer.send_bytes(b"".join(map(frame, opaques(2000, FEW))))
        assert await replies_to(peer, FEW) == dict.fromkeys(opaques(2000, FEW), b"single")
        assert fixture.together.learnt == [frame(2000)]


@pytest.mark.parametrize("count", [FEW, LEAST])
async def test_what_was_received_is_served_before_its_connection_is_closed(count: int) -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        await trio.testing.wait_all_tasks_blocked()
        connection, intake = fixture.server.connection(), fixture.server.reactor.intake
        raw_socket(peer).sendall(b"".join(map(frame, opaques(1000, count))))
        intake.turn_end = float("inf")
        intake.serve(connection)
        assert not fixture.together.order
        connection.close("a test says so")
        assert fixture.together.order == list(opaques(1000, count))
        assert set(await replies_to(peer, count)) == set(opaques(1000, count))


async def test_others_requests_are_not_learnt() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        await peer.send_bytes(b"".join(frame(opaque, b"x", OTHER) for opaque in opaques(1000, LEAST)))
        assert len(await replies_to(peer, LEAST)) == LEAST
        assert not fixture.together.learnt


async def test_lengths_that_differ_all_the_time_are_looked_at_less_and_less() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        rounds = 300
        for size in range(rounds):
            await peer.send_bytes(b"".join(frame(opaque, bytes(100 + size)) for opaque in opaques(1000, FEW)))
            assert len(await replies_to(peer, FEW)) == FEW
        assert 3 <= len(fixture.together.learnt) < rounds // 20


async def test_what_is_never_served_together_is_not_held_for_a_while() -> None:
    async with holding() as fixture, fixture.server.peer() as peer:
        fixture.together.passes = True
        for turn in range(60):
            await peer.send_bytes(b"".join(map(frame, opaques(1000 + turn * LEAST, LEAST))))
            assert len(await replies_to(peer, LEAST)) == LEAST
        assert 16 <= len(fixture.together.calls) < 50
