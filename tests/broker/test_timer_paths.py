"""Timed messages among ordinary ones: every path of a send gives the same replies and records.

Both brokers have the same clock, which stands still, so that they give the same times. One serves sends on all of its
paths, the other one only on the full path.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.broker.test_send_native import EXAMPLES, OTHER, TOPIC, Side, make_topic, of_message, of_reply, send_frame
from tests.broker.wire_client import WireClient
from tests.store.stores import until_dispatched
from trimq.broker.processors.send.send_native import GroupedSends
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode
from trimq.protocol.message import StoredMessage
from trimq.protocol.native import NATIVE
from trimq.protocol.recall_handle import decode_handle
from trimq.protocol.topic_rules import SCHEDULE_TOPIC, TIMER_TOPIC
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.grouping import LEAST
from trimq.remoting.server.handlers import Served, Span

NOW = 1_700_000_000_000
QUEUES = 2
ORDINARY = st.sampled_from(
    ["TAGS\x01a\x02", "KEYS\x01k1 k2\x02", "colour\x01blue\x02", "__SHARDINGKEY\x017\x02", "WAIT\x01false\x02", ""]
)
TIMED = st.sampled_from(
    [
        "TIMER_DELAY_MS\x012500\x02",
        "TIMER_DELAY_SEC\x013\x02",
        f"TIMER_DELIVER_MS\x01{NOW + 4_000}\x02",
        f"TIMER_DELIVER_MS\x01{NOW - 4_000}\x02",
        "TIMER_DELAY_MS\x01soon\x02",
        "TIMER_DELAY_SEC\x01999999999\x02",
        "TIMER_DELAY_MS\x011000\x02DELAY\x011\x02",
        f"TIMER_OUT_MS\x01{NOW + 1_000}\x02TIMER_DELAY_MS\x015000\x02",
        f"TIMER_DELIVER_MS\x01{NOW + 4_000}\x02TIMER_DEL_UNIQKEY\x01U3\x02",
        "REAL_TOPIC\x01Elsewhere\x02TIMER_DELAY_MS\x011500\x02",
    ]
)
SENDS = st.tuples(
    st.one_of(ORDINARY, ORDINARY, TIMED, st.tuples(ORDINARY, TIMED).map("".join)),
    st.integers(0, QUEUES - 1),
    st.sampled_from([b"a", b"0123456789", b"long" * 999]),
    st.sampled_from([TOPIC, TOPIC, OTHER]),
    st.booleans(),
    st.booleans(),
)

BURST = [
    ("TIMER_DELAY_MS\x012500\x02" if at % 13 == 9 else "TAGS\x01a\x02", at % QUEUES, b"a", TOPIC, False, False)
    for at in range(24)
]
"""Two timed messages among ordinary ones in one write: a round of it is more than the extension's group needs."""


@contextmanager
def counted_groups() -> Iterator[list[int]]:
    """The sends that each call of the extension's group has served."""
    found: list[int] = []
    serve = GroupedSends.serve

    def counted(self: GroupedSends, frames: memoryview, spans: Sequence[Span], most: int) -> Served | None:
        served = serve(self, frames, spans, most)
        found.append(sum(count for count, _ in served.parts) if served is not None else 0)
        return served

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupedSends, "serve", counted)
        yield found


async def records(side: Side) -> list[dict[str, Any]]:
    """All messages that a consumer, or the timer, gets."""
    found: list[StoredMessage] = []
    for topic, queue_id in [*((topic, queue) for topic in (TOPIC, OTHER) for queue in range(QUEUES)), (TIMER_TOPIC, 0)]:
        offset = 0
        while (reply := await side.client.pull(topic, offset, queueId=queue_id)).code == 0:
            found += await side.client.pull_messages(topic, offset, queueId=queue_id)
            offset = int(reply.ext_fields()["nextBeginOffset"])
    return [of_message(message) for message in found]


def without_places(messages: list[dict[str, Any]]) -> list[str]:
    """Without their offsets: a delay level and the timer may deliver in either order."""
    places = {"queue_offset", "commit_log_offset"}
    return sorted(repr({name: value for name, value in one.items() if name not in places}) for one in messages)


async def compare(path: Path, flush: str, messages: list[Any], *, alone: bool) -> None:
    clock = ManualClock(NOW)
    changes: dict[str, Any] = {
        "flushDiskType": flush,
        "recallMessageEnable": "true",
        "serverChannelMaxIdleTimeSeconds": "1000000",
    }
    async with (
        running_broker(path / "all", clock=clock, **changes) as one,
        running_broker(path / "full", clock=clock, **changes) as other,
        WireClient.connect(one.endpoint) as first,
        WireClient.connect(other.endpoint) as second,
    ):
        sides = [Side(one, first), Side(other, second)]
        for side in sides:
            for topic in (TOPIC, OTHER):
                await make_topic(side, topic, QUEUES)
            await side.burst([send_frame(1000, queue_id=0)], [1000])  # creates the log's first file
        for connection in other.reactor.connections.values():
            for code, route in list(connection.table.routes.items()):
                if code in (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2):
                    connection.table.route(code, replace(route, grouped=None, fast=None))
        frames = [
            send_frame(
                number, f"UNIQ_KEY\x01U{number}\x02{text}", queue_id=queue, body=body, topic=topic, binary=binary, v1=v1
            )
            for number, (text, queue, body, topic, binary, v1) in enumerate(messages, start=1)
        ]
        numbers = list(range(1, len(frames) + 1))
        with counted_groups() as groups:
            replies = [await (side.one_by_one if alone else side.burst)(frames, numbers) for side in sides]
        if messages is BURST and NATIVE.is_on:
            assert max(groups) >= LEAST, "no group of the extension has met the timed message"
        answers = [{number: of_reply(reply) for number, reply in found.items()} for found in replies]
        assert answers[0] == answers[1]
        handles = [fields["recallHandle"] for *_, fields in answers[0].values() if "recallHandle" in fields]
        if handles:
            ext = {"producerGroup": "P", "topic": decode_handle(handles[0]).topic, "recallHandle": handles[0]}
            recalls = [await side.client.ask(RequestCode.RECALL_MESSAGE, ext) for side in sides]
            assert of_reply(recalls[0]) == of_reply(recalls[1])
        waiting = [await records(side) for side in sides]
        assert waiting[0] == waiting[1]
        for _ in range(6):
            for side in sides:
                await entered(side)
            clock.advance(1)
        for side in sides:
            await delivered(side)
        found = [await records(side) for side in sides]
        assert without_places(found[0]) == without_places(found[1])
        assert len(found[0]) == len(waiting[0]) + one.context.timer.puts.delivered + one.context.schedule.delivered


async def entered(side: Side) -> None:
    while side.broker.context.timer.behind_messages:
        await trio.lowlevel.checkpoint()


async def delivered(side: Side) -> None:
    """Wait until no message waits any more, and all can be read."""
    store, schedule = side.broker.context.store, side.broker.context.schedule
    timers = store.timers
    assert timers is not None
    with trio.fail_after(50):
        while not timers.is_empty or schedule.delivered < store.max_offset(SCHEDULE_TOPIC, 0):
            await trio.lowlevel.checkpoint()
    await until_dispatched(store)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(messages=st.lists(SENDS, min_size=4, max_size=40), alone=st.booleans())
@example(messages=BURST, alone=False)
def test_all_paths_agree(flush: str, messages: list[Any], alone: bool) -> None:
    with tempfile.TemporaryDirectory() as name:

        async def run() -> None:
            await compare(Path(name), flush, messages, alone=alone)

        trio.run(run)
