"""CPU cost of requests in process: frames as rmqload makes them through the real broker, without its selector.

python -m bench.requests [--rows send,batch,pull,query] [--count 6000] [--profile] [--json FILE] [--set KEY=VALUE].
Each figure is the loop thread's time for a request, and for the index work behind it: the frame lies in a socket, is
received, served, and its reply is sent; what the client's side of the socket costs is measured alone and taken off.
"""

import argparse
import cProfile
import json
import pstats
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trio

from trimq.broker.controller import BrokerController
from trimq.broker.store.index.index_service import WAKE_AT
from trimq.broker.testing import running_broker
from trimq.protocol.batch import encode_batch
from trimq.remoting.server.connection import Connection

BODY = bytes(range(256)) * 4
WINDOW = 32
"""Requests in one turn of the connection."""
BIG = {
    "mappedFileSizeCommitLog": 1 << 30,
    "commitLogReserveStep": 64 << 20,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
}


def frame(code: int, opaque: int, fields: str, body: bytes = b"") -> bytes:
    """A request in the JSON form."""
    header = (
        f'{{"code":{code},"extFields":{{{fields}}},"flag":0,"language":"JAVA","opaque":{opaque},'
        '"serializeTypeCurrentRPC":"JSON","version":479}'
    ).encode()
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def send_fields(number: int, *, batch: bool = False) -> str:
    """Ext fields of a send with two keys and a tag."""
    properties = rf"KEYS\u0001k{number}\u0002UNIQ_KEY\u00017F0000011F9018B4{number:016X}\u0002TAGS\u0001TagA\u0002"
    return (
        f'"a":"load","b":"Requests","c":"TBW102","d":"4","e":"{number % 4}","f":"0","g":"1700000000000","h":"0",'
        f'"i":"{"" if batch else properties}","j":"0","k":"false","l":"0","m":"{str(batch).lower()}","n":"broker-a"'
    )


def send(number: int) -> bytes:
    """A message of 1 KiB."""
    return frame(310, number, send_fields(number), BODY)


def batch(number: int) -> bytes:
    """32 messages of 1 KiB in one request."""
    texts = [
        f"KEYS\x01k{at}\x02UNIQ_KEY\x017F0000011F9018B5{at:016X}\x02TAGS\x01TagA\x02".encode()
        for at in range(number * 32, number * 32 + 32)
    ]
    return frame(320, number, send_fields(number, batch=True), encode_batch([(0, BODY, text) for text in texts]))


def pull(number: int) -> bytes:
    """Up to 32 messages of a queue."""
    return frame(
        11,
        number,
        f'"consumerGroup":"load","topic":"Requests","queueId":"{number % 4}","queueOffset":"{number % 40 * 32}",'
        '"maxMsgNums":"32","sysFlag":"4","commitOffset":"0","suspendTimeoutMillis":"0","subscription":"*",'
        '"subVersion":"0","expressionType":"TAG"',
    )


def query(number: int) -> bytes:
    """The one message with a key."""
    return frame(
        12,
        number,
        f'"topic":"Requests","key":"k{number % 4000}","maxNum":"32","beginTimestamp":"0",'
        '"endTimestamp":"9223372036854775807"',
    )


class Wire:
    """A client's socket and the broker's connection at the other end of it, driven by hand."""

    def __init__(self, broker: BrokerController, client: socket.socket, conn: Connection) -> None:
        self.broker = broker
        self.reactor = broker.reactor
        self.client = client
        self.conn = conn
        self._waste = bytearray(1 << 20)
        self._taken = broker.reactor.stats.bytes_out

    @classmethod
    async def connect(cls, broker: BrokerController) -> "Wire":
        """A connection over loopback, as the reactor has accepted it."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        client.connect(broker.endpoint)
        while not broker.reactor.connections:  # noqa: ASYNC110 - there is no event for it, and it is there at once
            await trio.sleep(0.001)
        (conn,) = broker.reactor.connections.values()
        conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        return cls(broker, client, conn)

    def turn(self, frames: bytes) -> tuple[float, float]:
        """Serve ``frames``: seconds of the broker's work, and of the client's."""
        clock = time.thread_time
        began = clock()
        self.client.sendall(frames)
        sent = clock()
        reactor = self.reactor
        reactor.intake.turn_end = float("inf")
        reactor._sender.in_round = True  # noqa: SLF001 - the round is driven from here
        left = len(frames)
        while left > 0:
            before = reactor.stats.bytes_in
            reactor.intake.serve(self.conn)
            left -= reactor.stats.bytes_in - before
        reactor._end_round()  # noqa: SLF001 - as above
        served = clock()
        received = 0
        while received < reactor.stats.bytes_out - self._taken:
            received += self.client.recv_into(self._waste)
        self._taken += received
        return served - sent, clock() - served + sent - began


def turns(make: Callable[[int], bytes], count: int, window: int) -> Iterator[bytes]:
    """``count`` requests, ``window`` in each turn."""
    for begin in range(0, count, window):
        yield b"".join([make(number) for number in range(begin, begin + window)])


ROWS: dict[str, tuple[Callable[[int], bytes], int, int]] = {
    "send": (send, WINDOW, 1),
    "send alone": (send, 1, 1),
    "batch": (batch, 1, 32),
    "pull": (pull, 1, 32),
    "query": (query, WINDOW, 1),
}
"""Row to how its requests are made, how many come in a turn, and how many messages are in each."""


async def measure(wire: Wire, name: str, count: int, profile: cProfile.Profile | None) -> dict[str, float]:
    """The turn that a tenth of all turns are faster than: what else the machine does hardly shows in it."""
    make, window, messages = ROWS[name]
    index = wire.broker.parts.store.index
    took: list[float] = []
    behind = 0.0
    waiting = 0
    for frames in turns(make, max(count // messages, 512) // window * window, window):
        if profile is not None:
            profile.enable()
        took.append(wire.turn(frames)[0])
        if index is not None:
            began = time.thread_time()
            waiting += window * messages
            if waiting >= WAKE_AT:
                waiting = 0
                while index.pending and index.apply():
                    pass
            behind += time.thread_time() - began
        if profile is not None:
            profile.disable()
        if len(took) % 8 == 0:
            await trio.lowlevel.checkpoint()
    took.sort()
    each = took[len(took) // 10] / window * 1e6
    return {"us_request": each, "us_index": behind / (len(took) * window) * 1e6, "us_message": each / messages}


async def run(arguments: argparse.Namespace) -> None:
    """All rows."""
    profile = cProfile.Profile() if arguments.profile else None
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        async with running_broker(Path(directory), clock=None, disk=None, **BIG | arguments.set) as broker:
            wire = await Wire.connect(broker)
            for frames in turns(send, 6400, WINDOW):
                wire.turn(frames)
                await trio.sleep(0.0005)
            await trio.sleep(0.3)
            for name in arguments.rows.split(","):
                result = results[name] = await measure(wire, name, arguments.count, profile)
                print(
                    f"{name:12s} {result['us_request']:8.2f} us a request  {result['us_message']:7.2f} us a message  "
                    f"index behind it {result['us_index']:6.2f} us"
                )
    if profile is not None:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(40)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--set", type=_setting, action="append", default=[], help="KEY=VALUE of the broker")
    arguments = parser.parse_args()
    arguments.set = dict(arguments.set)
    trio.run(run, arguments)


def _setting(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


if __name__ == "__main__":
    main()
