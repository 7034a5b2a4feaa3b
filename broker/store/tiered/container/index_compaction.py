"""From the entries of a local index file to a compacted one, in pieces: memory does not grow with the file.

The result is what following each slot's chain gives: entries of a slot together, newest first.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from trimq.protocol.tiered_index_layout import (
    BEGIN_MAGIC,
    COMPACT_SIZE,
    END_MAGIC,
    ENTRY_SIZE,
    HEADER,
    HEADER_SIZE,
    SLOT_SIZE,
    entries_at,
)

_PIECE: Final = 1 << 20
"""About so many entries are sorted at a time."""


def _entries(view: Any, slots: int, count: int) -> Any:
    """The entries 1 to ``count`` as rows of bytes."""
    begin = entries_at(slots) + ENTRY_SIZE
    return np.frombuffer(view, np.uint8, count * ENTRY_SIZE, begin).reshape(count, ENTRY_SIZE)


def _slots_of(rows: Any, slots: int) -> Any:
    hashes = np.ascontiguousarray(rows[:, :4]).view(">i4").ravel()
    return (hashes % slots).astype(np.int32)


def compact(view: Any, slots: int, begin_ms: int, end_ms: int, count: int, piece: int = _PIECE) -> Iterator[bytes]:
    """The bytes of the compacted file: header, slots, then entries in pieces."""
    rows = _entries(view, slots, count)
    slot_of = _slots_of(rows, slots)
    counts = np.bincount(slot_of, minlength=slots)
    used = int(np.count_nonzero(counts))
    yield HEADER.pack(END_MAGIC, begin_ms, end_ms, used, count)
    ends = np.cumsum(counts, dtype=np.int64)
    table = np.empty((slots, 2), ">i4")
    table[:, 0] = entries_at(slots) + COMPACT_SIZE * (ends - counts)
    table[:, 1] = COMPACT_SIZE * counts
    yield table.tobytes()
    low = 0
    while low < slots:
        before = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + piece, side="right")))
        chosen = np.flatnonzero((slot_of >= low) & (slot_of < high))[::-1]
        chosen = chosen[np.argsort(slot_of[chosen], kind="stable")]
        yield rows[chosen, :COMPACT_SIZE].tobytes()
        low = high


def chain(view: Any, slots: int, begin_ms: int, entries: int) -> tuple[int, int, int]:
    """Chain the entries of a local file anew, up to the first that was not written. Returns count, used slots, end.

    For a file that a killed process or a power cut left: its pages may be of different moments. ``view`` is changed.
    """
    rows = _entries(view, slots, entries - 1)
    sizes = np.ascontiguousarray(rows[:, 20:24]).view(">i4").ravel()
    missing = np.flatnonzero(sizes <= 0)
    count = int(missing[0]) if len(missing) else len(rows)
    table = np.frombuffer(view, ">i4", 2 * slots, HEADER_SIZE).reshape(slots, 2)
    table[:] = 0
    if not count:
        return 0, 0, 0
    slot_of = _slots_of(rows[:count], slots)
    order = np.argsort(slot_of, kind="stable")
    sorted_slots = slot_of[order]
    previous = np.zeros(count, ">i4")
    same = np.flatnonzero(sorted_slots[1:] == sorted_slots[:-1])
    previous[order[same + 1]] = order[same] + 1
    rows[:count, 28:32] = previous.view(np.uint8).reshape(count, 4)
    last = np.flatnonzero(np.append(sorted_slots[1:] != sorted_slots[:-1], True))
    table[sorted_slots[last], 0] = order[last] + 1
    seconds = np.ascontiguousarray(rows[:count, 24:28]).view(">i4").ravel()
    return count, len(last), begin_ms + 1000 * int(seconds.max())


__all__ = ["BEGIN_MAGIC", "SLOT_SIZE", "chain", "compact"]
