"""Options: a configuration section is a frozen dataclass; ``option`` creates its fields with their documentation."""

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypedDict, Unpack

from trimq.remoting.config.properties import ConfigError

_INT32_MAX = 2**31 - 1
MASK: Final = "***"
"""Shown instead of a secret."""


@dataclass(frozen=True, slots=True)
class Option:
    """The definition of one key.

    `unit` is text for people ("ms", "bytes"). A change of a `dynamic` option applies while the program runs. The value
    of a `secret` one is shown nowhere, and no request changes it.
    """

    key: str
    name: str
    doc: str
    kind: type
    optional: bool
    default: Any
    unit: str = ""
    dynamic: bool = False
    minimum: int | None = None
    maximum: int | None = None
    ours: bool = False
    unset: str = ""
    shown: str = ""
    check: Callable[[Any], str] | None = None
    secret: bool = False

    def parse(self, text: str, where: str) -> Any:
        """The value of a text from a file, a flag or a remote change. Raises ConfigError if it is invalid."""
        text = text.strip()
        if not text and self.optional:
            return None
        value = self._plain(text, where)
        if self.check is not None and (problem := self.check(value)):
            raise ConfigError(where, self.key, self.masked(text), problem)
        return value

    def _plain(self, text: str, where: str) -> Any:
        if self.kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif self.kind is int:
            try:
                number = int(text)
            except ValueError:
                pass
            else:
                if (self.minimum is None or number >= self.minimum) and (
                    self.maximum is None or number <= self.maximum
                ):
                    return number
        elif issubclass(self.kind, enum.Enum):
            for member in self.kind:
                if member.value == text.upper() or member.value == text:
                    return member
        else:
            return text
        raise ConfigError(where, self.key, self.masked(text), self.expected())

    def expected(self) -> str:
        """A description of valid values."""
        if self.kind is bool:
            return "true or false"
        if issubclass(self.kind, enum.Enum):
            return "one of " + ", ".join(str(m.value) for m in self.kind)
        if self.kind is int:
            unit = f" ({self.unit})" if self.unit else ""
            if self.minimum is not None and self.maximum is not None:
                return f"a whole number from {self.minimum} to {self.maximum}{unit}"
            if self.minimum is not None:
                return f"a whole number of at least {self.minimum}{unit}"
            return f"a whole number{unit}"
        return "text"

    def masked(self, text: str) -> str:
        """The text of a value as people may see it: *** instead of a secret; an empty one stays empty."""
        return MASK if self.secret and text else text

    def text(self, value: Any) -> str:
        """A value as written in a file; a secret too."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, enum.Enum):
            return str(value.value)
        return str(value)


def camel_case(name: str) -> str:
    """`store_path_root_dir` -> `storePathRootDir`."""
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


class OptionFacts(TypedDict, total=False):
    """The keyword arguments of ``option``; see Option."""

    key: str | None
    unit: str
    dynamic: bool
    minimum: int | None
    maximum: int | None
    ours: bool
    unset: str
    shown: str
    check: Callable[[Any], str] | None
    secret: bool


def option(default: Any, doc: str, **facts: Unpack[OptionFacts]) -> Any:
    """A field of a section.

    ``ours`` marks a key that RocketMQ does not have. ``unset`` is the meaning of an empty value. ``check`` returns what
    was expected instead of an invalid value, and "" for a valid one. ``shown`` is printed instead of a default that
    depends on the machine. ``secret`` marks a value that nothing shows. A callable ``default`` is called for the value.
    """
    metadata = {"doc": doc, "key": None, "maximum": None, "unit": ""} | facts
    shows = not facts.get("secret", False)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata, repr=shows)
    return dataclasses.field(default=default, metadata=metadata, repr=shows)


def options_of(section: type) -> list[Option]:
    """The options of a section in the order of its fields."""
    return [
        opt if factory is None else dataclasses.replace(opt, default=factory()) for opt, factory in _fields_of(section)
    ]


@functools.cache
def _fields_of(section: type) -> tuple[tuple[Option, Callable[[], Any] | None], ...]:
    """Each option, and what makes its default if that depends on the machine."""
    hints = typing.get_type_hints(section)
    found = []
    for field in dataclasses.fields(section):
        if "doc" not in field.metadata:
            continue
        kind, optional = _kind(hints[field.name])
        factory = None if field.default_factory is dataclasses.MISSING else field.default_factory
        facts = dict(field.metadata)
        facts["key"] = facts["key"] or camel_case(field.name)
        if kind is int and facts["maximum"] is None and facts["unit"] in ("ms", "s"):
            facts["maximum"] = _INT32_MAX
        opt = Option(name=field.name, kind=kind, optional=optional, default=field.default, **facts)
        found.append((opt, factory))
    return tuple(found)


def _kind(hint: Any) -> tuple[type, bool]:
    if isinstance(hint, types.UnionType):
        (kind,) = (part for part in typing.get_args(hint) if part is not type(None))
        return kind, True
    return hint, False


def describe(opt: Option) -> str:
    """The meaning of an option in one line, with its unit and whether changes apply live."""
    text = opt.doc
    if opt.unset:
        text += f" Empty: {opt.unset}."
    facts = [f"unit: {opt.unit}"] if opt.unit else []
    if issubclass(opt.kind, enum.Enum):
        facts.append(opt.expected())
    if opt.dynamic:
        facts.append("changes apply live")
    if opt.ours:
        facts.append("TriMQ only")
    return f"{text} ({'; '.join(facts)})" if facts else text
