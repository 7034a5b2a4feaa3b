"""The replies to requests that are not let through, on a running broker: every row of the facts' table."""

import json
import ssl
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.auth.signed import ROOT, ROOT_SECRET, SECRETS, User, closed_broker, signed
from tests.broker.wire_client import WireClient, send_ext
from tests.canary import permitted_replies
from tests.ports import free_port
from tests.tls_certificates import Certificates
from trimq.protocol.auth.signature import ACCESS_KEY, SIGNATURE
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import ONEWAY_FLAG, Encoding, RemotingCommand
from trimq.remoting.auth.access import LARGE, MOST_FIELDS, MOST_FIELDS_BYTES

NO_USERNAME = (16, "username cannot be null.")
WRONG = (16, "check signature failed.")


def said(reply: RemotingCommand) -> tuple[int, str | None]:
    return reply.code, reply.remark


@pytest.mark.parametrize("encoding", [Encoding.JSON, Encoding.ROCKETMQ, Encoding.MSGPACK])
async def test_every_reason_for_a_refusal(tmp_path: Path, encoding: Encoding) -> None:
    async with closed_broker(tmp_path) as (broker, root), WireClient.connect(broker.endpoint, encoding) as client:
        app = User(client, (await root.make("app", "Topic:T Pub", "Topic:Shut* All", "Deny Topic:Shut Pub")).name)
        users = broker.context.users
        assert users is not None
        refused = users.access.refused
        send = send_ext("T")
        # without ext fields, without a name
        assert said(await client.ask(310)) == NO_USERNAME
        assert said(await client.ask(310, send, b"x")) == NO_USERNAME
        assert said(await client.ask(310, {**send, SIGNATURE: "x"}, b"x")) == NO_USERNAME
        assert said(await client.ask(310, {**send, ACCESS_KEY: ""}, b"x")) == NO_USERNAME
        # An unknown user and a wrong signature are answered alike: RocketMQ says which users there are.
        assert said(await User(client, "other").ask(310, send, b"x")) == WRONG
        assert said(await User(client, "app", "guess").ask(310, send, b"x")) == WRONG
        assert said(await client.ask(310, {**send, ACCESS_KEY: "app"}, b"x")) == WRONG
        assert said(await client.ask(310, signed(send, b"x", "app", app.secret), b"y")) == WRONG
        assert refused == {"authentication": 8, "replay": 0, "plain": 0, "authorization": 0}
        # policies
        no = "User:app has no permission to access"
        assert said(await app.ask(310, send_ext("U"), b"x")) == (
            16,
            f"{no} Topic:U from 127.0.0.1, no matched policies.",
        )
        assert said(await app.ask(310, send_ext("Shut"), b"x")) == (
            16,
            f"{no} Topic:Shut from 127.0.0.1, the decision is deny.",
        )
        assert said(await app.ask(34, None, b"{")) == (16, "parse authorization context error.")
        assert said(await app.ask(7777)) == (
            16,
            "authorization context is empty: the request code 7777 has no entry.",
        )
        assert refused == {"authentication": 8, "replay": 0, "plain": 0, "authorization": 4}
        # The connection has stayed open, and what is allowed is served.
        assert (await app.ask(310, send, b"x")).code == 0
        # Each request stands for itself.
        assert said(await client.ask(310, send, b"x")) == NO_USERNAME
        # disabled
        assert (await root.ask(3002, {"username": "app"}, b'{"userStatus":"disable"}')).code == 0
        assert said(await app.ask(310, send, b"x")) == (16, "User:app is disabled.")
        assert said(await User(client, "app", "guess").ask(310, send, b"x")) == WRONG


