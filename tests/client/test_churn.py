"""No message is lost while members join and leave a group under load, brokers restart and name servers are killed.

A message is delivered again only for a reason that at-least-once allows, and orderly members see each queue and each
sharding key in order, one member at a time. ``TRIMQ_CHURN_SECONDS`` sets the duration (180 in a nightly run),
``TRIMQ_CHURN_SEED`` repeats the choices of an earlier run; a run prints its seed and its figures.
"""

import math
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from tests.client.servers import Servers
from tests.interop.harness import probe
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker, NameServer
from trimq.client import Consumer, ConsumerMessage, Message, MessageQueue, Producer, RocketMQError, SendOutcome
from trimq.client.process_queue import ProcessQueue

SECONDS = float(os.environ.get("TRIMQ_CHURN_SECONDS", "6"))
SEED = int(os.environ.get("TRIMQ_CHURN_SEED") or random.randrange(1_000_000))
#: In a long run members join and leave until all is seen: how soon queues are taken over is tested too.
LONG = SECONDS >= 60
MEMBERS = 10
KEYS = "abcd"

#: Seconds after the last send until all must be seen: enough for the slowest machine, not a performance target.
PATIENCE = 120

# A generous timeout: four tests at a time, of three minutes each, did not end in time on two cores with a load of 17.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(SECONDS * 2 + PATIENCE + 60)]

Place = tuple[MessageQueue, int]
Trouble = Callable[[], Awaitable[None]]


class Tenure:
    """The time for which one member has a queue: from reading the committed offset to committing its own."""

    def __init__(self, start: int, began: float) -> None:
        self.start = start
        self.began = began
        self.closing = math.inf
        self.ended = math.inf

    def __repr__(self) -> str:
        return f"from {self.start}, {self.began:.6f} to {self.closing:.6f}, {self.ended:.6f}"


class Watched(Consumer):
    """A consumer that records its tenure of each queue."""

    tenures: dict[ProcessQueue, Tenure]

    async def _open_process_queue(self, queue: MessageQueue) -> ProcessQueue:
        began = time.monotonic()
        process_queue = await super()._open_process_queue(queue)
        self.tenures[process_queue] = Tenure(process_queue.window.next_offset, began)
        return process_queue

    async def _close_process_queue(self, process_queue: ProcessQueue) -> None:
        self.tenures[process_queue].closing = time.monotonic()
        await super()._close_process_queue(process_queue)
        self.tenures[process_queue].ended = time.monotonic()


class Delivery:
    """One delivery of a message to a member."""

    def __init__(self, process_queue: ProcessQueue) -> None:
        self.process_queue = process_queue
        self.acknowledged = math.inf


