"""The error of a send, for each response code and each network failure, after each kind of earlier attempt.

Guards: a definite refusal is never PerhapsStoredError; an earlier attempt that may have stored is never
forgotten; an outage is never UsageError.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from tests.client.scripted import ScriptedBroker, scripted_broker
from tests.client.test_scripted import BATCH, SEND, refused, stored
from trimq.client import (
    ClientOptions,
    Consumer,
    Message,
    NoBrokerError,
    NoPermissionError,
    NotStoredError,
    PerhapsStoredError,
    Producer,
    PullConsumer,
    RocketMQError,
    SendOutcome,
    TopicNotFoundError,
    UnreachableError,
    UsageError,
)
from trimq.client.attempts import Attempts, Failure
from trimq.client.core import transport_error
from trimq.client.message import MessageQueue
from trimq.client.routes import TopicRoute
from trimq.client.sending import Prepared
from trimq.protocol.body import BrokerData, ClusterInfo, QueueData, TopicRouteData, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError
from trimq.remoting.client.call import Call, running_loop
from trimq.remoting.errors import RemotingConnectError, RemotingTimeoutError

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
CLUSTER = RequestCode.GET_BROKER_CLUSTER_INFO
ADDRESS = "127.0.0.1:10911"

STORED = "stored"
USAGE, DENIED, NO_TOPIC, NOT, UNREACHABLE, PERHAPS = (
    UsageError, NoPermissionError, TopicNotFoundError, NotStoredError, UnreachableError, PerhapsStoredError,
)  # fmt: skip

CODES: dict[int, Any] = {
    0: STORED, 1: PERHAPS, 2: NOT, 3: USAGE, 4: PERHAPS, 10: STORED, 11: STORED, 12: STORED, 13: USAGE, 14: NOT, 15:
    USAGE, 16: DENIED, 17: NO_TOPIC, 18: USAGE, 19: NOT, 20: NOT, 21: NOT, 22: USAGE, 23: USAGE, 24: NOT, 25: NOT,
    26: USAGE, 27: NOT, 28: NOT, 29: USAGE, 200: PERHAPS, 201: PERHAPS, 202: PERHAPS, 203: USAGE, 204: USAGE, 205:
    USAGE, 206: USAGE, 207: PERHAPS, 208: USAGE, 209: NOT, 210: NOT, 211: NOT, 212: NOT, 213: USAGE, 215: NOT, 501:
    NOT, 604: USAGE, 1500: NOT, 3001: USAGE, 3002: USAGE, 9999: PERHAPS,
    **dict.fromkeys(range(2000, 2015), PERHAPS), **dict.fromkeys((2004, 2007, 2011, 2012), NOT),
    **dict.fromkeys((2005, 2008, 2009, 2010), USAGE),
}  # fmt: skip
"""RocketMQ's codes, those of its controllers, and an unknown one, after which the outcome is uncertain."""

FAILURES: dict[str, Any] = {
    "not connected": UNREACHABLE,
    "no space": UNREACHABLE,
    "closed before it was written": UNREACHABLE,
    "closed after it was written": PERHAPS,
    "silence, not written": UNREACHABLE,
    "silence, written": PERHAPS,
    "too long": USAGE,
    "an answer without its fields": PERHAPS,
}

EARLIER: dict[str, list[Any]] = {"first": [], "refused": [2], "unreachable": ["not connected"], "unknown": [1]}
"""The outcome of the attempt before."""


def test_no_code_is_left_out() -> None:
    assert {int(code) for code in ResponseCode} <= set(CODES)


class Connection:
    """A connection, with the attributes that Attempts uses."""

    address = ADDRESS
    encoding = Encoding.JSON
    closed = False
    close_reason = "it broke"
    refused = False

    def new_call(self) -> Call:
        return running_loop().call()

    def end(self, call: Call) -> None:
        """Do nothing."""


