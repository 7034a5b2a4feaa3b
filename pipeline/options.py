"""Options of the tables: read once, at planning time, with errors that say which option, its value, what was expected.

Spark hands options over as texts and compares their names without case; so does this module. An option that no table
knows is an error too: a typing mistake must not silently read everything. What Spark itself passes along is let
through.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

SPARKS_OWN: Final = frozenset(
    {"path", "checkpointlocation", "queryname", "outputmode", "header", "mergeschema", "recursivefilelookup"}
)
"""Options that Spark or its writers set on their own account."""

_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")


class OptionError(ValueError):
    """An option that cannot be used: the text names it, its value, and what was expected.

    >>> str(OptionError("minPartitions", "many", "a whole number of at least 1"))
    "option minPartitions = 'many': expected a whole number of at least 1"
    """

    def __init__(self, option: str, value: object, expected: str) -> None:
        given = "is not given" if value is None else f"= {value!r}"
        super().__init__(f"option {option} {given}: expected {expected}")
        self.option = option
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[type["OptionError"], tuple[str, object, str]]:
        """Spark carries errors from its workers by pickle."""
        return type(self), (self.option, self.value, self.expected)


class Options:
    """The options of one table. Every getter raises OptionError for a value that it does not understand.

    >>> options = Options({"MINPARTITIONS": "8", "failOnDataLoss": "no"})
    >>> options.integer("minPartitions", least=1), options.flag("failOnDataLoss", default=True)
    (8, False)
    >>> options.text("group") is None
    True
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given: dict[str, tuple[str, str]] = {name.lower(): (name, str(value)) for name, value in given.items()}

    def check_names(self, known: Iterable[str], table: str) -> None:
        """Raises OptionError for an option that is none of ``known``, with the one that was perhaps meant."""
        names = {name.lower(): name for name in known}
        for lower, (name, value) in self._given.items():
            if lower in names or lower in SPARKS_OWN or lower.startswith("spark."):
                continue
            near = difflib.get_close_matches(lower, names, n=1)
            hint = f"; is {names[near[0]]} meant?" if near else ""
            raise OptionError(name, value, f"an option of {table}: {', '.join(sorted(names.values()))}{hint}")

    def has(self, name: str) -> bool:
        """Whether the option is given and not empty."""
        return self.text(name) is not None

    def text(self, name: str, default: str | None = None) -> str | None:
        """The option's text without blanks around it; ``default`` where it is not given or empty."""
        found = self._given.get(name.lower())
        value = found[1].strip() if found is not None else ""
        return value or default

    def required(self, name: str, expected: str) -> str:
        """The option's text. Raises OptionError where it is not given."""
        value = self.text(name)
        if value is None:
            raise OptionError(name, None, expected)
        return value

    def words(self, name: str, separator: str = ",") -> tuple[str, ...]:
        """The option's parts, without blanks and empty ones, each once."""
        parts = (part.strip() for part in (self.text(name) or "").split(separator))
        return tuple(dict.fromkeys(part for part in parts if part))

    def flag(self, name: str, *, default: bool) -> bool:
        """A yes or no."""
        value = self.text(name)
        if value is None:
            return default
        if value.lower() in _TRUE:
            return True
        if value.lower() in _FALSE:
            return False
        raise OptionError(name, value, "true or false")

    def integer(self, name: str, default: int | None = None, *, least: int = 0, unit: str = "") -> int | None:
        """A whole number, ``least`` at the lowest; ``unit`` is named in the error."""
        value = self.text(name)
        if value is None:
            return default
        expected = f"a whole number{' of ' + unit if unit else ''}, at least {least}"
        try:
            number = int(value)
        except ValueError:
            raise OptionError(name, value, expected) from None
        if number < least:
            raise OptionError(name, value, expected)
        return number

    def choice(self, name: str, choices: Iterable[str], default: str) -> str:
        """One of some words; case does not matter."""
        words = {word.lower(): word for word in choices}
        value = self.text(name, default) or default
        if value.lower() not in words:
            raise OptionError(name, value, " or ".join(words.values()))
        return words[value.lower()]

    def json(self, name: str, expected: str) -> Any:
        """A JSON value; None where the option is not given."""
        value = self.text(name)
        if value is None:
            return None
        try:
            return json.loads(value)
        except ValueError:
            raise OptionError(name, value, expected) from None

    def at_most_one(self, *names: str) -> None:
        """Raises OptionError where more than one of these options is given."""
        given = [name for name in names if self.has(name)]
        if len(given) > 1:
            raise OptionError(given[1], self.text(given[1]), f"not to be given together with {given[0]}")
