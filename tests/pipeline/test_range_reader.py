"""Queues in which some offsets have no message: each message is one row, however many requests are in flight."""

from __future__ import annotations

import struct

import anyio
import pytest

from trimq.client.core import Client
from trimq.client.message import MessageQueue
from trimq.client.pulling import PullStatus
from trimq.pipeline.options import Options
from trimq.pipeline.topics.planning import Range
from trimq.pipeline.topics.pulling import RangeReader, Reply, _between
from trimq.pipeline.topics.settings import ReadSettings
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
