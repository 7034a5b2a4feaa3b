"""The SDK's part of bench/sdk.py, a process of its own: one load for a while, its figures as a line of JSON.

python -m bench.sdk_load NAMESRV TOPIC LOAD SECONDS [--backend asyncio] [--in-flight 64] [--profile FILE]. The loads:
fill (SECONDS is the number of messages), send, linger, raw_pull, process, batches, poll.
"""

import argparse
import cProfile
import json
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio

from client import Consumer, Message, Producer, PullConsumer
from protocol.codes import RequestCode
from protocol.command import RemotingCommand
from protocol.frame import FrameDecoder, encode
from protocol.headers.pull import PullMessageRequestHeader, PullMessageResponseHeader
from protocol.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND

SIZE = 1024
WARM_SECONDS = 1.5
BATCH = 32
"""Messages of a pull, and of a batch."""


class Count:
    """What is done, and when to stop."""

    def __init__(self, seconds: float) -> None:
        self.done = 0
        self._seconds = seconds
        self.rate = self.cpu_us = 0.0

    async def watch(self) -> None:
        """Sets the rate, when the time is over."""
        await anyio.sleep(WARM_SECONDS)
        before, began, used = self.done, time.perf_counter(), time.process_time()
        await anyio.sleep(self._seconds)
        self.rate = (self.done - before) / (time.perf_counter() - began)
        self.cpu_us = (time.process_time() - used) * 1e6 / max(self.done - before, 1)


async def during(count: Count, work: Callable[[], Coroutine[Any, Any, None]], tasks: int = 1) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(tasks):
            group.start_soon(work)
        await count.watch()
        group.cancel_scope.cancel()


async def send(namesrv: str, topic: str, count: Count, in_flight: int, linger: float | None) -> None:
    body = bytes(SIZE)
    async with Producer("bench_sdk", namesrv=namesrv, linger=linger) as producer:

        async def work() -> None:
            while True:
                await producer.send(Message(topic, body))
                count.done += 1

        await during(count, work, in_flight)


async def fill(namesrv: str, topic: str, messages: int) -> None:
    body = bytes(SIZE)
    async with Producer("bench_sdk", namesrv=namesrv) as producer:
        queues = await producer.queues(topic)
        for number in range(0, messages, 1000):
            queue = queues[number // 1000 % len(queues)]
            await producer.send_batch((Message(topic, body) for _ in range(1000)), queue=queue)


async def consume(namesrv: str, topic: str, count: Count, how: str) -> None:
    group = f"bench_{how}_{time.time_ns()}"
    if how == "poll":
        async with PullConsumer(group, namesrv=namesrv, start="first") as puller:
            await puller.assign(await puller.queues(topic))

            async def poll() -> None:
                while True:
                    count.done += len(await puller.poll(BATCH))

            await during(count, poll)
        return
    async with Consumer(group, topic, namesrv=namesrv, start="first") as consumer:

        async def one_by_one() -> None:
            async for message in consumer:
                async with message.process():
                    count.done += 1

        async def in_batches() -> None:
            async for batch in consumer.batches(BATCH):
                async with batch.process():
                    count.done += len(batch)

        await during(count, one_by_one if how == "process" else in_batches)


class RawPull:
    """The least that a reader can do: asks, takes the frame, looks where to go on, counts. A request a queue is out."""

    def __init__(self, address: str, topic: str, queues: int) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.decoder = FrameDecoder()
        self.topic = topic
        self.at = dict.fromkeys(range(queues), 0)
        self.done = 0

    def ask(self, queue: int, offset: int) -> None:
        """Sends a pull; its answer has the queue as its number."""
        header = PullMessageRequestHeader(
            consumer_group="bench_raw",
            topic=self.topic,
            queue_id=queue,
            queue_offset=offset,
            max_msg_nums=BATCH,
            sys_flag=PULL_SUSPEND | PULL_SUBSCRIPTION,
            commit_offset=0,
            suspend_timeout_millis=15_000,
            sub_version=0,
            subscription="*",
            expression_type="TAG",
        )
        command = RemotingCommand.request(RequestCode.PULL_MESSAGE, header)
        command.opaque = queue
        self.sock.sendall(encode(command))

    def run(self, until: float) -> None:
        """Adds to ``done`` until then, or until the topic is at its end."""
        decoder, receive = self.decoder, self.sock.recv
        while time.perf_counter() < until:
            for reply in decoder.feed(receive(64 * 1024)):
                if reply.code:
                    raise RuntimeError(f"the topic is at its end, or worse: {reply.code} {reply.remark}")
                offset = reply.header(PullMessageResponseHeader).next_begin_offset
                self.done += offset - self.at[reply.opaque]
                self.at[reply.opaque] = offset
                self.ask(reply.opaque, offset)

    def measure(self, seconds: float) -> tuple[float, float]:
        """Messages a second, all queues together, and what one costs."""
        for queue in self.at:
            self.ask(queue, 0)
        self.run(time.perf_counter() + WARM_SECONDS)
        before, began, used = self.done, time.perf_counter(), time.process_time()
        self.run(began + seconds)
        done = self.done - before
        return done / (time.perf_counter() - began), (time.process_time() - used) * 1e6 / done


async def route(namesrv: str, topic: str) -> tuple[str, int]:
    async with PullConsumer("bench_raw", namesrv=namesrv) as consumer:
        queues = await consumer.queues(topic)
        found = await consumer.client.routes.get(topic)
    return found.master(queues[0].broker_name) or "", len(queues)


async def run(arguments: argparse.Namespace) -> tuple[float, float]:
    namesrv, topic, load, seconds = arguments.namesrv, arguments.topic, arguments.load, arguments.seconds
    count = Count(seconds)
    if load == "fill":
        await fill(namesrv, topic, int(seconds))
    elif load in ("send", "linger"):
        await send(namesrv, topic, count, arguments.in_flight, 0.0 if load == "linger" else None)
    else:
        await consume(namesrv, topic, count, load)
    return count.rate, count.cpu_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("namesrv")
    parser.add_argument("topic")
    parser.add_argument("load")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--backend", default="trio")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--profile", type=Path)
    arguments = parser.parse_args()
    profile = cProfile.Profile(time.process_time)  # waiting is not what is looked for
    if arguments.profile:
        profile.enable()
    if arguments.load == "raw_pull":
        address, queues = anyio.run(route, arguments.namesrv, arguments.topic, backend=arguments.backend)
        rate, cpu_us = RawPull(address, arguments.topic, queues).measure(arguments.seconds)
    else:
        rate, cpu_us = anyio.run(run, arguments, backend=arguments.backend)
    profile.disable()
    if arguments.profile:
        profile.dump_stats(arguments.profile)
    print(json.dumps({"msg_s": rate, "cpu_us": cpu_us}))


if __name__ == "__main__":
    main()
