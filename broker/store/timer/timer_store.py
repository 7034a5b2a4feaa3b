"""TimerStore: pending timed messages (the data of RocketMQ's TimerMessageStore; its task is in services/timer.py).

``next_offset`` and ``read_time`` are the two ends: messages of the timer's queue before the one are in wheel and log,
or delivered; slots before the other are delivered. A checkpoint records both after everything below them is durable:
the delivered copies in the commit log, the units, the slots. A start goes back to the last checkpoint, so a crash
delivers again what was delivered since, and loses nothing. Rolls are not repeated, see services/timer_ahead.py. Nothing
of this exists on disk before the first timed message.
"""

import os
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import structlog
import trio
from msgspec.structs import replace

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory, write_durably
from trimq.broker.store.timer.log import TimerLog
from trimq.broker.store.timer.pending import PendingFloor
from trimq.broker.store.timer.wheel import TimerWheel
from trimq.protocol.timer_handover import NOTHING_PENDING, TimerHandover
from trimq.protocol.timer_layout import (
    MAGIC_DELETE,
    MAGIC_ROLL,
    NO_POSITION,
    SLOTS,
    UNIT_SIZE,
    Slot,
    TimerCheckpoint,
    TimerUnit,
    pack_unit,
    place_in_window,
    roll_window,
)
from trimq.protocol.timer_notes import NO_LOG, SlotRest, TimerNotes, encode_with_notes, rest_of

_log = structlog.get_logger(__name__)

_UNITS_OF_SLICE: Final = 500
_UNITS_OF_COUNT: Final = 10_000


class NewTimer(NamedTuple):
    """A message of the timer's queue that waits until ``time``.

    That is its TIMER_OUT_MS, unless it rolls. Only the wheel rounds it to a slot, so that each precision has its own.
    """

    time: int
    magic: int
    write_time: int
    offset: int
    size: int
    topic_hash: int


class TopicCount(NamedTuple):
    """The pending messages of a topic, less their delete marks, and the place of one of its records."""

    messages: int
    offset: int
    size: int


class PlacedTimers(NamedTuple):
    """Messages whose units are written; ``TimerStore.enter`` makes them pending."""

    timers: Sequence[NewTimer]
    positions: Sequence[int]


class DueTimers:
    """The units of a slot in log order: arrays, because a slot may have a million."""

    def __init__(self) -> None:
        self.offsets = array("q")
        self.sizes = array("i")
        self.magics = array("b")
        self.write_times = array("q")
        self.topic_hashes = array("i")
        self.deletes = 0
        """The number of delete marks."""

    def append(self, offset: int, size: int, magic: int, write_time: int, topic_hash: int) -> None:
        """Add a message by the fields of its unit."""
        self.deletes += magic & MAGIC_DELETE != 0
        self.topic_hashes.append(topic_hash)
        self.offsets.append(offset)
        self.sizes.append(size)
        self.magics.append(magic)
        self.write_times.append(write_time)

    def reverse(self) -> None:
        """Bring the units into log order."""
        for column in (self.offsets, self.sizes, self.magics, self.write_times, self.topic_hashes):
            column.reverse()

    async def counts(self) -> dict[int, int]:
        """What the units add to the counts of their topics, by hash: a delete mark -1."""
        found: Counter[int] = Counter()
        for begin in range(0, len(self), _UNITS_OF_COUNT):
            hashes = self.topic_hashes[begin : begin + _UNITS_OF_COUNT]
            found.update(hashes)
            if self.deletes:
                magics = self.magics[begin : begin + _UNITS_OF_COUNT]
                for topic_hash, magic in zip(hashes, magics, strict=True):
                    if magic & MAGIC_DELETE:
                        found[topic_hash] -= 2
            await trio.lowlevel.checkpoint()
        return found

    def __len__(self) -> int:
        return len(self.offsets)


