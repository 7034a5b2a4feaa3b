"""Half surrogate pairs in any field of a request to a broker: it answers, and others are served as before."""

from functools import partial
from pathlib import Path

from tests.broker.auth.signed import User, closed_broker, secret_of
from tests.broker.wire_client import WireClient
from tests.remoting.fuzz.odd_texts import by, outlives
from trimq.broker.controller import BrokerController
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding

GROUP = {"groupName": "G", "subscriptionDataSet": [{"topic": "Orders"}]}
HALF = b"\\ud800x"


async def test_without_access_control(broker: BrokerController, client: WireClient) -> None:
    assert await outlives(broker.endpoint, partial(client.send, "Orders")) > 1000
    assert (await client.send("Orders")).code == 0
    assert broker.reactor.stats.failures == 0


async def test_a_user_without_policies(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, root):
        user = await root.make("normal")
        ask = partial(root.ask, RequestCode.GET_BROKER_RUNTIME_INFO)
        assert await outlives(broker.endpoint, ask, by(user.name, secret_of(user.name))) > 1000
        assert (await ask()).code == 0
        assert broker.reactor.stats.failures == 0
        async with WireClient.connect(broker.endpoint) as other:
            lock = b'{"consumerGroup":"%s","clientId":"c","mqSet":[]}' % HALF
            reply = await User(other, "normal").ask(RequestCode.LOCK_BATCH_MQ, {}, lock)
            assert reply.code == ResponseCode.NO_PERMISSION


async def test_an_odd_client_id_is_not_registered(broker: BrokerController, client: WireClient) -> None:
    """It would be in the replies to every other member of the group, which could not rebalance."""
    await client.heartbeat("c1", consumers=[GROUP])
    async with WireClient.connect(broker.endpoint) as other:
        body = b'{"clientID":"%s","consumerDataSet":[{"groupName":"G"}],"producerDataSet":[{"groupName":"P"}]}' % HALF
        assert (await other.ask(RequestCode.HEART_BEAT, {}, body)).code == ResponseCode.SYSTEM_ERROR
        members = await client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
        assert (members.code, bytes(members.body)) == (0, b'{"consumerIdList":["c1"]}')
        for code, ext in (
            (RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"}),
            (RequestCode.GET_ALL_PRODUCER_INFO, {}),
        ):
            reply = await client.ask(code, ext)
            assert reply.code == 0, reply.remark
            assert b"ud800" not in bytes(reply.body)


async def test_a_relayed_answer_that_has_no_form_in_the_encoding_of_who_asks(
    broker: BrokerController, client: WireClient
) -> None:
    await client.heartbeat("c1", consumers=[GROUP])
    ask = {"consumerGroup": "G", "clientId": "c1"}
    code = RequestCode.GET_CONSUMER_RUNNING_INFO
    for encoding, answer, fields in (
        (Encoding.ROCKETMQ, 0, {"k" * 70_000: "v"}),
        (Encoding.MSGPACK, 10**30, {}),
    ):
        async with WireClient.connect(broker.endpoint, encoding) as asker:
            opaque = await asker.post(code, ask)
            asked = await client.asked_for(code)
            await client.send_command(asked.reply(answer, None, fields))
            reply = await asker.reply(opaque)
            assert (reply.code, (reply.remark or "").partition(":")[0]) == (1, "the reply cannot be sent")
            assert (await asker.ask(RequestCode.GET_MAX_OFFSET, {"topic": "Orders", "queueId": 0})).code == 0
    # An asker with JSON headers gets the same answer.
    opaque = await client.post(code, ask)
    asked = await client.asked_for(code)
    await client.send_command(asked.reply(10**30, None, {"k" * 70_000: "v"}))
    reply = await client.reply(opaque)
    assert (reply.code, reply.ext_fields()) == (10**30, {"k" * 70_000: "v"})
