"""A store with its timer on a simulated disk and a manual clock, without a broker around it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
import trio.testing

from tests.store.builders import message
from tests.store.simdisk import Loss, PowerCut, SimDisk
from tests.store.stores import drain
from trimq.broker.config import MessageStoreConfig
from trimq.broker.services.pending_timers import TIMED_MESSAGES, PendingTimers
from trimq.broker.services.queued_messages import QueuedMessages
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.timer import TimerMessageService
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.message_store import MessageStore, TimerStore
from trimq.broker.store.types import PutMessageResult
from trimq.broker.testing import configuration
from trimq.protocol.message import StoredMessage
from trimq.protocol.property_text import join_properties
from trimq.protocol.record import pack_host
from trimq.protocol.timer_layout import out_time
from trimq.protocol.timer_message import delete_key
from trimq.protocol.topic_rules import TIMER_TOPIC
from trimq.remoting.runtime.clock import ManualClock

NOW = 1_700_000_000_000
HOST = pack_host("10.9.9.9", 10911)
SMALL = {
    "mappedFileSizeCommitLog": 64 * 1024,
    "commitLogReserveStep": 64 * 1024,
    "maxMessageSize": 40_000,
    "mappedFileSizeTimerLog": 4096,
    "messageIndexEnable": "false",
    "flushConsumeQueueThoroughInterval": 1000,
}


class Rig:
    """Lives of one store. ``refuse`` makes puts fail: body -> results, first one first."""

    def __init__(self, *, slots: int = 8192, **changes: Any) -> None:
        self.clock = ManualClock(NOW)
        self.disk = SimDisk(now_ms=self.clock.wall_ms)
        self.slots = slots
        self.configuration = configuration(Path("/store"), SMALL | changes)
        self.refuse: dict[bytes, list[PutMessageResult]] = {}
        self.put: list[bytes] = []
        """The bodies of all attempts of the timer to put a message, in order."""
        self.store: MessageStore
        self.service: TimerMessageService
        self._lost: Loss | None = None

    @property
    def timers(self) -> TimerStore:
        assert self.store.timers is not None
        return self.store.timers

    @asynccontextmanager
    async def running(self, *, ending: Loss | None = None) -> AsyncIterator["Rig"]:
        """One life, ended in order, or by a crash with a loss of what is not synced."""
        try:
            async with self._running():
                yield self
                if ending is not None:
                    self._after = self.disk.power_cut(ending)
        except* PowerCut:
            pass
        if ending is not None:
            self.disk = self._after

    @asynccontextmanager
    async def store_alone(self) -> AsyncIterator[None]:
        """The store without the timer's task, as with timerWheelEnable=false."""
        self.store = MessageStore(
            self.configuration.section(MessageStoreConfig),
            disk=self.disk,
            clock=self.clock,
            sync_place=SyncPlace.THREAD,
            timer_slots=self.slots,
        )
        async with self.store.opened():
            yield

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        async with self.store_alone():
            stats = BrokerStats(self.clock, "C")
            service = TimerMessageService(self.configuration, self.store, self.disk, self.clock, stats, HOST)
            self.service = service
            self._listen_to_puts()
            self.store.add_topic_listener(TIMER_TOPIC, service.message_arriving)
            self.store.hold_log(PendingTimers(self.timers))
            self.store.hold_log(QueuedMessages(TIMED_MESSAGES, self.store, service.positions, service.unread))
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run)
                await self.settled()
                yield
                await service.stop()
                nursery.cancel_scope.cancel()

    def _listen_to_puts(self) -> None:
        put = self.store.put_message

        def listen(inner: Any, done: Any) -> PutMessageResult | None:
            if inner.store_host == HOST:
                self.put.append(bytes(inner.body))
                results = self.refuse.get(bytes(inner.body))
                if results:
                    return results.pop(0)
            return put(inner, done)

        self.store.put_message = listen

    @property
    def counts(self) -> dict[str, int]:
        """The counts of topics that are not 0."""
        return {topic: one.count for topic, one in self.service.metrics.counts.items() if one.count}

    async def settled(self) -> None:
        await trio.testing.wait_all_tasks_blocked()

    async def advance(self, seconds: float) -> None:
        await self.settled()
        self.clock.advance(seconds)
        await self.settled()

    async def send(self, body: bytes, after_ms: int, topic: str = "Orders", **properties: str) -> None:
        """Put a message as SendChecks places it."""
        due = out_time(self.clock.wall_ms() + after_ms, self.timers.precision)
        own = {"TIMER_OUT_MS": str(due), "REAL_TOPIC": topic, "REAL_QID": "0", "UNIQ_KEY": body.decode()}
        await self.store_one(message(body, TIMER_TOPIC, properties=join_properties(own | properties).encode()))

    async def recall(self, body: bytes, out_ms: int) -> None:
        """Store a delete mark as RecallMessageProcessor does."""
        name = body.decode()
        with_topic = self.configuration.section(MessageStoreConfig).append_topic_for_timer_delete_key
        key = delete_key("Orders", name, with_topic=with_topic)
        after = out_ms + 1 - self.clock.wall_ms()
        await self.send(b"mark", after, UNIQ_KEY=name, TIMER_DEL_UNIQKEY=key, TAGS="_RECALL_TAG_")

    async def store_one(self, inner: MessageInner) -> None:
        done = trio.Event()
        result = self.store.put_message(inner, lambda _result: done.set())
        if result is None:
            await done.wait()

    async def delivered(self, topic: str = "Orders") -> list[StoredMessage]:
        await self.settled()
        return await drain(self.store, topic)

    async def bodies(self, topic: str = "Orders") -> list[bytes]:
        return [one.body for one in await self.delivered(topic)]


def use(rig: Rig, precision: int, **changes: Any) -> None:
    """Another timerPrecisionMs, and other changes, from the next life on."""
    rig.configuration = configuration(Path("/store"), SMALL | {"timerPrecisionMs": precision} | changes)
