"""Readiness: whether a server is ready for clients, and the reasons if it is not, collected from its parts."""

from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct

Check = Callable[[], Iterable["Reason"]]

STARTING: Final = "starting"
STOPPING: Final = "stopping"


class Reason(Struct, frozen=True):
    """A reason why a server is not ready, or a note: ``code`` for programs, ``text`` for people."""

    code: str
    text: str


class Readiness(Struct, frozen=True, omit_defaults=True):
    """The body of /readyz. ``notes`` are information that does not affect ``ready``."""

    ready: bool
    reasons: list[Reason]
    notes: list[Reason] = []


class Health:
    """The health of a server. ``checks`` and ``notes`` are called for each request; they must be quick.

    A server is ready if no check returns a reason and ``phase`` is not set. ``notes`` do not affect it.
    """

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.notes: list[Check] = []
        self.phase: Reason | None = Reason(STARTING, "the server is starting")

    def readiness(self) -> Readiness:
        """The current readiness, with all reasons and notes."""
        reasons = [self.phase] if self.phase is not None else []
        for check in self.checks:
            reasons += check()
        notes = [note for check in self.notes for note in check()]
        return Readiness(ready=not reasons, reasons=reasons, notes=notes)

    def started(self) -> None:
        """Note that the server has started."""
        self.phase = None

    def stopping(self) -> None:
        """Note that the server is shutting down."""
        self.phase = Reason(STOPPING, "the server is shutting down")
