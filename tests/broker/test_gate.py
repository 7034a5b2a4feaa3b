"""The gate of a whole broker: no request bypasses a feature, whatever its code, encoding, path or port."""

import json
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.fast_paths import fast_paths
from tests.broker.test_send_native import send_frame
from tests.broker.wire_client import WireClient, pull_ext, send_ext
from tests.ports import free_port
from trimq.broker.controller import BrokerController
from trimq.broker.testing import configuration, running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import ONEWAY_FLAG, Encoding, RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import encode
from trimq.protocol.native import NATIVE
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature, Readiness, Sees
from trimq.remoting.server.grouping import FEW, LEAST
from trimq.remoting.server.handler_table import HandlerTable, json_front

TOPIC = "Orders"
MANY = LEAST + 8
UNKNOWN = (1, 9, 99, 7777, 99_999)
SENDS = frozenset({10, 310, 320})
BATCHES = {320} if NATIVE.is_on else set()
"""Batches have no other fast path."""
SLOW = 0 if NATIVE.is_on else 2
"""How many of ``requests`` have no fast path."""

Form = Callable[[int, int, dict[str, Any], bytes], bytes]


def code_first(code: int, opaque: int, ext: dict[str, Any], body: bytes) -> bytes:
    return _json({"code": code, "extFields": ext, "flag": 0, "opaque": opaque}, body)


def code_later(code: int, opaque: int, ext: dict[str, Any], body: bytes) -> bytes:
    return _json({"extFields": ext, "opaque": opaque, "code": code, "flag": 0}, body)


def _json(header: dict[str, Any], body: bytes) -> bytes:
    header |= {"language": "JAVA", "version": 479}
    raw = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack(">II", 4 + len(raw) + len(body), len(raw)) + raw + body


def _encoded(encoding: Encoding) -> Form:
    def form(code: int, opaque: int, ext: dict[str, Any], body: bytes) -> bytes:
        fields = {name: str(value) for name, value in ext.items()}
        return encode(RemotingCommand(code, opaque, ext=fields, body=body, encoding=encoding))

    return form


FORMS = [code_first, code_later, _encoded(Encoding.ROCKETMQ), _encoded(Encoding.MSGPACK)]


def batch(count: int) -> bytes:
    texts = [f"UNIQ_KEY\x01{number:032X}\x02TAGS\x01TagA\x02" for number in range(count)]
    return encode_batch([(0, b"body", text.encode()) for text in texts])


def requests(unique: str) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """Ordinary requests: each of them has a fast path."""
    properties = {"KEYS": "k1", "UNIQ_KEY": unique, "TAGS": "TagA", "WAIT": "true"}
    yield RequestCode.SEND_MESSAGE, _texts(send_ext(TOPIC, properties, v1=True)), b"one"
    yield RequestCode.SEND_MESSAGE_V2, _texts(send_ext(TOPIC, properties)), b"two"
    yield RequestCode.SEND_BATCH_MESSAGE, _texts(send_ext(TOPIC, {"WAIT": "true"}, batch="true")), batch(20)
    yield RequestCode.SEND_BATCH_MESSAGE, _texts(send_ext(TOPIC, {"WAIT": "true"}, batch="true")), batch(2)
    yield RequestCode.PULL_MESSAGE, _texts(pull_ext(TOPIC)), b""
    yield RequestCode.LITE_PULL_MESSAGE, _texts(pull_ext(TOPIC)), b""
    ext = {"topic": TOPIC, "key": "k1", "maxNum": 8, "beginTimestamp": 0, "endTimestamp": 1 << 60}
    yield RequestCode.QUERY_MESSAGE, _texts(ext), b""


def _texts(ext: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in ext.items()}


class Counting:
    """A feature that sees every request. ``seen`` counts requests by opaque, ``fails`` makes it refuse them."""

    def __init__(self, sees: Sees = Sees.HEADER, **more: Any) -> None:
        self.seen: Counter[int] = Counter()
        self.fails = False
        self.feature = Feature("counting", self._check, sees, **more)

    def _check(self, _connection: Connection, command: RemotingCommand) -> None:
        self.seen[command.opaque] += 1
        if self.fails:
            raise RemotingError(ResponseCode.NO_PERMISSION, "vetoed")


