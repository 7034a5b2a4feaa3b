"""Uses the SDK for the tests, on the host and inside containers. sdk_job.py send|read|flood NAMESRV TOPIC [COUNT]

sdk_job.py brokers NAMESRV prints the names of the brokers that a name server knows.

send: COUNT messages with the bodies 0, 1, ...; every third has the tag "third", the others "other".
read: prints the bodies of all stored messages, each once.
flood: sends until its input is closed and prints a line for each message: body and time of one that was acknowledged
(SEND_OK), the code of each other one.
"""

import sys
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread

from trimq.client import Message, Producer, PullConsumer, SendStatus
from trimq.client.admin import Admin
from trimq.client.errors import RocketMQError

READ_SECONDS = 120
ACKNOWLEDGED = "acknowledged "
REFUSED = "refused "


async def send(namesrv: str, topic: str, count: str) -> None:
    async with Producer("docker-test", namesrv=namesrv) as producer:
        for number in range(int(count)):
            await producer.send(Message(topic, b"%d" % number, tags="other" if number % 3 else "third"))


async def read(namesrv: str, topic: str) -> None:
    found: set[bytes] = set()
    with anyio.fail_after(READ_SECONDS):
        async with PullConsumer(f"readers-{time.time_ns()}", namesrv=namesrv, start="first") as consumer:
            queues = await consumer.queues(topic)
            ends = {queue: await consumer.end_offset(queue) for queue in queues}
            await consumer.assign(queues)
            while any(consumer.position(queue) < end for queue, end in ends.items()):
                found.update([message.body for message in await consumer.poll(timeout=1)])
    print(b"\n".join(sorted(found)).decode())


async def flood(namesrv: str, topic: str) -> None:
    async def stop_at_end_of_input() -> None:
        await anyio.to_thread.run_sync(sys.stdin.read)
        group.cancel_scope.cancel()

    # more than the time after which a master answers that its slave is late
    async with (
        Producer("docker-test", namesrv=namesrv, send_timeout=10) as producer,
        anyio.create_task_group() as group,
    ):
        group.start_soon(stop_at_end_of_input)
        number = 0
        while True:
            try:
                sent = await producer.send(Message(topic, b"%d" % number))
                acknowledged = sent.status is SendStatus.SEND_OK
                # with a prefix: the SDK logs to the same stream
                print(
                    f"{ACKNOWLEDGED}{number} {time.time()}" if acknowledged else f"{REFUSED}{sent.status.value}",
                    flush=True,
                )
            except RocketMQError as error:  # the broker is down, or takes no messages
                print(f"{REFUSED}{error.code}", flush=True)
                await anyio.sleep(0.1)
            number += 1


async def brokers(namesrv: str) -> None:
    async with Admin(namesrv=namesrv) as admin:
        print(*sorted((await admin.cluster_info()).broker_addr_table))


if __name__ == "__main__":
    jobs: dict[str, Callable[..., Awaitable[None]]] = {"send": send, "read": read, "flood": flood, "brokers": brokers}
    anyio.run(jobs[sys.argv[1]], *sys.argv[2:])
