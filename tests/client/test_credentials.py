"""Credentials: every request is signed, in every encoding; what servers refuse is reported, with what to do."""

import contextlib
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any, Literal

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.scripted import pull_header, records
from tests.client.test_request_reply import QUESTION, received
from tests.client.test_scripted import route_of_both
from tests.client.verifying import SECRET, USER, VerifyingBroker, problem, verifying_broker
from trimq.client import (
    Admin,
    ClientOptions,
    Consumer,
    Credentials,
    CredentialsError,
    Message,
    NoPermissionError,
    NoReplyError,
    Producer,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
    UsageError,
    sync,
)
from trimq.client.errors import error_for
from trimq.client.message import MessageQueue
from trimq.client.outages import Outages
from trimq.client.sending import Prepared, send_command
from trimq.client.signed_template import SignedSends, SignedTemplate
from trimq.protocol.auth.signature import is_valid
from trimq.protocol.auth.stamp import STAMP, read_stamp
from trimq.protocol.body import encode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import MAX_FRAME, decode, encode
from trimq.remoting.auth.replay_guard import NO_STAMP
from trimq.remoting.client.client_log import StandardLog
from trimq.remoting.client.credentials import Signer
from trimq.remoting.runtime.clock import ManualClock

SEND = RequestCode.SEND_MESSAGE_V2
MINE = Credentials(USER, SECRET)
WRONG = Credentials(USER, "another secret")
QUEUE = MessageQueue(topic="T", broker_name="a", queue_id=0)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
commands = st.builds(
    lambda fields, body, encoding, oneway: RemotingCommand.request(
        SEND, fields, body, encoding=encoding, oneway=oneway
    ),
    st.dictionaries(texts, texts | st.integers(-(2**62), 2**62) | st.booleans() | st.none(), max_size=8),
    st.binary(max_size=60),
    st.sampled_from(Encoding),
    st.booleans(),
)


def options(credentials: Credentials | None = MINE, header: Any = "json") -> ClientOptions:
    return ClientOptions(credentials=credentials, header=header)


def stored(command: RemotingCommand) -> RemotingCommand:
    return command.reply(header={"msgId": "0" * 32, "queueId": "0", "queueOffset": "5", "transactionId": "X"})


# -- the signature ---------------------------------------------------------------------------------------------------


@given(commands, texts.filter(str.strip), texts.filter(str.strip), st.none() | texts)
def test_a_signed_frame_verifies_by_its_bytes_and_after_decoding(
    command: RemotingCommand, user: str, secret: str, token: str | None
) -> None:
    # guards the signature of any fields, numbers and nulls among them, in every encoding, and that a retry signs again
    before = encode(command)
    signer = Signer(Credentials(user, secret, token))
    frame = signer.encode(command)
    assert encode(command) == before
    assert problem(frame[4:], {user: secret}) is None
    found = decode(memoryview(frame)[4:])
    fields = found.ext_fields()
    assert is_valid(secret, fields["Signature"], fields, found.body, found.version)
    assert not is_valid(f"{secret}!", fields["Signature"], fields, found.body, found.version)
    assert fields.get("SecurityToken") == (token if token is not None else (command.ext or {}).get("SecurityToken"))
    assert bytes(found.body) == command.body
    assert (found.code, found.flag, found.encoding) == (command.code, command.flag, command.encoding)
    again = RemotingCommand.request(SEND, fields, b"another body", encoding=command.encoding)
    assert problem(signer.encode(again)[4:], {user: secret}) is None
    assert "Signature" not in signer.fields(again)


@given(texts, texts, st.integers(0, 2**62), st.binary(max_size=60), texts, st.integers(1, 2**31 - 1), st.booleans())
def test_a_template_makes_the_frames_that_signing_each_request_makes(
    group: str, properties: str, born: int, body: bytes, user: str, opaque: int, stamped: bool
) -> None:
    # guards the shortened way of sends: same fields, same signature, each with a stamp of its own
    signer = Signer(Credentials(user + "u", SECRET, "token", replay_protection=stamped), ManualClock())
    prepared = Prepared(SEND, "T", body, properties, 0, 0, born, ("id",))
    frame = SignedSends(signer, group, SEND, QUEUE).frame(prepared, opaque)
    assert problem(frame[4:], {user + "u": SECRET}) is None
    found, plain = decode(memoryview(frame)[4:]), send_command(group, prepared, QUEUE)
    plain.opaque = opaque
    slow = decode(memoryview(signer.encode(plain))[4:])
    expected, fields = slow.ext_fields(), found.ext_fields()
    if stamped:
        stamp, next_one = (read_stamp(each.pop(STAMP).encode()) for each in (fields, expected))
        assert stamp is not None
        assert next_one == stamp._replace(number=stamp.number + 1)
        assert (stamp.code, stamp.time) == (SEND, ManualClock().wall_ms())
        assert fields.pop("Signature") != expected.pop("Signature")
    assert fields == expected
    assert (found.opaque, found.version, found.flag, bytes(found.body)) == (opaque, slow.version, 0, body)


