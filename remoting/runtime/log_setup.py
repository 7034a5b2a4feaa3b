"""Logging with structlog: one line per event, for people or as JSON, to standard error or to a rotated file.

Modules use ``log = structlog.get_logger("broker")`` and ``log.info("topic_created", topic=name)``. Nothing on the hot
path is logged: what happens for each message is counted instead (see the broker's statistics).
"""

import json
import os
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Final, TextIO

import structlog

from trimq.remoting.config.configuration import LogConfig, LogFormat, LogLevel

_LEVELS: Final = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}
_PLAIN_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:@%+#*()[]{},;")


class StructuredLog:
    """A server's log for the client side that runs in it (implements remoting.client.client_log.ClientLog)."""

    def __init__(self, name: str = "remoting") -> None:
        self._log = structlog.get_logger(name)

    def warning(self, event: str, **facts: object) -> None:
        """Log an unexpected condition."""
        self._log.warning(event, **facts)

    def failed(self, event: str, error: BaseException, **facts: object) -> None:
        """Log a fault, with its traceback."""
        self._log.error(event, exc_info=error, **facts)


class RotatingFile:
    """A text file that becomes ``FILE.1`` when it has ``max_size`` bytes; ``FILE.1`` becomes ``FILE.2``, and so on.

    At most ``backups`` of them are retained. A line is never split over two files.
    """

    def __init__(self, path: Path, max_size: int, backups: int) -> None:
        self._path = path
        self._max_size = max_size
        self._backups = backups
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def _open(self) -> TextIO:
        # An event may repeat a text that has no UTF-8 form: its line is written all the same.
        file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
        self._size = file.tell()
        return file

    def write(self, text: str) -> int:
        """Append ``text``, after a rotation if it would exceed the limit."""
        size = len(text.encode("utf-8", "backslashreplace"))
        if self._size and self._size + size > self._max_size:
            self._rotate()
        self._size += size
        return self._file.write(text)

    def flush(self) -> None:
        """Pass the written text to the kernel."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        if self._backups == 0:
            self._path.unlink(missing_ok=True)
        for number in range(self._backups, 0, -1):
            source = self._path if number == 1 else Path(f"{self._path}.{number - 1}")
            if source.exists():
                source.replace(f"{self._path}.{number}")
        self._file = self._open()


class _Sink:
    """Writes lines and ignores errors: a full disk or a closed terminal must not end the program."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def msg(self, message: str) -> None:
        try:
            self._file.write(message + "\n")
            self._file.flush()
        except (OSError, ValueError):
            return

    log = debug = info = warning = warn = error = critical = fatal = exception = msg


def configure(config: LogConfig) -> Callable[[], None]:
    """Set up logging by ``config``. The result closes the log file. Raises OSError if it cannot be opened."""
    if config.log_file:
        file: Any = RotatingFile(Path(config.log_file), config.log_file_max_size, config.log_file_backups)
    else:
        file = sys.stderr
    sink = _Sink(file)
    renderer = _json_line if config.log_format is LogFormat.JSON else _console_line
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("iso", utc=True),
            structlog.processors.ExceptionRenderer(),
            renderer,
        ],
        wrapper_class=_wrapper(config.log_level),
        logger_factory=lambda *_: sink,
        cache_logger_on_first_use=False,
    )
    return file.close if config.log_file else lambda: None


def set_level(level: LogLevel) -> None:
    """Log no events below ``level`` from now on (a change of logLevel at run time)."""
    structlog.configure(wrapper_class=_wrapper(level))


def _wrapper(level: LogLevel) -> Any:
    return structlog.make_filtering_bound_logger(_LEVELS[level.value])


def _console_line(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    stamp, level, name = event.pop("timestamp", ""), event.pop("level", "info"), event.pop("event", "")
    trace = event.pop("exception", None)
    words = [stamp, f"{level:<7}", str(name), *(f"{key}={_word(value)}" for key, value in event.items())]
    line = " ".join(words)
    return f"{line}{os.linesep}{trace}" if trace else line


def _word(value: Any) -> str:
    text = str(value)
    if text and _PLAIN_CHARS.issuperset(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r") + '"'


def _json_line(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    import msgspec  # noqa: PLC0415 - needed for JSON only

    try:
        return msgspec.json.encode(event, enc_hook=str).decode()
    except UnicodeEncodeError:  # half a surrogate pair in a text: as an escape it can be written
        return json.dumps(event, default=str, separators=(",", ":"))
