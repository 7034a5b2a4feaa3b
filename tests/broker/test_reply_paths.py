"""Ordinary traffic mixed with requests and replies: the fast paths and the full path store and answer the same."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broker.fast_paths import fast_paths
from tests.broker.test_send_native import EXAMPLES, KINDS, Side, make_topic, of_message, of_reply, send_frame, stored
from tests.broker.wire_client import WireClient, pull_ext, send_ext
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode
from trimq.protocol.property_text import decode_properties

REPLIES: Final = "DefaultCluster_REPLY_TOPIC"
PUSH: Final = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
REQUEST: Final = {
    "UNIQ_KEY": "7F01{0:012X}",
    "CORRELATION_ID": "3f2c-{0:08d}",
    "REPLY_TO_CLIENT": "asker",
    "TTL": "3000",
    "WAIT": "true",
}
PLACE: Final = {"PUSH_REPLY_TIME"}


@asynccontextmanager
async def two_sides(path: Path, flush: str) -> AsyncIterator[list[Side]]:
    """Two brokers, of which the second has no fast path. The client of each is also the one that asks."""
    async with (
        running_broker(path / "fast", flushDiskType=flush) as one,
        running_broker(path / "full", flushDiskType=flush) as other,
        WireClient.connect(one.endpoint) as first,
        WireClient.connect(other.endpoint) as second,
    ):
        both = [Side(one, first), Side(other, second)]
        for side in both:
            for topic in ("Orders", "Payments"):
                await make_topic(side, topic)
            await side.client.heartbeat("asker", producers=["P"])
        for connection in other.reactor.connections.values():
            table = connection.table
            for code, route in list(table.routes.items()):
                table.route(code, replace(route, fast=None, grouped=None))
        yield both


def request(number: int, kind: int) -> bytes:
    return send_frame(number, REQUEST if kind == len(KINDS) else KINDS[kind])


SENDS = st.lists(st.integers(0, len(KINDS)), min_size=1, max_size=24)
"""A burst of sends: the kind of each, of which the last one is a request."""
REPLY = st.fixed_dictionaries(
    {
        "to": st.sampled_from(["asker", "absent", None]),
        "v1": st.booleans(),
        "code": st.sampled_from([0, 1]),
        "queue": st.sampled_from([-1, 0, 7]),
        "topic": st.sampled_from([REPLIES, "Orders", "SELF_TEST_TOPIC"]),
        "body": st.binary(max_size=40),
        "tags": st.sampled_from([None, "TagA", "ä"]),
    }
)
STEPS = st.lists(st.one_of(SENDS, REPLY), min_size=1, max_size=8)


async def send_reply(side: Side, number: int, step: dict[str, Any]) -> Any:
    """Send a reply, answer the push of it if there is one, and return all that can be seen of both."""
    properties = {"UNIQ_KEY": f"7F02{number:012X}", "CORRELATION_ID": f"3f2c-{number:08d}", "MSG_TYPE": "reply"}
    properties |= {"REPLY_TO_CLIENT": step["to"]} if step["to"] is not None else {}
    properties |= {"TAGS": step["tags"]} if step["tags"] is not None else {}
    queue = 0 if step["topic"] == "Orders" and step["queue"] < 0 else step["queue"]  # not one that is drawn by lot
    code = RequestCode.SEND_REPLY_MESSAGE if step["v1"] else RequestCode.SEND_REPLY_MESSAGE_V2
    client = side.client
    opaque = await client.post(code, send_ext(step["topic"], properties, v1=step["v1"], queue_id=queue), step["body"])
    pushed = None
    async with client._arrived:
        while opaque not in client.replies and not client.asked:
            await client._arrived.wait()
    if client.asked:
        command = client.asked.pop()
        await client.answer(command, step["code"])
        ext = command.ext_fields()
        texts = decode_properties(ext["properties"])
        same = {name: texts[name] for name in texts if name not in PLACE}
        pushed = ext["topic"], ext["queueId"], same, bytes(command.body)
    return of_reply(await client.reply(opaque)), pushed


@given(steps=STEPS, flush=st.sampled_from(["ASYNC_FLUSH", "SYNC_FLUSH"]))
@settings(max_examples=EXAMPLES)
async def test_traffic_with_requests_and_replies_is_the_same_on_all_paths(
    steps: list[list[int] | dict[str, Any]], flush: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with two_sides(Path(directory), flush) as both:
            served = fast_paths(both[0].broker)
            number = 1000
            sends = 0
            for step in steps:
                seen = []
                for side in both:
                    if isinstance(step, dict):
                        seen.append(await send_reply(side, number, step))
                    else:
                        numbers = range(number, number + len(step))
                        frames = [request(at, kind) for at, kind in zip(numbers, step, strict=True)]
                        replies = await side.burst(frames, numbers)
                        seen.append({at: of_reply(reply) for at, reply in replies.items()})
                assert seen[0] == seen[1]
                number += 1 if isinstance(step, dict) else len(step)
                sends += 0 if isinstance(step, dict) else len(step)
            assert await stored(both[0]) == await stored(both[1])
            records = []
            for side in both:
                found = await side.client.ask(RequestCode.PULL_MESSAGE, pull_ext(REPLIES))
                messages = await side.client.pull_messages(REPLIES) if found.code == 0 else []
                records.append((found.code, [of_message(message) for message in messages]))
                assert side.broker.context.client_calls.running == 0
            assert records[0] == records[1]
            # Requests are ordinary messages: they take the fast path, and replies never do.
            assert {310, 10} >= set(served) - {RequestCode.PULL_MESSAGE}
            if any(isinstance(step, list) for step in steps):
                assert served
