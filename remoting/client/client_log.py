"""How the client side tells what goes wrong: to a log that its owner hands in.

The SDK lives in other people's programs: it logs with the standard library (StandardLog), which shows nothing but
warnings until the program says otherwise. Servers hand in theirs (trimq.remoting.runtime.log_setup.StructuredLog).
"""

import logging
import time
import traceback
from collections.abc import Callable
from typing import Final, Protocol

MOST: Final = 300
"""Characters of an exception's text, or of a fact, that are told."""
LINES: Final = 20
"""Lines a second of one log; what is beyond is counted."""
_FRAMES: Final = 20
_CAUSES: Final = 3


class ClientLog(Protocol):
    """Where the client side tells of what went wrong."""

    def warning(self, event: str, **facts: object) -> None:
        """Something is not as it should be."""

    def failed(self, event: str, error: BaseException, **facts: object) -> None:
        """A fault: of ours, or of a function that the owner has handed in."""


class StandardLog:
    """A logger of the standard library, ``name``: one line an event, cut where it is long.

    Of an exception its type and text are told. Never the values of local variables: they hold message bodies and
    secrets. The traceback, without them, is told at DEBUG only. ``clock`` gives monotonic seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.logger: logging.Logger = logging.getLogger(name)
        self._clock = clock
        self._second = 0
        self._used = self._left_out = 0

    def info(self, event: str, **facts: object) -> None:
        """For who wants to follow what happens."""
        self.say(logging.INFO, event, **facts)

    def warning(self, event: str, **facts: object) -> None:
        """Something is not as it should be; the SDK goes on."""
        self.say(logging.WARNING, event, **facts)

    def failed(self, event: str, error: BaseException, **facts: object) -> None:
        """A fault: an ERROR."""
        self.fault(logging.ERROR, event, error, **facts)

    def fault(self, level: int, event: str, error: BaseException, **facts: object) -> None:
        """An exception, of ours or of a function of the program."""
        if self.say(level, event, reason=error_text(error), **facts) and self.logger.isEnabledFor(logging.DEBUG):
            lines = traceback.format_tb(error.__traceback__, _FRAMES)
            self.logger.debug("where that came from:\n%s", "".join(lines).rstrip())

    def say(self, level: int, event: str, **facts: object) -> bool:
        """One line; False where it is not wanted, or there were too many in this second."""
        if not self.logger.isEnabledFor(level) or not self._allows(level):
            return False
        known = ", ".join(f"{name}={_cut(str(value))}" for name, value in facts.items())
        self.logger.log(level, "%s (%s)" if known else "%s%s", event, known)
        return True

    def _allows(self, level: int) -> bool:
        second = int(self._clock())
        if second != self._second:
            if self._left_out:
                self.logger.log(level, "%d lines more were left out", self._left_out)
            self._second, self._used, self._left_out = second, 0, 0
        self._used += 1
        if self._used > LINES:
            self._left_out += 1
            return False
        return True


def error_text(error: BaseException) -> str:
    """An exception's type and text in one line; of a group those of the first few that are in it.

    >>> error_text(ValueError("no number"))
    'ValueError: no number'
    """
    if isinstance(error, BaseExceptionGroup):
        inner = "; ".join(error_text(one) for one in error.exceptions[:_CAUSES])
        return _cut(f"{type(error).__name__} of {len(error.exceptions)}: {inner}")
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception of the program that cannot even be told
        text = ""
    name = type(error).__name__
    return _cut(f"{name}: {text}" if text else name)


def _cut(text: str) -> str:
    if len(text) > MOST:
        text = f"{text[:MOST]}..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()
