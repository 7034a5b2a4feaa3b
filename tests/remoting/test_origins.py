"""Connections and requests a second of one address, on a loopback port: whichever path serves, each counts once."""

import struct
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import pytest
from msgspec import Struct
from structlog.testing import capture_logs

from tests.remoting.harness import ECHO as FULL
from tests.remoting.harness import Peer, echo, until, within_seconds
from tests.remoting.harness import request as any_request
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import encode
from trimq.protocol.typed_request import TypedRequest
from trimq.remoting.config.client_limits import ClientLimitsConfig
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.gate import Feature, Gate, Sees
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Later, Served, Span
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.meters import MeteredGroup
from trimq.remoting.server.reactor import Connection, Origins

FAST = 100
GROUPED = 101
BUSY = ResponseCode.SYSTEM_BUSY


class Fields(Struct):
    word: str


def request(
    code: int = FULL, body: bytes = b"", *, oneway: bool = False, encoding: Encoding = Encoding.JSON
) -> RemotingCommand:
    return any_request(code, body, oneway=oneway, ext={"word": "w"}, encoding=encoding)


def origins(clock: ManualClock, connections: int = 0, rate: int = 0, proxies: str = "") -> Origins:
    return Origins(ClientLimitsConfig(connections, rate, proxies), clock, ReactorStats())


def answered(code: int, opaque: int, text: bytes) -> bytes:
    return encode(RemotingCommand(code, opaque).reply(body=text))


def opaque_of(header: memoryview) -> int:
    return int(msgspec.json.decode(header)["opaque"])


class Group:
    """Serves whole frames together, and alone those with a body."""

    def __init__(self) -> None:
        self.together = 0
        self.declines = False
        self.lies = False

    def serve(self, frames: memoryview, spans: Sequence[Span], _most: int) -> Served | None:
        if self.declines:
            return None
        if self.lies:
            return Served([])
        parts, replies = [], []
        for span in spans:
            at = span.begin
            found: list[int] = []
            while len(found) < span.most and span.end - at >= 8:
                total, head = struct.unpack_from(">II", frames, at)
                if at + 4 + total > span.end:
                    break
                found.append(opaque_of(frames[at + 8 : at + 8 + head]))
                at += 4 + total
            self.together += len(found)
            parts.append((len(found), at))
            replies.append(b"".join(answered(GROUPED, opaque, b"together") for opaque in found))
        return Served(parts, replies)

    def serve_one(self, _connection: Connection, frame: memoryview) -> bytes | Literal[Later.DEFERRED] | None:
        head = int.from_bytes(frame[4:8], "big")
        if len(frame) == head + 8:
            return None
        return answered(GROUPED, opaque_of(frame[8 : 8 + head]), b"alone")


def fast(_connection: Connection, asked: TypedRequest[Fields]) -> bytes | None:
    if bytes(asked.body) == b"raise":
        raise RemotingError(ResponseCode.TOPIC_NOT_EXIST, "no topic")
    return answered(FAST, asked.opaque, b"fast") if bytes(asked.body) != b"full" else None


def table(limits: Origins, group: Group | None = None) -> HandlerTable:
    made = HandlerTable(Gate())
    made.register(FULL, echo)
    made.register(FAST, echo, header=Fields, fast=fast)
    made.register(GROUPED, echo, header=Fields, grouped=group or Group())
    if limits.feature is not None:
        made.gate.register(limits.feature)
    return made


async def codes(peer: Peer, *commands: RemotingCommand) -> list[int]:
    await peer.send(*commands)
    replies = [await peer.receive() for _ in commands]
    return [reply.code for reply in sorted(replies, key=lambda reply: reply.opaque)]


async def test_connections_of_one_address_are_closed_beyond_the_limit() -> None:
    limits = origins(ManualClock(), connections=2)
    async with within_seconds(table(limits), origins=limits) as server:
        stats = server.reactor.stats
        async with server.peer() as one, server.peer() as two:
            assert await codes(one, request()) + await codes(two, request()) == [0, 0]
            with capture_logs() as logs:
                async with server.peer() as three:
                    assert await three.is_closed_by_server()
            assert [
                (line["event"], line["peer"], line["key"], line["limit"], line["connections"]) for line in logs
            ] == [("address_refused", "127.0.0.1", "maxConnectionsPerAddress", 2, 2)]
            assert (stats.refused, stats.accepted, dict(stats.limited)) == (1, 2, {"maxConnectionsPerAddress": 1})
            async with server.peer(source="127.0.0.2") as other:
                assert await codes(other, request()) == [0]
        await until(server, "s.connections == 0")
        async with server.peer() as again:
            assert await codes(again, request()) == [0]


