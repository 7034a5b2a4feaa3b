"""The short way of a query by key gives, byte for byte, the replies of the general one."""

from typing import Any

import trio

from broker.controller import BrokerController
from tests.broker.raw_client import Raw, json_frame
from tests.broker.wire_client import WireClient

FIELDS = {"topic": "Orders", "key": "k1", "maxNum": "32", "beginTimestamp": "0", "endTimestamp": "9223372036854775807"}
CASES: list[dict[str, Any]] = [
    {},
    {"key": "k2"},
    {"key": "big"},
    {"key": "none"},
    {"key": ""},
    {"maxNum": "1"},
    {"maxNum": "0"},
    {"endTimestamp": "1"},
    {"topic": "Other"},
    {"_UNIQUE_KEY_QUERY": "true"},
    {"_UNIQUE_KEY_QUERY": "true", "maxNum": "1"},
    {"maxNum": "-1"},
    {"maxNum": "100"},
    {"beginTimestamp": "5", "endTimestamp": "4"},
    {"maxNum": "x"},
]


async def test_both_ways_say_the_same(broker: BrokerController, client: WireClient) -> None:
    for number in range(6):
        await client.send("Orders", b"x" * 100, properties=f"KEYS\x01k{number % 3}\x02")
    for _ in range(3):
        await client.send("Orders", b"x" * 20_000, properties="KEYS\x01big\x02")
    async with await trio.open_tcp_stream(*broker.endpoint) as stream:
        raw = Raw(stream)
        await raw.ask(json_frame(12, FIELDS, direct=False))  # the index makes its first file
        for case in CASES:
            general = await raw.ask(json_frame(12, FIELDS | case, direct=False))
            assert await raw.ask(json_frame(12, FIELDS | case, direct=True)) == general, case
        assert b'"code":0' in await raw.ask(json_frame(12, FIELDS, direct=True))
    assert not any(file.is_held for file in broker.parts.store.files.files)
