"""Halves and ends of transactions in groups: what keeps them from the native extension, and what a fault leaves."""

import gc
import json
import struct
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from tests.broker.test_send_native import MANY, TOPIC, make_topic, send_frame
from tests.broker.test_transaction_mixed import brokers, comparable_reply
from tests.broker.transactions import COMMIT, EXPIRED, HALF, OK, ROLLBACK, Life, Place, end_ext, place_of
from trimq.broker.processors.send.send_native import GroupedSends
from trimq.broker.services.transaction.half_queue import State
from trimq.broker.store.log.message_rows import MessageRows
from trimq.protocol import record
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message_id import encode_offset_id
from trimq.protocol.native import NATIVE
from trimq.protocol.property_text import join_properties
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature, Readiness, Sees
from trimq.remoting.server.handler_table import json_front
from trimq.remoting.server.handlers import Served, Span

pytestmark = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")


def half_frame(number: int, body: bytes | None = None) -> bytes:
    """A half as Java sends it."""
    properties = {"UNIQ_KEY": f"7F{number:030X}", "WAIT": "true", "TRAN_MSG": "true", "PGROUP": "P"}
    return send_frame(number, properties, sys_flag=4, body=body)


def end_frame(half: Place, number: int, state: int = COMMIT, *, flag: int = 0, **changes: Any) -> bytes:
    """The end of a half as Java sends it."""
    ext = {name: str(value) for name, value in end_ext(half, state, **changes).items()}
    header = {"code": int(RequestCode.END_TRANSACTION), "extFields": ext, "flag": flag, "language": "JAVA"}
    header |= {"opaque": number, "serializeTypeCurrentRPC": "JSON", "version": 479}
    raw = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack(">II", 4 + len(raw), len(raw)) + raw


async def burst(life: Life, frames: Iterable[bytes], opaques: Iterable[int]) -> list[RemotingCommand]:
    """Send all in one write; return the replies."""
    await life.client.stream.send_all(b"".join(frames))
    return [await life.client.reply(opaque) for opaque in opaques]


async def prepared(life: Life, count: int, body: bytes | None = None) -> list[Place]:
    """Halves in the half queue, sent together."""
    numbers = range(1001, 1001 + count)
    replies = await burst(life, [half_frame(number, body) for number in numbers], numbers)
    assert {reply.code for reply in replies} == {OK}
    return [place_of(reply) for reply in replies]


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    async with Life(tmp_path / "store").running() as running:
        await ready(running)
        yield running


async def ready(life: Life) -> None:
    """The topic, and the log's first file."""
    await make_topic(life, TOPIC)  # type: ignore[arg-type]
    assert (await burst(life, [send_frame(1)], [1]))[0].code == OK


