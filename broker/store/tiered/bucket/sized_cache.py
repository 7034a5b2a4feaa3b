"""A cache that is bounded by bytes."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SizedCache(Generic[K, V]):
    """Values with their sizes. What was used least recently goes first; what is larger than all of it never enters.

    ``least``: so many values stay, whatever their size.
    """

    def __init__(self, limit: int, least: int = 0) -> None:
        self.limit = limit
        self._least = least
        self.bytes = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """The value. Counts as a use of it."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value of so many bytes."""
        self.drop(key)
        if size > self.limit and not self._least:
            return
        self._values[key] = value, size
        self.bytes += size
        while self.bytes > self.limit and len(self._values) > self._least:
            _, (_, gone) = self._values.popitem(last=False)
            self.bytes -= gone

    def drop(self, key: K) -> None:
        """Remove a value, if it is there."""
        found = self._values.pop(key, None)
        if found is not None:
            self.bytes -= found[1]