class Both:
    """A broker, and clients connected from the beginning to its main port and to the port without pulls."""

    def __init__(self, broker: BrokerController, clients: list[WireClient]) -> None:
        self.broker = broker
        self.clients = clients
        self._opaque = 1000

    def next(self) -> int:
        self._opaque += 1
        return self._opaque

    async def ask(self, client: WireClient, form: Form, code: int, ext: dict[str, Any], body: bytes) -> RemotingCommand:
        """Send one request alone, so that it is not held to be grouped with others, as after a burst."""
        self.broker.reactor.intake.grouping.many = False
        opaque = self.next()
        await client.stream.send_all(form(code, opaque, ext, body))
        return await client.reply(opaque)

    def end(self) -> int:
        return self.broker.context.store.max_phy_offset

    def connection(self, client: WireClient) -> Connection:
        """The broker's end of a client's connection."""
        ends = client.plain.socket.getsockname()[1], client.plain.socket.getpeername()[1]
        # Both: connections to the two ports of the broker may come from one port.
        found = self.broker.reactor.connections.values()
        (connection,) = (one for one in found if (one.peer[1], one.sock.getsockname()[1]) == ends)
        return connection

    def table(self, client: WireClient) -> HandlerTable:
        return self.connection(client).table


@asynccontextmanager
async def connected(broker: BrokerController, port: int) -> AsyncIterator[Both]:
    """Clients of a broker on which the topic exists."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(WireClient.connect(address))
            for address in (broker.endpoint, ("127.0.0.1", port))
        ]
        ext = {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
        ext |= {"topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
        assert (await clients[0].ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)).code == 0
        yield Both(broker, clients)


@asynccontextmanager
async def both(path: Path, **config: Any) -> AsyncIterator[Both]:
    """Clients of a broker that has the topic and messages."""
    port = free_port()
    async with running_broker(path, fastListenPort=port, **config) as broker, connected(broker, port) as found:
        clients = found.clients
        for code, fields, body in requests("A0"):
            assert (await found.ask(clients[0], code_first, code, fields, body)).code in {0, 22}
        for client in clients:
            await burst(found, client)
        yield found


async def burst(found: Both, client: WireClient, **form: Any) -> tuple[list[int], set[int]]:
    """Write many sends in one piece; return their opaques and the codes of the replies. ``form``: see send_frame."""
    begin = 100_000 + found.next() * 100
    opaques = list(range(begin, begin + 2 * MANY))
    frames = [send_frame(number, opaque=opaque, **form) for number, opaque in enumerate(opaques)]
    await client.stream.send_all(b"".join(frames[:FEW]))
    await client.stream.send_all(b"".join(frames[FEW:]))
    return opaques, {(await client.reply(opaque)).code for opaque in opaques}


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_nothing_gets_past_a_veto(tmp_path: Path, flush: str) -> None:
    async with both(tmp_path, flushDiskType=flush) as found:
        broker = found.broker
        veto = Counting()
        veto.fails = True
        broker.gate.register(veto.feature)
        end = found.end()
        stats = broker.context.store.stats
        handed_out = stats.transferred_messages_total
        for client in found.clients:
            table = found.table(client)
            assert not table.fast
            assert not table.grouped
            for code in {*table.routes, *UNKNOWN}:
                for form in FORMS:
                    reply = await found.ask(client, form, code, {}, b"")
                    assert (reply.code, reply.remark) == (ResponseCode.NO_PERMISSION, "vetoed"), (code, form)
                    assert veto.seen[reply.opaque] == 1
            for code, ext, body in requests("B0"):
                for form in FORMS:
                    reply = await found.ask(client, form, code, ext, body)
                    assert (reply.code, veto.seen[reply.opaque]) == (ResponseCode.NO_PERMISSION, 1)
            opaques, codes = await burst(found, client)
            assert codes == {ResponseCode.NO_PERMISSION}
            assert all(veto.seen[opaque] == 1 for opaque in opaques)
        assert found.end() == end
        assert stats.transferred_messages_total == handed_out


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_all_that_is_served_has_been_seen(tmp_path: Path, flush: str) -> None:
    async with both(tmp_path, flushDiskType=flush) as found:
        counting = Counting()
        found.broker.gate.register(counting.feature)
        asked = 0
        for client in found.clients:
            for form in FORMS:
                for code, ext, body in requests("C0"):
                    reply = await found.ask(client, form, code, ext, body)
                    assert reply.code in {0, 3}, reply.remark
                    asked += 1
                    assert counting.seen[reply.opaque] == 1
            opaques, codes = await burst(found, client)
            asked += len(opaques)
            assert codes == {0}
        assert counting.seen.total() == asked
        found.broker.gate.remove(counting.feature)
        opaques, codes = await burst(found, found.clients[0])
        assert codes == {0}
        assert counting.seen.total() == asked


async def test_each_code_is_seen_once_in_each_form(tmp_path: Path) -> None:
    """Including codes that are not served, and requests without fields."""
    async with both(tmp_path) as found:
        counting = Counting()
        found.broker.gate.register(counting.feature)
        for client in found.clients:
            for code in sorted({*found.table(client).routes, *UNKNOWN}):
                for form in FORMS:
                    reply = await found.ask(client, form, code, {}, b"")
                    assert counting.seen[reply.opaque] == 1, (code, form)


async def test_a_code_over_999_is_seen_like_others(tmp_path: Path) -> None:
    """The first bytes do not distinguish it from others, so it takes the full path only."""
    async with both(tmp_path) as found:
        code, served = 7777, []

        def handler(_connection: Connection, command: RemotingCommand) -> RemotingCommand:
            served.append(command.opaque)
            return command.reply()

        found.table(found.clients[0]).register(code, handler)
        counting = Counting()
        for fails, features in ((False, 0), (False, 1), (True, 1), (False, 0)):
            counting.fails = fails
            for feature in list(found.broker.gate.features):
                found.broker.gate.remove(feature)
            if features:
                found.broker.gate.register(counting.feature)
            for client in found.clients:
                for form in FORMS:
                    reply = await found.ask(client, form, code, {"a": "b"}, b"body")
                    assert reply.code == (ResponseCode.NO_PERMISSION if fails else 0)
                    assert counting.seen[reply.opaque] == features
                    assert (reply.opaque in served) == (not fails)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
async def test_one_way_requests_are_seen_too(tmp_path: Path, flush: str) -> None:
    """The client is not notified of the refusal."""
    async with both(tmp_path, flushDiskType=flush) as found:
        veto = Counting()
        veto.fails = True
        found.broker.gate.register(veto.feature)
        end = found.end()
        opaques: list[int] = []

        def frames(count: int, **form: Any) -> bytes:
            begin = opaques[-1] + 1 if opaques else 50_000
            opaques.extend(range(begin, begin + count))
            return b"".join(send_frame(n, opaque=n, flag=ONEWAY_FLAG, **form) for n in range(begin, begin + count))

        for client in found.clients:
            for form in ({}, {"v1": True}, {"binary": True}, {"v1": True, "binary": True}):
                for count in (1, 2 * MANY):
                    await client.stream.send_all(frames(count, **form))
                    refused = await found.ask(client, code_first, 310, {}, b"")  # the earlier requests have been served
                    assert refused.code == ResponseCode.NO_PERMISSION
            for body in (batch(2), batch(20)):
                await client.stream.send_all(frames(1, properties={"WAIT": "true"}, code=320, batch="true", body=body))
                await found.ask(client, code_first, 310, {}, b"")
            assert client.replies == {}
        assert found.end() == end
        assert {veto.seen[opaque] for opaque in opaques} == {1}
        found.broker.gate.remove(veto.feature)
        await found.clients[0].stream.send_all(frames(1))
        await found.ask(found.clients[0], code_first, 310, {}, b"")
        assert found.end() > end


@pytest.mark.parametrize("sees", [Sees.HEADER, Sees.PROPERTIES])
async def test_a_feature_of_before_the_start_sees_the_first_request(tmp_path: Path, sees: Sees) -> None:
    port = free_port()
    broker = BrokerController(configuration(tmp_path, {"fastListenPort": port}))
    names = frozenset({"colour", "KEYS"}) if sees is Sees.PROPERTIES else frozenset()
    codes_seen = frozenset({RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2})
    veto = Counting(sees, codes=codes_seen, properties=names)
    veto.fails = True
    broker.gate.register(veto.feature)
    async with trio.open_nursery() as nursery:
        await nursery.start(broker.run)
        try:
            async with connected(broker, port) as found:
                for queue_id in range(4):  # while a queue is empty, every send takes the full path
                    ext = _texts(send_ext(TOPIC, batch="true", queue_id=queue_id))
                    assert (await found.ask(found.clients[0], code_first, 320, ext, batch(2))).code == 0
                end = found.end()
                for client in found.clients:
                    for form in FORMS:
                        for code, ext, body in requests("A0"):
                            if code in codes_seen:
                                reply = await found.ask(client, form, code, ext, body)
                                assert (reply.code, veto.seen[reply.opaque]) == (ResponseCode.NO_PERMISSION, 1)
                    for v1 in (False, True):
                        opaques, codes = await burst(found, client, v1=v1)
                        assert codes == {ResponseCode.NO_PERMISSION}
                        assert {veto.seen[opaque] for opaque in opaques} == {1}
                assert found.end() == end
        finally:
            with trio.CancelScope(shield=True):
                broker.shutdown()
                await broker.stopped.wait()


async def test_fast_paths_are_open_again_when_the_feature_is_removed(tmp_path: Path) -> None:
    async with both(tmp_path) as found:
        counting = Counting()
        found.broker.gate.register(counting.feature)
        found.broker.gate.remove(counting.feature)
        served = fast_paths(found.broker)
        for code, ext, body in requests("D0"):
            await found.ask(found.clients[0], code_first, code, ext, body)
        assert set(served) == {10, 310, 11, 361, 12} | BATCHES


async def test_a_configuration_that_no_fast_path_knows_closes_them_on_both_ports(tmp_path: Path) -> None:
    async with both(tmp_path) as found:
        tables = {connection.table for connection in found.broker.reactor.connections.values()}
        assert len(tables) == 2
        sends = {json_front(code) for code in {10, 310} | BATCHES}
        for start, are_open in ((1, False), (0, True)):
            body = b"startAcceptSendRequestTimeStamp=%d" % start
            assert (await found.clients[0].ask(RequestCode.UPDATE_BROKER_CONFIG, body=body)).code == 0
            for table in tables:
                assert (sends <= table.fast.keys()) == are_open
                assert sends.isdisjoint(table.fast) == (not are_open)
                assert bool(table.grouped) == (are_open and NATIVE.is_on)


async def test_a_feature_of_one_code_closes_no_other(tmp_path: Path) -> None:
    async with both(tmp_path) as found:
        veto = Counting(codes=frozenset({RequestCode.SEND_MESSAGE}))
        veto.fails = True
        found.broker.gate.register(veto.feature)
        for client in found.clients:
            codes = {}
            for code, ext, body in requests("E0"):
                codes[code] = (await found.ask(client, code_first, code, ext, body)).code
            pulls = 0 if client is found.clients[0] else ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            assert codes == {10: ResponseCode.NO_PERMISSION, 310: 0, 320: 0, 11: pulls, 361: pulls, 12: 0}
            # frames of a closed code among grouped frames of an open one, and vice versa
            frames = [send_frame(number, opaque=500 + number, v1=number % 2 == 1) for number in range(2 * MANY)]
            await client.stream.send_all(b"".join(frames))
            refused = [(await client.reply(500 + number)).code for number in range(2 * MANY)]
            assert refused == [0, ResponseCode.NO_PERMISSION] * MANY


@pytest.mark.parametrize("name", ["colour", "KEYS", "TAGS", "UNIQ_KEY", "WAIT"])
async def test_a_feature_sees_the_messages_with_its_property_and_no_others(tmp_path: Path, name: str) -> None:
    async with both(tmp_path) as found:
        client = found.clients[0]
        counting = Counting(Sees.PROPERTIES, codes=SENDS, properties=frozenset({name}))
        found.broker.gate.register(counting.feature)
        served = fast_paths(found.broker)
        usual = {"UNIQ_KEY": "F0"} if name != "UNIQ_KEY" else {}
        for v1 in (False, True):
            code = 10 if v1 else 310
            with_it = _texts(send_ext(TOPIC, usual | {name: "true"}, v1=v1))
            before = counting.seen.total()
            assert (await found.ask(client, code_first, code, with_it, b"x")).code == 0
            assert counting.seen.total() == before + 1
            assert served == []
            if usual:
                without = _texts(send_ext(TOPIC, usual, v1=v1))
                assert (await found.ask(client, code_first, code, without, b"x")).code == 0
                assert counting.seen.total() == before + 1
                assert served == [code]
                served.clear()
        texts = [f"UNIQ_KEY\x01{number:032X}\x02{name}\x01true\x02".encode() for number in range(20)]
        body = encode_batch([(0, b"body", text) for text in texts])
        before = counting.seen.total()
        for _ in range(3):  # the layout is known from the second send on
            assert (await found.ask(client, code_first, 320, _texts(send_ext(TOPIC, batch="true")), body)).code == 0
        assert counting.seen.total() == before + 3
        if name == "colour":
            frames = [send_frame(number, opaque=700 + number) for number in range(MANY)]  # these have a colour
            await client.stream.send_all(b"".join(frames))
            assert {(await client.reply(700 + number)).code for number in range(MANY)} == {0}
            assert counting.seen.total() == before + 3 + MANY


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_listener_that_raises_opens_nothing_on_either_port(tmp_path: Path, place: int) -> None:
    """Sends have not been notified of the property at that point, and the ports are opened one after the other."""
    async with both(tmp_path) as found:
        gate = found.broker.gate

        def listener() -> None:
            raise ValueError("a mistake")

        gate.listeners.insert(place, listener)
        veto = Counting(Sees.PROPERTIES, properties=frozenset({"colour"}))
        veto.fails = True
        end = found.end()
        with pytest.raises(ValueError, match="a mistake"):
            gate.register(veto.feature)
        for client in found.clients:
            for form in ({}, {"v1": True}, {"binary": True}):
                _, codes = await burst(found, client, **form)
                assert codes == {ResponseCode.NO_PERMISSION}
            for code, ext, body in requests("J0"):
                if code not in SENDS:  # whose properties are not known
                    assert (await found.ask(client, code_first, code, ext, body)).code == ResponseCode.NO_PERMISSION
        assert found.end() == end
        gate.listeners.remove(listener)
        gate.changed()
        assert all(found.table(client).fast for client in found.clients)


async def test_a_prepared_pull_is_looked_at_when_it_is_taken(tmp_path: Path) -> None:
    async with both(tmp_path) as found:
        client = found.clients[0]
        ext = _texts(pull_ext(TOPIC, 0, maxMsgNums=2))
        first = await found.ask(client, code_first, RequestCode.PULL_MESSAGE, ext, b"")
        ext = _texts(pull_ext(TOPIC, int(first.ext_fields()["nextBeginOffset"]), maxMsgNums=2))
        with trio.fail_after(5):
            while not _is_prepared(found.broker):
                await trio.lowlevel.checkpoint()
        veto = Counting()
        veto.fails = True
        found.broker.gate.register(veto.feature)
        refused = await found.ask(client, code_first, RequestCode.PULL_MESSAGE, ext, b"")
        assert (refused.code, refused.body) == (ResponseCode.NO_PERMISSION, b"")


async def test_a_prepared_pull_is_looked_at_when_its_client_is_not_admitted_any_more(tmp_path: Path) -> None:
    async with both(tmp_path) as found, WireClient.connect(found.broker.endpoint) as other:
        client, gate = found.clients[0], found.broker.gate
        connection = found.connection(client)
        known = {connection}
        veto = Counting(Sees.IDENTITY, admits=known.__contains__)
        veto.fails = True
        gate.register(veto.feature)
        assert gate.admit(connection)
        ext = _texts(pull_ext(TOPIC, 0, maxMsgNums=2))
        first = await found.ask(client, code_first, RequestCode.PULL_MESSAGE, ext, b"")
        assert first.code == 0
        ext = _texts(pull_ext(TOPIC, int(first.ext_fields()["nextBeginOffset"]), maxMsgNums=2))
        with trio.fail_after(5):
            while not _is_prepared(found.broker):
                await trio.lowlevel.checkpoint()
        assert not veto.seen
        for asks in (other, client):  # a client that never was admitted, and one that no longer is
            if asks is client:
                known.clear()
                assert not gate.admit(connection)
            refused = await found.ask(asks, code_first, RequestCode.PULL_MESSAGE, ext, b"")
            assert (refused.code, refused.body) == (ResponseCode.NO_PERMISSION, b"")
            assert veto.seen[refused.opaque] == 1
        assert _is_prepared(found.broker)


def _is_prepared(broker: BrokerController) -> bool:
    return any(
        getattr(getattr(hook, "__self__", None), "_prepared", None) is not None for hook in broker.reactor.on_idle
    )


async def test_identity_is_worked_out_once_for_a_connection(tmp_path: Path) -> None:
    async with both(tmp_path) as found:
        client, gate = found.clients[0], found.broker.gate
        known: set[Connection] = set()
        counting = Counting(Sees.IDENTITY, admits=known.__contains__)
        gate.register(counting.feature)
        connection = found.connection(client)

        async def seen() -> bool:
            before = counting.seen.total()
            for code, ext, body in requests("G0"):
                assert (await found.ask(client, code_first, code, ext, body)).code == 0
            _, codes = await burst(found, client)
            assert codes == {0}
            number = counting.seen.total() - before
            assert number in {SLOW, 7 + 2 * MANY}
            return number > SLOW

        assert await seen()
        assert not gate.admit(connection)
        assert await seen()
        known.add(connection)
        assert gate.admit(connection)
        assert not await seen()
        gate.changed()  # a user's rights have changed
        assert await seen()
        assert gate.admit(connection)
        assert not await seen()
        gate.register(Counting(Sees.IDENTITY, admits=lambda _connection: False).feature)
        assert await seen()


async def test_one_client_s_identity_is_not_another_s(tmp_path: Path) -> None:
    """A client that was never checked and an unknown one: on either port, before and after the known client."""
    async with both(tmp_path) as found, WireClient.connect(found.broker.endpoint) as other:
        (client, vip), gate = found.clients, found.broker.gate
        known = {found.connection(client)}
        counting = Counting(Sees.IDENTITY, admits=known.__contains__)
        gate.register(counting.feature)

        async def seen(of: WireClient) -> int:
            before = counting.seen.total()
            for code, ext, body in requests("I0"):
                await found.ask(of, code_first, code, ext, body)
            _, codes = await burst(found, of)
            assert codes == {0}
            return counting.seen.total() - before

        total = 7 + 2 * MANY
        assert not gate.admit(found.connection(vip))
        assert gate.admit(found.connection(client))
        assert [await seen(of) for of in (client, vip, other)] == [SLOW, total, total]
        assert not gate.admit(found.connection(other))
        assert [await seen(of) for of in (client, vip, other)] == [SLOW, total, total]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize("sees", [Sees.IDENTITY, Sees.READINESS])
async def test_sends_of_a_round_are_seen_where_the_path_is_not_open(
    tmp_path: Path, sees: Sees, v1: bool, binary: bool
) -> None:
    """In either form, for either code. The path is open to known clients, or while the state is set."""
    async with both(tmp_path) as found:
        gate, ready = found.broker.gate, Readiness()
        known: set[Connection] = set()
        more: dict[str, Any] = {"readiness": ready} if sees is Sees.READINESS else {"admits": known.__contains__}
        counting = Counting(sees, codes=SENDS, **more)
        gate.register(counting.feature)
        for client in found.clients:
            connection = found.connection(client)
            for is_open in (False, True, False):
                ready.is_set = is_open
                (known.add if is_open else known.discard)(connection)
                gate.admit(connection)
                counting.fails = not is_open
                end = found.end()
                opaques, codes = await burst(found, client, v1=v1, binary=binary)
                seen = [counting.seen[opaque] for opaque in opaques]
                if is_open:
                    assert codes == {0}
                    # without the extension, and one by one, the binary form takes the full path only
                    assert sum(seen) == 0 or (binary and (not NATIVE.is_on or sum(seen) < len(seen)))
                else:
                    assert codes == {ResponseCode.NO_PERMISSION}
                    assert seen == [1] * len(opaques)
                    assert found.end() == end


async def test_a_state_counts_for_the_next_request(tmp_path: Path) -> None:
    async with both(tmp_path) as found:
        client = found.clients[0]
        ready = Readiness(is_set=True)
        counting = Counting(Sees.READINESS, codes=SENDS, readiness=ready)
        found.broker.gate.register(counting.feature)
        for is_set in (True, False, True):
            ready.is_set = is_set
            counting.fails = not is_set
            expected = 0 if is_set else ResponseCode.NO_PERMISSION
            before = counting.seen.total()
            for code, ext, body in requests("H0"):
                reply = await found.ask(client, code_first, code, ext, body)
                assert reply.code == (expected if code in SENDS else 0)
            _, codes = await burst(found, client)
            assert codes == {expected}
            assert counting.seen.total() - before == (SLOW if is_set else 4 + 2 * MANY)


@pytest.mark.parametrize(
    ("sees", "more"),
    [
        (Sees.IDENTITY, {}),
        (Sees.READINESS, {}),
        (Sees.PROPERTIES, {}),
        (Sees.NOTHING, {"properties": frozenset({"a"})}),
        (Sees.HEADER, {"readiness": Readiness()}),
    ],
)
def test_a_feature_gives_what_it_says(sees: Sees, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the feature counting sees"):
        Counting(sees, **more)
