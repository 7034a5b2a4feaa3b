"""Reading and changing configuration, and the sections common to all servers.

A program (broker, name server) has a ``Schema``: its sections, the RocketMQ keys that it knows but does not support,
and the keys that remote requests may not change. ``Configuration`` holds the current value of each section and the
source of each key, and applies changes at run time. Sections are immutable and replaced as a whole: code that needs
current values longer than for one request has to read ``configuration.section(T)`` again.
"""

import dataclasses
import difflib
import enum
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trimq.remoting.config import properties
from trimq.remoting.config.options import Option, describe, option, options_of
from trimq.remoting.config.properties import ConfigError

__all__ = [
    "ConfigError",
    "Configuration",
    "Effective",
    "LogConfig",
    "LogFormat",
    "LogLevel",
    "NettyServerConfig",
    "Option",
    "Refusal",
    "Schema",
    "describe",
    "option",
    "options_of",
    "parse_changes",
]

T = TypeVar("T")

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Schema:
    """All keys of a program's configuration.

    sections     the section classes, in the order in which they are shown
    inert        RocketMQ keys that are accepted and have no effect here: key -> why
    unsupported  RocketMQ keys whose feature is not implemented: key -> explanation. They cause a warning
    harmless     unsupported keys with the value that matches this program's behaviour: it is neither warned of nor
                 refused. In lower case
    more         further sources of values, named by keys: each applies one, after file, environment and flags
    checks       conditions on values of several sections: each returns key and expectation of a wrong value
    protected    keys that a remote request may not change (RocketMQ's configBlackList), besides those of secrets
    """

    program: str
    sections: tuple[type, ...]
    inert: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)
    harmless: Mapping[str, str] = dataclasses.field(default_factory=dict)
    protected: frozenset[str] = frozenset()
    more: "tuple[Callable[[Configuration], None], ...]" = ()
    checks: "tuple[Callable[[Configuration], tuple[str, str] | None], ...]" = ()

    def options(self) -> dict[str, tuple[type, Option]]:
        """Section and option of each key. Raises ValueError if two sections have the same key."""
        found: dict[str, tuple[type, Option]] = {}
        for section in self.sections:
            for opt in options_of(section):
                if opt.key in found:
                    raise ValueError(f"two sections have the key {opt.key}")
                found[opt.key] = (section, opt)
        return found


