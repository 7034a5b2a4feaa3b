"""Members join and leave a group under load, the broker restarts, a name server is lost: nothing is lost."""

import os
import random
from collections import Counter, defaultdict
from pathlib import Path

import anyio
import pytest

from client import Consumer, Message, MessageQueue, Producer, RocketMQError, SendOutcome
from tests.client.servers import Servers, running_servers

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

#: Minutes of a nightly run with TRIMQ_CHURN_SECONDS=180.
SECONDS = float(os.environ.get("TRIMQ_CHURN_SECONDS", "8"))
MEMBERS = 10


class Load:
    """Numbers sent by key, in order; what was stored, and what consumers have seen."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.stored: set[tuple[str, int]] = set()
        self.unknown: set[tuple[str, int]] = set()
        self.seen: Counter[tuple[str, int]] = Counter()
        self.last: dict[str, int] = defaultdict(int)
        self.out_of_order: list[str] = []
        self.places: dict[MessageQueue, list[int]] = defaultdict(list)
        self.sending = True

    async def send(self, namesrv: list[str], key: str) -> None:
        number = 0
        async with Producer(f"p_{self.topic}", namesrv=namesrv, retry_unknown=False) as producer:
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
                await anyio.sleep(0.01)

    def take(self, body: bytes, *, orderly: bool) -> None:
        key, number = body.decode().split()
        place = (key, int(number))
        self.seen[place] += 1
        if orderly and self.seen[place] == 1:  # a repetition may come at any time, what is new only in order
            if int(number) < self.last[key]:
                self.out_of_order.append(f"{key} {number} after {self.last[key]}")
            self.last[key] = int(number)

    async def member(self, namesrv: list[str], group: str, *, orderly: bool) -> None:
        """Joins, consumes for a while, leaves, and joins again."""
        while True:
            with anyio.move_on_after(random.uniform(0.5, 4.0)):
                async with Consumer(group, self.topic, namesrv=namesrv, start="first", orderly=orderly) as consumer:
                    async for message in consumer:
                        async with message.process():
                            await anyio.sleep(random.uniform(0, 0.005))
                            self.take(message.body, orderly=orderly)
            await anyio.sleep(random.uniform(0, 0.5))

    async def until_all_is_seen(self) -> None:
        with anyio.fail_after(120):
            while self.stored - set(self.seen):  # noqa: ASYNC110 - consumers change it
                await anyio.sleep(0.1)


@pytest.mark.parametrize("orderly", [False, True], ids=["concurrent", "orderly"])
async def test_members_come_and_go(servers: Servers, name: str, orderly: bool) -> None:
    servers.create_topic(name, 8)
    load = Load(name)
    await _churn(load, [servers.namesrv], name, orderly=orderly)
    _check(load)


async def test_over_restarts_of_the_broker_and_without_a_name_server(tmp_path: Path, name: str) -> None:
    """The first name server of the list is never there; the broker stops and starts in between."""
    with running_servers("trimq", tmp_path) as servers:
        servers.create_topic(name, 4)
        load = Load(name)

        async def restart() -> None:
            await anyio.sleep(SECONDS / 3)
            await anyio.to_thread.run_sync(servers.broker.stop)
            await anyio.sleep(0.5)
            await anyio.to_thread.run_sync(servers.broker.start)

        await _churn(load, ["127.0.0.1:1", servers.namesrv], name, orderly=False, trouble=restart)
        _check(load)


async def _churn(load: Load, namesrv: list[str], group: str, *, orderly: bool, trouble: object = None) -> None:
    async with anyio.create_task_group() as everybody:
        for _ in range(MEMBERS):
            everybody.start_soon(lambda: load.member(namesrv, group, orderly=orderly))
        async with anyio.create_task_group() as senders:
            for key in "abcd":
                senders.start_soon(load.send, namesrv, key)
            if callable(trouble):
                senders.start_soon(trouble)
            await anyio.sleep(SECONDS)
            load.sending = False
        await load.until_all_is_seen()
        everybody.cancel_scope.cancel()


def _check(load: Load) -> None:
    assert load.stored
    assert load.stored <= set(load.seen)
    assert set(load.seen) <= load.stored | load.unknown
    assert load.out_of_order == []
    # Duplicates come where a queue changes hands with messages in work, not in the course of things.
    repeated = sum(load.seen.values()) - len(load.seen)
    assert repeated < len(load.seen)
