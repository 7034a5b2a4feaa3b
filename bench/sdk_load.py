"""One load of bench/sdk.py in a process of its own: runs for some seconds and prints its figures as a line of JSON.

python -m bench.sdk_load NAMESRV TOPIC LOAD SECONDS [--messages N] [--backend asyncio] [--in-flight 64] [--profile FILE]
[--access-key NAME --secret-key SECRET [--no-stamps]]
where LOAD is: fill (writes N messages), send, linger, raw_pull, process, batches, poll (from a topic with N messages).
"""

import argparse
import cProfile
import json
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio

from trimq.client import ClientOptions, Consumer, Credentials, Message, Producer, PullConsumer
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode
from trimq.protocol.headers.pull import PullMessageRequestHeader, PullMessageResponseHeader
from trimq.protocol.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND

SIZE = 1024
WARM_SECONDS = 1.5
WARM_PART, LAST_PART = 0.1, 0.9
"""The shares of the topic at which the measurement starts and ends at the latest: until then no queue is empty."""
POLL = 0.02
BATCH = 32
"""Messages of a pull, and of a batch."""


class Count:
    """Counts messages, and ends the measurement when the time is over or the topic is nearly read."""

    def __init__(self, seconds: float, messages: int) -> None:
        self.done = 0
        self._seconds = seconds
        self._messages = messages
        self.rate = self.cpu_us = 0.0

    def is_over(self, began: float, seconds: float, part: float) -> bool:
        """Whether ``seconds`` since ``began`` are over, or the share ``part`` of the topic is read."""
        return time.perf_counter() - began >= seconds or self.done >= self._messages * part

    async def watch(self) -> None:
        """Wait for the warm-up and the measurement, and set the rate."""
        began = time.perf_counter()
        while not self.is_over(began, WARM_SECONDS, WARM_PART):  # noqa: ASYNC110 - an event would cost each message
            await anyio.sleep(POLL)
        before, began, used = self.done, time.perf_counter(), time.process_time()
        while not self.is_over(began, self._seconds, LAST_PART):  # noqa: ASYNC110 - as above
            await anyio.sleep(POLL)
        self.took(before, began, used)

    def took(self, before: int, began: float, used: float) -> None:
        """Set the rate and the CPU time of a message for the period from ``began`` to now."""
        done = max(self.done - before, 1)
        self.rate = done / (time.perf_counter() - began)
        self.cpu_us = (time.process_time() - used) * 1e6 / done


async def during(count: Count, work: Callable[[], Coroutine[Any, Any, None]], tasks: int = 1) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(tasks):
            group.start_soon(work)
        await count.watch()
        group.cancel_scope.cancel()


async def send(
    namesrv: str, topic: str, count: Count, in_flight: int, linger: float | None, options: ClientOptions
) -> None:
    body = bytes(SIZE)
    async with Producer("bench_sdk", namesrv=namesrv, linger=linger, options=options) as producer:

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
    """The least work of a reader: pull, receive the frame, read the next offset, count. One request for each queue."""

    def __init__(self, address: str, topic: str, queues: int) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.decoder = FrameDecoder()
        self.topic = topic
        self.at = dict.fromkeys(range(queues), 0)

    def ask(self, queue: int, offset: int) -> None:
        """Send a pull; its opaque, and so its reply's, is the number of the queue."""
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

    def run(self, count: Count, seconds: float, part: float) -> None:
        """Read and count until the period is over."""
        decoder, receive, began = self.decoder, self.sock.recv, time.perf_counter()
        while not count.is_over(began, seconds, part):
            for reply in decoder.feed(receive(64 * 1024)):
                if reply.code:
                    raise RuntimeError(
                        f"no message found; the end of the topic, or an error: {reply.code} {reply.remark}"
                    )
                offset = reply.header(PullMessageResponseHeader).next_begin_offset
                count.done += offset - self.at[reply.opaque]
                self.at[reply.opaque] = offset
                self.ask(reply.opaque, offset)

    def measure(self, count: Count, seconds: float) -> None:
        """Measure, with pulls on all queues."""
        for queue in self.at:
            self.ask(queue, 0)
        self.run(count, WARM_SECONDS, WARM_PART)
        before, began, used = count.done, time.perf_counter(), time.process_time()
        self.run(count, seconds, LAST_PART)
        count.took(before, began, used)


async def route(namesrv: str, topic: str) -> tuple[str, int]:
    async with PullConsumer("bench_raw", namesrv=namesrv) as consumer:
        queues = await consumer.queues(topic)
        found = await consumer.client.routes.get(topic)
    return found.master(queues[0].broker_name) or "", len(queues)


def options(arguments: argparse.Namespace) -> ClientOptions:
    """The credentials of a load that sends."""
    if arguments.access_key is None:
        return ClientOptions()
    stamps = not arguments.no_stamps
    return ClientOptions(credentials=Credentials(arguments.access_key, arguments.secret_key, replay_protection=stamps))


async def run(arguments: argparse.Namespace, count: Count) -> None:
    namesrv, topic, load = arguments.namesrv, arguments.topic, arguments.load
    if load == "fill":
        await fill(namesrv, topic, arguments.messages)
    elif load in ("send", "linger"):
        await send(namesrv, topic, count, arguments.in_flight, 0.0 if load == "linger" else None, options(arguments))
    else:
        await consume(namesrv, topic, count, load)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("namesrv")
    found.add_argument("topic")
    found.add_argument("load")
    found.add_argument("seconds", type=float)
    found.add_argument("--backend", default="trio")
    found.add_argument("--in-flight", type=int, default=64)
    found.add_argument("--messages", type=int, default=sys.maxsize)
    found.add_argument("--profile", type=Path)
    found.add_argument("--access-key", help="sign the requests of a load that sends as this user")
    found.add_argument("--secret-key")
    found.add_argument("--no-stamps", action="store_true", help="without protection from replays")
    return found


def main() -> None:
    arguments = parser().parse_args()
    count = Count(arguments.seconds, arguments.messages)
    profile = cProfile.Profile(time.process_time)  # CPU time: waiting does not count
    if arguments.profile:
        profile.enable()
    if arguments.load == "raw_pull":
        address, queues = anyio.run(route, arguments.namesrv, arguments.topic, backend=arguments.backend)
        RawPull(address, arguments.topic, queues).measure(count, arguments.seconds)
    else:
        anyio.run(run, arguments, count, backend=arguments.backend)
    profile.disable()
    if arguments.profile:
        profile.dump_stats(arguments.profile)
    print(json.dumps({"msg_s": count.rate, "cpu_us": count.cpu_us}))


if __name__ == "__main__":
    main()