def test_a_template_refuses_a_frame_that_is_too_long() -> None:
    template = SignedTemplate(Signer(MINE), RemotingCommand.request(SEND, {"x": ""}), ("x",))
    with pytest.raises(FrameError, match="over the limit"):
        template.frame(("1",), bytes(MAX_FRAME), 1)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (("", "s"), "access_key"),
        (("u", " "), "secret_key"),
        ((7, "s"), "access_key"),
        (("u", b"the-secret"), "secret_key"),
        (("u", "the-secret", 7), "security_token"),
    ],
)
def test_credentials_that_cannot_be_used_are_refused_without_showing_them(values: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        Credentials(*values)
    assert "the-secret" not in str(caught.value)


def test_no_text_of_credentials_has_a_secret() -> None:
    # guards logs and tracebacks: they print the repr of what they are given
    credentials = Credentials(USER, SECRET, "the-token")
    signer = Signer(credentials)
    for thing in (credentials, signer, options(credentials), Producer("g", namesrv="h:1", options=options()).client):
        assert SECRET not in f"{thing} {thing!r}"
        assert "the-token" not in f"{thing} {thing!r}"
    assert pickle.loads(pickle.dumps(credentials)) == credentials


# -- everything that the SDK sends -----------------------------------------------------------------------------------


async def _send(broker: VerifyingBroker, given: ClientOptions) -> None:
    async with Producer("p", namesrv=broker.address, options=given, enable_msg_trace=True) as producer:
        await producer.queues("T")
        await producer.client.heartbeat()
        await producer.send(Message("T", b"1", tags="a", keys=["k"]))
        await producer.send(Message("T", "ü".encode(), properties={"ü": "€"}))
        await producer.send_batch([Message("T", b"2"), Message("T", b"3")])
        await producer.send_oneway(Message("T", b"4"))


async def _consume(broker: VerifyingBroker, given: ClientOptions) -> None:
    async with Consumer("c", "T", namesrv=broker.address, options=given) as consumer:
        async for message in consumer:
            async with message.process():
                break


async def _poll(broker: VerifyingBroker, given: ClientOptions) -> None:
    async with PullConsumer("c", namesrv=broker.address, options=given) as consumer:
        await consumer.queues("T")
        await consumer.assign({QUEUE: 0})
        await consumer.client.heartbeat()
        assert await consumer.poll()
        await consumer.commit()


async def _transact(broker: VerifyingBroker, given: ClientOptions) -> None:
    def check(message: ReceivedMessage) -> TransactionState:
        raise AssertionError

    async with (
        TransactionProducer("t", check, namesrv=broker.address, options=given) as producer,
        producer.transaction(Message("T", b"half")),
    ):
        pass


async def _administer(broker: VerifyingBroker, given: ClientOptions) -> None:
    async with Admin(broker.address, options=given) as admin:
        await admin.broker_config(broker.address)
        await admin.route("T")
        await admin.update_broker_config(broker.address, {"a": "b"})


FLOWS: list[tuple[Callable[..., Any], set[int]]] = [
    (_send, {SEND, RequestCode.SEND_BATCH_MESSAGE, RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.HEART_BEAT}),
    (_consume, {RequestCode.PULL_MESSAGE, RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.UNREGISTER_CLIENT}),
    (_poll, {RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET}),
    (_transact, {SEND, RequestCode.END_TRANSACTION}),
    (_administer, {RequestCode.GET_BROKER_CONFIG, RequestCode.UPDATE_BROKER_CONFIG}),
]


def serve(broker: VerifyingBroker) -> None:
    """Answers with which all flows come to their end."""
    first = [True]

    def pulled(command: RemotingCommand) -> RemotingCommand | None:
        if command.ext_fields()["topic"] != "T" or not first:
            return None
        first.clear()
        return command.reply(header=pull_header(2), body=records(0, 2))

    def members(command: RemotingCommand) -> RemotingCommand:
        beats = [entry.body for _, entry in broker.seen if entry.code == RequestCode.HEART_BEAT]
        (client_id,) = re.findall(rb'"clientID":"([^"]+)"', bytes(beats[-1]))
        return command.reply(body=encode_json({"consumerIdList": [client_id.decode()]}))

    broker.answers |= {
        SEND: stored,
        RequestCode.SEND_BATCH_MESSAGE: stored,
        RequestCode.PULL_MESSAGE: pulled,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP: members,
        RequestCode.QUERY_CONSUMER_OFFSET: lambda command: command.reply(header={"offset": "0"}),
        RequestCode.HEART_BEAT: lambda command: command.reply(header={"TRIMQ_MSGPACK": "true"}),
    }


@pytest.mark.anyio
@pytest.mark.timeout(30)
@pytest.mark.parametrize("header", ["json", "rocketmq", "msgpack"])
@pytest.mark.parametrize(("flow", "codes"), FLOWS, ids=lambda value: getattr(value, "__name__", ""))
async def test_every_request_of_the_sdk_is_signed(
    flow: Callable[..., Any], codes: set[int], header: Literal["json", "rocketmq", "msgpack"]
) -> None:
    # guards callers that make their frames themselves, and requests to the name server
    async with verifying_broker() as broker:
        serve(broker)
        await flow(broker, options(header=header))
    assert broker.refused == []
    assert codes <= {code for code, _ in broker.fields}
    stamps = [(code, read_stamp(fields[STAMP].encode())) for code, fields in broker.fields]
    assert all(stamp is not None and stamp.code == code for code, stamp in stamps)
    assert len(set(stamps)) == len(stamps)
    if flow is not _administer:  # it sends no heartbeat, by whose reply a client learns that msgpack is welcome
        assert Encoding[header.upper()] in broker.encodings


@pytest.mark.anyio
@pytest.mark.timeout(30)
@pytest.mark.parametrize("flow", [_send, _consume, _administer])
async def test_stamps_can_be_left_out(flow: Callable[..., Any]) -> None:
    async with verifying_broker() as broker:
        serve(broker)
        await flow(broker, options(Credentials(USER, SECRET, replay_protection=False)))
    assert broker.refused == []
    assert [fields for _, fields in broker.fields if STAMP in fields] == []


@pytest.mark.anyio
@pytest.mark.timeout(30)
async def test_a_request_to_other_clients_and_its_reply_are_signed() -> None:
    async with verifying_broker() as broker:
        serve(broker)
        broker.answers[RequestCode.SEND_REPLY_MESSAGE_V2] = stored
        async with Producer("p", namesrv=broker.address, options=options()) as producer:
            with pytest.raises(NoReplyError):
                await producer.request(Message("T", b"?"), ttl=0.2)
            await producer.reply(received(QUESTION), b"!")
    assert broker.refused == []
    assert RequestCode.SEND_REPLY_MESSAGE_V2 in broker.counts


def test_programs_that_block_sign_too() -> None:
    # guards the facade: options reach the client inside
    async def main() -> None:
        async with verifying_broker() as broker:
            serve(broker)
            await anyio.to_thread.run_sync(send, broker.address)
            assert broker.refused == []
            assert SEND in broker.counts

    def send(address: str) -> None:
        with sync.Producer("p", namesrv=address, options=options()) as producer:
            producer.send(Message("T", b"1"))

    anyio.run(main)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remark", "kind", "advice"),
    [
        ("username cannot be null.", CredentialsError, "give credentials"),
        ("org.apache.rocketmq.acl.common.AclException: No accessKey is configured", CredentialsError, "credentials"),
        ("check signature failed.", CredentialsError, "mqadmin getUser"),
        ("User:me is not found.", CredentialsError, "mqadmin getUser"),
        ("User:me is disabled.", CredentialsError, "updateUser -s enable"),
        ("your clock is 400 s behind the server's: up to 300 s are", CredentialsError, "replay_protection=False"),
        (NO_STAMP.format(name="me"), CredentialsError, "replay_protection=True"),
        (
            "User:me has no permission to access Topic:T from 1.2.3.4, no matched policies.",
            NoPermissionError,
            "explainAccess",
        ),
        ("the topic[T] sending message is forbidden", NoPermissionError, "forbidden"),
        (None, NoPermissionError, "policy"),
    ],
)
def test_a_refusal_says_who_what_and_what_to_do(remark: str | None, kind: type, advice: str) -> None:
    error = error_for(16, remark, "h:1")
    assert type(error) is kind
    assert isinstance(error, UsageError)
    assert error.code == 16
    assert error.text.startswith(remark or "Not permitted")
    assert advice in error.text
    assert str(error).endswith("[NO_PERMISSION (16) from h:1]")


