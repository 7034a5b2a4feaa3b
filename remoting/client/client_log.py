"""Logging of the client side, to a log that its owner passes in.

The SDK runs inside other people's programs. It logs with the standard library (StandardLog), which shows only warnings
unless the program configures it otherwise. Servers pass their own log (trimq.remoting.runtime.log_setup.StructuredLog).
"""

import logging
import time
import traceback
from collections.abc import Callable
from typing import Final, Protocol

MOST: Final = 300
"""The most characters logged of an exception's text, or of the value of a fact."""
LINES: Final = 20
"""The most lines per second of one log; further ones are counted."""
_FRAMES: Final = 20
_CAUSES: Final = 3


class ClientLog(Protocol):
    """The log of the client side."""

    def warning(self, event: str, **facts: object) -> None:
        """Log an unexpected condition."""

    def failed(self, event: str, error: BaseException, **facts: object) -> None:
        """Log a fault of the client side, or of a function that its owner passed in."""


class StandardLog:
    """The standard library's logger ``name``: one line per event, long texts cut.

    Of an exception, the type and text are logged. Values of local variables never are: they hold message bodies and
    secrets. The traceback, without these values, is logged at DEBUG only. ``clock`` returns monotonic seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.logger: logging.Logger = logging.getLogger(name)
        self._clock = clock
        self._second = 0
        self._used = self._left_out = 0

    def info(self, event: str, **facts: object) -> None:
        """Log a normal event."""
        self.say(logging.INFO, event, **facts)

    def warning(self, event: str, **facts: object) -> None:
        """Log an unexpected condition after which the SDK continues."""
        self.say(logging.WARNING, event, **facts)

    def failed(self, event: str, error: BaseException, **facts: object) -> None:
        """Log a fault as an ERROR."""
        self.fault(logging.ERROR, event, error, **facts)

    def fault(self, level: int, event: str, error: BaseException, **facts: object) -> None:
        """Log an exception of the SDK or of a function of the program."""
        if self.say(level, event, reason=error_text(error), **facts) and self.logger.isEnabledFor(logging.DEBUG):
            lines = traceback.format_tb(error.__traceback__, _FRAMES)
            self.logger.debug("traceback:\n%s", "".join(lines).rstrip())

    def say(self, level: int, event: str, **facts: object) -> bool:
        """Log one line. False if the level is disabled, or too many lines were logged in this second."""
        if not self.logger.isEnabledFor(level) or not self._allows(level):
            return False
        known = ", ".join(f"{name}={_cut(str(value))}" for name, value in facts.items())
        self.logger.log(level, "%s (%s)" if known else "%s%s", event, known)
        return True

    def _allows(self, level: int) -> bool:
        second = int(self._clock())
        if second != self._second:
            if self._left_out:
                self.logger.log(level, "%d more lines were left out", self._left_out)
            self._second, self._used, self._left_out = second, 0, 0
        self._used += 1
        if self._used > LINES:
            self._left_out += 1
            return False
        return True


def error_text(error: BaseException) -> str:
    """An exception's type and text in one line; of a group, those of its first few exceptions.

    >>> error_text(ValueError("no number"))
    'ValueError: no number'
    """
    if isinstance(error, BaseExceptionGroup):
        inner = "; ".join(error_text(one) for one in error.exceptions[:_CAUSES])
        return _cut(f"{type(error).__name__} of {len(error.exceptions)}: {inner}")
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception of the program whose text cannot be made
        text = ""
    name = type(error).__name__
    return _cut(f"{name}: {text}" if text else name)


def _cut(text: str) -> str:
    if len(text) > MOST:
        text = f"{text[:MOST]}..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()
