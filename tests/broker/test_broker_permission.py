"""brokerPermission without the right to write: sends to order topics are refused on every path of a send."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.broker.test_batch_paths import ask as ask_batch
from tests.broker.test_batch_paths import batch, fields
from tests.broker.test_send_fast_path import ask, v2
from tests.broker.test_send_native import MANY, QUEUES, TOPIC, USUAL, Side, send_frame
from tests.broker.wire_client import WireClient, properties_text
from trimq.broker.controller import BrokerController
from trimq.broker.processors.send.send_native import GroupedSends
from trimq.broker.testing import running_broker
from trimq.protocol.body import TopicConfig
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.native import NATIVE
from trimq.remoting.server.handlers import Served, Span


def make_topic(broker: BrokerController, *, order: bool) -> None:
    broker.context.topics.put(
        TopicConfig(topic_name=TOPIC, read_queue_nums=QUEUES, write_queue_nums=QUEUES, perm=6, order=order)
    )


async def set_permission(client: WireClient, permission: int) -> None:
    reply = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"brokerPermission=%d" % permission)
    assert reply.code == 0


async def every_path(client: WireClient) -> list[RemotingCommand]:
    """The replies to single sends and batches, each on the fast path and on the full path."""
    text = properties_text({key: value.format(1) for key, value in USUAL.items()})
    replies = [await client.send(TOPIC, code=RequestCode.SEND_MESSAGE, v1=True)]
    for fast in (True, False):
        for reply in (
            await ask(client, v2(text), fast=fast),
            await ask_batch(client, fields(), batch(), fast=fast),
        ):
            assert reply is not None
            replies.append(reply)
    return replies


@pytest.mark.parametrize("permission", [0, 4])
async def test_order_topics_are_refused_and_others_pass(
    client: WireClient, broker: BrokerController, permission: int
) -> None:
    # guards that the fast paths leave such sends to the full path, and that each change takes effect immediately
    make_topic(broker, order=True)
    assert [reply.code for reply in await every_path(client)] == [0] * 5
    stored = broker.context.store.max_phy_offset
    await set_permission(client, permission)
    for reply in await every_path(client):
        assert reply.code == ResponseCode.NO_PERMISSION
        reason = f"this broker does not permit writing to the order topic Orders (brokerPermission={permission})"
        assert reply.remark == reason
        assert reply.ext_fields()["MSG_REGION"] == "DefaultRegion"
    assert broker.context.store.max_phy_offset == stored
    config = broker.context.topics.table[TOPIC]
    broker.context.topics.put(msgspec.structs.replace(config, order=False))
    assert [reply.code for reply in await every_path(client)] == [0] * 5
    assert (await client.send("New")).code == 0  # a new topic is no order topic
    broker.context.topics.put(config)
    await set_permission(client, 6)
    assert [reply.code for reply in await every_path(client)] == [0] * 5


@pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")
async def test_many_sends_of_one_round_are_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the path of grouped sends
    served = 0
    original = GroupedSends.serve

    def counted(self: GroupedSends, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        nonlocal served
        result = original(self, frames, spans, most)
        served += 0 if result is None else sum(count for count, _ in result.parts)
        return result

    monkeypatch.setattr(GroupedSends, "serve", counted)
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        make_topic(broker, order=True)
        side = Side(broker, client)
        await side.burst([send_frame(1)], [1])  # creates the log's first file
        numbers = range(1001, 1001 + MANY)
        replies = await side.burst(map(send_frame, numbers), numbers)
        assert {reply.code for reply in replies.values()} == {0}
        assert served
        served = 0
        await set_permission(client, 4)
        replies = await side.burst(map(send_frame, numbers), numbers)
        assert {reply.code for reply in replies.values()} == {ResponseCode.NO_PERMISSION}
        assert not served