@dataclass(frozen=True, slots=True)
class Effective:
    """A row of the effective configuration.

    `source` is "default", "FILE:LINE", the variable's or the flag's name, or "changed at run time".
    """

    key: str
    value: str
    source: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a change at run time was refused. For `protected` keys the reply is NO_PERMISSION."""

    key: str
    reason: str
    protected: bool = False


class Configuration:
    """The values of a program's options, their sources, and the problems found while reading them.

    warnings   texts for the log: unknown keys with the nearest known name, unsupported keys, repeated keys
    notes      less important texts: keys that are accepted without effect
    listeners  called with the set of changed keys after a change at run time
    counter    changes at run time so far (the DataVersion of request 26)
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.listeners: list[Callable[[frozenset[str]], None]] = []
        self.counter = 0
        self.file: Path | None = None
        self._options = schema.options()
        self._sources: dict[str, str] = {}
        self._protected = schema.protected | {opt.key for _, opt in self._options.values() if opt.secret}
        self._lower = {key.lower(): key for key in self._options}
        self._sections: dict[type, Any] = {section: section() for section in schema.sections}

    # reading

    def section(self, kind: type[T]) -> T:
        """The current value of a section. A change replaces it as a whole."""
        value: T = self._sections[kind]
        return value

    def load_file(self, path: str | Path) -> None:
        """Apply a properties file. Raises ConfigError for an unreadable file or an invalid value."""
        path = Path(path)
        try:
            text = properties.decode(path.read_bytes())
        except OSError as error:
            raise ConfigError(str(path), "", "", f"the configuration file cannot be read: {error.strerror}") from error
        self.file = path
        seen: dict[str, int] = {}
        for entry in properties.parse(text, str(path)):
            if entry.key in seen:
                self.warnings.append(
                    f"{path}:{entry.line}: {entry.key} is already set in line {seen[entry.key]}; the last value is used"
                )
            seen[entry.key] = entry.line
            self.apply(entry.key, entry.value, f"{path}:{entry.line}")

    def check(self) -> None:
        """Check that values fit together; to be called after file and flags were applied. Raises ConfigError."""
        problems = itertools.chain(
            (_section_problem(section) for section in self._sections.values()),
            (check(self) for check in self.schema.checks),
        )
        for problem in problems:
            if problem:
                key, expected = problem
                raise ConfigError(self.source(key), key, self.value(key), expected)

    def apply(self, key: str, value: str, source: str) -> None:
        """Set one key at start. An unknown key adds a warning; an invalid value raises ConfigError."""
        if key not in self._options:
            self._not_an_option(key, value, source)
            return
        section, opt = self._options[key]
        self._set(section, {opt.name: opt.parse(value, source)})
        self._sources[key] = source

    def _set(self, section: type, changes: Mapping[str, Any]) -> None:
        self._sections[section] = dataclasses.replace(self._sections[section], **changes)

    def _not_an_option(self, key: str, value: str, source: str) -> None:
        if key in self.schema.inert:
            self.notes.append(f"{source}: {key} has no effect: {self.schema.inert[key]}")
        elif reason := self._refusal(key, value):
            self.warnings.append(f"{source}: {key} {reason}")
        elif key not in self.schema.unsupported:
            self.warnings.append(f"{source}: unknown key {key}{self._hint(key)}; ignored")

    def _refusal(self, key: str, value: str) -> str:
        """Why a value of a key that is no option is refused: the key is unsupported, and the value is not harmless."""
        if key not in self.schema.unsupported or value.strip().lower() == self.schema.harmless.get(key):
            return ""
        return f"is not supported: {self.schema.unsupported[key]}"

    def _hint(self, key: str) -> str:
        exact = self._lower.get(key.lower())
        near = [exact] if exact else difflib.get_close_matches(key, [*self._options, *self.schema.unsupported], 1, 0.7)
        return f" (did you mean {near[0]}?)" if near else ""

    def protect(self, keys: str) -> None:
        """Protect more keys from remote changes (the value of configBlackList)."""
        self._protected |= {key.strip() for key in keys.split(";") if key.strip()}

    # showing

    def options(self) -> Iterable[Option]:
        """All options in the order in which they are shown."""
        return (opt for _, opt in self._options.values())

    def value(self, key: str) -> str:
        """The value of a key as text; *** for a secret. Raises KeyError."""
        section, opt = self._options[key]
        return opt.masked(opt.text(getattr(self._sections[section], opt.name)))

    def source(self, key: str) -> str:
        """The source of a key's value, see Effective."""
        return self._sources.get(key, "default")

    def effective(self) -> list[Effective]:
        """Every option with its value, the source of the value, and its meaning."""
        return [Effective(opt.key, self.value(opt.key), self.source(opt.key), describe(opt)) for opt in self.options()]

    def properties_text(self) -> str:
        """The body of the replies to requests 26 and 319: one `key=value` per line, sorted."""
        rows = sorted((opt.key, self.value(opt.key)) for opt in self.options())
        return "".join(f"{key}={value}\n" for key, value in rows)

    # changing

    def check_change(self, changes: Mapping[str, str]) -> list[Refusal]:
        """Why these changes cannot be made at run time; empty if they can. Changes nothing.

        Unknown keys are not refused (RocketMQ ignores them).
        """
        refusals = []
        for key, value in changes.items():
            if key in self._protected:
                refusals.append(Refusal(key, "may not be changed by a request", protected=True))
            elif reason := self._change_problem(key, value):
                refusals.append(Refusal(key, reason))
        return refusals or self._joint_refusals(changes)

    def _joint_refusals(self, changes: Mapping[str, str]) -> list[Refusal]:
        by_section: dict[type, dict[str, Any]] = {}
        for key, value in changes.items():
            if key in self._options:
                section, opt = self._options[key]
                by_section.setdefault(section, {})[opt.name] = opt.parse(value, "remote change")
        refusals = []
        for section, values in by_section.items():
            if problem := _section_problem(dataclasses.replace(self._sections[section], **values)):
                refusals.append(Refusal(problem[0], f"does not fit the other settings: expected {problem[1]}"))
        return refusals

    def _change_problem(self, key: str, value: str) -> str:
        if key not in self._options:
            return self._refusal(key, value)
        section, opt = self._options[key]
        try:
            new = opt.parse(value, "remote change")
        except ConfigError as error:
            return f"{error.value!r} is not {error.expected}"
        changed = new != getattr(self._sections[section], opt.name)
        if changed and not opt.dynamic:
            return "takes effect at the next start only: change it in the configuration file and restart"
        return ""

    def change(self, changes: Mapping[str, str]) -> dict[str, str]:
        """Apply changes that `check_change` accepted, and call the listeners.

        Returns the keys whose values differ from before, with their texts, to be written to the file.
        """
        changed: dict[str, str] = {}
        for key, value in changes.items():
            if key not in self._options:
                continue
            section, opt = self._options[key]
            new = opt.parse(value, "remote change")
            if new != getattr(self._sections[section], opt.name):
                self._set(section, {opt.name: new})
                self._sources[key] = "changed at run time"
                changed[key] = opt.text(new)
        if changed:
            self.counter += 1
            for listener in self.listeners:
                listener(frozenset(changed))
        return changed