class Groups:
    """How many requests each call of the extension has served."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        serve = GroupedSends.serve

        def counted(sends: GroupedSends, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
            served = serve(sends, frames, spans, most)
            self.counts.append(0 if served is None else sum(count for count, _ in served.parts))
            return served

        monkeypatch.setattr(GroupedSends, "serve", counted)


@pytest.mark.parametrize("name", ["TRAN_MSG", "PGROUP", "REAL_TOPIC", "KEYS", ""])
async def test_a_feature_sees_the_halves_that_have_its_property(
    life: Life, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # guards features that have to see transactional messages: TRAN_MSG is what makes one of a send
    seen: list[int] = []

    def check(_connection: Connection, command: RemotingCommand) -> None:
        seen.append(command.opaque)

    codes = frozenset({int(RequestCode.SEND_MESSAGE_V2)})
    groups = Groups(monkeypatch)
    if name:
        life.broker.gate.register(Feature("halves", check, Sees.PROPERTIES, codes=codes, properties=frozenset({name})))
    await prepared(life, MANY)
    single = half_frame(2001)
    assert (await burst(life, [single], [2001]))[0].code == OK
    is_seen = name in {"TRAN_MSG", "PGROUP"}
    assert seen == ([*range(1001, 1001 + MANY), 2001] if is_seen else seen)
    if not name:
        assert sum(groups.counts) == MANY + 1


async def test_one_round_does_not_read_more_of_the_log_than_other_clients_can_wait_for(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    # guards memory and the other clients: the ends are short, but the records that they name have megabytes
    halves = [(await prepared(life, 1, bytes(3 << 17)))[0] for _ in range(MANY)]
    put: list[int] = []
    measure = MessageRows.measure

    def measured(rows: MessageRows, log: Any) -> int:
        put.append(measure(rows, log))
        return put[-1]

    monkeypatch.setattr(MessageRows, "measure", measured)
    numbers = range(3001, 3001 + MANY)
    states = [ROLLBACK if number % 8 == 0 else COMMIT for number in numbers]
    frames = [end_frame(half, number, state) for half, number, state in zip(halves, numbers, states, strict=True)]
    assert {reply.code for reply in await burst(life, frames, numbers)} == {OK}
    assert 3 << 17 < max(put) <= 1 << 20
    assert (life.pending, life.counters.commits) == (0, states.count(COMMIT))


@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
async def test_a_commit_record_that_may_be_stored_is_not_stored_again(
    life: Life, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    # guards consumers: after an error behind the put the message is there, and the producer is notified that it is not
    halves = await prepared(life, 1 if alone else MANY)
    numbers = range(3001, 3001 + len(halves))
    frames = [end_frame(half, number) for half, number in zip(halves, numbers, strict=True)]
    dispatch = MessageRows.dispatch_into

    def broken(*arguments: Any) -> None:
        dispatch(*arguments)
        raise ValueError("a listener's fault")

    monkeypatch.setattr(MessageRows, "dispatch_into", broken)
    with structlog.testing.capture_logs():
        failed = await burst(life, frames, numbers)
    assert {reply.code for reply in failed} == {ResponseCode.SYSTEM_ERROR}
    monkeypatch.undo()
    assert {life.transactions.halves.state(half.queue_offset) for half in halves} == {State.COMMITTING}
    replies = await burst(life, frames, numbers)
    assert {reply.code for reply in replies} == {ResponseCode.SYSTEM_ERROR}
    assert all("is being committed" in str(reply.remark) for reply in replies)
    assert len(await life.stored(TOPIC)) == 1 + len(halves)
    # and a start finds out that they are committed
    assert len(life.transactions.settled) == len(halves)


async def test_halves_whose_topic_was_deleted_are_left_to_the_full_path(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    async with brokers({}) as (fast, full):
        answers = []
        for life in (fast, full):
            halves = await prepared(life, MANY)
            here = await life.prepare(topic="T")
            assert (await life.client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC})).code == OK
            groups.counts.clear()
            numbers = range(3001, 3002 + MANY)
            ends = [COMMIT, ROLLBACK, *[COMMIT] * (MANY - 2)]
            frames = [end_frame(half, number, end) for half, number, end in zip(halves, numbers[1:], ends, strict=True)]
            replies = await burst(life, [end_frame(here, numbers[0]), *frames], numbers)
            assert life.pending == MANY - 1
            assert not life.broker.context.store.has_queue(TOPIC, 0)
            answers.append([comparable_reply(reply) for reply in replies])
            if life is fast:
                assert sum(groups.counts) == 1, "only the commit to the other topic"
        assert answers[0] == answers[1]
        codes = [code for code, _, _ in answers[0]]
        assert codes == [OK, ResponseCode.TOPIC_NOT_EXIST, OK, *[ResponseCode.TOPIC_NOT_EXIST] * (MANY - 2)]


async def test_one_way_ends_that_wait_for_the_disk_queue_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Life(tmp_path / "store", flushDiskType="SYNC_FLUSH").running() as life:
        await ready(life)
        halves = await prepared(life, MANY + 1)
        (connection,) = life.broker.reactor.connections.values()
        replies: list[Any] = []
        reply = Connection.reply

        def noted(to: Connection, data: Any) -> None:
            replies.append(data)
            reply(to, data)

        monkeypatch.setattr(Connection, "reply", noted)
        groups = Groups(monkeypatch)
        frames = [end_frame(half, number, flag=2) for number, half in enumerate(halves)]
        await life.client.stream.send_all(b"".join(frames[1:]))
        await life.settled()
        await life.client.stream.send_all(frames[0])
        await life.settled()
        assert groups.counts == [MANY, 1]
        assert len(await life.stored(TOPIC)) == 1 + len(halves)
        assert not any(replies)
        assert b"" not in replies
        assert connection.inflight == 0


async def test_guarded_servers_of_an_earlier_configuration_are_freed(life: Life) -> None:
    # guards memory: each change of the configuration makes new servers, with the queues that they have sent to
    ready = Readiness(is_set=True)
    life.broker.gate.register(Feature("replicas", lambda _connection, _command: None, Sees.READINESS, readiness=ready))
    (connection,) = life.broker.reactor.connections.values()
    routes, codes = connection.table.routes, (RequestCode.SEND_MESSAGE_V2, RequestCode.END_TRANSACTION)
    server = weakref.ref(routes[codes[0]].grouped)
    assert server() is routes[codes[1]].grouped is not None
    guarded = [connection.table.grouped[json_front(code)] for code in codes]
    assert guarded[0] is guarded[1] is not server()
    del guarded
    life.broker.configuration.change({"regionId": "elsewhere"})
    gc.collect()
    assert server() is None


@pytest.mark.parametrize("outcome", ["failed", "late"])
async def test_ends_where_the_device_fails_or_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    # guards SYNC_FLUSH: what the full path answers and knows afterwards is the same for each request of a group
    groups = Groups(monkeypatch)
    async with brokers({"flushDiskType": "SYNC_FLUSH"}) as (fast, full):
        found = []
        for life in (fast, full):
            assert (await burst(life, [send_frame(1)], [1]))[0].code == OK
            halves = await prepared(life, MANY)
            sync = life.broker.context.store.write_path.sync
            stuck = trio.Event()
            if outcome == "late":  # only now: on a busy machine the halves themselves would be late
                monkeypatch.setattr(life.broker.context.store.write_path.durability, "_timeout", 0.05)

            async def flush(event: trio.Event = stuck) -> bool:
                if outcome == "late":
                    await event.wait()
                return False

            monkeypatch.setattr(sync, "flush_inline", lambda: None)
            monkeypatch.setattr(sync, "advance", flush)
            monkeypatch.setattr(sync, "flush", flush)
            monkeypatch.setattr(sync, "failed", "the device is gone")
            numbers = list(range(3001, 3001 + MANY))
            oneway, rolled_back = numbers[2::8], numbers[3::8]
            frames = [
                end_frame(half, number, ROLLBACK if number in rolled_back else COMMIT, flag=2 * (number in oneway))
                for half, number in zip(halves, numbers, strict=True)
            ]
            sends = [send_frame(4001), half_frame(4002)]
            expected = [number for number in numbers if number not in oneway] + [4001, 4002]
            groups.counts.clear()
            replies = [comparable_reply(reply) for reply in await burst(life, frames + sends, expected)]
            assert sum(groups.counts) == (MANY + 2 if life is fast else 0)
            await trio.testing.wait_all_tasks_blocked()
            counts, states = life.counters, bytes(life.transactions.halves.table[1])
            topics = [life.broker.context.stats.topic_counters(topic)[0].value for topic in (TOPIC, HALF)]
            found.append(
                (
                    replies,
                    states,
                    life.pending,
                    counts.commits,
                    counts.rollbacks,
                    len(life.transactions.settled),
                    topics,
                )
            )
            assert life.broker.reactor.stats.inflight == 0
            stuck.set()
        assert found[0] == found[1]
        code = ResponseCode.SERVICE_NOT_AVAILABLE if outcome == "failed" else ResponseCode.FLUSH_DISK_TIMEOUT
        assert found[0][0][-1][0] == code


async def forge(life: Life, topic: str, queue_offset: int) -> int:
    """Send a body with the bytes of a half in ``topic``; returns their log offset."""
    store = life.broker.context.store
    at = store.max_phy_offset + record.OVERHEAD_V1 - 3  # behind a body there are two more lengths
    host = b"\x7f\0\0\1\0\0\0\1"
    properties = {"UNIQ_KEY": "F0", "TRAN_MSG": "true", "PGROUP": "P", "REAL_TOPIC": TOPIC, "REAL_QID": "0"}
    body = record.encode_record(
        topic=topic.encode(),
        body=b"forged",
        properties=join_properties(properties).encode(),
        queue_id=0,
        queue_offset=queue_offset,
        physical_offset=at,
        born_timestamp=1,
        born_host=host,
        store_timestamp=1,
        store_host=host,
    )
    await burst(life, [send_frame(2001, body=body)], [2001])
    assert len(store.look_message(at) or b"") == len(body), "the body is elsewhere: the test shows nothing"
    return at


@pytest.mark.parametrize("path", ["together", "alone", "full"])
@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
async def test_a_body_with_the_bytes_of_a_half_is_no_half(life: Life, path: str, state: int) -> None:
    # guards other halves, and topics that the client may not send to: it can know where its body will be in the log
    if path == "full":
        life.take_full_paths()
    victim, *others = await prepared(life, MANY)
    at = await forge(life, HALF, victim.queue_offset)
    forged = Place(victim.queue_offset, at, "F0")
    number = 3000
    if path != "alone":
        frames = [end_frame(half, number + 1 + index, ROLLBACK) for index, half in enumerate(others)]
        frames.insert(5, end_frame(forged, number, state))
        reply, *good = await burst(life, frames, range(number, number + MANY))
        assert {one.code for one in good} == {OK}
    else:
        (reply,) = await burst(life, [end_frame(forged, number, state)], [number])
    assert (reply.code, "half message 0 is at" in str(reply.remark)) == (ResponseCode.SYSTEM_ERROR, True)
    assert life.transactions.halves.state(victim.queue_offset) is State.PENDING
    assert b"forged" not in await life.bodies(TOPIC)
    assert (await burst(life, [end_frame(victim, 4000)], [4000]))[0].code == OK


@pytest.mark.parametrize(("topic", "beyond"), [(HALF, 0), (EXPIRED, 0), (EXPIRED, 7)])
async def test_a_body_with_the_bytes_of_a_half_is_not_resumed(life: Life, topic: str, beyond: int) -> None:
    # guards RESUME_CHECK_HALF_MESSAGE: a half stored again has the body of the record that the request names
    life.broker.configuration.change({"transactionCheckMax": "1"})
    await life.join()
    await life.prepare()
    if topic == EXPIRED:
        await life.advance(7)
        await life.round()
        await life.round()
        assert len(await life.stored(EXPIRED, [0])) == 1
    at = await forge(life, topic, beyond)
    before = [(half.body, half.properties) for half in await life.stored(HALF, [0])], life.pending
    message_id = encode_offset_id(b"\x7f\0\0\1\0\0\0\1", at)
    reply = await life.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, {"topic": topic, "msgId": message_id})
    assert (reply.code, "is not at the commit log offset" in str(reply.remark)) == (ResponseCode.SYSTEM_ERROR, True)
    assert ([(half.body, half.properties) for half in await life.stored(HALF, [0])], life.pending) == before
