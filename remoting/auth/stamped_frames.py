"""StampedFrames: the stamped frames of a round that a fast path may serve, each once.

They are looked at one after the other, each as if those before it had been served; none is recorded before it was.
"""

from collections.abc import Sequence

from trimq.protocol.native import StampedFrame
from trimq.remoting.auth.replay_guard import ReplayGuard, Sender


class StampedFrames:
    """Of one round. Nothing may be served between ``may`` and ``commit``."""

    def __init__(self, guard: ReplayGuard) -> None:
        self._guard = guard
        self._frames: list[tuple[StampedFrame, str, Sender]] = []
        self._ahead: dict[Sender, Sender] = {}
        """Senders as they are when all of these frames have been served."""

    def may(self, frame: StampedFrame, name: str) -> bool:
        """Whether a frame of the user ``name`` may be served after those before it."""
        _, _, _, _, code, stamp = frame
        sender = self._guard.look(name, code, stamp)
        if sender is None:
            return False
        _, time, _, number = stamp
        ahead = self._ahead.get(sender)
        if ahead is None:
            ahead = self._ahead[sender] = sender.copy()
        elif not ahead.accepts(number):
            return False
        ahead.take(number, time)
        self._frames.append((frame, name, sender))
        return True

    def commit(self, parts: Sequence[tuple[int, int]] | None) -> None:
        """Record the frames that were served: see CommitParts."""
        for (span, before, _, _, _, stamp), name, sender in self._frames:
            if parts is None or before < parts[span][0]:
                self._guard.record(name, sender, stamp)
