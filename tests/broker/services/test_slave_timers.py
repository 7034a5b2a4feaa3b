"""What a slave stores of its master's timers, and from where on it needs the log for them."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.store.timers import NOW, SIZE, Records
from trimq.broker.services.slave_timers import SlaveTimers
from trimq.protocol.timer_handover import NOT_KNOWN, NOTHING_PENDING, TimerHandover
from trimq.protocol.timer_layout import TimerCheckpoint
from trimq.protocol.topic_rules import TIMER_TOPIC


class Rig:
    def __init__(self, known: int = 0) -> None:
        self.records = Records(20, first=4)
        self.followed: list[tuple[TimerHandover, int]] = []
        data = SimpleNamespace(checkpoint=TimerCheckpoint(queue_offset=known), follow=self._follow)
        store: Any = SimpleNamespace(timer_data=data, look_message_cold=self.records.read)
        self.timers = SlaveTimers(store)

    async def _follow(self, handover: TimerHandover, begin: int) -> None:
        self.followed.append((handover, begin))

    @property
    def held_from(self) -> int:
        ((topic, queue_id, offset),) = self.timers.positions()
        assert (topic, queue_id) == (TIMER_TOPIC, 0)
        return offset


def handover(lowest: int, *, queue_offset: int = 12, read_time: int = NOW) -> TimerHandover:
    return TimerHandover(TimerCheckpoint(read_time, 0, queue_offset, queue_offset), 12, NOW, lowest)


@pytest.mark.parametrize(
    ("lowest", "begin", "held_from"),
    [
        (9 * SIZE, 9, 9),
        (NOTHING_PENDING, 12, 12),
        (NOT_KNOWN, 0, 12),  # RocketMQ's master: all of the queue is read, and it holds no file for it
        (15 * SIZE, 12, 12),  # a message that came after the checkpoint
        (3 * SIZE, 0, 0),  # its record is gone here
        (10 * SIZE, 0, 0),  # another topic's record: this is not the master's log
    ],
)
async def test_the_queue_is_read_and_held_from_the_first_pending_message_on(
    lowest: int, begin: int, held_from: int
) -> None:
    rig = Rig(known=7)
    rig.records.foreign.add(10)
    assert rig.held_from == 7  # what the slave before this start knew
    found = handover(lowest)
    await rig.timers.follow(found)
    assert rig.followed == [(found, begin)]
    assert rig.held_from == held_from


async def test_a_master_that_has_had_no_timed_message_says_nothing() -> None:
    rig = Rig()
    await rig.timers.follow(handover(NOTHING_PENDING, queue_offset=0, read_time=0))
    assert (rig.followed, rig.held_from) == ([], 0)
