"""Puts, ReputMessageService and the rebuild in a recovery follow the same dispatch rules."""

from typing import Any

import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.store.builders import Answers, message
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, by_key, killed, opened, put, settings
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.queue.consume_queue import QueueShape
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol import sysflag
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

KINDS = {
    "ordinary": sysflag.TRANSACTION_NOT,
    "prepared": sysflag.TRANSACTION_PREPARED,
    "committed": sysflag.TRANSACTION_COMMIT,
    "rolled back": sysflag.TRANSACTION_ROLLBACK,
}
LEVELS = ("1", "3", "99", "0", "")
"""Values of DELAY. The last one stands for a message of the schedule topic without DELAY."""
Derived = dict[str, Any]


async def _put_all(store: MessageStore) -> None:
    for name, kind in KINDS.items():
        await put(store, name.encode(), unique=name, tag="T", sys_flag=kind)
    for number, level in enumerate(LEVELS):
        more = f"DELAY\x01{level}\x02" if level else ""
        await put(store, b"later", topic=SCHEDULE_TOPIC, queue_id=number % 2, tag="T", more=more)


async def _derived(store: MessageStore) -> Derived:
    """All units and index entries of a log's records."""
    found: Derived = {
        f"{topic}/{queue_id}": await store.queue_units(topic, queue_id, 0, 100)
        for topic, queue_ids in store.topics().items()
        for queue_id in queue_ids
    }
    found |= {key: [one.body for one in await by_key(store, key)] for key in (*KINDS, "T#T")}
    return found


async def test_recovery_makes_what_puts_have_made() -> None:
    disk = SimDisk()
    async with killed(disk) as store:
        await _put_all(store)
        live = await _derived(store)
    assert len(live[f"{TOPIC}/0"]) == 2
    assert {key: bool(live[key]) for key in KINDS} == {
        "ordinary": True,
        "prepared": True,
        "committed": True,
        "rolled back": False,
    }
    async with opened(disk.power_cut()) as store:
        assert store.recovered is not None
        assert store.recovered.records == len(KINDS) + len(LEVELS)
        assert store.recovered.units_rebuilt > 0
        assert store.recovered.keys_rebuilt > 0
        assert await _derived(store) == live


async def test_what_is_read_from_the_log_later_makes_the_same() -> None:
    async with opened(SimDisk()) as store:
        await _put_all(store)
        live = await _derived(store)
    async with opened(SimDisk()) as store:
        store.dispatcher.position, store.dispatcher.on_behind = 1 << 40, lambda: None
        await _put_all(store)
        assert not store.topics()
        store.dispatcher.position = 0
        await store._reput.catch_up()
        assert await _derived(store) == live


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("fast", [False, True])
async def test_a_delayed_message_has_its_due_time_whichever_path_it_takes(sync: bool, fast: bool) -> None:
    """No delayed message takes the fast path today, but the steps after an append are the same for both paths."""
    async with opened(SimDisk(), settings(sync=sync)) as store:
        await put(store)
        later = message(topic=SCHEDULE_TOPIC, queue_id=0, properties=b"DELAY\x011\x02TAGS\x01T\x02")
        answers = Answers()
        result = store.put_now(later, answers.later) if fast else store.put_message(later, answers.later)
        assert (result is not None) is (fast or not sync)
        await trio.testing.wait_all_tasks_blocked()
        ((_, _, due),) = await store.queue_units(SCHEDULE_TOPIC, 0, 0, 1)
        assert due == store.clock.wall_ms() + 1000
        stats = store.stats
        assert (stats.put_message_times_total, stats.put_message_size_total) == (2, store.max_phy_offset)


queues_steps = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 1, 3, -1]), st.sampled_from([0, 0, 100, 5000, -300]), st.booleans()),
    max_size=20,
)


@given(queues_steps)
def test_a_message_adds_the_unit_that_its_queue_would_add(steps: list[tuple[int, int, bool]]) -> None:
    """MessageInner contains the usual case of ConsumeQueue.put inline: these are the hottest calls of a send."""

    def run(*, by_message: bool) -> list[object]:
        queues = ConsumeQueueStore(SimDisk(), "/store", QueueShape(10, 1 << 20))
        queue = queues.find_or_create(TOPIC, 0)
        phy, seen = 0, list[object]()
        for jump, gap, written in steps:
            phy, offset = max(0, phy + gap), max(0, queue.next_offset + jump)
            if written:
                queue.dirty = False
            if by_message:
                result = PutMessageResult(PutMessageStatus.PUT_OK, phy, offset, 100, 1)
                message(topic=TOPIC, tags_code=7).dispatch_into(None, queues, result)
            else:
                queue.put(phy, 100, 7, offset)
            phy += 100
            seen.append((bytes(queue.tail), queue.next_offset, queue.max_phy, queue.min_offset, queue.dirty))
        return seen

    assert run(by_message=True) == run(by_message=False)
