"""OffsetWindow: the offset that may be committed while messages are finished in any order (RocketMQ's ProcessQueue)."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence


class _Taken:
    """The offsets of messages that were added together.

    Those before the index ``at`` are finished and removed, ``done`` has finished ones behind it, and ``left`` counts
    the unfinished.
    """

    __slots__ = ("at", "done", "left", "offsets")

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = offsets
        self.at = 0
        self.left = len(offsets)
        self.done: set[int] = set()


class OffsetWindow:
    """The messages of a queue that a consumer has pulled and not finished.

    ``committable`` is never behind an unfinished message, so a message without an acknowledgement is delivered again by
    the next owner of the queue. Messages that were added together and are finished together cost one step, whatever
    their number.

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
        # Invariant: only the first entry has ``at`` > 0, and its message at ``at`` is unfinished. Entries behind the
        # first may be finished completely; they are removed when they become the first. So committable needs no search.

    def took(self, offsets: Sequence[int]) -> None:
        """Adds messages by their offsets, in order and behind all added before."""
        if offsets:
            self._taken.append(_Taken(offsets))

    def moved_to(self, offset: int) -> None:
        """Sets the offset of the next pull. All messages before it were added or do not match the subscription."""
        self.next_offset = offset

    def finished_all(self, offsets: Sequence[int]) -> bool:
        """Marks all messages of one ``took`` as finished, given the same ``offsets`` object.

        Returns False, without side effects, if there is no such object or some of its messages were finished before.
        """
        for taken in self._taken:
            if taken.offsets is offsets:  # identity: comparing all offsets would cost as much as finishing them singly
                if taken.left != len(offsets):
                    return False
                taken.left = 0
                if taken is self._taken[0]:
                    self._trim()
                return True
        return False

    def finished(self, offset: int) -> bool:
        """Marks a message as finished. Returns False if it is not in the window or was finished before."""
        if not self._taken:
            return False
        # Fast path for the order in which most messages are finished: that of the queue.
        first = self._taken[0]
        at = first.at
        if first.offsets[at] == offset:
            first.at = at + 1
            first.left = left = first.left - 1
            if not left or first.done:
                self._trim()
            return True
        for taken in self._taken:
            offsets = taken.offsets
            if offset <= offsets[-1]:
                break
        else:
            return False
        if not taken.left or offsets[bisect_left(offsets, offset, taken.at)] != offset or offset in taken.done:
            return False
        # Before ``at`` nothing matches, since bisect starts there. No trim: the message at the first entry's ``at`` is
        # another one, and unfinished.
        taken.done.add(offset)
        taken.left -= 1
        return True

    def _trim(self) -> None:
        """Removes the finished messages that have no unfinished one before them."""
        while self._taken:
            taken = self._taken[0]
            if taken.left:
                while taken.offsets[taken.at] in taken.done:
                    taken.at += 1
                return
            self._taken.popleft()

    @property
    def committable(self) -> int:
        """The offset to commit: that of the first unfinished message, or of the next pull if there is none."""
        if not self._taken:
            return self.next_offset
        first = self._taken[0]
        return first.offsets[first.at]

    @property
    def span(self) -> int:
        """The number of messages from the first unfinished one on, finished ones included."""
        if not self._taken:
            return 0
        return sum([len(taken.offsets) for taken in self._taken]) - self._taken[0].at

    @property
    def unfinished(self) -> int:
        """The number of unfinished messages."""
        return sum([taken.left for taken in self._taken])
