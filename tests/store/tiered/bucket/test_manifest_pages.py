"""The pages of a manifest in memory against a plain list of objects: changes, joins of small pages, divisions."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.broker.store.tiered.bucket import manifest_pages
from trimq.broker.store.tiered.bucket.manifest_pages import Page, Pages, compact
from trimq.protocol.bucket_manifest import (
    OBJECT,
    STRETCH,
    Entry,
    PageRef,
    StoredObject,
    Stretch,
    StretchRows,
    decode_page,
    encode_page,
)

PAGE_ROWS = 8000
ONE = StretchRows.of([Stretch("T", 0, 1, 0, 1, 80, 64, 0, 0, 0, 0)])


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_pages, "PAGE_ROWS", PAGE_ROWS)
        yield


def entry(number: int, size: int, generation: int = 0) -> Entry:
    """An object whose rows take so many tenths of a page."""
    stretches = size * PAGE_ROWS // 10 // STRETCH.itemsize
    rows = ONE.rows[[0] * stretches]
    return Entry(StoredObject(number * 10, number * 10 + 10, generation, 1, 0, 9, 9), StretchRows(ONE.topics, rows))


def save(pages: Pages) -> int:
    """Give each page that needs it a name, as a save does; return their number."""
    written = 0
    for page in pages.arrange():
        if page.refs is None:
            page.refs = (PageRef(f"page-{id(page)}", 1, len(page.entries)),)
            written += 1
    return written


CHANGES = st.lists(st.tuples(st.sampled_from("aacs"), st.integers(0, 30), st.integers(1, 6)), max_size=40)


@given(CHANGES)
def test_pages_have_what_a_list_has(changes: list[tuple[str, int, int]]) -> None:
    pages, expected, number = Pages(), list[Entry](), 0
    for kind, place, size in changes:
        if kind == "a":
            added = [entry(number, size), entry(number + 1, 1)]
            number += 2
            pages.append(added)
            expected += added
        elif kind == "c" and expected:
            at = place % len(expected)
            gone = expected[at : at + size]
            first = gone[0].object
            joined = entry(first.begin // 10, max(1, size - 2), first.generation + 1)
            pages.change([one.object for one in gone], [joined] if size % 2 else [])
            expected[at : at + size] = [joined] if size % 2 else []
        else:
            save(pages)
            # Neighbours are not both small, so there are few pages; none is too large if it could be divided.
            for one, two in pairwise(pages):
                assert one.rows + two.rows > PAGE_ROWS
            for page in pages:
                assert page.rows <= PAGE_ROWS or len(page.entries) == 1
            assert save(pages) == 0
        assert pages.entries == expected
        assert [one for page in pages for one in page.entries] == expected
        assert all(page.entries for page in pages)
    assert len(pages) == len(list(pages))


def test_a_change_writes_only_the_pages_that_it_touches() -> None:
    pages = Pages()
    pages.append([entry(number, 2) for number in range(50)])
    assert save(pages) >= 10
    before = list(pages)
    pages.change([before[3].entries[0].object], [])
    assert save(pages) == 1
    assert len(set(before) & set(pages)) == len(before) - 1
    # Over the edge of two pages: both are written, or one if they fit it.
    before = list(pages)
    left, right = before[5].entries[-1], before[6].entries[0]
    pages.change([left.object, right.object], [entry(left.object.begin // 10, 1, 1)])
    assert save(pages) == 2
    assert pages.entries == sorted(pages.entries, key=lambda one: one.object.begin)


def test_an_object_in_front_of_all_others() -> None:
    pages = Pages()
    pages.append([entry(number, 1) for number in (5, 6)])
    pages.change([], [entry(1, 1)])
    assert [one.object.begin for one in pages.entries] == [10, 50, 60]
    pages.change([one.object for one in pages.entries], [])
    assert len(pages) == 0
    pages.change([], [entry(2, 1), entry(1, 1)])
    assert [one.object.begin for one in pages.entries] == [10, 20]


def test_the_same_object_twice() -> None:
    pages = Pages()
    with pytest.raises(ValueError, match="already"):
        pages.change([], [entry(1, 1), entry(1, 1)])
    assert pages.entries == []


def test_entries_that_stay_do_not_keep_a_page_that_has_gone() -> None:
    decoded = decode_page(encode_page([entry(number, 1) for number in range(4)]))
    whole = decoded[0].stretches
    assert isinstance(whole, StretchRows)
    assert whole.rows.base is not None
    pages = Pages([Page(decoded, (PageRef("p", 1, 4),))])
    pages.change([decoded[1].object], [])
    for one in pages.entries:
        assert isinstance(one.stretches, StretchRows)
        assert one.stretches.rows.base is None
    assert compact(Entry(decoded[0].object, list(whole))) == decoded[0]


def test_small_pages_that_are_saved_stay() -> None:
    pages = Pages([Page([entry(number, 1)], (PageRef(f"p{number}", 1, 1),)) for number in range(3)])
    assert save(pages) == 0
    assert len(pages) == 3
    pages.append([entry(3, 1)])
    assert save(pages) == 1
    assert len(pages) == 3


def test_rows_of_a_page() -> None:
    assert Page([entry(1, 0), entry(2, 5)]).rows == 2 * OBJECT.itemsize + STRETCH.itemsize * (
        5 * PAGE_ROWS // 10 // STRETCH.itemsize
    )
