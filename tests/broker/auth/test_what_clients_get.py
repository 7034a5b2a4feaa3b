"""What the broker sends on its own goes to clients of users who may have it: heartbeats of producers need no policy."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.broker.auth.signed import User, closed_broker
from tests.broker.wire_client import WireClient, send_ext
from tests.store.stores import until_dispatched
from trimq.broker.controller import BrokerController
from trimq.protocol.codes import RequestCode
from trimq.remoting.runtime.clock import ManualClock

CHECK = RequestCode.CHECK_TRANSACTION_STATE
HALF = {"TRAN_MSG": "true", "PGROUP": "P", "UNIQ_KEY": "A" * 32}


async def check(broker: BrokerController, clock: ManualClock) -> None:
    """A round of checks, in which each half is due. One that is checked is stored again."""
    await until_dispatched(broker.context.store)
    clock.advance(1)
    await broker.context.transaction_checks.check()


async def producer(stack: AsyncExitStack, broker: BrokerController, name: str, client_id: str) -> User:
    """A user on a connection of its own, in the producer group P."""
    user = User(await stack.enter_async_context(WireClient.connect(broker.endpoint)), name)
    body = {"clientID": client_id, "producerDataSet": [{"groupName": "P"}], "consumerDataSet": []}
    assert (await user.ask(34, body=msgspec.json.encode(body))).code == 0
    return user


REVOKED: dict[str, tuple[int, dict[str, Any], bytes]] = {
    "the policy": (3008, {"subject": "User:app"}, b""),
    "the user": (3003, {"username": "app"}, b""),
    "disabled": (3002, {"username": "app"}, b'{"userStatus":"disable"}'),
}


@pytest.mark.parametrize("what", REVOKED)
async def test_checks_of_halves_have_their_messages_so_they_go_to_who_may_send_them(tmp_path: Path, what: str) -> None:
    clock = ManualClock()
    async with (
        closed_broker(tmp_path, transactionTimeOut=0, clock=clock) as (broker, root),
        AsyncExitStack() as stack,
    ):
        await root.make("app", "Topic:T Pub")
        await root.make("stranger", "Topic:Other All", "Group:* All")
        stranger = await producer(stack, broker, "stranger", "s")
        assert (await root.ask(310, send_ext("T", HALF) | {"f": 4}, b"half")).code == 0
        counters = broker.context.transactions.counters
        await check(broker, clock)
        assert (counters.unanswered, counters.checks) == (1, 0)
        app = await producer(stack, broker, "app", "a")
        for number in (1, 2):
            await check(broker, clock)
            assert b"half" in bytes((await app.client.asked_for(CHECK)).body)
            assert counters.checks == number
        assert (await root.ask(*REVOKED[what])).code == 0
        await check(broker, clock)
        assert (counters.unanswered, counters.checks) == (2, 2)
        assert not stranger.client.asked


async def test_without_authorization_each_user_gets_checks_and_without_signed_heartbeats_all(tmp_path: Path) -> None:
    for number, (key, value) in enumerate(
        [("authorizationEnabled", False), ("authorizationWhitelist", "34"), ("authenticationWhitelist", "34")]
    ):
        clock = ManualClock()
        async with (
            closed_broker(tmp_path / str(number), transactionTimeOut=0, clock=clock, **{key: value}) as (broker, root),
            AsyncExitStack() as stack,
        ):
            await root.make("app")
            app = await producer(stack, broker, "app", "a")
            assert (await root.ask(310, send_ext("T", HALF) | {"f": 4}, b"half")).code == 0
            await check(broker, clock)
            assert b"half" in bytes((await app.client.asked_for(CHECK)).body)