def _section_problem(section: Any) -> tuple[str, str] | None:
    """The result of a section's own check of its values together (`problem()`): (key, what was expected)."""
    find: Callable[[], tuple[str, str] | None] | None = getattr(section, "problem", None)
    return find() if find is not None else None


def parse_changes(text: str) -> dict[str, str]:
    """Parse the body of requests 25 and 318 (`key=value` lines). Raises ConfigError if it is no properties text."""
    return {entry.key: entry.value for entry in properties.parse(text, "request")}


@dataclass(frozen=True)
class NettyServerConfig:
    """The server's sockets and the limits of its reactor (RocketMQ's NettyServerConfig)."""

    bind_address: str = option(
        "0.0.0.0",  # noqa: S104 - a server serves other hosts; this key restricts it
        "Address to listen on. With 127.0.0.1 only this host can connect.",
    )
    server_channel_max_idle_time_seconds: int = option(
        120, "A connection that neither sends nor receives for this long is closed.", unit="s", minimum=1
    )
    server_socket_backlog: int = option(1024, "Connections that may wait to be accepted (listen backlog).", minimum=1)
    server_socket_snd_buf_size: int = option(
        0, "Send buffer of a socket; 0 leaves it to the kernel.", unit="bytes", minimum=0
    )
    server_socket_rcv_buf_size: int = option(
        0, "Receive buffer of a socket; 0 leaves it to the kernel.", unit="bytes", minimum=0
    )
    write_buffer_high_water_mark: int = option(
        8 * 1024 * 1024,
        "A connection with this much waiting to be sent is not read until it has drained.",
        unit="bytes",
        minimum=65536,
    )
    write_buffer_low_water_mark: int = option(
        2 * 1024 * 1024,
        "A connection that was not read is read again once no more than this waits to be sent.",
        unit="bytes",
        minimum=0,
    )
    shutdown_wait_time_seconds: int = option(
        30,
        "A graceful shutdown waits this long for requests in flight; then all connections are closed.",
        unit="s",
        minimum=1,
    )
    max_requests_in_flight: int = option(
        65536,
        "The most requests in flight; further ones are answered with SYSTEM_BUSY. Held long polls do not count. A "
        "request that runs as a task, such as a send that creates a topic, counts until it ends, also when its client "
        "has gone. So does a one-way; beyond the limit it is dropped.",
        minimum=1,
        ours=True,
    )
    max_requests_in_flight_per_connection: int = option(4096, "The same for one connection.", minimum=1, ours=True)
    max_connections: int = option(
        0,
        "The most open connections; 0 takes three quarters of the descriptor limit, the rest is for the store's files.",
        minimum=0,
        ours=True,
    )
    frame_max_length: int = option(
        16777216,
        "A frame longer than this closes its connection.",
        unit="bytes",
        minimum=4096,
        maximum=_INT32_MAX,
        ours=True,
    )
    max_unfinished_frame_bytes: int = option(
        0,
        "The most memory for incompletely received frames of all connections; beyond it the slowest sender is closed. "
        "At least twice frameMaxLength; 0 takes a sixteenth of the memory of the machine or its control group, from "
        "64 MiB to 1 GiB.",
        unit="bytes",
        minimum=0,
        ours=True,
    )
    min_frame_progress_bytes: int = option(
        65536,
        "An incompletely received frame must grow by this much, or end, in every serverChannelMaxIdleTimeSeconds, or "
        "its connection is closed.",
        unit="bytes",
        minimum=1,
        ours=True,
    )

    def problem(self) -> tuple[str, str] | None:
        """A key that does not fit the others, and what was expected of it; None if all fit."""
        if self.write_buffer_low_water_mark > self.write_buffer_high_water_mark:
            return "writeBufferLowWaterMark", f"at most writeBufferHighWaterMark ({self.write_buffer_high_water_mark})"
        if 0 < self.max_unfinished_frame_bytes < 2 * self.frame_max_length:
            return "maxUnfinishedFrameBytes", f"0, or at least twice frameMaxLength ({self.frame_max_length})"
        return None


class LogFormat(enum.StrEnum):
    """The format of a line of the log."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """The lowest level that is logged."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


@dataclass(frozen=True)
class LogConfig:
    """Where and how events are logged."""

    log_format: LogFormat = option(
        LogFormat.CONSOLE, "Format of a line: for people, or one JSON object per event.", ours=True
    )
    log_level: LogLevel = option(LogLevel.INFO, "Events below this level are not logged.", dynamic=True, ours=True)
    log_file: str | None = option(None, "File to log to.", unset="standard error", ours=True)
    log_file_max_size: int = option(
        100 * 1024 * 1024,
        "A log file of this size is rotated: FILE becomes FILE.1, FILE.1 becomes FILE.2.",
        unit="bytes",
        minimum=4096,
        ours=True,
    )
    log_file_backups: int = option(10, "The most rotated files that are retained.", minimum=0, maximum=1000, ours=True)
