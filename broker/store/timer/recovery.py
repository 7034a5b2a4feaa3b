"""Brings the timer's data into agreement with its checkpoint and with the commit log, at every start.

Wheel and log go back to the checkpoint: units of messages that it does not know are cut off, and the queue is read on
from its offset. So are units whose records are gone, because a power cut truncated the commit log, whatever was stored
there later. Where wheel or log cannot be used the other one serves, and in the last resort the timer's queue, from its
beginning; what was delivered according to the checkpoint is left out then. RocketMQ (TimerMessageStore.recover) checks
the last unit only, and keeps units behind its checkpoint.

Where the wheel is one of another precision (timerPrecisionMs), or the units do not fit its slots, it is deleted, and
the pending units are written again into a file of their own; the old wheel says which they are. The new checkpoint is
written when they are on disk and the old wheel is gone, and then the old units are deleted; the new wheel follows with
the next checkpoint, at the end of the start. So a power cut leaves the old units or the new ones to start with, and
never a wheel that belongs to the others.
"""

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import structlog
import trio
from msgspec.structs import replace

from trimq.broker.store.disk.durable_files import read_whole
from trimq.broker.store.timer.timer_store import TimerStore
from trimq.broker.store.timer.wheel import OTHER_PRECISION, TimerWheel
from trimq.protocol import record
from trimq.protocol.timer_layout import (
    NO_POSITION,
    UNIT_SIZE,
    Slot,
    TimerCheckpoint,
    TimerUnit,
    decode_checkpoint,
)
from trimq.protocol.timer_notes import NO_LOG, NO_NOTES, TimerNotes, decode_notes
from trimq.protocol.topic_rules import TIMER_TOPIC

_log = structlog.get_logger(__name__)

_TOPIC: Final = TIMER_TOPIC.encode()
_SLOTS_OF_SLICE: Final = 2000


class LogState(NamedTuple):
    """The commit log and the timer's queue after their own recovery."""

    min_phy: int
    max_phy: int
    min_offset: int
    max_offset: int


ReadRecord = Callable[[int], Awaitable[bytes]]
"""(commit log offset) -> the record, b"" if there is none."""


