"""Why the store cannot be read or written at the moment (RocketMQ's RunningFlags), with a text for humans."""

from collections.abc import Callable
from enum import IntFlag


class Flag(IntFlag):
    """The bits, as RocketMQ reports them in its running information."""

    NOT_READABLE = 1
    NOT_WRITEABLE = 2
    WRITE_LOGICS_QUEUE_ERROR = 4
    WRITE_INDEX_FILE_ERROR = 8
    DISK_FULL = 16
    FENCED = 32
    LOGIC_DISK_FULL = 64
    NO_SPACE = 128
    """Allocating space failed. Reported as DISK_FULL, but separate from it, which depends on the used share only."""
    REPLICAS = 256
    """Fewer replicas are in sync than a message needs."""
    SLAVE = 512
    """This store follows a master's."""


_READ = Flag.NOT_READABLE


class RunningFlags:
    """The reasons that are set. ``writable`` and ``readable`` are plain attributes: the hot path reads only them.

    A reason that was set ``forever`` (a failed sync) stays until the process ends.
    """

    def __init__(self) -> None:
        self.readable = True
        self.writable = True
        self._reasons: dict[Flag, str] = {}
        self._forever: set[Flag] = set()
        self.on_broken: Callable[[Flag, str], None] = lambda _flag, _reason: None
        """Called with a reason that stays until the process ends."""

    @property
    def bits(self) -> int:
        """All reasons as one number."""
        total = sum(int(flag) for flag in self._reasons)
        return (total | Flag.DISK_FULL) - Flag.NO_SPACE if total & Flag.NO_SPACE else total

    @property
    def reason(self) -> str:
        """Why puts are refused; empty if they are not."""
        return "; ".join(text for flag, text in self._reasons.items() if flag is not _READ)

    def reasons(self) -> list[tuple[Flag, str]]:
        """All reasons that are set, with their texts."""
        return list(self._reasons.items())

    def has(self, flag: Flag) -> bool:
        """True while this reason is set."""
        return flag in self._reasons

    def is_only(self, flag: Flag) -> bool:
        """True if puts are refused for this reason alone."""
        return flag in self._reasons and all(found in (flag, _READ) for found in self._reasons)

    def set(self, flag: Flag, reason: str, *, forever: bool = False) -> None:
        """Set a reason with its text. One that was set forever keeps its first text."""
        if flag in self._forever:
            return
        self._reasons[flag] = reason
        self._update()
        if forever:
            self._forever.add(flag)
            self.on_broken(flag, reason)

    def clear(self, flag: Flag) -> None:
        """Clear a reason, unless it was set forever."""
        if flag not in self._forever:
            self._reasons.pop(flag, None)
            self._update()

    @property
    def is_broken(self) -> bool:
        """True after a fault that only a restart with recovery can repair: the exit must count as abnormal."""
        return bool(self._forever)

    def _update(self) -> None:
        self.readable = _READ not in self._reasons
        self.writable = all(flag is _READ for flag in self._reasons)