@pytest.mark.anyio
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("credentials", "text"), [(WRONG, "check signature failed. The server"), (None, "username cannot be null. This")]
)
async def test_a_send_that_no_broker_accepts_fails_at_once(credentials: Credentials | None, text: str) -> None:
    # guards programs with a wrong secret: one attempt with one broker, and the text says why
    async with verifying_broker() as broker:
        broker.open_codes.add(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        async with Producer("p", namesrv=broker.address, options=options(credentials)) as producer:
            with pytest.raises(CredentialsError, match=text) as caught:
                await producer.send(Message("T", b"1"))
        assert broker.counts[SEND] == 1
        assert SECRET not in f"{caught.value!r}{caught.value}"


@pytest.mark.anyio
@pytest.mark.timeout(30)
async def test_a_producer_tries_another_broker_which_may_know_the_user() -> None:
    # guards the rule of Java's producers, and that the second attempt is signed anew
    async with verifying_broker() as one, verifying_broker() as two:
        one.users = {}
        one.open_codes.add(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        both = route_of_both(one, two)
        one.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] = both
        two.answers[SEND] = stored
        async with Producer("p", namesrv=one.address, options=options(), retries=1) as producer:
            for _ in range(4):
                assert (await producer.send(Message("T", b"1"))).queue.broker_name == "b"
        assert (two.counts[SEND], two.refused) == (4, [])


@pytest.mark.anyio
@pytest.mark.timeout(30)
async def test_a_consumer_that_no_broker_accepts_does_not_open() -> None:
    async with verifying_broker() as broker:
        broker.open_codes.add(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        with pytest.raises(CredentialsError, match="check signature failed"):
            async with Consumer("c", "T", namesrv=broker.address, options=options(WRONG)):
                pass
        serve(broker)
        await _consume(broker, options())  # and with the right secret it does


@pytest.mark.anyio
@pytest.mark.timeout(30)
async def test_a_consumer_reports_what_it_may_not_do_and_goes_on_when_it_may(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # guards consumers whose policy comes later than they: a warning, the state in ``denied``, and then messages
    refusal = f"User:{USER} has no permission to access Topic:T from 127.0.0.1, no matched policies."
    async with verifying_broker() as broker:
        serve(broker)
        pulled = broker.answers[RequestCode.PULL_MESSAGE]
        broker.answers[RequestCode.PULL_MESSAGE] = lambda command: command.reply(16, refusal)
        with caplog.at_level(logging.WARNING, "trimq.client"):
            async with Consumer("c", "T", namesrv=broker.address, options=options()) as consumer:
                await broker.until(RequestCode.PULL_MESSAGE, 3)
                (denied,) = consumer.client.denied
                assert (denied.event, denied.error.address) == ("a pull", broker.address)
                assert refusal in str(denied.error)
                assert SECRET not in repr(denied)
                broker.answers[RequestCode.PULL_MESSAGE] = pulled
                assert (await anext(consumer)).body == b"0"
        lines = [record.getMessage() for record in caplog.records if "explainAccess" in record.getMessage()]
        assert len(lines) == 1
        assert SECRET not in caplog.text


@pytest.mark.anyio
@pytest.mark.timeout(30)
async def test_a_poll_that_would_wait_for_ever_says_that_the_user_is_not_accepted() -> None:
    async with verifying_broker() as broker:
        broker.open_codes.add(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        serve(broker)
        broker.users = {}
        async with PullConsumer("c", namesrv=broker.address, options=options()) as consumer:
            await consumer.assign({QUEUE: 0})
            with pytest.raises(CredentialsError, match="is not found"):
                await consumer.poll()
            broker.users = {USER: SECRET}
            found: list[ReceivedMessage] = []
            while not found:
                with contextlib.suppress(CredentialsError):  # of a pull before the user was made
                    found = await consumer.poll()
            assert found[0].body == b"0"


def test_a_denial_counts_for_a_minute() -> None:
    now = [0.0]
    outages = Outages(StandardLog("trimq.client.test"), lambda: now[0])
    outages.note("a pull", error_for(16, "no", "h:1"), level=logging.INFO)
    outages.note("a pull", error_for(2, "busy", "h:1"))
    now[0] = 30.0
    outages.note("a heartbeat", error_for(16, "no", "h:1"))
    assert [denied.event for denied in outages.denied] == ["a pull", "a heartbeat"]
    now[0] = 70.0
    outages.note("a pull", error_for(16, "no", "h:2"))
    assert [(denied.event, denied.error.address) for denied in outages.denied] == [
        ("a heartbeat", "h:1"),
        ("a pull", "h:2"),
    ]
    now[0] = 200.0
    assert outages.denied == []
