"""Sends or reads with the SDK: run on the host and inside containers. sdk_job.py send|read NAMESRV TOPIC COUNT"""

import sys
import time

import anyio

from client import Message, Producer, PullConsumer


async def send(namesrv: str, topic: str, count: int) -> None:
    async with Producer("docker-test", namesrv=namesrv) as producer:
        for number in range(count):
            await producer.send(Message(topic, b"%d" % number))


async def read(namesrv: str, topic: str, count: int) -> None:
    found: set[bytes] = set()
    ends = time.monotonic() + 40
    async with PullConsumer(f"readers-{time.time_ns()}", namesrv=namesrv, start="first") as consumer:
        await consumer.assign(await consumer.queues(topic))
        while len(found) < count and time.monotonic() < ends:
            found.update([message.body for message in await consumer.poll(timeout=1)])
    print(len(found & {b"%d" % number for number in range(count)}))


if __name__ == "__main__":
    job = {"send": send, "read": read}[sys.argv[1]]
    anyio.run(job, sys.argv[2], sys.argv[3], int(sys.argv[4]))
