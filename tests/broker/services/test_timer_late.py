"""Messages that are due long before they can enter the wheel, and have to wait in it all the same."""

from collections.abc import Callable

import pytest

from tests.broker.services.timer_rig import NOW, Rig
from tests.store.builders import message
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.property_text import join_properties
from trimq.protocol.timer_layout import out_time
from trimq.protocol.topic_rules import TIMER_TOPIC

BUSY = PutMessageResult(PutMessageStatus.OS_PAGE_CACHE_BUSY, remark="busy")

pytestmark = pytest.mark.usefixtures("autojump_clock")


def switch(rig: Rig, **values: str) -> None:
    for name, value in values.items():
        rig.configuration.apply(name, value, "test")


def without_log(rig: Rig) -> None:
    for name in rig.disk.list("/store/timerlog"):
        rig.disk.delete(f"/store/timerlog/{name}")


def without_wheel(rig: Rig) -> None:
    rig.disk.delete("/store/timerwheel")


@pytest.mark.parametrize("lose", [without_log, without_wheel])
async def test_a_late_message_that_a_stop_puts_off_outlives_the_files(lose: Callable[[Rig], None]) -> None:
    """What is due before the read time counts as delivered: that has to be true of a message in the wheel."""
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        await rig.send(b"late", 2_000)
        await rig.send(b"later", 600_000)
        await rig.advance(10)
        rig.refuse = {b"late": [BUSY] * 99}
        switch(rig, timerStopEnqueue="false")
        await rig.advance(0.1)
        assert await rig.bodies() == []
    assert rig.timers.next_offset == 2
    rig.refuse = {}
    lose(rig)
    async with rig.running():
        await rig.advance(1)
        assert await rig.bodies() == [b"late"]
        await rig.advance(600)
        assert await rig.bodies() == [b"late", b"later"]


async def test_a_recall_of_a_late_message_in_the_wheel() -> None:
    """The mark is read from the queue when the delivery goes on: it has to find the message in its own slot."""
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        await rig.send(b"M", 2_000)
        due = out_time(NOW + 2_000, 1000)
        await rig.advance(10)
        switch(rig, timerStopDequeue="true", timerStopEnqueue="false")
        await rig.advance(2)
        assert rig.timers.wheel.count == 1
        switch(rig, timerStopEnqueue="true")
        properties = {"TIMER_OUT_MS": str(due), "REAL_TOPIC": "Orders", "REAL_QID": "0", "TIMER_DEL_UNIQKEY": "M"}
        await rig.store_one(message(b"mark", TIMER_TOPIC, properties=join_properties(properties).encode()))
        switch(rig, timerStopEnqueue="false", timerStopDequeue="false")
        await rig.advance(5)
        assert await rig.bodies() == []
        assert rig.service.puts.cancelled == 1
        assert (rig.timers.wheel.count, rig.counts) == (0, {})


async def test_the_whole_window_stays_free_for_later_messages() -> None:
    """A message that is overdue by more waits in the queue; the delivery takes it from there."""
    rig = Rig(timerStopEnqueue="true", timerRollWindowSlot="1000")
    async with rig.running():
        most = rig.timers.wheel.slots - 1000 - 2
        await rig.send(b"late", 2_000)
        await rig.send(b"window", (most + 1 + 999) * 1000)
        await rig.advance(1 + most)  # its slot is the earliest to which the read time may go back
        switch(rig, timerStopDequeue="true", timerStopEnqueue="false")
        await rig.advance(0.5)
        assert (rig.timers.wheel.count, rig.service.behind_messages) == (2, 0)
        await rig.send(b"end", 1000 * 1000)
        await rig.advance(0.1)
        assert (rig.timers.wheel.count, rig.service.behind_messages) == (3, 0)
        switch(rig, timerStopDequeue="false")
        await rig.advance(2)
        assert await rig.bodies() == [b"late"]
        await rig.advance(998)
        await rig.advance(2)
        assert await rig.bodies() == [b"late", b"window", b"end"]


async def test_a_message_that_is_overdue_by_too_long_for_the_wheel() -> None:
    rig = Rig(timerStopEnqueue="true", timerRollWindowSlot="1000")
    async with rig.running():
        await rig.send(b"late", 2_000)
        await rig.send(b"later", 10_000_000)
        await rig.advance(rig.timers.wheel.slots - 1000)
        switch(rig, timerStopDequeue="true", timerStopEnqueue="false")
        await rig.advance(2)
        assert (rig.timers.wheel.count, rig.service.behind_messages) == (0, 2)
        switch(rig, timerStopDequeue="false")
        await rig.advance(2)
        assert await rig.bodies() == [b"late"]
        assert (rig.timers.wheel.count, rig.service.behind_messages) == (1, 0)


async def test_delivered_messages_do_not_count_as_pending_when_the_read_time_goes_back() -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"later", 600_000)
        await rig.send(b"delivered", 5_000)
        await rig.advance(1)
        switch(rig, timerStopEnqueue="true")
        await rig.send(b"late", 2_000)
        await rig.advance(10)
        assert await rig.bodies() == [b"delivered"]
        switch(rig, timerStopDequeue="true", timerStopEnqueue="false")
        await rig.advance(2)
        assert rig.timers.wheel.count == 2
        assert await rig.timers.count_between(0, 1 << 60) == 2
