"""The limit of series per metric on a page."""

from collections.abc import Collection
from itertools import islice
from typing import TypeVar

_K = TypeVar("_K")


class SeriesLimit:
    """The limit for one page. Each metric shows its oldest series; ``left_out`` counts the missing ones by metric."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.left_out: dict[str, int] = {}

    def shown(self, name: str, keys: Collection[_K]) -> list[_K]:
        """The oldest of ``keys``, as many as the limit allows."""
        return list(islice(keys, self.room(name, len(keys))))

    def room(self, name: str, series: int) -> int:
        """How many of a metric's ``series`` may be shown."""
        self.left_out[name] = max(0, series - self._most)
        return self._most