@pytest.mark.parametrize(
    ("code", "encoding"), [(FULL, Encoding.JSON), (FAST, Encoding.JSON), (FAST, Encoding.ROCKETMQ)]
)
async def test_requests_of_one_address_on_all_its_connections(code: int, encoding: Encoding) -> None:
    clock = ManualClock()
    limits = origins(clock, rate=3)
    async with within_seconds(table(limits), clock=clock, origins=limits) as server:
        stats = server.reactor.stats
        async with server.peer() as one, server.peer() as two, server.peer(source="127.0.0.2") as other:
            assert await codes(one, request(code, encoding=encoding), request(code, encoding=encoding)) == [0, 0]
            assert await codes(two, request(code, encoding=encoding)) == [0]
            reply = await two.ask(request(code, encoding=encoding))
            assert (reply.code, reply.remark) == (
                BUSY,
                (
                    "system busy: maxRequestsPerSecondPerAddress=3: address 127.0.0.1 has sent 3 requests in the last "
                    "second; the next one is served in 333 ms"
                ),
            )
            served = await other.ask(request(code, encoding=encoding))
            is_fast = code == FAST and encoding is Encoding.JSON
            assert (served.code, served.body) == (0, b"fast" if is_fast else b"")
            clock.advance(0.4)
            assert await codes(one, request(code, encoding=encoding), request(code, encoding=encoding)) == [0, BUSY]
            assert (stats.busy, dict(stats.limited)) == (2, {"maxRequestsPerSecondPerAddress": 2})


async def test_a_request_counts_once_though_its_fast_path_declines_or_refuses_it() -> None:
    clock = ManualClock()
    limits = origins(clock, rate=3)
    async with within_seconds(table(limits), clock=clock, origins=limits) as server, server.peer() as peer:
        assert await codes(peer, request(FAST, b"full")) == [0]
        assert await codes(peer, request(FAST, b"raise")) == [ResponseCode.TOPIC_NOT_EXIST]
        assert await codes(peer, request(999)) == [ResponseCode.REQUEST_CODE_NOT_SUPPORTED]
        assert await codes(peer, request(999)) == [BUSY]
        clock.advance(1)
        assert await codes(peer, request(GROUPED), request(GROUPED, b"x"), request(FAST)) == [0, 0, 0]
        assert await codes(peer, request(GROUPED, b"x")) == [BUSY]


async def test_requests_served_together_are_as_many_as_there_is_room_for() -> None:
    clock = ManualClock()
    limits = origins(clock, rate=20)
    group = Group()
    async with within_seconds(table(limits, group), clock=clock, origins=limits) as server, server.peer() as peer:
        assert await codes(peer, *(request(GROUPED) for _ in range(50))) == [0] * 20 + [BUSY] * 30
        assert group.together == 20
        clock.advance(0.5)
        assert await codes(peer, *(request(GROUPED) for _ in range(12))) == [0] * 10 + [BUSY] * 2
        clock.advance(1)
        group.declines = True
        assert await codes(peer, *(request(GROUPED) for _ in range(22))) == [0] * 20 + [BUSY] * 2


def test_spans_of_one_address_share_its_room() -> None:
    clock = ManualClock()
    limits = origins(clock, rate=5)
    one, two = _connection(limits), _connection(limits)
    frames = encode(request(GROUPED)) * 4
    half = len(frames)
    group = Group()
    metered = MeteredGroup(limits, group)
    spans = [Span(one, 0, half, 100), Span(two, half, 2 * half, 100)]
    served = metered.serve(memoryview(frames * 2), spans, 256)
    assert served is not None
    assert [count for count, _ in served.parts] == [4, 0]  # the first had taken all, and gives back what is left
    assert limits.room(one) == limits.room(two) == 1
    group.lies = True
    assert metered.serve(memoryview(frames * 2), spans, 256) == Served([])
    assert limits.room(one) == 1


