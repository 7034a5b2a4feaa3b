"""How many timed messages a full disk deletes: each once, and none that was recalled."""

import trio.testing

from tests.broker.services.timer_rig import Rig
from trimq.broker.services.pending_timers import TIMED_MESSAGES
from trimq.protocol.topic_rules import TIMER_TOPIC


async def _counted(rig: Rig, files: int = 1) -> int:
    """What is counted if the first files of the log are deleted forcibly."""
    await rig.settled()
    holds = rig.store.log_holds
    before = holds.deleted[TIMED_MESSAGES]
    for file in rig.store.files.files[:files]:
        await holds.note_deletion(file.path, file.start, file.end)
    return holds.deleted[TIMED_MESSAGES] - before


async def test_messages_that_no_checkpoint_has_count_once(autojump_clock: trio.testing.MockClock) -> None:
    """They are in the wheel, and a start would read them from the queue again."""
    rig = Rig(timerFlushIntervalMs="1000000000")
    async with rig.running():
        for number in range(60):
            await rig.send(b"%d" % number + b"x" * 3000, 600_000)
        await rig.settled()
        end = rig.store.files.files[0].end
        waiting = sum(one.commit_log_offset < end for one in await rig.delivered(TIMER_TOPIC))
        assert 0 < waiting < 60
        assert rig.timers.unsaved_offset == 0
        assert await _counted(rig) == waiting
        assert await _counted(rig, 99) == 60


async def test_messages_that_are_not_in_the_wheel_yet_count(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(timerStopEnqueue="true")
    async with rig.running():
        for number in range(3):
            await rig.send(b"%d" % number, 600_000)
        assert rig.timers.is_empty
        assert await _counted(rig) == 3


async def test_a_recalled_message_does_not_count(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        for body in (b"kept", b"recalled", b"other"):
            await rig.send(body, 600_000)
        await rig.send(b"later", 700_000)
        await rig.send(b"mark", 600_000, UNIQ_KEY="recalled", TIMER_DEL_UNIQKEY="recalled")
        await rig.advance(2)
        assert rig.timers.wheel.count == 3
        assert await _counted(rig) == 3


async def test_a_mark_in_a_later_file_counts_for_its_message(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.running():
        await rig.send(b"recalled", 600_000)
        while len(rig.store.files.files) < 2:
            await rig.send(b"x" * 3000, 1)
        await rig.send(b"mark", 600_000, UNIQ_KEY="recalled", TIMER_DEL_UNIQKEY="recalled")
        for _ in range(5):
            await rig.advance(1)
        assert rig.timers.next_offset == rig.store.max_offset(TIMER_TOPIC, 0)
        assert await _counted(rig) == 0
