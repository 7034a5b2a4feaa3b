"""Units of the SDK without a server: windows, in-flight limits, routes, fault tolerance, errors, decoding."""

import copy
import random
from collections.abc import Callable

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.client import (
    Client,
    Consumer,
    Message,
    MessageQueue,
    NotStoredError,
    PerhapsStoredError,
    Producer,
    PullConsumer,
    ReceivedMessage,
    TopicNotFoundError,
    UsageError,
)
from trimq.client.decode import split_messages
from trimq.client.errors import error_for
from trimq.client.in_flight_limit import InFlightLimit
from trimq.client.latency_fault_tolerance import LatencyFaultTolerance
from trimq.client.lifecycle import Lifecycle
from trimq.client.name_servers import parse_addresses
from trimq.client.offset_window import OffsetWindow
from trimq.client.pulling import PullCall
from trimq.client.routes import RouteCache
from trimq.client.send_template import SendTemplate
from trimq.client.sending import Limits, Prepared, prepare, send_command
from trimq.client.subscription import Subscription
from trimq.protocol.body import BrokerData, QueueData, TopicRouteData
from trimq.protocol.codes import RequestCode
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import MAX_FRAME, encode
from trimq.protocol.message_id import UniqueIdGenerator
from trimq.protocol.property_text import decode_properties
from trimq.protocol.record import RecordError, encode_record, pack_host

LIMITS = Limits(1000, None, 1000, 0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.randoms())
def test_a_window_never_commits_past_an_unfinished_message(gaps: list[int], chance: random.Random) -> None:
    window = OffsetWindow(10)
    offsets, at = [], 10
    for gap in gaps:  # filtered messages leave gaps
        at += gap
        offsets.append(at)
        window.took([at])
        at += 1
    window.moved_to(at)
    left = set(offsets)
    order = offsets.copy()
    chance.shuffle(order)
    for offset in order:
        assert window.committable == min(left)
        assert window.unfinished == len(left)
        window.finished(offset)
        left.discard(offset)
    assert window.committable == at
    assert window.span == 0


def test_a_window_ignores_what_it_does_not_hold() -> None:
    window = OffsetWindow(5)
    window.finished(3)
    window.took([5])
    window.moved_to(6)
    window.finished(9)
    assert window.committable == 5


@pytest.mark.anyio
async def test_an_in_flight_limit_lets_in_in_order_and_one_that_is_too_large_alone() -> None:
    limit = InFlightLimit(count=2, size=10)
    order: list[str] = []

    async def enter(name: str, size: int) -> None:
        await limit.enter(size)
        order.append(name)

    assert limit.try_enter(6)
    async with anyio.create_task_group() as group:
        group.start_soon(enter, "large", 50)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(enter, "small", 1)
        await anyio.wait_all_tasks_blocked()
        assert order == []  # the small one would fit, but an earlier one waits
        limit.leave(6)
        await anyio.wait_all_tasks_blocked()
        assert order == ["large"]
        limit.leave(50)
    assert order == ["large", "small"]


@pytest.mark.anyio
async def test_a_cancelled_waiter_leaves_the_in_flight_limit_as_it_was() -> None:
    limit = InFlightLimit(count=1, size=10)
    assert limit.try_enter(1)
    with anyio.move_on_after(0.01):
        await limit.enter(1)
    limit.leave(1)
    assert limit.inside == 0
    assert limit.try_enter(1)


def queue(broker: str, number: int = 0) -> MessageQueue:
    return MessageQueue(topic="T", broker_name=broker, queue_id=number)


def test_a_faulty_broker_is_left_alone_for_a_while() -> None:
    now = 0.0
    tolerance = LatencyFaultTolerance(lambda: now)
    both = [queue("a"), queue("b")]
    tolerance.failed("a")
    assert {tolerance.select(both).broker_name for _ in range(8)} == {"b"}
    assert tolerance.select([queue("a")]).broker_name == "a"  # the only broker is selected although it failed
    now = 1000.0
    assert {tolerance.select(both).broker_name for _ in range(8)} == {"a", "b"}
    tolerance.took("b", 0.6)
    assert not tolerance.is_available("b")
    tolerance.took("b", 0.01)
    assert tolerance.is_available("b")