def _connection(limits: Origins) -> Connection:
    """One that has only what Origins looks at."""
    connection = Connection.__new__(Connection)
    connection.peer = ("10.0.0.1", 1)
    limits.join(connection)
    return connection


async def test_one_ways_beyond_the_limit_are_dropped_and_counted() -> None:
    clock = ManualClock()
    limits = origins(clock, rate=1)
    seen: list[bytes] = []
    made = HandlerTable()

    def handler(_connection: Connection, command: RemotingCommand) -> None:
        seen.append(bytes(command.body))

    made.register(FULL, handler)
    assert limits.feature is not None
    made.gate.register(limits.feature)
    async with within_seconds(made, clock=clock, origins=limits) as server, server.peer() as peer:
        await peer.send(request(body=b"a", oneway=True), request(body=b"b", oneway=True))
        reply = await peer.ask(request(body=b"c"))
        assert reply.code == BUSY
        assert seen == [b"a"]
        assert server.reactor.stats.busy == 2
        assert not peer.arrived


async def test_one_line_a_minute_for_an_address_that_is_limited() -> None:
    clock = ManualClock()
    limits = origins(clock, rate=1)
    async with within_seconds(table(limits), clock=clock, origins=limits) as server, server.peer() as peer:
        with capture_logs() as logs:
            assert await codes(peer, *(request() for _ in range(9))) == [0] + [BUSY] * 8
        lines = [line for line in logs if line["event"] == "requests_limited"]
        assert [(line["caller"], line["key"], line["limit"]) for line in lines] == [
            ("address 127.0.0.1", "maxRequestsPerSecondPerAddress", 1)
        ]


async def test_a_request_that_closes_its_connection_leaves_the_count_right() -> None:
    clock = ManualClock()
    limits = origins(clock, rate=5)

    def closing(connection: Connection, _asked: TypedRequest[Fields]) -> bytes | None:
        connection.close("test")
        return None

    made = table(limits)
    made.register(102, echo, header=Fields, fast=closing)
    async with within_seconds(made, clock=clock, origins=limits) as server:
        async with server.peer() as peer:
            await peer.send(request(102))
            assert await peer.is_closed_by_server()
        async with server.peer() as peer:
            assert await codes(peer, *(request() for _ in range(5))) == [0] * 4 + [BUSY]


@pytest.mark.parametrize("seen", ["fast", "group"])
def test_fast_paths_stay_open_and_nothing_is_wrapped_without_a_limit(seen: str) -> None:
    limits = origins(ManualClock(), rate=5)
    gate = Gate()
    group = Group()
    same: Callable[[], object] = {
        "fast": lambda: gate.guarded(FAST, fast) is fast,
        "group": lambda: gate.guarded_group(GROUPED, group) is group,
    }[seen]
    assert same()
    assert limits.feature is not None
    gate.register(limits.feature)
    assert gate.opens(FAST, Sees.NOTHING)
    assert not same()


def test_a_feature_with_amounts_needs_a_meter() -> None:
    with pytest.raises(ValueError, match="AMOUNT"):
        Feature("f", lambda _connection, _command: None, Sees.AMOUNT)


def test_off_by_default() -> None:
    stats = ReactorStats()
    assert Origins.of(ClientLimitsConfig(), ManualClock(), stats) is None
    made = Origins.of(ClientLimitsConfig(proxy_protocol_networks="10.0.0.0/8"), ManualClock(), stats)
    assert made is not None
    assert made.feature is None


@pytest.mark.parametrize(
    ("address", "known"),
    [
        ("10.0.0.1", True),
        ("10.0.0.2", False),
        ("10.1.2.3", True),
        ("2001:db8::7", True),
        ("::1", False),
        ("sim", False),
    ],
)
def test_which_addresses_are_proxies(address: str, known: bool) -> None:
    assert origins(ManualClock(), proxies="10.0.0.1, 10.1.0.0/16,2001:db8::/32").is_proxy(address) is known
    assert not origins(ManualClock(), rate=1).is_proxy(address)


def test_an_address_that_left_may_come_again() -> None:
    limits = origins(ManualClock(), connections=1)
    connection = _connection(limits)
    assert not limits.admits("10.0.0.1")
    limits.leave(connection)
    assert limits.room(connection) == 0
    limits.take(connection, 1)
    limits.leave(connection)
    assert limits.admits("10.0.0.1")
