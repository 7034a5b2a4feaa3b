"""The stretches of many objects by queue: with numpy, because a thousand queues in 256 objects are 256,000 rows.

To group them takes a second: it is done in a thread.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from trimq.broker.store.tiered.bucket.stretch_table import StretchTable
from trimq.protocol.bucket_manifest import Entry, StretchRows

_COLUMNS: Final = (
    *("offset", "messages", "size", "position", "blocks"),
    *("first_physical", "last_physical", "begin_ms", "end_ms"),
)
"""The order of StretchTable."""
_OFFSET, _MESSAGES, _SIZE, _FIRST, _LAST = 0, 1, 2, 5, 6
_LOW: Final = 0xFFFFFFFF


class Run(NamedTuple):
    """Messages of a queue that follow each other, in one stretch or in more. ``size``: bytes of the records."""

    topic: str
    queue_id: int
    offset: int
    messages: int
    size: int
    first_physical: int
    last_physical: int


class StretchGroups:
    """See above. ``len`` is the number of queues. To create one blocks: for a thread."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._objects = [entry.object for entry in entries]
        counts = [len(entry.stretches) for entry in entries]
        self._numbers = np.empty((sum(counts), len(_COLUMNS)), np.int64)
        keys = np.empty(sum(counts), np.int64)
        topics: dict[str, int] = {}
        known: dict[int, tuple[Sequence[str], Any]] = {}
        at = 0
        for entry in entries:
            own = StretchRows.of(entry.stretches)
            if id(own.topics) not in known:
                known[id(own.topics)] = own.topics, _numbers_of(own.topics, topics)
            end = at + len(own)
            for column, name in enumerate(_COLUMNS):
                self._numbers[at:end, column] = own.rows[name]
            keys[at:end] = known[id(own.topics)][1][own.rows["topic"]] << 32
            keys[at:end] |= own.rows["queue_id"].astype(np.int64) & _LOW
            at = end
        objects = np.repeat(np.arange(len(entries)), counts)
        # The sort is stable: stretches with the same offset stay in the order of their objects.
        order = np.lexsort((self._numbers[:, _OFFSET], keys))
        keys, objects, numbers = keys[order], objects[order], self._numbers
        offsets = numbers[:, _OFFSET].take(order)
        ends = offsets + numbers[:, _MESSAGES].take(order)
        firsts = np.flatnonzero(_differs(keys))
        queues = keys[firsts].tolist()
        names = list(topics)
        self.queues: list[tuple[str, int]] = [
            (names[key >> 32], (key & _LOW ^ 0x80000000) - 0x80000000) for key in queues
        ]
        self.ends: list[int] = np.maximum.reduceat(ends, firsts).tolist() if len(firsts) else []
        """Where each queue ends: also by a stretch without messages."""
        keep = ends > offsets
        order, keys, objects, offsets = order[keep], keys[keep], objects[keep], offsets[keep]
        keep = _differs(keys) | _differs(offsets) | _differs(objects)
        self._order, self._keys, self._of = order[keep], keys[keep], objects[keep]
        self._edges = np.searchsorted(self._keys, [*queues, np.iinfo(np.int64).max]).tolist()

    def __len__(self) -> int:
        return len(self.queues)

    def table(self, number: int) -> StretchTable:
        """The stretches with messages of a queue."""
        begin, end = self._edges[number : number + 2]
        numbers = self._numbers[self._order[begin:end]]
        ends = numbers[:-1, _OFFSET] + numbers[:-1, _MESSAGES]
        has_overlaps = bool((ends > numbers[1:, _OFFSET]).any())
        objects = tuple([self._objects[place] for place in self._of[begin:end].tolist()])
        return StretchTable.of(numbers.tobytes(), objects, has_overlaps=has_overlaps)

    def runs(self) -> list[Run]:
        """The messages of all queues, sorted by queue and offset. Blocks: for a thread."""
        if not len(self._order):
            return []
        offsets, messages, sizes, first, last = (
            self._numbers[:, column].take(self._order) for column in (_OFFSET, _MESSAGES, _SIZE, _FIRST, _LAST)
        )
        begins = _differs(self._keys)
        begins[1:] |= (offsets[:-1] + messages[:-1] != offsets[1:]) | (last[:-1] >= first[1:])
        at = np.flatnonzero(begins)
        behind = np.append(at[1:], len(begins)) - 1
        places = np.searchsorted(np.flatnonzero(_differs(self._keys)), at, "right") - 1
        queues = [self.queues[number] for number in range(len(self)) if self._edges[number] < self._edges[number + 1]]
        columns = (
            offsets[at],
            np.add.reduceat(messages, at),
            np.add.reduceat(sizes, at),
            first[at],
            last[behind],
        )
        return sorted(
            Run(*queues[place], *numbers)
            for place, *numbers in zip(places.tolist(), *(column.tolist() for column in columns), strict=True)
        )


def runs_of(entries: Sequence[Entry]) -> list[Run]:
    """See StretchGroups.runs. Blocks: for a thread."""
    return StretchGroups(entries).runs()


def _numbers_of(topics: Sequence[str], numbers: dict[str, int]) -> Any:
    return np.array([numbers.setdefault(topic, len(numbers)) for topic in topics], np.int64)


def _differs(values: Any) -> Any:
    """Whether each value differs from the one before; the first does."""
    flags = np.ones(len(values), np.bool_)
    flags[1:] = values[1:] != values[:-1]
    return flags
