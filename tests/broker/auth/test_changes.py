"""Changes of users and policies apply at once: to open connections, and to pulls that are held."""

from pathlib import Path

import pytest
import trio

from tests.broker.auth.signed import User, acl, closed_broker
from tests.broker.wire_client import WireClient, pull_ext, send_ext
from trimq.broker.controller import BrokerController
from trimq.protocol.codes import ResponseCode
from trimq.protocol.message import decode_messages

TOPIC = "T"
PULL = ("Topic:T Sub", "Group:G Sub")


async def hold(broker: BrokerController, user: User) -> int:
    """Send a pull that finds nothing; returns its number."""
    holds = broker.context.long_polling
    before = holds.held
    end = broker.context.store.max_offset(TOPIC, 0)
    ext = pull_ext(TOPIC, end, consumerGroup="G", sysFlag=6, suspendTimeoutMillis=60_000)
    opaque = await user.post(11, ext)
    with trio.fail_after(5):
        while holds.held == before:
            await trio.lowlevel.checkpoint()
    return opaque


REVOKED = {
    "the policy": (3008, {"subject": "User:app"}, b""),
    "an entry": (3008, {"subject": "User:app", "resource": "Topic:T"}, b""),
    "a Deny": (3007, {"subject": "User:app"}, acl("app", "Deny Topic:T Sub")),
    "the user": (3003, {"username": "app"}, b""),
    "disabled": (3002, {"username": "app"}, b'{"userStatus":"disable"}'),
    "the password": (3002, {"username": "app"}, b'{"password":"another"}'),
}


@pytest.mark.parametrize("what", REVOKED)
async def test_a_held_pull_of_a_user_whose_right_was_revoked_gets_no_data(tmp_path: Path, what: str) -> None:
    async with closed_broker(tmp_path) as (broker, root), WireClient.connect(broker.endpoint) as client:
        assert (await root.ask(310, send_ext(TOPIC), b"first")).code == 0
        app = User(client, (await root.make("app", *PULL)).name)
        opaque = await hold(broker, app)
        assert (await root.ask(*REVOKED[what])).code == 0
        assert (await root.ask(310, send_ext(TOPIC), b"news")).code == 0
        reply = await client.reply(opaque)
        assert (reply.code, len(reply.body)) == (ResponseCode.PULL_NOT_FOUND, 0)
        again = await app.ask(11, pull_ext(TOPIC, 0, consumerGroup="G"))
        assert (again.code, len(again.body)) == (ResponseCode.NO_PERMISSION, 0)


async def test_a_held_pull_is_asked_again_after_another_change_and_then_served(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root), WireClient.connect(broker.endpoint) as client:
        assert (await root.ask(310, send_ext(TOPIC), b"first")).code == 0
        app = User(client, (await root.make("app", *PULL)).name)
        opaque = await hold(broker, app)
        await root.make("another")
        reply = await client.reply(opaque)
        assert (reply.code, len(reply.body)) == (ResponseCode.PULL_NOT_FOUND, 0)
        opaque = await hold(broker, app)
        # Neither is a change: the pull stays.
        assert (await root.ask(3003, {"username": "none"})).code == 0
        assert (await root.ask(3001, {"username": "app"}, b'{"password":"x"}')).code == ResponseCode.NO_PERMISSION
        assert opaque not in client.replies
        assert broker.context.long_polling.held == 1
        assert (await root.ask(310, send_ext(TOPIC), b"news")).code == 0
        reply = await client.reply(opaque)
        assert [message.body for message in decode_messages(bytes(reply.body))] == [b"news"]


async def test_open_connections_see_each_change_with_the_next_request(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root), WireClient.connect(broker.endpoint) as client:
        app = User(client, (await root.make("app")).name)

        async def may_send() -> bool:
            reply = await app.ask(310, send_ext(TOPIC), b"x")
            assert reply.code in (ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION)
            return reply.code == ResponseCode.SUCCESS

        assert not await may_send()
        await root.grant("app", "Topic:* Pub")
        assert await may_send()
        await root.grant("app", "Deny Topic:T Pub")
        assert not await may_send()
        assert (await root.ask(3008, {"subject": "User:app", "resource": "Topic:T"})).code == 0
        assert await may_send()
        assert (await root.ask(3002, {"username": "app"}, b'{"userStatus":"disable"}')).code == 0
        assert not await may_send()
        assert (await root.ask(3002, {"username": "app"}, b'{"userStatus":"enable","userType":"Super"}')).code == 0
        assert (await app.ask(26)).code == 0
        assert (await root.ask(3003, {"username": "app"})).code == 0
        assert not await may_send()
        assert not client.closed
