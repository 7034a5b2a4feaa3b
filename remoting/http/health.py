"""Whether a server is ready for its clients, and if not, why: the reasons come from those who know."""

from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct

Check = Callable[[], Iterable["Reason"]]

STARTING: Final = "starting"
STOPPING: Final = "stopping"


class Reason(Struct, frozen=True):
    """One thing that keeps a server from being ready, or a note: ``code`` for programs, ``text`` for people."""

    code: str
    text: str


class Readiness(Struct, frozen=True, omit_defaults=True):
    """What /readyz says. ``notes`` are worth knowing and keep nobody from being ready."""

    ready: bool
    reasons: list[Reason]
    notes: list[Reason] = []


class Health:
    """``checks`` and ``notes`` are asked each time somebody wants to know; they must be quick.

    What ``checks`` say stands against being ready, and so does ``phase`` while it is set; ``notes`` do not.
    """

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.notes: list[Check] = []
        self.phase: Reason | None = Reason(STARTING, "the server is starting")

    def readiness(self) -> Readiness:
        """Ready where nobody has a reason against it."""
        reasons = [self.phase] if self.phase is not None else []
        for check in self.checks:
            reasons += check()
        notes = [note for check in self.notes for note in check()]
        return Readiness(ready=not reasons, reasons=reasons, notes=notes)

    def started(self) -> None:
        """The start is over."""
        self.phase = None

    def stopping(self) -> None:
        """The stop has begun."""
        self.phase = Reason(STOPPING, "the server is shutting down")
