"""The share of the crash tests that one run takes: all of them, or one of some equal parts.

CI takes an eighth of the enumerations, power cuts and simulations with each commit, and the commit decides which;
``make crash`` and ``make nightly`` take all. ``CRASH_SHARE=2/8`` is the third eighth.
"""

import os
import re
from typing import Final, NamedTuple

VARIABLE: Final = "CRASH_SHARE"


class Share(NamedTuple):
    """Part number ``turn``, counted from 0, of ``of`` parts."""

    turn: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "Share":
        """The share that a text like ``2/4`` means. Raises ValueError."""
        found = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
        if found is None or int(found[1]) >= int(found[2]):
            raise ValueError(f"{VARIABLE}={text}: expected TURN/PARTS, with a turn from 0 to PARTS - 1, as in 2/4")
        return cls(int(found[1]), int(found[2]))

    def parts(self, count: int) -> range:
        """Those of ``count`` numbered parts that belong to this share. Raises ValueError if there may be none."""
        if count < self.of:
            raise ValueError(f"{VARIABLE}: {self.of} shares of {count} parts")
        return range(self.turn, count, self.of)

    def least(self, whole: int) -> int:
        """How much a check of this share finds at least if all find ``whole``; shares differ by up to four times."""
        return whole if self.of == 1 else whole // (4 * self.of)


def share() -> Share:
    """The share that this run takes. Raises ValueError if the variable is set to something else."""
    text = os.environ.get(VARIABLE, "")
    return Share.parse(text) if text else Share()
