"""What verifications find: faults of several kinds, and the exit code that follows from them."""

from enum import IntEnum
from typing import Final

from msgspec import Struct, field

_SHOWN: Final = 20


class Verdict(IntEnum):
    """The exit code of a verification."""

    SOUND = 0
    REPAIRABLE = 1
    """Queues, index or checkpoint do not match the log. A rebuild repairs them; see ``Report.start_mends``."""
    NOT_USABLE = 2
    DAMAGED = 3
    """Records of the log are damaged, files of it are missing, or a state file cannot be read."""


class Faults(Struct):
    """Faults of one kind: their number, and the texts of the first ones."""

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Count a fault, and store its text while there are few."""
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(text)


class TierFindings(Struct, kw_only=True):
    """What a verification of a tier finds, whatever keeps it."""

    lost: Faults = field(default_factory=Faults)
    """Messages, or what holds them, that should be there and are not, or are damaged."""
    repairable: Faults = field(default_factory=Faults)
    """What a broker puts right: at its next start, or with its store."""
    index: Faults = field(default_factory=Faults)
    """Faults of the index: messages may not be found by a key."""
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The exit code."""
        if self.lost.count:
            return Verdict.DAMAGED
        return Verdict.REPAIRABLE if self.repairable.count or self.index.count else Verdict.SOUND