class Scripted:
    """A client whose requests end with ``steps`` in turn: a response code, or a failure of FAILURES."""

    signer = None

    def __init__(self, steps: Sequence[Any], routes: Sequence[TopicRoute | RocketMQError] = ()) -> None:
        self.steps = list(steps)
        self.routes = self
        self._routes = list(routes)

    def doubt(self, address: str) -> None:
        """Do nothing."""

    def known(self, topic: str) -> TopicRoute | None:
        return None if self._routes else route(topic)

    async def refresh(self, _topic: str, **_: object) -> TopicRoute:
        found = self._routes.pop(0)
        if isinstance(found, RocketMQError):
            raise found
        return found

    def ready(self, _address: str) -> Connection | None:
        return None if self.steps[0] in ("not connected", "no space") else Connection()

    async def with_space(self, address: str, code: int, timeout: float) -> Connection:
        if self.steps.pop(0) == "not connected":
            raise transport_error(RemotingConnectError(address, ConnectionRefusedError()))
        raise transport_error(RemotingTimeoutError(address, code, timeout, written=False))

    def begin(
        self, connection: Connection, frame: Callable[[int, Encoding], bytes], _timeout: float, call: Call
    ) -> None:
        step = self.steps.pop(0)
        if step == "too long":
            raise FrameError("too long")
        frame(1, Encoding.JSON)
        if isinstance(step, int):
            call.reply = stored(RemotingCommand.request(SEND, {"e": "0"}))
            call.reply.code, call.reply.remark = step, "as scripted"
        elif step == "an answer without its fields":
            call.reply = RemotingCommand.request(SEND, {}).reply()
        else:
            connection.closed = step.startswith("closed")
            call.written = "not written" not in step and "before" not in step
        call.finish()


def route(topic: str = "T") -> TopicRoute:
    queues = [QueueData(broker_name="a", read_queue_nums=1, write_queue_nums=1, perm=6)]
    brokers = [BrokerData(cluster="c", broker_name="a", broker_addrs={"0": ADDRESS})]
    return TopicRoute(topic, TopicRouteData(queue_datas=queues, broker_datas=brokers))


PREPARED = Prepared(SEND, "T", b"x", "", 0, 0, 0, ("id",))


def attempts(client: Scripted, retries: int) -> Attempts:
    return Attempts(
        client,  # type: ignore[arg-type] # has the methods that are used
        "p", retries=retries, retry_unknown=True, timeout=1.0, create_topics=True,
    )  # fmt: skip


async def outcome(client: Scripted, retries: int, failure: Failure | None = None) -> Any:
    """``stored``, or the error's class. The outcome of the message must match."""
    message = Message("T", b"x")
    try:
        await attempts(client, retries).deliver(PREPARED, None, [message], None, failure)
    except RocketMQError as error:
        if not isinstance(error, PerhapsStoredError):
            assert message.outcome is SendOutcome.NOT_STORED
        return type(error)
    return STORED


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimq.client.attempts.random.random", lambda: 0.0)


@pytest.mark.parametrize("earlier", EARLIER)
async def test_the_error_of_a_send(earlier: str) -> None:
    """The whole table. If an earlier attempt may have stored the message, every later error is uncertain."""
    before = EARLIER[earlier]
    found, expected = {}, CODES | FAILURES
    for step in expected:
        found[step] = await outcome(Scripted([*before, step]), len(before))
    if earlier == "unknown":
        expected = {step: STORED if kind is STORED else PERHAPS for step, kind in expected.items()}
    assert found == expected


async def test_a_first_attempt_that_may_have_worked_is_not_forgotten_where_others_made_it() -> None:
    """The first attempt of a batch is made without a task; its failure is passed to the task that retries."""
    first = Failure(MessageQueue(topic="T", broker_name="a", queue_id=0), PerhapsStoredError("silence"))
    assert await outcome(Scripted([13]), 2, first) is PerhapsStoredError
    assert await outcome(Scripted([], [NoBrokerError("gone")]), 2, first) is PerhapsStoredError
    assert await outcome(Scripted([0]), 2, first) is STORED


async def test_a_topic_that_vanishes_between_attempts_does_not_make_the_first_one_certain() -> None:
    """A template's route is not cached: it is requested before each attempt."""
    for lost in (NoBrokerError("gone"), TopicNotFoundError("gone", code=17)):
        assert await outcome(Scripted(["silence, written"], [route(), lost]), 2) is PerhapsStoredError
        assert await outcome(Scripted([2], [route(), lost]), 2) is type(lost)


async def test_a_message_that_no_broker_takes_is_not_the_brokers_fault() -> None:
    """Guards: a broker was avoided for ten minutes after it had refused a message that was too large."""
    sends = attempts(Scripted([13, 2]), 0)
    for code, is_available in ((13, True), (2, False)):
        with pytest.raises(RocketMQError) as caught:
            await sends.deliver(PREPARED, None, [Message("T", b"x")])
        assert caught.value.code == code
        assert sends._fault_tolerance.is_available("a") is is_available