async def test_a_super_needs_no_policy_and_hears_what_is_not_served(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        assert (await root.ask(310, send_ext("T"), b"x")).code == 0
        assert (await root.ask(7777)).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        assert (await root.client.ask(7777)).code == ResponseCode.NO_PERMISSION
        reply = await root.ask(200050, {"topic": "T", "consumerGroup": "G"})
        assert (reply.code, reply.remark) == (3, "POP consumers (200050) are not supported")


async def test_old_clients_sign_without_the_field_that_they_add_later(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        query = {"topic": "T", "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1}
        ext = signed(query, b"", ROOT, ROOT_SECRET, version=393) | {"_UNIQUE_KEY_QUERY": "true"}
        assert (await root.client.ask(12, ext, version=393)).code == ResponseCode.QUERY_NOT_FOUND
        assert said(await root.client.ask(12, ext, version=394)) == WRONG


async def test_one_ways_that_are_refused_are_dropped_and_counted(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root):
        app = await root.make("app", "Topic:U Pub")
        users = broker.context.users
        assert users is not None
        await root.client.post(310, send_ext("T"), b"x", flag=ONEWAY_FLAG)
        await app.post(310, send_ext("T"), b"x", flag=ONEWAY_FLAG)
        await app.post(310, send_ext("U"), b"x", flag=ONEWAY_FLAG)
        assert (await root.ask(351, {"topic": "U"})).code == 0
        assert users.access.refused == {"authentication": 1, "replay": 0, "plain": 0, "authorization": 1}
        assert (await root.ask(351, {"topic": "T"})).code == ResponseCode.TOPIC_NOT_EXIST
        assert root.client.replies == {}


async def test_a_log_line_for_refusals_has_no_signature_and_no_unknown_name(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        await root.make("app")
        with capture_logs() as logs:
            await User(root.client, "app").ask(310, send_ext("T"), b"x")
            await root.client.ask(310, signed(send_ext("T"), b"x", "a secret in the wrong place", "s"), b"x")
            await root.client.ask(310, {"a": 1})
        lines = [line for line in logs if line["event"] == "access_refused"]
        assert [(line["user"], line["code"], line["reason"]) for line in lines] == [
            ("app", 310, "authorization"),
            ("unknown", 310, "authentication"),
            ("unknown", 310, "authentication"),
        ]
        assert SIGNATURE not in str(logs)
        assert "wrong place" not in str(logs)


async def test_authentication_alone_lets_each_user_do_everything_but_manage_supers(tmp_path: Path) -> None:
    async with closed_broker(tmp_path, authorizationEnabled=False) as (_, root):
        app = await root.make("app")
        assert (await app.ask(310, send_ext("T"), b"x")).code == 0
        assert (await app.ask(26)).code == 0
        assert (await app.ask(3004, {"username": ROOT})).code == 0
        assert (await app.ask(3003, {"username": ROOT})).code == 16
        assert (await app.ask(3006, {"subject": "User:app"}, b"")).code != 0
        assert (await root.client.ask(26)).code == 16


async def test_white_lists_name_request_codes(tmp_path: Path) -> None:
    async with closed_broker(tmp_path, authenticationWhitelist="30, 3005", authorizationWhitelist="31") as (_, root):
        app = await root.make("app")
        assert (await root.ask(310, send_ext("T"), b"x")).code == 0
        queue = {"topic": "T", "queueId": 0}
        assert (await root.client.ask(30, queue)).code == 0
        assert (await app.ask(30, queue)).code == 0
        assert (await app.ask(31, queue)).code == 0
        assert said(await root.client.ask(31, queue)) == NO_USERNAME
        assert (await app.ask(29, queue | {"timestamp": 0})).code == 16
        # The name in a request that need not be signed is a mere claim.
        for ext in ({}, {ACCESS_KEY: ROOT}):
            reply = await root.client.ask(3005, ext)
            assert said(reply) == (16, "users and policies are shown and changed for users only: sign the request")


async def test_policies_may_name_where_requests_come_from(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (_, root):
        app = await root.make("app")
        await root.grant("app", "Topic:Here Pub", ips=["127.0.0.0/8"])
        await root.grant("app", "Topic:There Pub", ips=["10.1.2.3"])
        assert (await app.ask(310, send_ext("Here"), b"x")).code == 0
        assert (await app.ask(310, send_ext("There"), b"x")).code == 16


@pytest.mark.parametrize("code", [25, 17, 215, 200, 207, 222, 3001, 3004, 3005, 3006, 3010])
async def test_administration_needs_tls(tmp_path: Path, code: int) -> None:
    text = "requests of administrators are served on TLS connections only: connect with TLS, or set "
    async with closed_broker(tmp_path, allowAdminOverPlain=False) as (broker, root):
        users = broker.context.users
        assert users is not None
        assert said(await root.ask(code, {"username": "x"})) == (16, text + "allowAdminOverPlain=true")
        assert said(await root.client.ask(code, {"username": "x"})) == NO_USERNAME
        assert users.access.refused == {"authentication": 1, "replay": 0, "plain": 1, "authorization": 0}
        assert (await root.ask(26)).code == 0
        assert (await root.ask(310, send_ext("T"), b"x")).code == 0


async def test_the_port_without_pulls_asks_too(tmp_path: Path) -> None:
    port = free_port()
    async with (
        closed_broker(tmp_path, fastListenPort=port) as (_, root),
        WireClient.connect(("127.0.0.1", port)) as client,
    ):
        assert said(await client.ask(310, send_ext("T"), b"x")) == NO_USERNAME
        assert said(await client.ask(11)) == NO_USERNAME
        assert (await User(client).ask(310, send_ext("T"), b"x")).code == 0
        assert SECRETS[root.name] == root.secret


async def test_administration_and_passwords_over_tls(tmp_path: Path, certificates: Certificates) -> None:
    keys = {
        "tls.server.certPath": certificates.server.cert,
        "tls.server.keyPath": certificates.server.key,
        "authReturnPasswords": "superOverTls",
        "allowAdminOverPlain": False,
    }
    context = ssl.create_default_context(cafile=str(certificates.ca))
    async with closed_broker(tmp_path, **keys) as (broker, plain):
        tcp = await trio.open_tcp_stream(*broker.endpoint)
        stream = trio.SSLStream(tcp, context, server_hostname="localhost")
        async with WireClient.over(stream) as client:
            root = User(client)
            app = await root.make("app", "Cluster:DefaultCluster Get")
            with permitted_replies():
                shown = await root.ask(3004, {"username": "app"})
            assert json.loads(bytes(shown.body))["password"] == app.secret
            hidden = await app.ask(3004, {"username": "app"})
            assert hidden.code == 0
            assert "password" not in json.loads(bytes(hidden.body))
            assert said(await client.ask(3005)) == NO_USERNAME
            assert (await plain.ask(3005)).code == 16


@pytest.mark.parametrize("encoding", [Encoding.JSON, Encoding.ROCKETMQ])
async def test_headers_that_would_take_long_are_refused_before_they_are_read(
    tmp_path: Path, encoding: Encoding
) -> None:
    async with closed_broker(tmp_path) as (broker, _), WireClient.connect(broker.endpoint, encoding) as client:
        root = User(client)
        most = send_ext("T", {"key": "\N{SNOWMAN}" * 10_000 + "\x07" * 1000})
        assert (await root.ask(310, most | {f"f{number}": "" for number in range(900)}, b"x")).code == 0
        assert said(await root.ask(310, send_ext("T") | dict.fromkeys(map(str, range(MOST_FIELDS)), ""))) == (16, LARGE)
        if encoding is Encoding.JSON:
            assert said(await root.ask(310, send_ext("T") | {"long": "x" * MOST_FIELDS_BYTES})) == (16, LARGE)
        assert (await root.ask(310, send_ext("T"), b"x")).code == 0
