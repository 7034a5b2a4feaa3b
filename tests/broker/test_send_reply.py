"""Request-reply on the broker: a reply is pushed to the client that waits for it, stored, and answered."""

from typing import Any

import pytest
import trio

from tests.broker.wire_client import WireClient, properties_text, send_ext
from trimq.broker.controller import BrokerController
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.property_text import decode_properties

TOPIC = "DefaultCluster_REPLY_TOPIC"
PROPERTIES = {"MSG_TYPE": "reply", "CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "asker", "TTL": "3000", "UNIQ_KEY": "U1"}


@pytest.mark.parametrize("v1", [False, True])
async def test_a_reply_is_pushed_and_stored(broker: BrokerController, client: WireClient, v1: bool) -> None:
    async with WireClient.connect(broker.endpoint) as asker:
        await asker.heartbeat("asker", producers=["P"])
        code = RequestCode.SEND_REPLY_MESSAGE if v1 else RequestCode.SEND_REPLY_MESSAGE_V2
        opaque = await client.post(code, send_ext(TOPIC, PROPERTIES, v1=v1, flag=7), b"answer")
        pushed = await asker.asked_for(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
        await asker.answer(pushed)
        reply = await client.reply(opaque)
        ext = pushed.ext_fields()
        assert bytes(pushed.body) == b"answer"
        properties = decode_properties(ext["properties"])
        assert int(properties.pop("PUSH_REPLY_TIME")) > 1_700_000_000_000
        assert properties == PROPERTIES
        assert reply.code == 0, reply.remark
        (stored,) = await client.pull_messages(TOPIC)
        assert (stored.body, stored.flag) == (b"answer", 7)
        assert stored.properties == PROPERTIES
