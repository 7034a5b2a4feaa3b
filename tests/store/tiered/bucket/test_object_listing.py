"""Listings against a plain model, in obstore's memory store."""

import itertools
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from trimq.broker.store.tiered.bucket.obstore_store import ObstoreStore

_PARTS = ("a", "ab", "a-b", "b", "0", "00", "a%2Fb", "é")
NAMES = ["/".join(parts) for length in (1, 2, 3) for parts in itertools.product(_PARTS, repeat=length)]
"""Names that are prefixes of others, with and without the slash, and characters below and above it."""


def expected(names: list[str], prefix: str, after: str) -> list[str]:
    return sorted(name for name in names if name.startswith(prefix) and name not in (prefix, after) and name > after)


def filled(names: list[str]) -> ObstoreStore:
    store = ObstoreStore(MemoryStore())
    for name in names:
        store.create(name, [name.encode()])
    return store


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 400),
    of=st.sampled_from(NAMES),
    length=st.integers(0, 12),
    after=st.sampled_from(["", *NAMES]),
    page=st.integers(1, 50),
)
def test_a_listing_equals_the_model_and_its_pages_miss_nothing(
    seed: int, count: int, of: str, length: int, after: str, page: int
) -> None:
    names = Random(seed).sample(NAMES, count)
    store, prefix = filled(names), of[:length]
    wanted = expected(names, prefix, after)
    assert [info.name for info in store.list(prefix, after)] == wanted
    found: list[str] = []
    while infos := store.list(prefix, found[-1] if found else after, page):
        assert len(infos) <= page
        assert all(info.size == len(info.name.encode()) for info in infos)
        found += [info.name for info in infos]
    assert found == wanted


def test_a_thousand_and_more() -> None:
    names = [f"log/{number:05d}" for number in range(2500)]
    store = filled(names)
    assert [info.name for info in store.list("log/")] == names[:1000]
    assert [info.name for info in store.list("log/", names[1999])] == names[2000:]
    assert [info.name for info in store.list("log/", "", 2200)] == names[:2200]
    assert store.list("log/")[0].modified_ms > 1_700_000_000_000
