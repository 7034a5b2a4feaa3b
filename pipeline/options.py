"""Options of the tables: read once, at planning time. Errors name the option, its value and what was expected.

Spark passes options as strings and ignores the case of their names; so does this module. An unknown option is an error
too, since a misspelt filter must not silently read everything. Options that Spark itself adds are accepted.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

SPARKS_OWN: Final = frozenset(
    {"path", "checkpointlocation", "queryname", "outputmode", "header", "mergeschema", "recursivefilelookup"}
)
"""Options that Spark or its readers and writers add themselves."""

_SECRET: Final = re.compile("secret|password|token", re.IGNORECASE)
_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")


class OptionError(ValueError):
    """An option that cannot be used. The text names the option, its value, and what was expected.

    >>> str(OptionError("minPartitions", "many", "a whole number of at least 1"))
    "option minPartitions = 'many': expected a whole number of at least 1"
    """

    def __init__(self, option: str, value: object, expected: str) -> None:
        if isinstance(value, str) and _SECRET.search(option) and not option.lower().endswith("file"):
            value = "***"  # given by mistake: the text goes to logs and web pages
        given = "is not given" if value is None else f"= {value!r}"
        super().__init__(f"option {option} {given}: expected {expected}")
        self.option = option
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[type["OptionError"], tuple[str, object, str]]:
        """Spark pickles the errors of its workers, and the default would call ``__init__`` with the text alone."""
        return type(self), (self.option, self.value, self.expected)


class Options:
    """The options of one table. Each getter raises OptionError for a value that cannot be parsed.

    >>> options = Options({"MINPARTITIONS": "8", "failOnDataLoss": "no"})
    >>> options.integer("minPartitions", least=1), options.flag("failOnDataLoss", default=True)
    (8, False)
    >>> options.text("group") is None
    True
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given: dict[str, tuple[str, str]] = {name.lower(): (name, str(value)) for name, value in given.items()}

    def check_names(self, known: Iterable[str], table: str) -> None:
        """Raises OptionError for an option that is not in ``known``, and suggests the nearest name."""
        names = {name.lower(): name for name in known}
        for lower, (name, value) in self._given.items():
            if lower in names or lower in SPARKS_OWN or lower.startswith("spark."):
                continue
            near = difflib.get_close_matches(lower, names, n=1)
            hint = f"; did you mean {names[near[0]]}?" if near else ""
            raise OptionError(name, value, f"an option of {table}: {', '.join(sorted(names.values()))}{hint}")

    def has(self, name: str) -> bool:
        """Whether the option is given and not empty."""
        return self.text(name) is not None

    def text(self, name: str, default: str | None = None) -> str | None:
        """The option's text, stripped; ``default`` if it is not given or empty."""
        found = self._given.get(name.lower())
        value = found[1].strip() if found is not None else ""
        return value or default

    def required(self, name: str, expected: str) -> str:
        """The option's text. Raises OptionError if it is not given."""
        value = self.text(name)
        if value is None:
            raise OptionError(name, None, expected)
        return value

    def words(self, name: str, separator: str = ",") -> tuple[str, ...]:
        """The option's parts, stripped, without empty ones and duplicates."""
        parts = (part.strip() for part in (self.text(name) or "").split(separator))
        return tuple(dict.fromkeys(part for part in parts if part))

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean: ``true``, ``1``, ``yes``, ``on`` or their opposites."""
        value = self.text(name)
        if value is None:
            return default
        if value.lower() in _TRUE:
            return True
        if value.lower() in _FALSE:
            return False
        raise OptionError(name, value, "true or false")

    def integer(self, name: str, default: int | None = None, *, least: int = 0, unit: str = "") -> int | None:
        """An integer of at least ``least``; the error names ``unit``."""
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
        """One of ``choices``, compared without case."""
        words = {word.lower(): word for word in choices}
        value = self.text(name, default) or default
        if value.lower() not in words:
            raise OptionError(name, value, " or ".join(words.values()))
        return words[value.lower()]

    def json(self, name: str, expected: str) -> Any:
        """A JSON value; None if the option is not given."""
        value = self.text(name)
        if value is None:
            return None
        try:
            return json.loads(value)
        except ValueError:
            raise OptionError(name, value, expected) from None

    def sql(self, name: str) -> str | None:
        """An SQL92 expression over the properties of messages; None if it is not given.

        >>> Options({"sql": "amount > 10"}).sql("sql")
        'amount > 10'
        """
        from trimq.protocol.sql92 import ExpressionError, compile_expression  # noqa: PLC0415 - few tables have one

        value = self.text(name)
        if value is None:
            return None
        try:
            compile_expression(value)
        except ExpressionError as error:
            raise OptionError(
                name, value, f"an SQL92 expression (at position {error.position}: {error.reason})"
            ) from None
        return value

    def at_most_one(self, *names: str) -> None:
        """Raises OptionError if more than one of these options is given."""
        given = [name for name in names if self.has(name)]
        if len(given) > 1:
            raise OptionError(given[1], self.text(given[1]), f"not to be given together with {given[0]}")
