"""A broker with a manual clock for tests of timed messages, and what clients do with it."""

from typing import Any

from tests.broker.test_delay_clock import ASYNC, Life, comes, there
from tests.broker.wire_client import WireClient
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.message import StoredMessage

__all__ = ["ASYNC", "Life", "comes", "there"]

TIMER = "rmq_sys_wheel_timer"
RECALLS = ASYNC | {"recallMessageEnable": "true"}


async def timed(client: WireClient, body: bytes, after_ms: int, topic: str = "Orders", **more: str) -> dict[str, str]:
    """Send a message that is due after a time; return the fields of the reply."""
    reply = await client.send(topic, body, {"TIMER_DELAY_MS": str(after_ms), **more})
    assert reply.code == ResponseCode.SUCCESS, reply.remark
    return reply.ext_fields()


async def recalled(client: WireClient, handle: str, topic: str = "Orders") -> Any:
    """Recall a message; return the reply."""
    ext = {"producerGroup": "P", "topic": topic, "recallHandle": handle}
    return await client.ask(RequestCode.RECALL_MESSAGE, ext)


async def all_there(client: WireClient, topic: str = "Orders") -> list[StoredMessage]:
    """All messages of queue 0 of a topic."""
    found: list[StoredMessage] = []
    while more := await there(client, topic, len(found)):
        found += more
    return found