class TimerStore:
    """The timer's data. One task calls ``add``, ``due`` and ``delivered``; another may call ``save``."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        *,
        precision: int,
        log_file_size: int,
        window: int,
        slots: int = SLOTS,
    ) -> None:
        """``window``: the configured number of slots after which a message is stored again."""
        self.disk = disk
        self.precision = precision
        self.window = roll_window(slots, window)
        self.checkpoint_path = f"{root}/config/timercheck"
        self.wheel = TimerWheel(disk, f"{root}/timerwheel", precision, slots)
        self.log = TimerLog(disk, f"{root}/timerlog", log_file_size)
        self.floor = PendingFloor(precision)
        self.checkpoint = TimerCheckpoint()
        self.next_offset = 0
        self.read_time = 0
        self.found_until = 0
        """Messages of the queue before this offset that were due before ``found_read_time`` are delivered already.

        Set if wheel and log were lost, so that the queue is read again from its beginning.
        """
        self.found_read_time = 0
        self.exists = False
        """The files exist, or will with the next checkpoint."""
        self.notes: list[str] = []
        """What recovery had to repair."""
        self.changed = False
        """There is something that the last checkpoint does not have, other than the read time."""
        self.is_between = False
        """No checkpoint may be written now: a start after it would not reach delete marks that are still needed."""
        self._marks_passed = False
        """Slots with delete marks were delivered since the last checkpoint."""
        self.rests: dict[int, SlotRest] = {}
        """What is left of slots that were delivered in part, by their times."""
        self.late_since = 0
        """The earliest time of messages that wait in later slots, because those of their times are delivered; or 0.

        Where the log is lost, what was due before the read time counts as delivered, but not from here on.
        """
        self.late_until = 0
        """The last slot in which one waits, or before; 0 if none does."""
        self.follows = False
        """This is what a slave keeps of its master's timers: see ``follow``."""
        self._checkpoint_floor: int | None = None
        """The lowest log offset that the last checkpoint needs."""
        self._broken = False
        self._saving = trio.Lock()

    # -- adding

    def free_until(self) -> int:
        """The time from which on the wheel has no free slots: there it still holds slots that are not delivered."""
        return self.read_time + (self.wheel.slots - 1) * self.precision

    def timer(self, due: int, now: int, offset: int, size: int, topic_hash: int, magic: int) -> NewTimer:
        """The timer of a message that is due at ``due``, which may have to roll. ``now`` is a time of the wheel."""
        time, rolls = place_in_window(due, now, self.window, self.precision)
        slot = time - time % self.precision  # a message of another precision is between two slots
        while now < slot < self.free_until() and self.wheel.is_taken(slot):
            # Earlier, and then again: the slot that has the place may be due a whole turn of the wheel later.
            rolls = True
            time = slot = slot - ((slot - now) // self.precision // 2 * self.precision or self.precision)
        return NewTimer(time, magic | MAGIC_ROLL if rolls else magic, now, offset, size, topic_hash)

    async def add(self, timers: Sequence[NewTimer], next_offset: int) -> None:
        """Add messages, and move ``next_offset``. Raises OSError: then nothing has changed."""
        self.enter(await self.write(timers), next_offset)

    async def write(self, timers: Sequence[NewTimer]) -> PlacedTimers | None:
        """Write the units of messages, whose times are in [read_time, free_until). Raises OSError.

        Nothing has changed before ``enter``; the next call writes at the same positions.
        """
        if not timers:
            return None
        positions = self.log.place(len(timers))
        last: dict[int, int] = {}
        """The position of the last unit by the number of its slot."""
        units = []
        for timer, position in zip(timers, positions, strict=True):
            time, magic, write_time, offset, size, topic_hash = timer
            number = time // self.precision
            previous = last.get(number)
            if previous is None:
                slot = self.wheel.find(time)
                previous = NO_POSITION if slot is None else slot.last
            last[number] = position
            units.append(pack_unit(TimerUnit(previous, magic, write_time, time, offset, size, topic_hash)))
        for piece in self.log.pieces(positions, units):
            if self.log.has_to_sync(piece) and not self._broken:
                await self._sync_log()
            await self.disk.run(self.log.write, piece)
        return PlacedTimers(timers, positions)

    def enter(self, placed: PlacedTimers | None, next_offset: int) -> None:
        """Make written messages pending, and move ``next_offset``: a checkpoint finds all of this together."""
        if placed is not None:
            self.log.wrote(placed.positions[-1] + UNIT_SIZE)
            for timer, position in zip(*placed, strict=True):
                self.wheel.put(timer.time, position, -1 if timer.magic & MAGIC_DELETE else 1)
                self.floor.add(timer.time, timer.offset, position)
        self.next_offset = next_offset
        self.exists = self.changed = True

    # -- what is due

    async def due(self, slot: Slot) -> DueTimers:
        """The units of a slot, in log order."""
        found = DueTimers()
        position = slot.last
        while position != NO_POSITION:
            unit = await self.log.unit(position)
            if unit is None or unit.time // self.precision != slot.time // self.precision or unit.previous >= position:
                _log.error("timer_chain_broken", time=slot.time, position=position)
                return await self._scan(slot)
            found.append(unit.offset, unit.size, unit.magic, unit.write_time, unit.topic_hash)
            position = unit.previous
            if not len(found) % _UNITS_OF_SLICE:
                await trio.lowlevel.checkpoint()
        found.reverse()
        return found

    async def _scan(self, slot: Slot) -> DueTimers:
        """As ``due`` for a damaged chain: all units of the log that belong to the slot."""
        found = DueTimers()
        position = self.log.begin
        while position < self.log.end:
            units, position = await self.log.units_from(position, self.log.end)
            for _, unit in units:
                if unit.time // self.precision == slot.time // self.precision:
                    found.append(unit.offset, unit.size, unit.magic, unit.write_time, unit.topic_hash)
        return found

    def delivered(self, time: int, *, has_marks: bool = False) -> None:
        """The slot of a time, and all before it, are delivered: the copies are in the commit log.

        ``has_marks``: it had delete marks, which are not needed any more.
        """
        self.wheel.clear(time)
        self.rests.pop(time, None)
        self.changed = True
        self._marks_passed |= has_marks
        self.move_read_time(time + self.precision)

    def delivered_but(self, time: int, due: DueTimers, numbers: Sequence[int]) -> None:
        """Of a slot, whose units are ``due``, all messages are delivered but those with these numbers."""
        self.rests[time] = rest_of(time, due.offsets, numbers)
        self.changed = True

    def move_read_time(self, time: int) -> None:
        """No slot before ``time`` has a message any more. Also back, when the wall clock was set back."""
        self.read_time = time
        if time > self.late_until:
            self.late_since = self.late_until = 0
        if self.wheel.is_empty:
            self.floor.clear()
        else:
            self.floor.passed(time)

    def keep_read_time_before(self, now: int) -> None:
        """The wall clock is at ``now``: if it was set back, messages may come for slots from there on.

        That is allowed because the slots before the read time are empty, also on disk.
        """
        if self.read_time > now:
            self.move_read_time(now - now % self.precision)

    def wait_late(self, due: int, time: int) -> None:
        """A message that is due at ``due``, before the read time, waits in the slot ``time``."""
        self.late_since = min(due, self.late_since or due)
        self.late_until = max(time, self.late_until)

    def may_wait_late(self, due: int) -> bool:
        """Whether a message that is due at ``due``, before the read time, may wait in a later slot."""
        return 0 < self.late_since <= due

    @property
    def is_empty(self) -> bool:
        """Whether no unit is pending."""
        return self.wheel.is_empty

    async def counts(self) -> dict[int, TopicCount]:
        """The pending messages by the hash of their topic. Reads the log. Raises OSError."""
        found: dict[int, TopicCount] = {}
        async for unit in self._pending_units():
            before = found.get(unit.topic_hash)
            count = (0 if before is None else before.messages) + (-1 if unit.deletes else 1)
            found[unit.topic_hash] = TopicCount(count, unit.offset, unit.size)
        return found

    async def _pending_units(self, until: int | None = None) -> AsyncIterator[TimerUnit]:
        """The units of slots that are not delivered, in log order, and so in that of their commit log offsets.

        Ends at the first whose record is at the commit log offset ``until``, or behind it.
        """
        position = self.log.end if self.floor.position is None else self.floor.position
        while position < self.log.end:
            units, position = await self.log.units_from(position, self.log.end)
            for at, unit in units:
                if unit.time < self.read_time or not self.wheel.holds(unit.time, at):
                    continue
                if until is not None and unit.offset >= until:
                    return
                yield unit

    async def count_between(self, start: int, end: int) -> int:
        """The pending messages whose records are between two commit log offsets. Reads the log, twice.

        Messages of a slot and topic are less by the delete marks that are pending for them: the units do not say which.
        So the first ones count as cancelled, wherever they are: each mark hides one message in all of the log.
        """
        marks: Counter[tuple[int, int]] = Counter()
        async for unit in self._pending_units():
            if unit.deletes:
                marks[unit.time // self.precision, unit.topic_hash] += 1
        found = 0
        async for unit in self._pending_units(until=end):
            if unit.deletes:
                continue
            key = unit.time // self.precision, unit.topic_hash
            if marks and (cancelled := marks[key]):
                marks[key] = cancelled - 1
            else:
                found += unit.offset >= start
        return found

    def lowest_offset(self) -> int | None:
        """The commit log offset from which on pending timers need the log; None if none is pending.

        Those of the last checkpoint too: a start goes back to it, and delivered copies may not be on disk yet.
        """
        return min((at for at in (self.floor.offset, self._checkpoint_floor) if at is not None), default=None)

    @property
    def unsaved_offset(self) -> int:
        """The offset in the timer's queue from which on a start would read it."""
        return min(self.next_offset, self.checkpoint.queue_offset) if self.exists else self.next_offset

    @property
    def is_read_again(self) -> bool:
        """Whether the queue is read again because wheel and log were lost, and not yet as far as before."""
        return self.next_offset < self.found_until

    def recovered(self) -> None:
        """Recovery is at its end: this is what the checkpoint on disk leads to."""
        self._checkpoint_floor = self.floor.offset

    # -- checkpoints

    async def save(self, sync_commit_log: Callable[[], Awaitable[bool]], now_ms: int, *, last: bool = False) -> bool:
        """Write a checkpoint if there is something new. Returns False if that failed, or may not be done now.

        ``last``: the last one of this process, which also records the read time if nothing else has changed.

        ``sync_commit_log`` makes durable what is in the commit log. After a failed sync there are no checkpoints until
        the restart, which then starts with the last one.
        """
        async with self._saving:
            if self._broken:
                return False
            if not self.exists or not (self.changed or (last and self.read_time != self.checkpoint.read_time)):
                return True
            if self.is_between:
                return False
            # One turn of the loop: these belong together.
            checkpoint, notes = self.next_checkpoint(now_ms), self.next_notes()
            pages = self.wheel.snapshot()
            self.changed = False
            before, self._marks_passed = self._marks_passed, False
            needed, floor = self.floor.position, self.floor.offset
            written = False
            try:
                # The delivered copies first: a slot may be cleared on disk only when they are there.
                if not await sync_commit_log() or not await self._sync_log():
                    return False
                await self.disk.run(self._write, checkpoint, notes, pages, before)
                written = True
            except OSError as error:
                _log.error("timer_checkpoint_failed", error=str(error))
                return False
            finally:
                if not written:  # also if the caller is cancelled: the next checkpoint has them
                    self.wheel.take_back(pages)
                    self.changed = True
                    self._marks_passed |= before
            self.checkpoint, self._checkpoint_floor = checkpoint, floor
            await self._delete_old_files(checkpoint.log_position if needed is None else needed)
            return True

    def next_checkpoint(self, now_ms: int) -> TimerCheckpoint:
        """The checkpoint of what is in memory now."""
        return TimerCheckpoint(
            read_time=self.read_time,
            log_position=self.log.end,
            queue_offset=self.next_offset,
            master_queue_offset=self.next_offset,
            timestamp=now_ms,
            counter=self.checkpoint.counter + 1,
        )

    def next_notes(self, log_begin: int = 0) -> TimerNotes:
        """The notes of what is in memory now."""
        found = (self.found_until, self.found_read_time) if self.is_read_again else (0, 0)
        late_until = self.late_until if self.late_since else 0
        return TimerNotes(log_begin, *found, self.late_since, late_until, tuple(self.rests.values()))

    async def _sync_log(self) -> bool:
        try:
            await self.disk.run(self.log.sync)
        except OSError as error:
            self._broken = True
            _log.error("timer_log_sync_failed", error=str(error))
            return False
        return True

    @property
    def is_broken(self) -> bool:
        """True after a failed sync of the timer log."""
        return self._broken

    def _write(self, checkpoint: TimerCheckpoint, notes: TimerNotes, pages: dict[int, bytes], before: bool) -> None:
        """Blocks. The wheel before the checkpoint: its slots may be newer than that, but not older.

        ``before``: a delete mark must not vanish from its slot while a start would read the copy of a rolled message
        that it has cancelled from the queue again. So there is a checkpoint with the new queue offset first. Its
        position in the log is that of the old wheel: a start enters the units from there on.
        """
        if before:
            position = self.checkpoint.log_position
            self.write_checkpoint(replace(checkpoint, log_position=position), notes)
        self.wheel.write(pages)
        self.write_checkpoint(checkpoint, notes)

    def write_checkpoint(self, checkpoint: TimerCheckpoint, notes: TimerNotes) -> None:
        """Replace timercheck. Blocks. Raises OSError."""
        make_durable_directory(self.disk, os.path.dirname(self.checkpoint_path))
        write_durably(self.disk, self.checkpoint_path, encode_with_notes(checkpoint, notes))

    # -- masters and slaves

    def handover(self) -> TimerHandover:
        """What a slave that has the log up to its end of now may rely on when it becomes the master."""
        checkpoint = self.checkpoint
        lowest = self.lowest_offset()
        found = checkpoint.queue_offset, min(checkpoint.read_time, self.late_since or checkpoint.read_time)
        if checkpoint.queue_offset < self.found_until:
            found = self.found_until, self.found_read_time
        return TimerHandover(checkpoint, *found, NOTHING_PENDING if lowest is None else lowest)

    async def follow(self, handover: TimerHandover, begin: int) -> None:
        """Replace what a slave has by what its master says. Raises OSError: then the next call has to do it again.

        The log is durable up to where the master's ended when it said so. The next start as a master reads the timer's
        queue from ``begin`` on, without what the master has delivered. This needs no wheel and no log: those of an
        earlier life as a master go. RocketMQ would read from ``begin`` on too, and deliver what is overdue once more.
        """
        checkpoint = replace(handover.checkpoint, log_position=0, queue_offset=begin, master_queue_offset=begin)
        notes = TimerNotes(0, handover.found_until, handover.found_read_time)
        async with self._saving:
            if not self.follows:
                # First of all a checkpoint that no wheel and no log belong to.
                await self.disk.run(self.write_checkpoint, checkpoint, replace(notes, log_begin=NO_LOG))
                await self.disk.run(self.wheel.discard)
                await self.disk.run(self.log.truncate, 0)
                self.floor.clear()
                self.rests.clear()
                self.late_since = self.late_until = 0
                self._checkpoint_floor = None
                self.follows = True
            await self.disk.run(self.write_checkpoint, checkpoint, notes)
            self.checkpoint = checkpoint
            self.read_time, self.next_offset = checkpoint.read_time, begin
            self.found_until, self.found_read_time = handover.found_until, handover.found_read_time
            self.exists = True

    async def _delete_old_files(self, position: int) -> None:
        if len(self.log.starts) > 1 and self.log.starts[1] <= position:
            try:
                await self.disk.run(self.log.delete_before, position)
            except OSError as error:
                _log.error("timer_log_not_deleted", error=str(error))

    def close(self) -> None:
        """Close the files."""
        self.log.close()