class Load:
    """The numbers sent for each key, in order, the messages stored, and the deliveries to members."""

    def __init__(self, topic: str, namesrv: list[str], *, orderly: bool) -> None:
        self.topic = topic
        self.namesrv = namesrv
        self.orderly = orderly
        self.random = random.Random(SEED)
        self.stored: set[tuple[str, int]] = set()
        self.unknown: set[tuple[str, int]] = set()
        self.seen: Counter[tuple[str, int]] = Counter()
        self.deliveries: dict[Place, list[Delivery]] = defaultdict(list)
        self.tenures: dict[ProcessQueue, Tenure] = {}
        self.last_of_key: dict[str, int] = defaultdict(int)
        self.last_of_process_queue: dict[ProcessQueue, int] = {}
        self.in_work: dict[MessageQueue, ProcessQueue] = {}
        self.faults: list[str] = []
        self.joined = self.not_joined = 0
        self.troubled = False
        self.sending = True

    async def send(self, key: str) -> None:
        number = 0
        async with Producer(f"p_{self.topic}", namesrv=self.namesrv, retry_unknown=False) as producer:
            while self.sending:
                number += 1
                message = Message(self.topic, f"{key} {number}".encode(), sharding_key=key)
                try:
                    await producer.send(message)
                except RocketMQError:
                    await anyio.sleep(0.1)
                if message.outcome is SendOutcome.STORED:
                    self.stored.add((key, number))
                elif message.outcome is SendOutcome.PERHAPS_STORED:
                    self.unknown.add((key, number))
                await anyio.sleep(0.005)

    async def member(self) -> None:
        """Join, consume for a while, leave, and join again; in a short run, stay once all is sent."""
        while True:
            consumer = Watched(self.topic, self.topic, namesrv=self.namesrv, start="first", orderly=self.orderly)
            consumer.tenures = self.tenures
            try:
                with anyio.move_on_after(self.random.uniform(0.5, 4.0) if self.sending or LONG else None):
                    async with consumer:
                        self.joined += 1
                        async for message in consumer:
                            await self.work(message)
            except RocketMQError:  # no name server answers: the consumer cannot start
                self.not_joined += 1
            await anyio.sleep(self.random.uniform(0, 0.5))

    async def work(self, message: ConsumerMessage) -> None:
        async with message.process():
            delivery = Delivery(message.source)
            with self.alone(message):
                await anyio.sleep(self.random.uniform(0, 0.005))
                self.take(message, delivery)
        delivery.acknowledged = time.monotonic()

    def alone(self, message: ConsumerMessage) -> ExitStack:
        """Check that no other member works on the queue of an orderly member while the block runs."""
        stack = ExitStack()
        if self.orderly:
            other = self.in_work.get(message.queue)
            if other is not None and not self.troubled:
                self.faults.append(f"two members work on {message.queue} at the same time")
            self.in_work[message.queue] = message.source
            stack.callback(self.in_work.pop, message.queue, None)
        return stack

    def take(self, message: ConsumerMessage, delivery: Delivery) -> None:
        key, number = message.body.decode().split()
        known = (key, int(number))
        self.seen[known] += 1
        before = self.deliveries[message.queue, message.queue_offset]
        for other in before:
            self.check_repetition(message, other, delivery)
        before.append(delivery)
        if not self.orderly:
            return
        last = self.last_of_process_queue.get(delivery.process_queue, -1)
        if message.queue_offset <= last:
            self.faults.append(f"{message.queue}: {message.queue_offset} after {last} in one member's hands")
        self.last_of_process_queue[delivery.process_queue] = message.queue_offset
        if self.seen[known] == 1:  # a repeated message has a lower offset; new messages must be in order
            if known[1] < self.last_of_key[key]:
                self.faults.append(f"{key} {number} after {self.last_of_key[key]}")
            self.last_of_key[key] = known[1]

    def check_repetition(self, message: ConsumerMessage, other: Delivery, now: Delivery) -> None:
        """At-least-once allows it if a member, when it started, did not know the progress of the member before it.

        That member repeats what the one before had done, and so do its successors. Which of two commits in flight at
        the same time is applied last, the broker decides: their replies may come in either order.
        """
        if other.process_queue is now.process_queue:
            self.faults.append(f"{message!r} came twice to one member that had it")
        before, after = self.tenures[other.process_queue], self.tenures[now.process_queue]
        if self.troubled or not (other.acknowledged < before.closing < before.ended < after.began):
            return
        unaware = (
            tenure
            for process_queue, tenure in self.tenures.items()
            if process_queue.queue == message.queue and tenure.began < before.ended and before.closing < tenure.ended
        )
        if not any(tenure.start <= message.queue_offset and tenure is not before for tenure in unaware):
            all_of_queue = [
                tenure for process_queue, tenure in self.tenures.items() if process_queue.queue == message.queue
            ]
            self.faults.append(
                f"{message!r} came again after its member's commit: {before}, then {after}; all: {all_of_queue}"
            )

    async def until_all_is_seen(self) -> None:
        with anyio.move_on_after(PATIENCE):
            while self.stored - set(self.seen):  # noqa: ASYNC110 - members change it
                await anyio.sleep(0.1)

    def report(self, what: str, after: float) -> None:
        repeated = sum(self.seen.values()) - len(self.seen)
        self.write(
            f"{what}, seed {SEED}, {SECONDS:g} s: {len(self.stored)} stored, {len(self.unknown)} perhaps stored,"
            f" {len(self.seen)} seen, {repeated} times again, {self.joined} times joined ({self.not_joined} times not),"
            f" all seen {after:.1f} s after the last"
        )

    def write(self, text: str) -> None:
        """Write to standard output, which pytest shows with -s and for failed tests."""
        sys.stdout.write(f"\n{text}\n")

    def check(self) -> None:
        assert len(self.stored) > SECONDS
        assert self.stored - set(self.seen) == set()
        assert set(self.seen) <= self.stored | self.unknown
        assert self.faults == []