def test_selection_takes_turns_and_avoids() -> None:
    tolerance = LatencyFaultTolerance(lambda: 0.0)
    every = [queue(name, number) for name in "ab" for number in range(2)]
    assert {tolerance.select(every) for _ in range(4)} == set(every)
    assert {tolerance.select(every, avoid="a").broker_name for _ in range(4)} == {"b"}


def route(**brokers: int) -> TopicRouteData:
    return TopicRouteData(
        broker_datas=[
            BrokerData(broker_name=name, broker_addrs={"0": f"{name}:1", "1": f"{name}:2"}) for name in brokers
        ],
        queue_datas=[
            QueueData(broker_name=name, read_queue_nums=8, write_queue_nums=8, perm=perm)
            for name, perm in brokers.items()
        ],
    )


@pytest.mark.anyio
async def test_routes_are_asked_for_once_and_templates_are_not_kept() -> None:
    asked: list[str] = []
    known = {"TBW102": route(a=7)}

    async def fetch(topic: str) -> TopicRouteData | None:
        asked.append(topic)
        await anyio.lowlevel.checkpoint()
        return known.get(topic)

    async def any_broker() -> bool:
        return True

    cache = RouteCache(fetch, any_broker)
    with pytest.raises(TopicNotFoundError):
        await cache.get("T")
    template = await cache.get("T", create=True)
    assert len(template.write_queues) == 4
    assert cache.known("T") is None
    known["T"] = route(a=6, b=4)
    asked.clear()
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(cache.refresh, "T")
    assert asked == ["T"]
    found = await cache.get("T")
    assert {one.broker_name for one in found.write_queues} == {"a"}
    assert {one.broker_name for one in found.read_queues} == {"a", "b"}
    assert found.member("b", 1) == "b:2"
    assert found.member("b", 7) == "b:1"
    assert cache.address_of("a") == "a:1"
    del known["T"]
    assert await cache.refresh("T") is found  # a name server that has just started knows no broker
    assert set(cache.addresses(masters_only=True)) == {"a:1", "b:1"}


@pytest.mark.parametrize(
    ("code", "kind"),
    [(2, NotStoredError), (14, NotStoredError), (1, PerhapsStoredError), (13, UsageError), (17, TopicNotFoundError)],
)
def test_codes_become_errors_by_what_to_do(code: int, kind: type[Exception]) -> None:
    error = error_for(code, None, "127.0.0.1:1")
    assert type(error) is kind
    assert error.code == code
    assert error.help
    assert "127.0.0.1:1" in str(error)


def test_name_server_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_addresses(["a:1", " b "]) == ["a:1", "b:9876"]
    monkeypatch.setenv("NAMESRV_ADDR", "c:2;d:3")
    assert parse_addresses(None) == ["c:2", "d:3"]
    monkeypatch.delenv("NAMESRV_ADDR")
    with pytest.raises(UsageError, match="NAMESRV_ADDR"):
        parse_addresses(None)
    with pytest.raises(UsageError, match="host:port"):
        parse_addresses("a:b")


def record(body: bytes = b"x") -> bytes:
    host = pack_host("127.0.0.1", 1)
    return encode_record(
        topic=b"T", body=body, properties=b"", queue_id=0, queue_offset=3, physical_offset=0, born_timestamp=0,
        born_host=host, store_timestamp=0, store_host=host,
    )  # fmt: skip


def test_replies_are_split_into_messages() -> None:
    found = split_messages(record(b"a") + record(b"b"), "broker-a", ReceivedMessage)
    assert [message.body for message in found] == [b"a", b"b"]
    for broken in (record()[:-1], record() + b"\0", b"\0" * 100, b"\0"):
        with pytest.raises(RecordError):
            split_messages(broken, "broker-a", ReceivedMessage)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "make",
    [
        lambda: Client("127.0.0.1:1"),
        lambda: Producer("p", namesrv="127.0.0.1:1"),
        lambda: PullConsumer("g", namesrv="127.0.0.1:1"),
        lambda: Consumer("g", "T", namesrv="127.0.0.1:1"),
    ],
    ids=["client", "producer", "pull_consumer", "consumer"],
)
async def test_opening_in_a_cancelled_scope_ends(make: Callable[[], Lifecycle]) -> None:
    """Its tasks are shielded: only the opening code can end them."""
    with anyio.fail_after(10, shield=True), anyio.CancelScope() as scope:
        scope.cancel()
        async with make():
            pytest.fail("it has opened")
    assert scope.cancelled_caught


