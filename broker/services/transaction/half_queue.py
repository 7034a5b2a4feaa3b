"""What is known of each half in the half queue: one byte each, from the first one that is not done.

RocketMQ keeps no such table: it accepts a second commit of a half until the op record of the first one has been read,
and then delivers the message twice. Here a half is ended once. Its entry stays until its end is durable: only then may
the group's offset pass it, because what is below that offset counts as ended after a restart. The entries of the last
halves that are done stay longer, so that a producer which repeats an end gets the answer that it missed.
"""

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final

_DONE: Final = 0x80
_done_prefix: Final = re.compile(b"[\x80-\xff]*+").match
_KEPT: Final = 1 << 20
"""Entries that are kept when they are done, so that an end which is repeated later is recognized."""
_TRIM_AT: Final = 4096
"""Further entries that may be done before their memory is freed: each time the others are moved."""
_STALE_AT: Final = 1024
"""Halves that may be lost before it is looked which of them had been stored again."""


class State(IntEnum):
    """The state of a half. One that is done has ``_DONE`` added: its end is durable."""

    PENDING = 0
    """Not ended. Every other state is left only on the way to done, except COMMITTING, which may fail."""
    COMMITTING = 1
    """Its commit record is being stored."""
    COMMITTED = 2
    ROLLED_BACK = 3
    MOVED = 4
    """It was stored again at a later offset, which stands for it now."""
    EXPIRED = 5
    """It was moved to TRANS_CHECK_MAX_TIME_TOPIC."""
    ENDED = 6
    """Ended before this start, or deleted with its log file."""
    UNREADABLE = 7
    """This start could not read it: it is pending, or was ended, or stands for a half that has other records too."""


_STATES: Final = tuple(State)