class TimerRecovery:
    """One recovery. Nothing else touches the timer's data while it runs."""

    def __init__(self, timers: TimerStore, state: LogState, read: ReadRecord, now_ms: int) -> None:
        self._timers = timers
        self._wheel = timers.wheel
        self._log = timers.log
        self._state = state
        self._read = read
        self._now_ms = now_ms
        self._now = now_ms - now_ms % timers.precision
        self._notes = NO_NOTES
        """Those of the checkpoint."""

    async def run(self) -> None:
        """Recover. Raises StoreLoadError if a file of the log has another size than configured, OSError."""
        timers, disk = self._timers, self._timers.disk
        await disk.run(self._log.load)
        checkpoint = await self._checkpoint()
        if checkpoint is None:
            if self._log.starts:
                self._note("there is a timer log without a checkpoint")
            await self._start_over(None)
        elif not self._has_log(checkpoint):
            self._note(f"the timer log does not reach the checkpoint's position {checkpoint.log_position}")
            await self._start_over(checkpoint)
        else:
            await self._recover(checkpoint)
        self._keep_in_queue()
        # A time in the future is that of a clock that was ahead.
        timers.move_read_time(min(timers.read_time, self._now))
        timers.recovered()
        timers.changed = bool(timers.notes)
        if timers.notes:
            _log.warning("timer_recovered", notes=timers.notes, next_offset=timers.next_offset)

    def _keep_in_queue(self) -> None:
        timers, state = self._timers, self._state
        timers.next_offset = min(max(timers.next_offset, state.min_offset), state.max_offset)
        # Where the log was truncated, other messages come to these places.
        timers.found_until = min(timers.found_until, state.max_offset)

    def _note(self, text: str) -> None:
        self._timers.notes.append(text)

    async def _checkpoint(self) -> TimerCheckpoint | None:
        timers = self._timers
        data = await timers.disk.run(read_whole, timers.disk, timers.checkpoint_path)
        if data is None:
            return None
        try:
            checkpoint = decode_checkpoint(data)
        except ValueError as error:
            self._note(f"{timers.checkpoint_path}: {error}")
            return None
        self._notes = decode_notes(data)
        return checkpoint if checkpoint.read_time else None  # RocketMQ creates it full of zeros

    def _has_log(self, checkpoint: TimerCheckpoint) -> bool:
        position = checkpoint.log_position
        if self._notes.log_begin == NO_LOG:
            return False
        if position == 0:
            return True
        return bool(self._log.starts) and self._log.begin <= position <= self._log.files_end

    async def _start_over(self, checkpoint: TimerCheckpoint | None) -> None:
        """Start with an empty wheel, and read the timer's queue from its beginning."""
        timers = self._timers
        if checkpoint is not None:
            late_since = self._notes.late_since or checkpoint.read_time
            timers.found_until = checkpoint.queue_offset
            timers.found_read_time = min(checkpoint.read_time, late_since)
            if self._notes.found_until:  # it was lost once more, before the queue was read as far as that
                timers.found_until, timers.found_read_time = self._notes.found_until, self._notes.found_read_time
            # Before there is a new log, to whose units the checkpoint's position does not belong.
            notes = TimerNotes(NO_LOG, timers.found_until, timers.found_read_time)
            await timers.disk.run(timers.write_checkpoint, checkpoint, notes)
        if self._log.starts or await timers.disk.run(timers.disk.stat, self._wheel.path) is not None:
            await timers.disk.run(self._wheel.discard)
            await timers.disk.run(self._log.truncate, 0)
        timers.next_offset = self._state.min_offset
        timers.read_time = self._now
        if checkpoint is not None:
            timers.exists = True
        else:  # nothing is known to be delivered, but copies of what was rolled are in the queue
            timers.found_until = self._state.max_offset
        timers.exists = timers.exists or bool(timers.notes)

    # -- a log that the checkpoint belongs to

    async def _recover(self, checkpoint: TimerCheckpoint) -> None:
        timers, precision = self._timers, self._timers.precision
        timers.exists = True
        timers.checkpoint = checkpoint
        timers.found_until, timers.found_read_time = self._notes.found_until, self._notes.found_read_time
        await timers.disk.run(self._log.delete_before, self._notes.log_begin)
        timers.read_time = checkpoint.read_time - checkpoint.read_time % precision
        timers.late_since = self._notes.late_since
        timers.late_until = max(timers.read_time, self._notes.late_until)
        timers.next_offset = checkpoint.queue_offset
        replay_from = checkpoint.log_position
        end = await self._known_end(checkpoint)
        end = await self._end_with_records(end, checkpoint)
        problem = await timers.disk.run(self._wheel.load, timers.read_time)
        if not problem and not await self._cut_slots(end):
            problem = "a chain of units is broken"
            await timers.disk.run(self._wheel.reset)
        if problem:
            if self._log.starts:
                self._note(f"the wheel was made again from the timer log: {problem}")
            replay_from = self._log.begin
        before = None
        if problem == OTHER_PRECISION:
            before = await self._wheel_before(checkpoint.read_time)
        # Another precision, or its wheel is gone too. Units that happen to fit are written again as well: of the slot
        # of the read time, which was rounded down, some are delivered.
        is_other = problem == OTHER_PRECISION or (bool(problem) and timers.read_time < checkpoint.read_time)
        fits = not is_other and await self._replay(replay_from, end)
        if not fits:
            await timers.disk.run(self._wheel.discard)
        if end < self._log.files_end:
            # The wheel first: the chains that were followed to repair it are erased afterwards.
            pages = self._wheel.snapshot()
            if pages:
                await timers.disk.run(self._wheel.write, pages)
            await timers.disk.run(self._log.truncate, end)
        self._log.wrote(end)
        if not fits:
            await self._convert(end, before)
        await self._fill_floor()
        # Where something was repaired, or the precision is another one, a slot may have other messages.
        if not timers.notes:
            timers.rests = {rest.time: rest for rest in self._notes.rests if self._wheel.find(rest.time) is not None}

    async def _known_end(self, checkpoint: TimerCheckpoint) -> int:
        """The end of the units that belong to the checkpoint.

        RocketMQ notes its log position before it syncs the log, so that units of messages before its queue offset
        follow. Their places in the commit log rise. Where they do not, RocketMQ was killed earlier, and has written the
        last ones once more before it went on with new ones; or a power cut ended ``_convert``.
        """
        known = at = checkpoint.log_position
        last = await self._log.unit(self._log.before(known))
        while at < self._log.files_end:
            units, at = await self._log.units_from(at, self._log.files_end)
            for position, unit in units:
                offset = await self._queue_offset(unit)
                if offset is None or offset >= checkpoint.queue_offset:
                    return known
                follows = position == self._log.next_position(known)
                elsewhere = position // self._log.file_size != known // self._log.file_size
                if not follows and elsewhere and not await self._log.went_on(known):
                    return known  # of ``_convert``, in a file of its own
                if not follows or (last is not None and unit.offset <= last.offset):
                    await self._read_again_behind(last, checkpoint)
                    return known
                known, last = position + UNIT_SIZE, unit
            if not units:  # nothing follows, unless it is in the next file
                if not await self._log.went_on(known):
                    return known
                at = max(at, known - known % self._log.file_size + self._log.file_size)
        return known

    async def _read_again_behind(self, last: TimerUnit | None, checkpoint: TimerCheckpoint) -> None:
        """Go on in the queue behind the message of a unit: later ones may have units that do not count."""
        # Without its record: that is before all that the queue has.
        offset = None if last is None else await self._queue_offset(last)
        begin = self._state.min_offset if offset is None else offset + 1
        if begin < checkpoint.queue_offset:
            timers = self._timers
            timers.next_offset = begin
            self._note(f"units behind the checkpoint do not follow each other: the queue is read from {begin} on")
            # At once: the units that say so are erased before there is another checkpoint.
            timers.checkpoint = replace(checkpoint, queue_offset=begin, master_queue_offset=begin)
            notes = replace(self._notes, rests=())
            await timers.disk.run(timers.write_checkpoint, timers.checkpoint, notes)

    async def _end_with_records(self, end: int, checkpoint: TimerCheckpoint) -> int:
        """``end`` without units whose records are gone. Then the queue is read from behind the last that is there."""
        cut = False
        position = end
        while (position := self._log.before(position)) != NO_POSITION:
            unit = await self._log.unit(position)
            if unit is not None and unit.offset < self._state.min_phy:
                if cut:
                    self._timers.next_offset = self._state.min_offset
                break
            offset = None if unit is None else await self._queue_offset(unit)
            if offset is not None:
                if cut:
                    self._timers.next_offset = offset + 1
                break
            cut, end = True, position
        else:
            if cut:
                self._timers.next_offset = self._state.min_offset
        if cut:
            self._note(f"units from {end} on referred to records that are gone")
        elif checkpoint.queue_offset > self._state.max_offset:
            self._note("the timer's queue is shorter than the checkpoint knows it")
        return end

    async def _queue_offset(self, unit: TimerUnit) -> int | None:
        """The queue offset of the unit's record; None if that is not a record of the timer's topic."""
        if not self._state.min_phy <= unit.offset <= self._state.max_phy - unit.size:
            return None
        data = await self._read(unit.offset)
        if len(data) != unit.size:
            return None
        head = record.decode_head(data)
        return head.queue_offset if bytes(data[head.topic_at : head.topic_end]) == _TOPIC else None

    async def _cut_slots(self, end: int) -> bool:
        """Take units from ``end`` on out of the slots. False if a slot's chain is broken."""
        for number, slot in enumerate(list(self._wheel.all_slots())):
            if not number % _SLOTS_OF_SLICE:
                await trio.lowlevel.checkpoint()
            last, count = slot.last, slot.messages
            while last >= end:
                unit = await self._log.unit(last)
                if unit is None or unit.time // self._timers.precision * self._timers.precision != slot.time:
                    return False
                last, count = unit.previous, count - (-1 if unit.deletes else 1)
            if last == NO_POSITION:
                self._wheel.clear(slot.time)
            elif last != slot.last:
                self._wheel.set(Slot(slot.time, slot.first, last, count))
        return True

    async def _replay(self, position: int, end: int) -> bool:
        """Put the units of [position, end) into the wheel, as far as they are pending and not in it.

        False if their chains are not those of this wheel's slots.
        """
        precision, read_time = self._timers.precision, self._timers.checkpoint.read_time
        while position < end:
            units, position = await self._log.units_from(position, end)
            for at, unit in units:
                if unit.time < read_time:
                    continue
                time = unit.time - unit.time % precision
                slot = self._wheel.find(time)
                if slot is not None and at <= slot.last:
                    continue
                chained = unit.previous == (NO_POSITION if slot is None else slot.last)
                if not chained or time >= self._timers.free_until():
                    return False
                self._wheel.put(time, at, -1 if unit.deletes else 1)
        return True

    async def _wheel_before(self, read_time: int) -> TimerWheel | None:
        """The wheel with the old precision; None if a slot does not begin and end with units of its own."""
        wheel = await self._timers.disk.run(self._wheel.with_other_precision, read_time)
        if wheel is None:
            return None
        for number, slot in enumerate(wheel.all_slots()):
            if not number % _SLOTS_OF_SLICE:
                await trio.lowlevel.checkpoint()
            for position in (slot.first, slot.last):
                unit = await self._log.unit(position)
                if unit is None or unit.time // wheel.precision * wheel.precision != slot.time:
                    return None
                if (unit.previous == NO_POSITION) != (position == slot.first):
                    return None
        return wheel

    async def _convert(self, end: int, before: TimerWheel | None) -> None:
        """Write the pending units of [begin, end) again, for the slots of this wheel, which is empty and has no file.

        It is another precision, and ``before`` is the wheel with the old one; or a unit is damaged.
        """
        timers, log = self._timers, self._log
        position = log.begin
        begin = log.files_end
        while position < end:
            units, position = await log.units_from(position, end)
            pending = [unit for at, unit in units if self._is_pending(at, unit, before)]
            if not pending:
                continue
            if log.end < begin:  # In a file of their own: the files before it can be deleted.
                log.wrote(begin)
            # From the read time on, where the whole window fits into the wheel.
            added = [
                timers.timer(unit.time, timers.read_time, unit.offset, unit.size, unit.topic_hash, unit.magic)
                for unit in pending
            ]
            await timers.add(added, timers.next_offset)
        if log.end <= begin:
            return
        self._note("the pending timers were written again, because they did not fit the slots")
        await timers.disk.run(log.sync)
        self._keep_in_queue()
        checkpoint = timers.next_checkpoint(self._now_ms)
        await timers.disk.run(timers.write_checkpoint, checkpoint, timers.next_notes(begin))
        timers.checkpoint = checkpoint
        await timers.disk.run(log.delete_before, begin)

    def _is_pending(self, at: int, unit: TimerUnit, before: TimerWheel | None) -> bool:
        if before is not None and before.holds(unit.time, at):
            return True
        # The old wheel may not have the units behind the checkpoint's position.
        checkpoint = self._timers.checkpoint
        return unit.time >= checkpoint.read_time and (before is None or at >= checkpoint.log_position)

    async def _fill_floor(self) -> None:
        """The floor of the pending units, from the first unit of each slot."""
        firsts = sorted((slot.first, slot.time) for slot in self._wheel.all_slots())
        for number, (position, time) in enumerate(firsts):
            if not number % _SLOTS_OF_SLICE:
                await trio.lowlevel.checkpoint()
            if self._timers.floor.would_add(time):
                unit = await self._log.unit(position)
                if unit is not None:
                    self._timers.floor.add(time, unit.offset, position)
