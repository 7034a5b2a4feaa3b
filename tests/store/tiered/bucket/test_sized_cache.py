"""The cache that is bounded by bytes, against a model."""

from hypothesis import given
from hypothesis import strategies as st

from trimq.broker.store.tiered.bucket.sized_cache import SizedCache

Steps = list[tuple[str, int, int]]


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.integers(0, 5), st.integers(0, 12))),
    st.integers(0, 20),
    st.integers(0, 2),
)
def test_what_was_used_least_recently_goes_first(steps: Steps, limit: int, least: int) -> None:
    cache: SizedCache[int, int] = SizedCache(limit, least)
    model: list[tuple[int, int, int]] = []
    for number, (step, key, size) in enumerate(steps):
        known = [entry for entry in model if entry[0] == key]
        others = [entry for entry in model if entry[0] != key]
        if step == "get":
            assert cache.get(key) == (known[0][1] if known else None)
            model = others + known
        elif step == "drop":
            cache.drop(key)
            model = others
        else:
            cache.put(key, number, size)
            model = [*others, (key, number, size)] if size <= limit or least else others
            while sum(entry[2] for entry in model) > limit and len(model) > least:
                del model[0]
        assert [key in cache for key in range(6)] == [any(entry[0] == key for entry in model) for key in range(6)]
        assert (len(cache), cache.bytes) == (len(model), sum(entry[2] for entry in model))


def test_a_use_keeps_a_value() -> None:
    cache: SizedCache[str, int] = SizedCache(10)
    cache.put("a", 1, 5)
    cache.put("b", 2, 5)
    assert cache.get("a") == 1
    cache.put("c", 3, 5)
    assert ("a" in cache, "b" in cache, "c" in cache) == (True, False, True)
