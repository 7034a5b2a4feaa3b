"""Timed messages in the script: the timer that runs beside the store, and what it owes after a crash."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final

import trio
import trio.testing

from tests.store.simdisk import SimDisk
from trimq.broker.services.pending_timers import TIMED_MESSAGES, PendingTimers
from trimq.broker.services.queued_messages import QueuedMessages
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.timer import TimerMessageService
from trimq.broker.store.message_store import MessageStore
from trimq.broker.testing import configuration
from trimq.protocol.message import StoredMessage
from trimq.protocol.topic_rules import TIMER_TOPIC
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import ManualClock

TIMED: Final = "Timed"
"""The real topic of all timed messages of the script."""
SLOTS: Final = 256
LOG_FILE: Final = 300
_DAYS: Final = 86_400


@lru_cache
def _configuration() -> Configuration:
    return configuration(Path("/store"), {"timerFlushIntervalMs": 500})


@asynccontextmanager
async def running_timer(store: MessageStore, disk: SimDisk, clock: ManualClock) -> AsyncIterator[TimerMessageService]:
    """The timer of an open store, stopped in order at the end."""
    service = TimerMessageService(_configuration(), store, disk, clock, BrokerStats(clock, "C"))
    assert store.timers is not None
    store.add_topic_listener(TIMER_TOPIC, service.message_arriving)
    store.hold_log(PendingTimers(store.timers))
    store.hold_log(QueuedMessages(TIMED_MESSAGES, store, service.positions, service.unread))
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        try:
            yield service
        finally:
            with trio.CancelScope(shield=True):
                await service.stop()
            nursery.cancel_scope.cancel()


async def settle(_store: MessageStore) -> None:
    """Let the timer do what it can without the clock going on. With the transient store pool more belongs to it."""
    await trio.testing.wait_all_tasks_blocked()


async def deliver_all(store: MessageStore, disk: SimDisk, clock: ManualClock, *, outage_days: int) -> None:
    """Run the timer until everything is delivered that it knows; it starts ``outage_days`` after the script."""
    clock.advance(outage_days * _DAYS)
    async with running_timer(store, disk, clock):
        await settle(store)
        for _ in range(16):  # more than the script lasts; messages that are due later than a turn of the wheel roll
            clock.advance(_DAYS)
            await settle(store)


def problem(
    copies: Sequence[StoredMessage], wanted: set[bytes], never: set[bytes], sent: set[bytes], lives: int, lost: int
) -> str:
    """What is wrong with the delivered copies; "" if nothing is.

    ``wanted``: the messages that have to be there; ``never``: those that were recalled. ``lives``: how often at most a
    message may come, once for each life of the store that did not end in order. ``lost``: damaged places of the log,
    each of which may have held a copy or a delete mark.
    """
    counts = Counter(one.body for one in copies)
    if unknown := counts.keys() - sent:
        return f"{len(unknown)} timed messages were never sent"
    for one in copies:
        if int(one.properties["TIMER_DEQUEUE_MS"]) < int(one.properties["TIMER_OUT_MS"]):
            return f"message {one.body[:4].hex()} came before its time"
    missing = wanted - counts.keys()
    if len(missing) > lost:
        return f"timed messages are missing: {sorted(body[:4].hex() for body in missing)}"
    came = never & counts.keys()
    if len(came) > lost:
        return f"recalled messages came: {sorted(body[:4].hex() for body in came)}"
    for body, times in counts.items():
        if times > lives:  # a crash repeats the deliveries since the last checkpoint, and no rolls
            return f"message {body[:4].hex()} came {times} times"
    return ""