@given(st.integers(0, 2**62), st.integers(1, 2**31 - 1), st.booleans())
def test_a_pulls_frame_is_what_its_command_would_be(offset: int, opaque: int, with_subscription: bool) -> None:
    subscription = Subscription("T", 'a || "b"', 7)
    call = PullCall("g%1-2", queue("a", 3), subscription, 32, with_subscription=with_subscription)
    command = call.command(offset)
    command.opaque = opaque
    assert call.frame(offset, opaque) == encode(command)


@given(st.text(max_size=50), st.binary(max_size=50), st.integers(0, 2**62), st.integers(1, 2**31 - 1), st.booleans())
def test_a_sends_frame_is_what_its_command_would_be(
    properties: str, body: bytes, born: int, opaque: int, many: bool
) -> None:
    code = RequestCode.SEND_BATCH_MESSAGE if many else RequestCode.SEND_MESSAGE_V2
    where = queue("a-\u00e4", 3)
    prepared = Prepared(code, "T", body, properties, 0, 0, born, ("id",))
    assert prepared.is_usual
    command = send_command("g%1-2", prepared, where)
    command.opaque = opaque
    assert SendTemplate("g%1-2", code, where).frame(prepared, opaque) == encode(command)


def test_a_send_that_fits_no_frame_is_refused() -> None:
    prepared = Prepared(RequestCode.SEND_MESSAGE_V2, "T", bytes(MAX_FRAME), "", 0, 0, 0, ("id",))
    with pytest.raises(FrameError, match="over the limit"):
        SendTemplate("g", prepared.code, queue("a")).frame(prepared, 1)


USUAL = Prepared(310, "T", b"x", "", 0, 0, 0, ("id",))


@pytest.mark.parametrize(
    "prepared",
    [
        USUAL._replace(flag=1),
        USUAL._replace(sys_flag=1),
        USUAL._replace(reconsume_times=1),
        USUAL._replace(max_reconsume_times=0),
    ],
)
def test_what_the_form_has_no_place_for_is_not_usual(prepared: Prepared) -> None:
    assert USUAL.is_usual
    assert not prepared.is_usual


@pytest.mark.parametrize(
    "message",
    [
        Message("T", b"x"),
        Message("T", b"x", wait_stored=False),
        Message("T", b"x", tags="a"),
        Message("T", b"x", tags="a", keys=["k", "l"]),
        Message("T", b"x", properties={"p": "q"}),
        Message("T", b"x", sharding_key="s"),
        Message("T", b"x", delay_level=3),
    ],
    ids=["bare", "not waiting", "tags", "tags and keys", "properties", "sharding key", "delay"],
)
def test_properties_travel_in_whichever_form_they_are_written(message: Message) -> None:
    ids = UniqueIdGenerator(bytes(4))
    expected = message.wire_properties()
    for instead in (None, message.wire_properties()):
        prepared = prepare(message, instead, ids, LIMITS)
        assert decode_properties(prepared.properties) == {**expected, "UNIQ_KEY": message.message_id}
        assert prepared.message_ids == (message.message_id,)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("T", b"x", tags="a\x02b\x01c"), "separator"),
        (Message("T", b"x", keys="a\x01b"), "separator"),
        (Message("T", b"x", keys=["a b"]), "blank"),
        (Message("T", b"x", tags="\u20ac" * 11_000), "limit"),
        (Message("T", b"x", tags="\N{GRINNING FACE}" * 9000), "limit"),
    ],
    ids=["tags", "keys", "blank", "long", "four bytes"],
)
def test_tags_and_keys_that_cannot_travel_are_refused(message: Message, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        prepare(message, None, UniqueIdGenerator(bytes(4)), LIMITS)


def test_a_messages_properties_can_be_set_and_added_to() -> None:
    given = {"a": "b"}
    message, other = Message("T", b"x", properties=given), Message("T", b"x")
    message.properties["c"] = "d"
    other.properties["e"] = "f"
    assert (given, message.properties, other.properties) == ({"a": "b"}, {"a": "b", "c": "d"}, {"e": "f"})
    other.properties = given
    assert copy.deepcopy(other).properties == given
    assert other.wire_properties() == {"a": "b", "WAIT": "true"}
