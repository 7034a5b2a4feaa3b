"""Queues in which some offsets have no message: each message is one row, however many requests are in flight.

And brokers that are away, deleted messages, or return none in the middle of a range.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from structlog.testing import capture_logs

from trimq.client.core import Client
from trimq.client.errors import PerhapsStoredError, RocketMQError, TopicNotFoundError, UnreachableError, UsageError
from trimq.client.message import MessageQueue
from trimq.client.pulling import PullStatus
from trimq.pipeline.options import Options
from trimq.pipeline.topics.planning import DataLossError, Range
from trimq.pipeline.topics.pulling import RangeReader, Reply, _between
from trimq.pipeline.topics.settings import ReadSettings
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.pull import PullMessageResponseHeader
from trimq.protocol.record import encode_record, pack_host

SETTINGS = ReadSettings.of(Options({"namesrv": "127.0.0.1:9", "topics": "T"}))
QUEUE = MessageQueue(topic="T", broker_name="b", queue_id=0)
HOST = pack_host("10.0.0.1", 10911)
MOST = 32
"""Number of messages in one reply."""


def record(offset: int) -> bytes:
    return encode_record(
        topic=b"T",
        body=b"%d" % offset,
        properties=b"",
        queue_id=0,
        queue_offset=offset,
        physical_offset=offset * 100,
        born_timestamp=1,
        born_host=HOST,
        store_timestamp=1,
        store_host=HOST,
    )


class GappyReader(RangeReader):
    """Reads from a broker that has only some offsets, and that returns ``count`` messages wherever they are."""

    def __init__(self, client: Client, there: list[int], span: Range) -> None:
        super().__init__(client, SETTINGS, span)
        self._there = there
        self._end = span.end

    async def _pull(self, at: int, count: int) -> Reply | None:
        await anyio.lowlevel.checkpoint()
        given = [offset for offset in self._there if offset >= at][: min(count, MOST)]
        if not given:
            return Reply(PullStatus.NO_MATCHED_MESSAGE, b"", self._end, 0, self._end)
        return Reply(PullStatus.FOUND, b"".join(map(record, given)), given[-1] + 1, 0, self._end)


def offsets_read(there: list[int], span: Range) -> list[int]:
    async def read() -> bytes:
        async with Client("127.0.0.1:9") as client:
            return b"".join([body async for body in GappyReader(client, there, span).bodies()])

    data, at, offsets = anyio.run(read), 0, []
    while at < len(data):
        size, offset = struct.unpack_from(">i16xq", data, at)
        offsets.append(offset)
        at += size
    return offsets


@pytest.mark.parametrize(
    "there",
    [
        pytest.param([n for n in range(1000) if n != 500], id="one is missing"),
        pytest.param(
            [n for n in range(1000) if not (200 <= n < 220 or 500 <= n < 520)], id="two stretches are missing"
        ),
        pytest.param([*range(64), *range(64, 1000, 20)], id="few are left, as in a compaction topic"),
        pytest.param([*range(40), *range(960, 1000)], id="a long stretch is missing"),
        pytest.param([*range(900)], id="the end is missing"),
        pytest.param([*range(1000)], id="nothing is missing"),
    ],
)
@pytest.mark.parametrize("begin", [0, 7])
def test_each_message_is_read_once(there: list[int], begin: int) -> None:
    span = Range(QUEUE, begin, 1000)
    assert offsets_read(there, span) == [offset for offset in there if offset >= begin]


def test_what_is_no_message_is_not_passed_over() -> None:
    """The decoder gets the bytes and raises an error."""
    data = record(1) + record(2) + record(3)
    assert _between(data, 1, 4) == data
    assert _between(data, 2, 3) == record(2)
    assert _between(data + b"\0" * 40, 2, 3) == record(2) + b"\0" * 40
    assert _between(data[:-3], 3, 4) == record(3)[:-3]


# -- brokers that fail in the middle of a range ------------------------------------------------------------------------

Step = Exception | tuple[PullStatus, list[int], int, int, int]
"""What one request gets: an error, or the status, the offsets of the messages, the next, first and end offset."""


class ScriptedClient:
    """Stands in for a client: its broker answers each request with the next step, and repeats the last one."""

    def __init__(self, steps: list[Step], away: int = 0, refresh: Exception | None = None) -> None:
        self.steps = steps
        self.away = away
        """How many routes are given that have no address of the broker."""
        self.refreshed = 0
        self.refresh_error = refresh
        self.routes = SimpleNamespace(get=self._route, refresh=self._refresh)

    async def _route(self, topic: str) -> object:
        self.away -= 1
        return SimpleNamespace(member=lambda name: None if self.away >= 0 else "127.0.0.1:9")

    async def _refresh(self, topic: str) -> None:
        self.refreshed += 1
        if self.refresh_error is not None:
            raise self.refresh_error

    async def invoke(self, address: str, request: RemotingCommand) -> RemotingCommand:
        await anyio.lowlevel.checkpoint()
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, Exception):
            raise step
        status, offsets, following, first, end = step
        header = PullMessageResponseHeader(
            suggest_which_broker_id=0, next_begin_offset=following, min_offset=first, max_offset=end
        )
        return request.reply(status.value, header=header, body=b"".join(map(record, offsets)))


def read_scripted(client: ScriptedClient, **options: str) -> list[int]:
    """The offsets of [0, 4) that a reader returns. ``pollTimeoutMs`` is 1 unless given: the second failure ends it."""
    given = {"namesrv": "127.0.0.1:9", "topics": "T", "pollTimeoutMs": "1"} | options
    reader = RangeReader(cast("Client", client), ReadSettings.of(Options(given)), Range(QUEUE, 0, 4))

    async def read() -> list[bytes]:
        return [body async for body in reader.bodies()]

    bodies = anyio.run(read)
    return [struct.unpack_from(">i16xq", body, at)[1] for body in bodies for at in range(0, len(body), len(record(0)))]


ALL: Step = (PullStatus.FOUND, [0, 1, 2, 3], 4, 0, 4)
PATIENT: dict[str, str] = {"pollTimeoutMs": "30000"}
FILTERED: dict[str, str] = {"tags": "paid"}


@pytest.mark.parametrize("refresh", [None, TopicNotFoundError("T"), UnreachableError("away")])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda r: ScriptedClient([ALL], away=2, refresh=r), id="its route has no broker for a while"),
        pytest.param(lambda r: ScriptedClient([UnreachableError("away"), ALL], refresh=r), id="it is unreachable once"),
        pytest.param(lambda r: ScriptedClient([PerhapsStoredError("?"), ALL], refresh=r), id="it does not answer once"),
    ],
)
def test_a_broker_that_is_away_for_a_while(
    make: Callable[[Exception | None], ScriptedClient], refresh: Exception | None
) -> None:
    client = make(refresh)
    assert read_scripted(client, **PATIENT) == [0, 1, 2, 3]
    assert client.refreshed > 0


@pytest.mark.parametrize("options", [{}, FILTERED], ids=["all", "filtered"])
@pytest.mark.parametrize(
    ("client", "error"),
    [
        pytest.param(ScriptedClient([ALL], away=1 << 30), TopicNotFoundError, id="its route has no broker"),
        pytest.param(ScriptedClient([UnreachableError("away")]), UnreachableError, id="it is unreachable"),
    ],
)
def test_a_broker_that_stays_away(client: ScriptedClient, error: type[RocketMQError], options: dict[str, str]) -> None:
    with pytest.raises(error):
        read_scripted(client, **options)


def test_a_refusal_is_not_repeated() -> None:
    class Refusing(ScriptedClient):
        async def invoke(self, address: str, request: RemotingCommand) -> RemotingCommand:
            self.refreshed += 1
            return request.reply(ResponseCode.NO_PERMISSION, "reading is forbidden")

    client = Refusing([ALL])
    with pytest.raises(UsageError, match="reading is forbidden"):
        read_scripted(client, **PATIENT)
    assert client.refreshed == 1


@pytest.mark.parametrize(
    ("steps", "what", "left"),
    [
        pytest.param(
            [(PullStatus.OFFSET_MOVED, [], 2, 2, 4), (PullStatus.FOUND, [2, 3], 4, 2, 4)],
            "begins at 2, 0 was to be read", [2, 3], id="the begin was deleted",
        ),
        pytest.param(
            [(PullStatus.FOUND, [0, 1], 2, 0, 2), (PullStatus.NO_NEW_MESSAGE, [], 2, 0, 2)],
            "ends at 2, offsets up to 4 were to be read", [0, 1], id="the queue ends early",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, FILTERED], ids=["all", "filtered"])
def test_deleted_messages_are_reported(steps: list[Step], what: str, left: list[int], options: dict[str, str]) -> None:
    with pytest.raises(DataLossError, match=what):
        read_scripted(ScriptedClient(list(steps)), **options)
    with capture_logs() as logs:
        assert read_scripted(ScriptedClient(list(steps)), failOnDataLoss="false", **options) == left
    assert any(what in entry["reason"] for entry in logs if entry["event"] == "messages were deleted")


def test_a_broker_that_does_not_return_what_its_queue_has() -> None:
    steps: list[Step] = [(PullStatus.FOUND, [0, 1], 2, 0, 4), (PullStatus.NO_NEW_MESSAGE, [], 2, 0, 4)]
    with pytest.raises(PerhapsStoredError, match="has messages at 2, but the broker does not return them"):
        read_scripted(ScriptedClient(steps))


def test_a_queue_that_is_still_growing() -> None:
    steps: list[Step] = [
        (PullStatus.FOUND, [0, 1], 2, 0, 2),
        (PullStatus.NO_NEW_MESSAGE, [], 2, 0, 2),
        (PullStatus.FOUND, [2, 3], 4, 0, 4),
    ]
    assert read_scripted(ScriptedClient(steps), **PATIENT) == [0, 1, 2, 3]
