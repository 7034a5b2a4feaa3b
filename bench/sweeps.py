"""How the cost of a request grows: the loop's CPU time by size, connections, topics, queues, keys and store.

python -m bench.sweeps [--sweeps size,connections,topics,queues,keys,store] [--store-gb 2] [--json FILE]. Measured in
this process as by bench.requests: the first decile of all turns. ``--store-gb 20`` fills a store of that size, which
needs the space in the temporary directory.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from bench.frames import BIG, BODY, frame, key, pull, pull_fields, query, send_fields, unique
from bench.wire import Wire, connected
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.protocol.batch import encode_batch
from trimq.protocol.body import TopicConfig

Points = list[tuple[float, float]]
"""The quantity that grows, and the microseconds of a request."""
Sweep = Callable[[BrokerController, argparse.Namespace], Awaitable[dict[str, Points]]]

TURN_BYTES = 200_000
"""Bytes of requests in one turn: less than the receive buffer."""
GIB = 1 << 30


def send_frame(number: int, topic: str, queue_id: int, body: bytes, keys: int = 1) -> bytes:
    """The frame of a send, with a unique key and ``keys`` more keys."""
    words = " ".join(f"k{number}-{at}" for at in range(keys))
    text = rf"UNIQ_KEY\u0001{unique(number)}\u0002" + (rf"KEYS\u0001{words}\u0002" if keys else "")
    return frame(310, number, send_fields(topic, queue_id, text), body)


def add_topic(broker: BrokerController, name: str, queues: int) -> None:
    """Add a topic to the broker's table, without writing its file."""
    broker.context.topics.table[name] = TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues)