async def test_who_is_cancelled_between_attempts_learns_that_the_first_was_refused() -> None:
    async with scripted_broker() as broker:
        broker.answers[SEND] = refused(ResponseCode.SYSTEM_BUSY)
        message = Message("T", b"x")
        async with Producer("p", namesrv=broker.address) as producer, anyio.create_task_group() as group:
            paused = anyio.Event()

            async def pause(_seconds: float) -> None:
                paused.set()
                await anyio.sleep_forever()

            with pytest.MonkeyPatch.context() as patch:
                # Not anyio's own ``sleep``: the client's background tasks sleep too, and may start only now.
                patch.setattr("trimq.client.attempts.anyio", SimpleNamespace(**vars(anyio) | {"sleep": pause}))
                group.start_soon(producer.send, message)
                await paused.wait()
                group.cancel_scope.cancel()
        assert message.outcome is SendOutcome.NOT_STORED


async def test_who_is_cancelled_while_it_connects_learns_that_nothing_was_sent() -> None:
    async with scripted_broker() as broker:
        message = Message("T", b"x")
        async with Producer("p", namesrv=broker.address) as producer, anyio.create_task_group() as group:
            await producer.queues("T")
            connecting = anyio.Event()

            async def with_space(*_: object) -> None:
                connecting.set()
                await anyio.sleep_forever()

            producer.client.ready = lambda _: None  # type: ignore[method-assign,assignment]
            producer.client.with_space = with_space  # type: ignore[method-assign,assignment]
            group.start_soon(producer.send, message)
            await connecting.wait()
            group.cancel_scope.cancel()
        assert message.outcome is SendOutcome.NOT_STORED


async def test_a_batchs_first_attempt_that_may_have_worked_is_not_forgotten() -> None:
    async with scripted_broker() as broker:
        broker.answers[BATCH] = stored
        async with Producer("p", namesrv=broker.address, linger=0.0) as producer:
            await producer.send(Message("T", b"opens the connection"))
            codes = iter([ResponseCode.SYSTEM_ERROR, ResponseCode.MESSAGE_ILLEGAL])
            broker.answers[BATCH] = lambda command: command.reply(next(codes), "no")
            message = Message("T", b"x")
            with pytest.raises(PerhapsStoredError):
                await producer.send(message)
        assert message.outcome is SendOutcome.PERHAPS_STORED
        assert next(codes, None) is None


async def test_a_batch_that_is_closed_over_says_what_is_known() -> None:
    """Closing cancels an internal task, whose error is not one of the SDK's: the messages may have been stored."""
    async with scripted_broker() as broker:
        broker.answers[BATCH] = lambda _: None
        errors: list[RocketMQError] = []
        messages = [Message("T", b"out"), Message("T", b"out too")]

        async def send(message: Message) -> None:
            try:
                await producer.send(message)
            except RocketMQError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            producer = Producer("p", namesrv=broker.address, linger=0.0, send_timeout=20.0)
            async with producer:
                for message in messages:
                    group.start_soon(send, message)
                await broker.until(BATCH, 1)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("trimq.client.lifecycle.CLOSE_TIMEOUT", 0.01)
                    await producer.__aexit__(None, None, None)
        assert [type(error) for error in errors] == [PerhapsStoredError] * 2
        assert {message.outcome for message in messages} == {SendOutcome.PERHAPS_STORED}


# -- outages -----------------------------------------------------------------------------------------------------------


def unknown(command: RemotingCommand) -> RemotingCommand:
    return command.reply(ResponseCode.TOPIC_NOT_EXIST, "no route")


def cluster(*addresses: str) -> bytes:
    table = {
        address: BrokerData(cluster="c", broker_name=address, broker_addrs={"0": address}) for address in addresses
    }
    return encode_json(ClusterInfo(broker_addr_table=table))


async def test_a_send_waits_for_a_broker_that_restarts() -> None:
    """While a broker restarts, its name server may know no broker, and so no topic."""
    async with scripted_broker() as broker:

        def comes_back(command: RemotingCommand) -> RemotingCommand:
            return unknown(command) if broker.counts[CLUSTER] < 3 else broker.route(command)

        broker.answers |= {ROUTE: comes_back, CLUSTER: lambda command: command.reply(body=cluster()), SEND: stored}
        async with Producer("p", namesrv=broker.address, send_timeout=20.0) as producer:
            assert (await producer.send(Message("T", b"x"))).queue_offset == 5
        assert broker.counts[CLUSTER] == 3


