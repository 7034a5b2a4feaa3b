"""How members acquire and release queues, against a scripted broker."""

import anyio
import pytest

from tests.client.scripted import ScriptedBroker, pull_header, records, scripted_broker
from trimq.client import ClientOptions, Consumer, rebalance
from trimq.protocol.body import LockBatchBody, decode_json, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

#: Far below the interval at which a member rebalances regularly.
SOON = 10


class Group:
    """The broker's side of a group: its members, and the owner of each queue."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.broker = broker
        self.others: list[str] = []
        self.me = ""
        self.refuse = 0
        broker.answers |= {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.members,
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.QUERY_CONSUMER_OFFSET: lambda command: command.reply(header={"offset": "7"}),
            RequestCode.PULL_MESSAGE: lambda _: None,
        }

    def heartbeat(self, command: RemotingCommand) -> RemotingCommand:
        self.me = decode_json(command.body, dict)["clientID"]
        return command.reply(header={})

    def members(self, command: RemotingCommand) -> RemotingCommand:
        return command.reply(body=encode_json({"consumerIdList": [self.me, *self.others]}))

    def lock(self, command: RemotingCommand) -> RemotingCommand:
        self.refuse -= 1
        wanted = decode_json(command.body, LockBatchBody).mq_set
        return command.reply(body=encode_json({"lockOKMQSet": [] if self.refuse >= 0 else wanted}))


def member(broker: ScriptedBroker, request_timeout: float = 3.0) -> Consumer:
    options = ClientOptions(request_timeout=request_timeout)
    return Consumer("g", "T", namesrv=broker.address, options=options, start="first", orderly=True)


async def test_queues_are_taken_up_with_one_request_of_each_kind() -> None:
    async with scripted_broker(queues=4) as broker:
        Group(broker)
        async with member(broker) as consumer:
            assert [queue.queue_id for queue in consumer.assignment] == [0, 1, 2, 3]
            pulls = await broker.until(RequestCode.PULL_MESSAGE, 5)
            assert {command.ext_fields()["queueOffset"] for command in pulls} == {"7"}
            assert broker.counts[RequestCode.GET_CONSUMER_LIST_BY_GROUP] == 1
            assert broker.counts[RequestCode.LOCK_BATCH_MQ] == 1
            assert broker.counts[RequestCode.QUERY_CONSUMER_OFFSET] == 5  # the group's retry topic has a queue as well


async def test_a_queue_that_another_member_has_locked_is_asked_for_again_soon() -> None:
    async with scripted_broker(queues=4) as broker:
        Group(broker).refuse = 3
        with anyio.fail_after(SOON):
            async with member(broker) as consumer:
                assert consumer.assignment == []
                await broker.until(RequestCode.PULL_MESSAGE, 5)
                assert len(consumer.assignment) == 4


async def test_a_queue_is_kept_for_a_while_before_it_is_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_broker(queues=1) as broker:
        group = Group(broker)
        monkeypatch.setattr(rebalance, "TENURE", 3600.0)
        with anyio.fail_after(SOON):
            async with member(broker) as consumer:
                group.others = ["0"]  # it sorts before our client id, so the only queue is its own
                consumer.rebalancer.now()
                await broker.until(RequestCode.GET_CONSUMER_LIST_BY_GROUP, 4)
                assert len(consumer.assignment) == 1
                assert broker.counts[RequestCode.UNLOCK_BATCH_MQ] == 0
                monkeypatch.setattr(rebalance, "TENURE", 0.0)
                await broker.until(RequestCode.UNLOCK_BATCH_MQ, 1)
                assert consumer.assignment == []


async def test_a_broker_that_talks_nonsense_does_not_end_the_rebalancing() -> None:
    async with scripted_broker(queues=4) as broker:
        group = Group(broker)
        group.others = ["0"]
        with anyio.fail_after(SOON):
            async with member(broker) as consumer:
                assert len(consumer.assignment) == 2
                broker.answers[RequestCode.GET_CONSUMER_LIST_BY_GROUP] = lambda command: command.reply(body=b"{[")
                consumer.rebalancer.now()
                await broker.until(RequestCode.GET_CONSUMER_LIST_BY_GROUP, 3)
                group.others = []
                broker.answers[RequestCode.GET_CONSUMER_LIST_BY_GROUP] = group.members
                await broker.until(RequestCode.PULL_MESSAGE, 5)
                assert len(consumer.assignment) == 4


async def test_a_queue_whose_offset_cannot_be_asked_for_does_not_hold_up_the_others() -> None:
    async with scripted_broker(queues=4) as broker:
        Group(broker)

        def offset(command: RemotingCommand) -> RemotingCommand:
            if broker.counts[RequestCode.QUERY_CONSUMER_OFFSET] == 1:
                return command.reply(ResponseCode.SYSTEM_ERROR, "not now")
            return command.reply(header={"offset": "7"})

        broker.answers[RequestCode.QUERY_CONSUMER_OFFSET] = offset
        with anyio.fail_after(SOON):
            async with member(broker):
                await broker.until(RequestCode.PULL_MESSAGE, 5)
                assert broker.counts[RequestCode.QUERY_CONSUMER_OFFSET] == 6


async def test_a_member_that_leaves_unlocks_its_queues_though_its_commit_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rebalance, "LEAVE_TIMEOUT", 0.05)
    async with scripted_broker(queues=1) as broker:
        Group(broker)

        def pull(command: RemotingCommand) -> RemotingCommand | None:
            fields = command.ext_fields()
            if fields["topic"] != "T" or fields["queueOffset"] != "7":
                return None
            return command.reply(header=pull_header(8), body=records(7, 1))

        broker.answers |= {RequestCode.PULL_MESSAGE: pull, RequestCode.UPDATE_CONSUMER_OFFSET: lambda _: None}
        with anyio.fail_after(SOON):
            async with member(broker, request_timeout=60.0) as consumer, (await anext(consumer)).process():
                pass
            (commit,) = await broker.until(RequestCode.UPDATE_CONSUMER_OFFSET, 1)
            (unlock,) = await broker.until(RequestCode.UNLOCK_BATCH_MQ, 1)
        assert commit.ext_fields()["commitOffset"] == "8"
        assert len(decode_json(unlock.body, LockBatchBody).mq_set) == 2