class HalfQueue:
    """The states of the halves from ``first`` on, and where those are that were stored again.

    ``pending`` is the number of halves that are not ended. One that is committed counts until its record is stored.
    ``unreadable``: the records that this start could not read and that are not done. They do not count. One is done
    when the half whose first record it is has ended, or its log file is deleted; any other one waits for a start.
    """

    def __init__(self, first: int = 0, end: int = 0) -> None:
        self._latest: dict[int, int] = {}
        self.restart(first, end)

    def restart(self, first: int, end: int) -> None:
        """Set by the start: the halves of [first, end), all pending."""
        self._base = first
        self._done = 0  # entries at the front that are done and not yet freed
        self._states = bytearray(end - first)
        self._latest.clear()
        self._stale = 0  # at most so many entries of _latest are of halves that were lost
        self.unreadable: set[int] = set()
        self.pending = end - first

    def __len__(self) -> int:
        """The number of halves from ``first`` on."""
        return len(self._states) - self._done

    @property
    def first(self) -> int:
        """The offset of the first half that is not done: all below it are ended durably."""
        return self._base + self._done

    @property
    def end(self) -> int:
        """The offset behind the last half."""
        return self._base + len(self._states)

    @property
    def moved(self) -> int:
        """The number of halves that were stored again and are not done."""
        return len(self._latest)

    def reach(self, end: int) -> None:
        """The queue ends at ``end`` now: new halves are pending."""
        count = end - self.end
        if count > 0:
            self._states += bytes(count)
            self.pending += count

    def state(self, offset: int) -> State | None:
        """The state of a half; ENDED below ``first``, None behind the end."""
        if offset < self.first:
            return State.ENDED
        at = offset - self._base
        return _STATES[self._states[at] & ~_DONE] if at < len(self._states) else None

    def end_of(self, origin: int, offset: int) -> State | None:
        """The state of the half with the record at ``offset``, whichever of its records stands for it now.

        Unlike ``state``, it knows how the last halves below ``first`` ended, if that was in this process.
        """
        state = self._kept(self.latest(origin, offset))
        # Once a half is done it is not in _latest, but its first record has its end.
        if state is State.MOVED:
            first = self._kept(origin)
            return first if first is not None and first > State.COMMITTING else state
        return state

    def _kept(self, offset: int) -> State | None:
        at = offset - self._base
        return _STATES[self._states[at] & ~_DONE] if 0 <= at < self._done else self.state(offset)

    def set(self, offset: int, state: State) -> None:
        """Change the state of a half that is not done. It has to be in the table."""
        at = offset - self._base
        before = self._states[at]
        self._states[at] = state
        self.pending += (state <= State.COMMITTING) - (before <= State.COMMITTING)

    def set_all(self, offsets: Iterable[int], before: State, state: State) -> None:
        """Change the state of several halves, which all have the state ``before``."""
        states, base = self._states, self._base
        count = 0
        for offset in offsets:
            states[offset - base] = state
            count += 1
        self.pending += count * ((state <= State.COMMITTING) - (before <= State.COMMITTING))

    @property
    def table(self) -> tuple[int, bytearray]:
        """The first offset with a state, and the states from it on; those that are 0 are pending halves'."""
        return self._base, self._states

    def done(self, offset: int) -> None:
        """The end of a half is durable. Ignored below ``first``."""
        at = offset - self._base
        if at >= self._done:
            self._states[at] |= _DONE
            self.unreadable.discard(offset)

    def ended(self, offset: int) -> None:
        """A half that was ended durably before this start. Ignored if it is not in the table."""
        at = offset - self._base
        if self._done <= at < len(self._states) and self._states[at] <= State.COMMITTING:
            self._states[at] = State.ENDED | _DONE
            self.pending -= 1

    def lose(self, offset: int) -> bool:
        """A record cannot be read any more, and never will. False if no half is lost with it.

        Then the half was ended, or another record stands for it. Nothing says which entry of _latest leads to a record.
        """
        if offset < self.first:  # it has no entry
            return False
        if offset in self.unreadable:
            self.unreadable.remove(offset)
            self._states[offset - self._base] = State.ENDED | _DONE
            return offset not in self._latest
        self.ended(offset)
        self._stale += 1
        if self._stale >= max(_STALE_AT, len(self._latest) // 2):
            self._stale = 0
            self._latest = {origin: last for origin, last in self._latest.items() if not self._is_ended(last)}
        return True

    def _is_ended(self, offset: int) -> bool:
        at = offset - self._base
        return at < 0 or self._states[at] == State.ENDED | _DONE

    def hide(self, offset: int) -> None:
        """Set by the start: a half that could not be read. It stays as it is until the next start."""
        self.set(offset, State.UNREADABLE)
        self.unreadable.add(offset)

    def replaced(self, offset: int) -> None:
        """Set by the start: a pending half was stored again, durably."""
        self.set(offset, State.MOVED)
        self.done(offset)

    def stands_for(self, origin: int, offset: int) -> None:
        """Set by the start: the half first stored at ``origin`` is at ``offset`` now."""
        self._latest[origin] = offset

    def advance(self) -> int:
        """Move ``first`` behind all halves that are done, and return it."""
        found = _done_prefix(self._states, self._done)
        assert found is not None  # the pattern matches an empty text too
        self._done = found.end()
        freed = self._done - _KEPT
        if freed >= _TRIM_AT and freed * 2 >= len(self._states) - _KEPT:
            del self._states[:freed]
            self._base += freed
            self._done = _KEPT
        return self.first

    def next_pending(self, offset: int, end: int) -> int:
        """The first pending half in [offset, end); -1 if there is none."""
        at = self._states.find(0, max(offset - self._base, self._done), max(0, end - self._base))
        return -1 if at < 0 else self._base + at

    def count_pending(self, begin: int, end: int) -> int:
        """The number of halves in [begin, end) that are pending, or were not readable at the start."""
        unreadable = sum(begin <= offset < end for offset in self.unreadable)
        return unreadable + self._states.count(0, max(begin - self._base, self._done), max(0, end - self._base))

    def all_pending(self) -> Iterator[int]:
        """The offsets of all pending halves; those that are ended meanwhile are left out."""
        offset = self.next_pending(self.first, self.end)
        while offset >= 0:
            yield offset
            offset = self.next_pending(offset + 1, self.end)

    def all_ended(self) -> Iterator[int]:
        """The offsets from ``first`` on that were ended before this start."""
        states = self._states
        at = states.find(State.ENDED | _DONE, self._done)
        while at >= 0:
            yield self._base + at
            at = states.find(State.ENDED | _DONE, at + 1)

    # -- halves that were stored again

    def moves(self, origin: int, old: int, new: int) -> None:
        """A half was stored again: ``new`` stands for it now. ``origin``: see protocol/transaction.Half."""
        self.reach(new + 1)
        self.set(old, State.MOVED)
        self._latest[origin] = new

    def latest(self, origin: int, offset: int) -> int:
        """The offset that stands now for the half that was read at ``offset``."""
        return self._latest.get(origin, offset)

    def forget(self, origin: int) -> None:
        """The half is done, so its last offset need not be known any more: the first one gets its end."""
        last = self._latest.pop(origin, -1) - self._base
        at = origin - self._base
        if at >= 0 and last >= 0:
            self._states[at] = self._states[at] & _DONE | self._states[last] & ~_DONE
