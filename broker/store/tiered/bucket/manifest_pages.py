"""The objects of a manifest in memory, divided into pages.

A change makes the pages that it touches unsaved; the others keep the names that they have in the bucket. Two pages next
to each other that together are small enough become one as soon as one of them changes, so their number stays bounded:
two neighbours always have more than PAGE_ROWS bytes of rows.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from trimq.protocol.bucket_manifest import OBJECT, STRETCH, Entry, PageRef, StoredObject, StretchRows

PAGE_ROWS: Final = 4 * 1024 * 1024
"""Bytes of the rows of a page before they are packed, to about a fifth. A single object may have more."""


def order(entry: Entry) -> tuple[int, int, int]:
    """Where an entry stands in the manifest."""
    return entry.object.begin, entry.object.generation, entry.object.number


def compact(entry: Entry) -> Entry:
    """The entry with rows of its own: those of a page that has gone are not kept in memory."""
    stretches = StretchRows.of(entry.stretches)
    if stretches.rows.base is None:
        return Entry(entry.object, stretches)
    return Entry(entry.object, StretchRows(stretches.topics, stretches.rows.copy()))


class Page:
    """Consecutive entries. ``refs``: the pages in the bucket that have them, None if they are not saved.

    They are more than one if they did not fit one. A page is never changed: another one takes its place.
    """

    __slots__ = ("entries", "refs", "rows")

    def __init__(self, entries: Sequence[Entry], refs: tuple[PageRef, ...] | None = None) -> None:
        self.entries = entries
        self.refs = refs
        self.rows = sum(OBJECT.itemsize + STRETCH.itemsize * len(entry.stretches) for entry in entries)


class Pages:
    """All pages in log order. ``entries``: their entries; a change gives it a new list."""

    def __init__(self, pages: Iterable[Page] = ()) -> None:
        self._pages = [page for page in pages if page.entries]
        self.entries: list[Entry] = []
        self._collect()

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages)

    def __len__(self) -> int:
        return len(self._pages)

    def _collect(self) -> None:
        self.entries = [entry for page in self._pages for entry in page.entries]

    def append(self, entries: Sequence[Entry]) -> None:
        """Add entries behind all others."""
        if self._pages and self._pages[-1].refs is None:
            self._pages[-1] = Page([*self._pages[-1].entries, *entries])
        elif entries:
            self._pages.append(Page(entries))
        self.entries.extend(entries)

    def change(self, remove: Collection[StoredObject], add: Sequence[Entry]) -> None:
        """Remove some objects and add others, all at once. Raises ValueError if one is missing, or there already."""
        firsts = [order(page.entries[0]) for page in self._pages]
        gone: dict[int, set[StoredObject]] = {}
        come: dict[int, list[Entry]] = {}
        for stored in remove:
            gone.setdefault(_place(firsts, (stored.begin, stored.generation, stored.number)), set()).add(stored)
        for entry in add:
            come.setdefault(_place(firsts, order(entry)), []).append(compact(entry))
        touched: dict[int, Page] = {}
        for place in gone.keys() | come.keys():
            old = self._pages[place].entries if place < len(self._pages) else []
            removed = gone.get(place, set())
            kept = [entry for entry in old if entry.object not in removed]
            if len(kept) + len(removed) != len(old):
                missing = removed.difference(entry.object for entry in old)
                raise ValueError(f"{min(missing).name} is not in the manifest")
            entries = sorted([*map(compact, kept), *come.get(place, [])], key=order)
            for before, after in pairwise(entries):
                if order(before) == order(after):
                    raise ValueError(f"{after.object.name} is in the manifest already")
            touched[place] = Page(entries)
        changed = [touched.get(place, page) for place, page in enumerate(self._pages)]
        changed.extend(page for place, page in sorted(touched.items()) if place >= len(self._pages))
        self._pages = [page for page in changed if page.entries]
        self._collect()

    def arrange(self) -> list[Page]:
        """Divide large unsaved pages and join small ones with their neighbours; all pages."""
        arranged: list[Page] = []
        for page in self._pages:
            for part in _divide(page) if page.refs is None else (page,):
                last = arranged[-1] if arranged else None
                if last is not None and (last.refs is None or part.refs is None) and last.rows + part.rows <= PAGE_ROWS:
                    arranged[-1] = Page([*last.entries, *part.entries])
                else:
                    arranged.append(part)
        self._pages = arranged
        return list(arranged)


def _place(firsts: list[tuple[int, int, int]], key: tuple[int, int, int]) -> int:
    return max(0, bisect_right(firsts, key) - 1)


def _divide(page: Page) -> list[Page]:
    if page.rows <= PAGE_ROWS:
        return [page]
    parts: list[Page] = []
    entries: list[Entry] = []
    rows = 0
    for entry in page.entries:
        size = OBJECT.itemsize + STRETCH.itemsize * len(entry.stretches)
        if entries and rows + size > PAGE_ROWS:
            parts.append(Page(entries))
            entries, rows = [], 0
        entries.append(entry)
        rows += size
    return [*parts, Page(entries)]