@pytest.mark.parametrize("what", ["send", "batch", "queues"])
async def test_an_outage_that_lasts_is_an_outage_error(what: str) -> None:
    async with scripted_broker() as broker:
        broker.answers |= {ROUTE: unknown, CLUSTER: lambda command: command.reply(body=cluster())}
        message = Message("T", b"x")
        linger = 0.0 if what == "batch" else None
        options = ClientOptions(request_timeout=0.5)
        async with (
            Producer("p", namesrv=broker.address, send_timeout=0.5, linger=linger, options=options) as producer,
            PullConsumer("g", client=producer.client) as consumer,
        ):
            attempt = consumer.queues("T") if what == "queues" else producer.send(message)
            with pytest.raises(NoBrokerError) as caught:
                await attempt
        error = caught.value
        assert isinstance(error, NotStoredError)
        assert not isinstance(error, UsageError)
        assert error.code is None
        assert message.outcome is SendOutcome.NOT_STORED
        assert broker.counts[CLUSTER] > 1


async def test_while_brokers_are_up_an_unknown_topic_is_not_found_immediately() -> None:
    async with scripted_broker() as broker:
        broker.answers |= {ROUTE: unknown, CLUSTER: lambda command: command.reply(body=cluster(broker.address))}
        async with Producer("p", namesrv=broker.address, send_timeout=100.0) as producer:
            with pytest.raises(TopicNotFoundError):
                await producer.send(Message("T", b"x"))
        assert broker.counts[CLUSTER] == 1


async def test_a_name_server_that_has_just_started_does_not_speak_for_the_others() -> None:
    async with scripted_broker() as fresh, scripted_broker() as broker:
        fresh.answers |= {ROUTE: unknown, CLUSTER: lambda command: command.reply(body=cluster())}
        broker.answers[SEND] = stored
        for _ in range(4):  # the first broker is random
            async with Producer("p", namesrv=[fresh.address, broker.address]) as producer:
                await producer.send(Message("T", b"x"))
        assert broker.counts[SEND] == 4


async def test_a_consumer_opens_while_no_broker_is_there_and_waits() -> None:
    """A consumer of a topic that is not known yet opens, and starts when the topic is created."""
    async with scripted_broker() as broker:
        broker.answers |= {ROUTE: unknown, CLUSTER: lambda command: command.reply(body=cluster())}
        async with Consumer("g", "T", namesrv=broker.address, start="first", model="broadcasting") as consumer:
            assert consumer.assignment == []
            broker.answers |= {ROUTE: broker.route, RequestCode.PULL_MESSAGE: lambda _: None}
            broker.answers[RequestCode.GET_MIN_OFFSET] = lambda command: command.reply(header={"offset": "0"})
            with anyio.fail_after(20):
                await broker.until(RequestCode.PULL_MESSAGE, 1)


async def many_senders(broker: ScriptedBroker, number: int) -> list[type[RocketMQError]]:
    kinds: list[type[RocketMQError]] = []

    async def send() -> None:
        try:
            await producer.send(Message("T", b"x"))
        except RocketMQError as error:
            kinds.append(type(error))

    async with Producer("p", namesrv=broker.address, send_timeout=0.0) as producer, anyio.create_task_group() as group:
        for _ in range(number):
            group.start_soon(send)
    return kinds


async def test_those_who_ask_for_the_same_topic_share_the_answer_that_there_is_none() -> None:
    """Guards: a hundred sends made a hundred route requests, one after the other."""
    async with scripted_broker() as broker:
        broker.answers |= {ROUTE: unknown, CLUSTER: lambda command: command.reply(body=cluster(broker.address))}
        assert await many_senders(broker, 100) == [TopicNotFoundError] * 100
        assert broker.counts[CLUSTER] < 4


@pytest.mark.parametrize("answer", [refused(1), lambda command: command.reply(body=b"{")], ids=["error", "nonsense"])
async def test_a_name_servers_fault_stores_nothing(answer: Callable[[RemotingCommand], RemotingCommand]) -> None:
    """Guards: if the route request failed with SYSTEM_ERROR, the send raised PerhapsStoredError."""
    async with scripted_broker() as broker:
        broker.answers[ROUTE] = answer
        async with Producer("p", namesrv=broker.address) as producer:
            with pytest.raises(NotStoredError, match="route of T"):
                await producer.send(Message("T", b"x"))


async def test_what_is_too_long_for_a_frame_is_a_usage_error() -> None:
    async with scripted_broker() as broker:
        size = 17 * 1024 * 1024
        async with Producer("p", namesrv=broker.address, max_message_size=2 * size, compression=None) as producer:
            for send in (producer.send, producer.send_oneway):
                message = Message("T", bytes(size))
                with pytest.raises(UsageError, match="limit"):
                    await send(message)
                assert message.outcome is SendOutcome.NOT_STORED
