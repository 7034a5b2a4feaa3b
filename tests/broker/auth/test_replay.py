"""Recorded requests: what the SDK has sent is served once and with its code; official clients are served as ever."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from tests.broker.auth.requests import CASES, WRITE, case
from tests.broker.auth.signed import ROOT, ROOT_SECRET, User, closed_broker, signed
from tests.broker.auth.test_codes import command_of, made
from tests.broker.raw_client import Raw
from tests.broker.wire_client import WireClient, send_ext
from tests.web_client import get
from trimq.broker.controller import BrokerController
from trimq.client import ClientOptions, Credentials, CredentialsError, Message, Producer, PullConsumer
from trimq.client.admin import Admin
from trimq.client.message import MessageQueue
from trimq.client.sending import Prepared
from trimq.client.signed_template import SignedSends
from trimq.protocol.auth.permissions import ADMINISTRATION, TABLE
from trimq.protocol.auth.signature import ACCESS_KEY, SIGNATURE, sign
from trimq.protocol.auth.stamp import STAMP, read_stamp, stamp_text
from trimq.protocol.codes import VERSION, RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import decode, encode
from trimq.remoting.auth.access import PLAIN
from trimq.remoting.auth.replay_guard import AGAIN, BEFORE
from trimq.remoting.client.client_connection import ClientConnection
from trimq.remoting.client.credentials import Signer
from trimq.remoting.runtime.clock import ManualClock, SystemClock

ROOTS = Credentials(ROOT, ROOT_SECRET)
SERVED = (0, None)
UNIQUE = "UNIQ_KEY\x017F0000010001AABB0000000000000001\x02"
INNER = "brokers"
NAMES = {
    "embeddedNamesrvEnable": "true",
    "embeddedNamesrvPort": 0,
    # The name server asks for signatures too.
    "innerClientAuthenticationCredentials": json.dumps({"accessKey": INNER, "secretKey": "inner canary-27"}),
}


def refused(broker: BrokerController) -> dict[str, int]:
    users = broker.context.users
    assert users is not None
    return {reason: count for reason, count in users.access.refused.items() if count}


async def messages(user: User) -> list[str]:
    """The ends of the queues of the topic T."""
    return [(await user.ask(30, {"topic": "T", "queueId": queue})).ext_fields()["offset"] for queue in range(4)]


async def answer(broker: BrokerController, frame: bytes) -> tuple[int, str | None]:
    """The reply to a frame on a connection of its own."""
    stream = await trio.open_tcp_stream(*broker.endpoint)
    async with stream:
        reply = decode(memoryview(await Raw(stream).ask(frame))[4:])
    return reply.code, reply.remark


def changed(frame: bytes, code: int, fields: dict[str, str] | None = None) -> bytes:
    """A recorded frame with another code, or with other ext fields; the signature stays."""
    command = decode(memoryview(frame)[4:])
    ext = command.ext_fields() if fields is None else fields
    return encode(RemotingCommand(code, command.opaque, 0, command.version, ext=ext, body=bytes(command.body)))


@pytest.mark.parametrize("header", ["json", "rocketmq"])
async def test_what_the_sdk_has_sent_is_not_served_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: Any
) -> None:
    frames: list[bytes] = []
    put = ClientConnection._put

    def recorded(connection: ClientConnection, frame: bytes) -> None:
        frames.append(frame)
        put(connection, frame)

    monkeypatch.setattr(ClientConnection, "_put", recorded)
    options = ClientOptions(credentials=ROOTS, header=header)
    async with closed_broker(tmp_path, **NAMES) as (broker, root):
        names = broker.name_servers[0].split()[0]
        async with Producer("p", namesrv=names, options=options) as producer:
            for _ in range(3):
                await producer.send(Message("T", b"x"))
        async with PullConsumer("c", namesrv=names, options=options) as consumer:
            await consumer.assign(dict.fromkeys(await consumer.queues("T"), 0))
            await consumer.client.heartbeat()
            assert await consumer.poll()
            await consumer.commit()
        async with Admin(names, options=options) as admin:
            await admin.broker_config(f"{broker.endpoint[0]}:{broker.endpoint[1]}")
        assert refused(broker) == {}
        before = await messages(root)
        codes = set()
        for frame in frames:
            command = decode(memoryview(frame)[4:])
            if command.ext_fields()[ACCESS_KEY] == INNER or command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
                continue  # of the broker, or to the name server
            assert STAMP in command.ext_fields()
            codes.add(command.code)
            assert await answer(broker, frame) == (16, AGAIN)
            # As fast paths want it, too: only the name of the field is another one, before and behind the others.
            for name in (b"!0nce", b"00nce", b"@nceA"):
                assert await answer(broker, frame.replace(b"!once", name)) == (16, AGAIN)
            text = f"the request was made with the code {command.code}, and not 3003."
            assert await answer(broker, changed(frame, 3003)) == (16, text)
        assert {310, 11, 34, 26} <= codes
        assert await messages(root) == before
        assert set(refused(broker)) == {"replay"}


@pytest.mark.parametrize(("code", "header"), [(26, {}), (310, send_ext("T")), (30, {"topic": "T", "queueId": 0})])
async def test_a_stamp_cannot_be_taken_off_or_changed(tmp_path: Path, code: int, header: dict[str, Any]) -> None:
    async with closed_broker(tmp_path) as (broker, root):
        # Fast paths, if there are any, know the user and the topic.
        assert (await root.ask(310, send_ext("T"), b"x")).code == 0
        frame = Signer(ROOTS).encode(RemotingCommand.request(code, header, b"x" if code == 310 else b""))
        fields = decode(memoryview(frame)[4:]).ext_fields()
        stamp = fields[STAMP]
        rest = {name: value for name, value in fields.items() if name != STAMP}
        wrong = (16, "check signature failed.")
        assert await answer(broker, changed(frame, code, rest)) == wrong
        later = stamp.replace(stamp.split(":")[2], str(int(stamp.split(":")[2]) + 1))
        assert await answer(broker, changed(frame, code, rest | {STAMP: later})) == wrong
        other = stamp.replace(f":{code}:", ":25:")
        assert await answer(broker, changed(frame, code, rest | {STAMP: other})) == wrong
        assert (await answer(broker, frame))[0] == 0
        # The same text under other names has the same signature: the values are signed in the order of the names.
        for names in ({"!a": stamp}, {"!a": "", "!b": stamp}, {"!a": stamp[:3], "!b": stamp[3:]}, {"0": stamp}):
            assert await answer(broker, changed(frame, code, rest | names)) == (16, AGAIN)
        # The stamp as the name of the user, and with it.
        for name in (stamp, stamp + ROOT):
            moved = rest | {"AccessKey": name} | ({"B": ROOT} if name == stamp else {})
            assert await answer(broker, changed(frame, code, moved)) == wrong
        assert refused(broker) == {"authentication": 5, "replay": 4}


async def test_the_clock_of_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with closed_broker(tmp_path, authReplayWindowSeconds=60) as (broker, _):
        signer = Signer(ROOTS, ManualClock())
        code, text = await answer(broker, signer.encode(RemotingCommand.request(26)))
        assert code == 16
        assert "s behind the server's, or the request was sent so late: up to 60 s are accepted" in str(text)
        assert refused(broker) == {"replay": 1}
        # The error of the SDK says what to do.
        monkeypatch.setattr(Signer, "stamp", lambda _, code: stamp_text(code, 1_700_000_000_000, "A" * 16, 1))
        async with Admin("127.0.0.1:1", options=ClientOptions(credentials=ROOTS)) as admin:
            with pytest.raises(CredentialsError, match=r"your clock is .* replay_protection=False"):
                await admin.broker_config(f"{broker.endpoint[0]}:{broker.endpoint[1]}")


async def test_what_was_made_before_the_start_may_be_sent_anew(tmp_path: Path) -> None:
    # guards restarts: requests that the process before this one has served
    frame = Signer(ROOTS).encode(RemotingCommand.request(26))
    async with closed_broker(tmp_path) as (broker, _):
        assert await answer(broker, frame) == (2, BEFORE)
        assert await answer(broker, Signer(ROOTS).encode(RemotingCommand.request(26))) == SERVED


async def test_requests_of_official_clients_are_served_also_again(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root):
        ext = signed(send_ext("T"), b"x", ROOT, ROOT_SECRET)
        for _ in range(2):
            assert (await root.client.ask(310, ext, b"x")).code == 0
        assert refused(broker) == {}


@pytest.mark.parametrize(
    ("required", "root_needs", "app_needs"), [("superUsers", True, False), ("app , x", False, True)]
)
async def test_users_who_need_a_stamp(tmp_path: Path, required: str, root_needs: bool, app_needs: bool) -> None:
    async with closed_broker(tmp_path) as (_, root):
        await root.make("app", "Topic:T Pub", "Cluster:DefaultCluster Get")
    async with (
        closed_broker(tmp_path, authRequireReplayProtection=required) as (broker, root),
        WireClient.connect(broker.endpoint) as client,
    ):
        app = User(client, "app")
        for user, needs in ((root, root_needs), (app, app_needs)):
            reply = await user.ask(310, send_ext("T"), b"x")
            assert (reply.code == 16) is needs
            if needs:
                assert str(reply.remark).startswith(f"requests of User:{user.name} have to say when they were made")
            signer = Signer(Credentials(user.name, user.secret))
            assert await answer(broker, signer.encode(RemotingCommand.request(26))) == SERVED
            assert (await answer(broker, signer.encode(RemotingCommand.request(310, send_ext("T"), b"x"))))[0] == 0
            # Also when fast paths, which decline messages without an id, know the user and the topic.
            unstamped = Signer(Credentials(user.name, user.secret, replay_protection=False))
            send = SignedSends(unstamped, "p", 310, MessageQueue(topic="T", broker_name="broker-a", queue_id=0))
            frame = send.frame(Prepared(310, "T", b"x", UNIQUE, 0, 0, 1, ("id",)), 7)
            assert ((await answer(broker, frame))[0] == 16) is needs
        assert refused(broker) == {"replay": 2}


PLAIN_CONNECTION: Any = SimpleNamespace(peer=("127.0.0.1", 1), peer_text="127.0.0.1:1", tls=None)
TLS_CONNECTION: Any = SimpleNamespace(peer=("127.0.0.1", 1), peer_text="127.0.0.1:1", tls=object())


@pytest.mark.parametrize("code", sorted(TABLE))
async def test_administration_is_served_over_tls_only(code: int) -> None:
    # guards that the connection decides about every code of the table, also for a Super, and for no other code
    access, _ = await made(allow_admin_over_plain=False)
    command = command_of(code, CASES[code], "root")
    if code == RequestCode.CONTROLLER_ELECT_MASTER:
        access.check(PLAIN_CONNECTION, command)  # a broker's, which has no master
        command = command_of(code, case(WRITE, brokerName="b", designateElect="true"), "root")
    if code in ADMINISTRATION:
        with pytest.raises(RemotingError) as caught:
            access.check(PLAIN_CONNECTION, command)
        assert (caught.value.code, caught.value.remark) == (16, PLAIN)
    else:
        access.check(PLAIN_CONNECTION, command)
    access.check(TLS_CONNECTION, command)
    permissive, _ = await made(allow_admin_over_plain=True)
    permissive.check(PLAIN_CONNECTION, command)


@pytest.mark.parametrize("code", sorted(ADMINISTRATION))
async def test_the_brokers_own_user_may_only_hand_over_on_plain_connections(code: int) -> None:
    # guards that the exception for a master that stops is one for a single code, though all requests have stamps
    access, _ = await made(inner_user="root", allow_admin_over_plain=False)
    is_handing_over = code == RequestCode.CONTROLLER_ELECT_MASTER
    given = case(WRITE, brokerName="b", designateElect="true") if is_handing_over else CASES[code]
    time = SystemClock().wall_ms() + 1000  # after the start, whatever the clock's resolution
    given = given._replace(ext=given.ext | {STAMP: stamp_text(code, time, "A" * 16, 1)})
    command = command_of(code, given, "root")
    if is_handing_over:
        access.check(PLAIN_CONNECTION, command)
        return
    with pytest.raises(RemotingError) as caught:
        access.check(PLAIN_CONNECTION, command)
    assert (caught.value.code, caught.value.remark) == (16, PLAIN)


async def test_a_request_that_is_refused_counts_as_sent(tmp_path: Path) -> None:
    # guards administrators who forget TLS: what was recorded then is of no use on a connection with TLS
    async with closed_broker(tmp_path, allowAdminOverPlain=False) as (broker, _):
        frame = Signer(ROOTS).encode(RemotingCommand.request(3005))
        assert (await answer(broker, frame))[0] == 16
        assert refused(broker) == {"plain": 1}
        assert await answer(broker, frame) == (16, AGAIN)


async def test_a_wrong_signature_marks_nothing(tmp_path: Path) -> None:
    # guards against clients without a secret, who could use up the numbers of others
    async with closed_broker(tmp_path) as (broker, _):
        frame = Signer(ROOTS).encode(RemotingCommand.request(26))
        fields = decode(memoryview(frame)[4:]).ext_fields()
        assert (await answer(broker, changed(frame, 26, fields | {SIGNATURE: "x"})))[0] == 16
        assert await answer(broker, frame) == SERVED


async def test_metrics_of_recorded_requests(tmp_path: Path) -> None:
    async with closed_broker(tmp_path, metricsExporterType="PROM", metricsPromExporterPort=0) as (broker, _):
        frame = Signer(ROOTS).encode(RemotingCommand.request(26))
        for _ in range(3):
            await answer(broker, frame)
        page = (await get(broker.web_endpoints[0], "/metrics")).body
        assert 'trimq_access_refused_total{reason="replay"} 2.0' in page
        assert "trimq_access_senders 1.0" in page


async def test_a_stamp_that_cannot_be_read(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        ext = {STAMP: "tmq1:?", "AccessKey": ROOT}
        reply = await root.client.ask(26, ext | {SIGNATURE: sign(ROOT_SECRET, ext, b"", VERSION)})
        assert (reply.code, reply.remark) == (16, "the field !once cannot be read.")
        assert read_stamp(b"tmq1:?") is None
