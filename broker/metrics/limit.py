"""How many series a metric may have on a page."""

from collections.abc import Collection
from itertools import islice


class SeriesLimit:
    """The limit of one page: each metric shows its oldest series, ``left_out`` has how many are missing, by metric."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.left_out: dict[str, int] = {}

    def shown(self, name: str, keys: Collection[str]) -> list[str]:
        """As many of the keys as the limit allows, the oldest ones."""
        self.left_out[name] = max(0, len(keys) - self._most)
        return list(islice(keys, self._most))