async def cost(wire: Wire, make: Callable[[int], bytes], window: int, turns: int = 300) -> float:
    """The microseconds of a request in turns of ``window`` requests, including the index work after them."""
    index = wire.broker.context.store.index
    took: list[float] = []
    behind = 0.0
    for turn in range(turns):
        seconds = (await wire.turn([b"".join([make(turn * window + at) for at in range(window)])])).seconds
        began = time.thread_time()
        if index is not None and len(index.pending) >= 256:  # before the index's own service does it, unmeasured
            index.apply()
        behind += time.thread_time() - began
        took.append(seconds)
        await trio.sleep(0.0003)
    took.sort()
    return (took[len(took) // 10] + behind / turns) / window * 1e6


async def sweep_size(broker: BrokerController, _: argparse.Namespace) -> dict[str, Points]:
    """Sends of bodies from 128 bytes to 128 KiB."""
    add_topic(broker, "Sizes", 4)
    points: Points = []
    async with connected(broker) as wire:
        for size in (128, 512, 1024, 4096, 16_384, 65_536, 131_072):
            body = (BODY * (size // len(BODY) + 1))[:size]
            window = max(1, min(32, TURN_BYTES // (size + 300)))

            def make(number: int, body: bytes = body) -> bytes:
                return send_frame(number, "Sizes", number % 4, body)

            await cost(wire, make, window, 20)
            points.append((size, await cost(wire, make, window, 200)))
    return {"send": points}


async def sweep_connections(broker: BrokerController, arguments: argparse.Namespace) -> dict[str, Points]:
    """One send on each of 1 to 2,000 connections, all of them ready at the same time."""
    add_topic(broker, "Connections", 4)
    points: Points = []
    for count in (1, 8, 64, 500, arguments.connections):
        async with connected(broker, count) as wire:
            took = []
            for turn in range(max(12, 2000 // count)):
                numbers = range(turn * count, (turn + 1) * count)
                frames = [send_frame(number, "Connections", number % 4, BODY) for number in numbers]
                took.append((await wire.turn(frames)).seconds)
                await trio.sleep(0.001)
        took.sort()
        points.append((count, took[len(took) // 10] / count * 1e6))
    return {"send": points}


async def sweep_topics(broker: BrokerController, arguments: argparse.Namespace) -> dict[str, Points]:
    """Sends and pulls that go from topic to topic."""
    sends: Points = []
    pulls: Points = []
    async with connected(broker) as wire:
        for count in (1, 10, 100, 1000, arguments.topics):
            for number in range(count):
                add_topic(broker, f"Topic{number}", 1)

            def send_to(number: int, count: int = count) -> bytes:
                return send_frame(number, f"Topic{number % count}", 0, BODY)

            def pull_from(number: int, count: int = count) -> bytes:
                return frame(11, number, pull_fields(f"Topic{number % count}", 0, 0, 1))

            turns = max(60, count // 32 + 1)
            await cost(wire, send_to, 32, turns)  # warm-up: the first message of a topic creates its queue
            sends.append((count, await cost(wire, send_to, 32, turns)))
            await cost(wire, pull_from, 32, turns)
            pulls.append((count, await cost(wire, pull_from, 32, turns)))
    return {"send": sends, "pull of one message": pulls}


async def sweep_queues(broker: BrokerController, _: argparse.Namespace) -> dict[str, Points]:
    """Sends that go from queue to queue of one topic."""
    points: Points = []
    async with connected(broker) as wire:
        for count in (1, 4, 16, 64, 256, 1024):
            add_topic(broker, f"Queues{count}", count)

            def make(number: int, count: int = count) -> bytes:
                return send_frame(number, f"Queues{count}", number % count, BODY)

            await cost(wire, make, 32, count // 32 + 10)
            points.append((count, await cost(wire, make, 32, 150)))
    return {"send": points}


async def sweep_keys(broker: BrokerController, _: argparse.Namespace) -> dict[str, Points]:
    """Sends with an increasing number of keys, including the index work."""
    add_topic(broker, "Keys", 4)
    points: Points = []
    async with connected(broker) as wire:
        for keys in (0, 1, 2, 4, 8, 16):

            def make(number: int, keys: int = keys) -> bytes:
                return send_frame(number, "Keys", number % 4, BODY, keys)

            await cost(wire, make, 32, 20)
            points.append((keys + 1, await cost(wire, make, 32, 150)))
    return {"send": points}


async def sweep_store(broker: BrokerController, arguments: argparse.Namespace) -> dict[str, Points]:
    """Requests at both ends of a growing store, and of a queue whose backlog grows with it."""
    add_topic(broker, "Requests", 4)
    add_topic(broker, "Filler", 1)
    store = broker.context.store
    found: dict[str, Points] = {"send": [], "pull of 32, newest": [], "pull of 32, oldest": [], "query, oldest": []}
    async with connected(broker) as wire:
        for turn in range(150):
            await wire.turn([b"".join([_keyed(turn * 32 + at) for at in range(32)])])
            await trio.sleep(0.0005)
        size = 0.0
        for target in (0.0, 0.25, 1.0, 2.0, 5.0, 10.0, 20.0):
            if target > arguments.store_gb:
                break
            await _fill(wire, int(target * GIB))
            size = max(store.max_phy_offset / GIB, 0.001)
            newest = min(store.queues.next_offset("Requests", queue) for queue in range(4)) - 32

            def pull_newest(number: int, newest: int = newest) -> bytes:
                return frame(11, number, pull_fields("Requests", number % 4, newest, 32))

            for name, make, window in (
                ("send", _later_send, 32),
                ("pull of 32, newest", pull_newest, 1),
                ("pull of 32, oldest", pull, 1),
                ("query, oldest", query, 32),
            ):
                await cost(wire, make, window, 20)
                found[name].append((size, await cost(wire, make, window, 200)))
    return found


def _later_send(number: int) -> bytes:
    """A send with a key that is never queried."""
    return _keyed(1_000_000 + number)


def _keyed(number: int) -> bytes:
    """A send with the key that ``query`` uses."""
    text = rf"KEYS\u0001{key(number)}\u0002UNIQ_KEY\u0001{unique(number)}\u0002"
    return frame(310, number, send_fields("Requests", number % 4, text), BODY)


async def _fill(wire: Wire, end: int) -> None:
    """Grow the log to ``end`` bytes with batches of large messages."""
    store = wire.broker.context.store
    body = encode_batch([(0, BODY * 64, f"UNIQ_KEY\x01{at:032X}\x02".encode()) for at in range(3)])
    request = frame(320, 1, send_fields("Filler", 0, "", batch=True), body)
    while store.max_phy_offset < end:
        await wire.turn([request])
        await trio.sleep(0.0005)


SWEEPS: dict[str, Sweep] = {
    "size": sweep_size,
    "connections": sweep_connections,
    "topics": sweep_topics,
    "queues": sweep_queues,
    "keys": sweep_keys,
    "store": sweep_store,
}
UNITS = {
    "size": "bytes of a body",
    "connections": "connections, all ready at the same time",
    "topics": "topics",
    "queues": "queues of a topic",
    "keys": "keys of a message",
    "store": "GiB of store, and of backlog",
}


async def run(arguments: argparse.Namespace) -> None:
    """Run all sweeps, each with its own broker and store."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results: dict[str, dict[str, Points]] = {}
    for name in arguments.sweeps.split(","):
        with tempfile.TemporaryDirectory() as directory:
            async with running_broker(Path(directory), clock=None, disk=None, **BIG) as broker:
                results[name] = await SWEEPS[name](broker, arguments)
        for row, points in results[name].items():
            figures = "  ".join(f"{x:,.4g}: {y:.1f}" for x, y in points)
            print(f"{UNITS[name]:32s} {row:20s} {figures}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", default=",".join(SWEEPS))
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--store-gb", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
