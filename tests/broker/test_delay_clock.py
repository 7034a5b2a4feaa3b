"""Delays and retries of a broker whose clock was ahead for a while: no message may be delivered early.

One message stored while the clock is ahead gives all later records its store time until the clock has caught up. The
time that a delayed message is due must not follow it: otherwise the message is delivered immediately, and one that is
sent back uses up all of its tries.
"""

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import pytest
import trio
import trio.testing

from tests.broker.wire_client import WireClient
from trimq.broker.controller import BrokerController
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.message import StoredMessage, decode_messages
from trimq.remoting.runtime.clock import ManualClock

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

HOUR = 3_600_000
RETRY = "%RETRY%G"
PARKED = "SCHEDULE_TOPIC_XXXX"
RETRY_SECONDS = [10, 30, *(60 * minutes for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)), 3600, 7200]
ASYNC = {"serverChannelMaxIdleTimeSeconds": "1000000"}
SYNC = ASYNC | {"flushDiskType": "SYNC_FLUSH"}
POOL = ASYNC | {"transientStorePoolEnable": "true"}


class CountingDisk(RealDisk):
    """Counts the disk's active threads. To trio, a task that waits for a thread is merely blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.active = 0

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        self.active += 1
        try:
            return await super().run(fn, *args)
        finally:
            self.active -= 1


class Life:
    """A sequence of brokers on one store, all with one clock."""

    def __init__(self, directory: Path, changes: dict[str, Any]) -> None:
        self.directory = directory
        self.changes = changes
        self.clock = ManualClock()
        self.disk = CountingDisk()
        self._lives = 0
        self.broker: BrokerController

    @asynccontextmanager
    async def running(self) -> AsyncIterator[WireClient]:
        async with (
            running_broker(self.directory, clock=self.clock, disk=self.disk, **self.changes) as broker,
            WireClient.connect(broker.endpoint) as client,
        ):
            self.broker = broker
            await self.settled()  # delays count from the first look at the stored messages
            yield client

    async def settled(self) -> None:
        """Return when the broker is idle until the clock moves or a request comes."""
        await trio.testing.wait_all_tasks_blocked()
        while self.disk.active:
            await trio.testing.wait_all_tasks_blocked(0.001)

    async def kill(self) -> None:
        """Make the store what a SIGKILL would leave now, for the next broker."""
        await self.broker.context.schedule.persist()  # otherwise the deliveries of the last seconds are repeated
        await self.settled()  # no file may be replaced while it is copied
        self._lives += 1
        before, self.directory = self.directory, self.directory.with_name(f"life{self._lives}")
        shutil.copytree(before, self.directory, ignore=shutil.ignore_patterns("*.tmp"))

    @property
    def delivered(self) -> int:
        """The number of delayed messages that the current broker has delivered, readable or not yet."""
        return self.broker.context.schedule.delivered

    async def advance(self, seconds: float) -> None:
        await self.settled()
        self.clock.advance(seconds)
        await self.settled()

    async def was_ahead(self, client: WireClient) -> None:
        """Set the clock an hour ahead, send one message, set the clock back."""
        self.clock.set_wall_ms(self.clock.wall_ms() + HOUR)
        await sent(client, b"from the future")
        self.clock.set_wall_ms(self.clock.wall_ms() - HOUR)


async def sent(client: WireClient, body: bytes, properties: dict[str, str] | None = None) -> None:
    assert (await client.send("Orders", body, properties)).code == ResponseCode.SUCCESS


async def there(client: WireClient, topic: str, offset: int = 0, **more: Any) -> list[StoredMessage]:
    """The messages of a queue, once the broker is idle."""
    await trio.testing.wait_all_tasks_blocked(0.005)
    reply = await client.pull(topic, offset, **more)
    return decode_messages(bytes(reply.body)) if reply.code == ResponseCode.SUCCESS else []


async def comes(client: WireClient, topic: str, offset: int, **more: Any) -> StoredMessage:
    with trio.fail_after(50):
        while not (found := await there(client, topic, offset, **more)):
            pass
    return found[0]


@pytest.mark.parametrize("changes", [ASYNC, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_delayed_message_waits_its_time_after_a_clock_that_was_ahead(
    tmp_path: Path, end: str, changes: dict[str, Any]
) -> None:
    """Level 14 (10 minutes): one stored before a restart, one after it; the restart is the hardest case for both."""
    life = Life(tmp_path / "store", changes)
    async with life.running() as client:
        await life.was_ahead(client)
        await sent(client, b"before", {"DELAY": "14"})
        await life.advance(1)
        assert [one.body for one in await there(client, "Orders")] == [b"from the future"]
        if end == "kill":
            await life.kill()
    async with life.running() as client:
        await sent(client, b"behind", {"DELAY": "14"})
        await life.advance(598.9)
        assert await there(client, "Orders", 1) == []
        await life.advance(1.2 if end == "kill" else 0.2)  # after a kill: 10 minutes from the restart
        assert (await comes(client, "Orders", 1)).body == b"before"
        await life.advance(1)
        assert (await comes(client, "Orders", 2)).body == b"behind"


@pytest.mark.parametrize("changes", [ASYNC, SYNC, POOL], ids=["async", "sync", "pool"])
async def test_without_a_restart(tmp_path: Path, changes: dict[str, Any]) -> None:
    life = Life(tmp_path / "store", changes)
    async with life.running() as client:
        await life.was_ahead(client)
        await sent(client, b"late", {"DELAY": "14"})
        assert (await comes(client, PARKED, 0, queueId=13)).body == b"late"  # with the pool this takes a moment
        await life.advance(599.9)
        assert len(await there(client, "Orders")) == 1
        assert life.delivered == 0
        await life.advance(0.2)
        assert (await comes(client, "Orders", 1)).body == b"late"


@pytest.mark.parametrize("end", ["", "stop", "kill"])
async def test_a_message_that_is_sent_back_does_not_use_up_its_tries(tmp_path: Path, end: str) -> None:
    """16 retries, each after its own delay; the broker is restarted while the first and the sixth wait."""
    life = Life(tmp_path / "store", ASYNC)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(life.running())
        await life.was_ahead(client)
        await sent(client, b"hard")
        (topic, offset), following = ("Orders", 1), 0
        for number, seconds in enumerate(RETRY_SECONDS):
            assert await sent_back(client, topic, offset) == number
            if end and number in {0, 5}:
                if end == "kill":
                    await life.kill()
                await stack.aclose()
                client = await stack.enter_async_context(life.running())
            await life.advance(seconds - 0.1)
            assert await there(client, RETRY, following) == []
            await life.advance(0.2)
            await comes(client, RETRY, following)
            (topic, offset), following = (RETRY, following), following + 1
        assert await sent_back(client, topic, offset) == len(RETRY_SECONDS)
        assert len(await there(client, "%DLQ%G")) == 1


async def test_a_delayed_message_holds_its_log_file_until_it_is_delivered(tmp_path: Path) -> None:
    life = Life(tmp_path / "store", ASYNC)
    async with life.running() as client:
        await sent(client, b"at once")
        first = await comes(client, "Orders", 0)
        await sent(client, b"later", {"DELAY": "5"})
        holds = life.broker.context.store.log_holds
        assert await holds.lowest() == first.commit_log_offset + first.size
        await life.advance(60.2)
        await comes(client, "Orders", 1)
        assert await life.broker.context.store.flush()
        assert await holds.lowest() is None


async def sent_back(client: WireClient, topic: str, offset: int) -> int:
    """Send a message back for its next try; return how many it has had."""
    found = await comes(client, topic, offset)
    ext = {"offset": found.commit_log_offset, "group": "G", "delayLevel": 0, "originTopic": "Orders"}
    assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext)).code == ResponseCode.SUCCESS
    return found.reconsume_times
