"""OffsetWindow: which offset of a queue may be committed while handlers end in any order (RocketMQ's ProcessQueue)."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence


class _Taken:
    """Messages that were taken together. Those before ``at`` are forgotten; ``left`` are not finished."""

    __slots__ = ("at", "done", "left", "offsets")

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = offsets
        self.at = 0
        self.left = len(offsets)
        self.done: set[int] = set()


class OffsetWindow:
    """The messages of a queue that a consumer has taken and not finished; ``committable`` never passes one of them.

    What was taken together and is finished together is one step, whatever its number.

    >>> window = OffsetWindow(5)
    >>> window.took([5, 6]), window.moved_to(7)
    (None, None)
    >>> window.finished(6), window.committable
    (True, 5)
    >>> window.finished(5), window.committable
    (True, 7)
    """

    __slots__ = ("_taken", "next_offset")

    def __init__(self, start: int) -> None:
        self.next_offset: int = start
        self._taken: deque[_Taken] = deque()
        # Only the first may have forgotten something, and it always has an unfinished message, the one at ``at``.

    def took(self, offsets: Sequence[int]) -> None:
        """Messages were taken from the queue, in order, behind all before."""
        if offsets:
            self._taken.append(_Taken(offsets))

    def moved_to(self, offset: int) -> None:
        """Everything before ``offset`` was taken or is not wanted."""
        self.next_offset = offset

    def finished_all(self, offsets: Sequence[int]) -> bool:
        """All messages of a ``took``, by the same object, are done with.

        False, and nothing done, where it is none or some of them were done with before.
        """
        for taken in self._taken:
            if taken.offsets is offsets:
                if taken.left != len(offsets):
                    return False
                taken.left = 0
                if taken is self._taken[0]:
                    self._forget()
                return True
        return False

    def finished(self, offset: int) -> bool:
        """A message is done with; False for one that is not in the window, or was done with before."""
        if not self._taken:
            return False
        first = self._taken[0]
        at = first.at
        if first.offsets[at] == offset:
            first.at = at + 1
            first.left = left = first.left - 1
            if not left or first.done:
                self._forget()
            return True
        for taken in self._taken:
            offsets = taken.offsets
            if offset <= offsets[-1]:
                break
        else:
            return False
        if not taken.left or offsets[bisect_left(offsets, offset, taken.at)] != offset or offset in taken.done:
            return False
        taken.done.add(offset)
        taken.left -= 1
        return True

    def _forget(self) -> None:
        """Lets go of what is finished and has nothing unfinished before it."""
        while self._taken:
            taken = self._taken[0]
            if taken.left:
                while taken.offsets[taken.at] in taken.done:
                    taken.at += 1
                return
            self._taken.popleft()

    @property
    def committable(self) -> int:
        """The offset from which a successor has to go on."""
        if not self._taken:
            return self.next_offset
        first = self._taken[0]
        return first.offsets[first.at]

    @property
    def span(self) -> int:
        """How many messages it holds, finished ones behind an unfinished one included."""
        if not self._taken:
            return 0
        return sum([len(taken.offsets) for taken in self._taken]) - self._taken[0].at

    @property
    def unfinished(self) -> int:
        """How many messages are not finished."""
        return sum([taken.left for taken in self._taken])