async def churn(load: Load, what: str, trouble: Trouble | None = None) -> None:
    async with anyio.create_task_group() as members:
        for _ in range(MEMBERS):
            members.start_soon(load.member)
        async with anyio.create_task_group() as senders:
            for key in KEYS:
                senders.start_soon(load.send, key)
            if trouble is None:
                await anyio.sleep(SECONDS)
            else:
                load.troubled = True
                with anyio.move_on_after(SECONDS):
                    while True:
                        await trouble()
            load.sending = False
        ended = time.monotonic()
        await load.until_all_is_seen()
        load.report(what, time.monotonic() - ended)
        members.cancel_scope.cancel()
    load.check()


def named(orderly: bool) -> str:
    return "orderly" if orderly else "concurrent"


@pytest.mark.parametrize("orderly", [False, True], ids=named)
async def test_members_come_and_go(servers: Servers, name: str, orderly: bool) -> None:
    servers.create_topic(name, 8)
    # Apache's broker loses some of a group's first commits for a topic if they arrive at the same moment.
    probe.create_group(servers.broker.address, name)
    probe.commit_offset(servers.broker.address, name, name, 0, 0)
    await churn(Load(name, [servers.namesrv], orderly=orderly), named(orderly))


class Cluster:
    """Two name servers and a broker, which are killed and restarted."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.name_servers = [NameServer("trimq", directory / f"namesrv-{number}") for number in range(2)]
        self.broker = Broker("trimq", directory / "broker", self.name_servers, store=directory / "store")
        parts: list[NameServer | Broker] = [*self.name_servers, self.broker]
        for part in parts:
            stack.enter_context(ended_afterwards(part.process))
            part.start()
        self.servers = Servers("trimq", self.name_servers[0], self.broker)
        self.happened: Counter[str] = Counter()

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.name_servers]

    @asynccontextmanager
    async def lost(self, *servers: NameServer) -> AsyncIterator[None]:
        """Kill name servers; they are started again after the block."""
        for server in servers:
            await anyio.to_thread.run_sync(server.process.kill)
        self.happened[f"{len(servers)} name servers killed"] += 1
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                for server in servers:
                    await anyio.to_thread.run_sync(server.start)

    async def restart_broker(self, how: str) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.broker.stop if how == "stopped" else self.broker.kill)
            self.happened[f"broker {how}"] += 1
            await anyio.to_thread.run_sync(self.broker.start)

    async def trouble(self) -> None:
        """Kill one name server and restart the broker while it is down; kill all name servers; kill the broker."""
        pause = min(SECONDS / 12, 5.0)
        async with self.lost(self.name_servers[0]):
            await anyio.sleep(pause)
            await self.restart_broker("stopped")
            await anyio.sleep(pause)
        async with self.lost(*self.name_servers):
            await anyio.sleep(pause)
        await anyio.sleep(pause)
        await self.restart_broker("killed")
        self.name_servers.reverse()


@pytest.mark.parametrize("orderly", [False, True], ids=named)
async def test_over_restarts_of_the_broker_and_loss_of_name_servers(tmp_path: Path, name: str, orderly: bool) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        cluster.servers.create_topic(name, 4)
        load = Load(name, cluster.addresses, orderly=orderly)
        await churn(load, f"{named(orderly)}, in trouble", cluster.trouble)
        load.write(", ".join(f"{count} times {what}" for what, count in cluster.happened.items()))
