import builtins
import errno
import itertools
import struct
from collections.abc import Callable
from typing import Any, cast

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from trimq.broker.store.index.index_file import Cold, IndexShape
from trimq.broker.store.index.index_service import IndexService
from trimq.broker.store.running_flags import RunningFlags
from trimq.protocol.hashing import key_hash, string_hash
from trimq.protocol.index_batch import Batch, Message, PlainBatch, make_batch, other_batch, seconds_since
from trimq.protocol.index_batch_native import NativeBatch
from trimq.protocol.index_batch_numpy import NumpyBatch
from trimq.protocol.index_layout import ENTRY, HEADER, entry_at, file_size, slot_at
from trimq.protocol.native import NATIVE, Extension, Keys, NativeExtension

NOW = 1_700_000_000_000
FAR = 1 << 62
TOPIC = "TopicTest"
BATCHES: list[Batch] = [PlainBatch(), NumpyBatch()]
if NATIVE.is_on:
    BATCHES.append(NativeBatch(NATIVE, NumpyBatch))

texts = st.one_of(
    st.text(st.characters(codec="ascii"), min_size=1, max_size=40),
    st.text(min_size=1, max_size=30),
    st.text(st.characters(codec="ascii"), min_size=190, max_size=300),
)


class Rig:
    def __init__(
        self, disk: SimDisk | None = None, *, slots: int = 8, entries: int = 20, batch: Batch | None = None
    ) -> None:
        self.disk = disk or SimDisk()
        self.flags = RunningFlags()
        self.service = IndexService(
            self.disk, "/store", IndexShape(slots, entries), self.flags, wall_ms=lambda: NOW, batch=batch
        )

    async def put(self, phy: int, *keys: str, time: int = NOW) -> None:
        self.service.put(TOPIC, keys, phy, time)
        assert await self.service.flush_pending()

    def find(self, key: str, *, begin: int = 0, end: int = FAR, limit: int = 1000) -> list[int]:
        return self.service.select(TOPIC, key, begin, end, limit)

    def image(self, number: int = 0) -> bytes:
        return self.disk.content(f"/store/index/{self.disk.list('/store/index')[number]}")

    def reloaded(self) -> "Rig":
        shape = self.service.shape
        rig = Rig(self.disk, slots=shape.slots, entries=shape.entries)
        rig.service.load()
        return rig


# -- hashes


@given(st.lists(texts, max_size=30))
@example(["0000000#"])  # an empty rest after a negative hash
def test_hashes_are_those_of_java(keys: list[str]) -> None:
    expected = [key_hash(*text.split("#", 1)) if "#" in text else abs(string_hash(text)) for text in keys]
    expected = [value if value <= 0x7FFFFFFF else 0 for value in expected]
    for batch in BATCHES:
        assert batch.key_hashes(keys) == expected


def test_the_hash_without_an_absolute_value_is_zero() -> None:
    text = "polygenelubricants"  # String.hashCode is the smallest integer
    assert string_hash(text) == -(1 << 31)
    for batch in BATCHES:
        assert batch.key_hashes([text, "a"]) == [0, 97]


def test_many_long_texts_are_hashed_as_each_alone() -> None:
    """More letters than are processed together."""
    keys = [chr(33 + at % 90) * (1 + at * 7 % 1024) for at in range(300)]
    for batch in BATCHES:
        assert batch.key_hashes(keys) == [abs(string_hash(key)) for key in keys]


def test_the_fastest_form_that_is_installed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_batch(), NativeBatch if NATIVE.is_on else NumpyBatch)
    assert isinstance(other_batch(), NumpyBatch)
    real = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name == "trimq.protocol.index_batch_numpy":
            raise ImportError
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert isinstance(other_batch(), PlainBatch)


class FailingExtension:
    """The extension's calls for the index, one of which raises NativeFault."""

    class NativeFault(Exception):  # noqa: N818 - the extension's name
        """Stands for the extension's own exception."""

    def __init__(self, call: str, *, after: int = 0) -> None:
        """``after``: the number of calls that succeed first."""
        self._call = call
        self._after = after

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            self._after -= 1
            if self._after < 0:
                return self._fail
        return getattr(NATIVE.extension, name)

    def _fail(self, *_: Any) -> None:
        raise self.NativeFault("a test says so")


@pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")
@pytest.mark.parametrize("call", ["flat", "put_entries"])
async def test_a_fault_of_the_extension_costs_the_index_nothing(call: str) -> None:
    native = NativeExtension(cast("Extension", FailingExtension(call)))
    rig, other = Rig(slots=8, batch=NativeBatch(native, NumpyBatch)), Rig(slots=8, batch=NumpyBatch())
    for one in (rig, other):
        await one.put(100, "unique", "one")
        one.service.put_run(HashedKeys([(key_hash(TOPIC, "hashed"), 300, NOW)]))
        await one.put(200, "two", time=NOW + 5000)
    assert (native.is_on, native.reason) == (False, "a fault: a test says so")
    assert rig.image() == other.image()
    assert rig.find("one") == [100]
    assert rig.find("hashed") == [300]


@pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")
@pytest.mark.parametrize("other", [NumpyBatch, PlainBatch])
async def test_a_fault_in_one_file_leaves_the_next_one_to_the_other_form(other: Callable[[], Batch]) -> None:
    """Its rows still come from the extension."""
    native = NativeExtension(cast("Extension", FailingExtension("put_entries", after=1)))
    rigs = [Rig(slots=8, entries=20, batch=batch) for batch in (NativeBatch(native, other), other())]
    for rig in rigs:
        for keys in (range(1, 19), range(19, 25)):  # enough for a second file to be made ahead, and some keys for both
            for at in keys:
                rig.service.put(TOPIC, (f"k{at}",), 100 * at, NOW + 1000 * at)
            assert await rig.service.flush_pending()
            assert native.is_on == (rig is rigs[0] and keys.start == 1)
    assert [file.count for file in rigs[0].service.files] == [20, 6]
    for number in range(2):
        assert rigs[0].image(number) == rigs[1].image(number)


@pytest.mark.parametrize("batch", BATCHES)
async def test_half_of_a_pair_of_surrogates_is_a_key_like_others(batch: Batch) -> None:
    rig = Rig(slots=8, batch=batch)
    await rig.put(100, "\ud800", "ä")
    assert rig.find("\ud800") == rig.find("ä") == [100]


# -- bytes


async def test_bytes_of_a_file() -> None:
    rig = Rig(slots=4, entries=6)
    await rig.put(100, "unique", "one", time=NOW)
    await rig.put(300, "two", time=NOW + 2999)
    await rig.put(500, "one", time=NOW + 3000)
    assert file_size(4, 6) == len(rig.image()) == 40 + 16 + 120
    hashes = [key_hash(TOPIC, key) for key in ("unique", "one", "two", "one")]
    chains: dict[int, int] = {}
    expected = bytearray(len(rig.image()))
    for number, (key, phy, seconds) in enumerate(zip(hashes, (100, 100, 300, 500), (0, 0, 2, 3), strict=True), start=1):
        struct.pack_into(">iqii", expected, 56 + 20 * number, key, phy, seconds, chains.get(key % 4, 0))
        chains[key % 4] = number
    for slot, number in chains.items():
        struct.pack_into(">i", expected, 40 + 4 * slot, number)
    struct.pack_into(">qqqqii", expected, 0, NOW, NOW + 3000, 100, 500, len(chains), 5)
    assert rig.image() == expected


words = st.one_of(st.integers(0, 9).map("k{}".format), texts, st.just(""))


@given(
    st.lists(st.tuples(st.sampled_from([TOPIC, "Other"]), st.lists(words, max_size=4)), max_size=40),
    st.integers(1, 7),
    st.integers(1, 9),
)
@example([(TOPIC, ["k1", "\u20ac", "k1"]), ("Other", []), ("Other", ["k1", ""])], 2, 9)
@settings(max_examples=50)
def test_all_forms_write_the_same_bytes(messages: list[tuple[str, list[str]]], slots: int, at_once: int) -> None:
    async def run(batch: Batch) -> list[bytes]:
        rig = Rig(slots=slots, entries=17, batch=batch)
        for number, (topic, keys) in enumerate(messages):
            rig.service.put(topic, tuple(keys), 100 * number, NOW + 700 * number)
            if number % at_once == 0:
                assert await rig.service.flush_pending()
        assert await rig.service.flush_pending()
        return [rig.disk.content(f"/store/index/{name}") for name in rig.disk.list("/store/index")]

    plain, *others = (trio.run(run, batch) for batch in BATCHES)
    for other in others:
        assert other == plain


async def test_a_full_file_is_followed_by_one_that_begins_where_it_ended() -> None:
    rig = Rig(slots=4, entries=4)
    await rig.put(100, "a", "b", time=NOW + 1000)
    await rig.put(200, "c", "d", time=NOW + 5000)
    await rig.put(300, "e", time=NOW + 7000)
    assert [HEADER.unpack_from(rig.image(number)) for number in (0, 1)] == [
        (NOW + 1000, NOW + 5000, 100, 200, len({key_hash(TOPIC, key) % 4 for key in "abc"}), 4),
        (NOW + 5000, NOW + 7000, 200, 300, len({key_hash(TOPIC, key) % 4 for key in "de"}), 3),
    ]
    # the first entry's time difference refers to the pre-filled header, as in RocketMQ
    assert [ENTRY.unpack_from(rig.image(1), entry_at(4, number))[1:3] for number in (1, 2)] == [(200, 0), (300, 2)]
    for key, phy in zip("abcde", (100, 100, 200, 200, 300), strict=True):
        assert rig.find(key) == [phy]


def test_seconds_are_whole_and_never_negative() -> None:
    assert seconds_since(0, NOW) == 0
    assert seconds_since(NOW, NOW + 1999) == 1
    assert seconds_since(NOW, NOW - 5000) == 0
    assert seconds_since(1, 1 << 60) == 0x7FFFFFFF


# -- queries


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=3), st.integers(0, 4000)), max_size=60),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 120_000), st.integers(0, 120_000)), max_size=10),
)
@settings(max_examples=60)
def test_a_query_finds_what_a_dictionary_finds(
    messages: list[tuple[list[int], int]], queries: list[tuple[int, int, int]]
) -> None:
    async def run() -> None:
        rig = Rig(slots=3, entries=10)
        model: list[tuple[int, int, set[str]]] = []
        time = NOW
        for number, (keys, later) in enumerate(messages):
            time += later
            words = tuple(f"k{key}" for key in keys)
            rig.service.put(TOPIC, words, 100 * number, time)
            model.append((100 * number, time, set(words)))
        assert await rig.service.flush_pending()
        for rigs in (rig, rig.reloaded()):
            for key, begin, end in queries:
                found = rigs.find(f"k{key}", begin=NOW + begin, end=NOW + end)
                sure = [phy for phy, at, words in model if f"k{key}" in words and NOW + begin <= at <= NOW + end]
                near = [phy for phy, at, words in model if f"k{key}" in words]
                assert set(sure) <= set(found) <= set(near), "times are whole seconds, no other results are returned"
                assert found == sorted(found, reverse=True)
                assert len(found) == len(set(found))
            for limit in (1, 2, 5):
                everything = [phy for phy, _, words in reversed(model) if "k1" in words]
                assert rigs.find("k1", limit=limit) == everything[:limit]

    trio.run(run)


async def test_chains_that_lead_nowhere_end_a_query() -> None:
    rig = Rig(slots=1, entries=20)
    for number in range(5):
        await rig.put(100 * number, "key")
    file = rig.service.files[0]
    for previous in (4, 5, 19, -3, 1 << 30):  # to itself, to a later entry, out of the file
        file.view[entry_at(1, 4) + 16 : entry_at(1, 4) + 20] = previous.to_bytes(4, "big", signed=True)
        assert rig.find("key") == [400, 300]
    file.view[slot_at(0) : slot_at(1)] = (77).to_bytes(4, "big")
    assert rig.find("key") == []


async def test_what_is_not_in_memory_is_waited_for() -> None:
    rig = Rig()
    await rig.put(100, "key")
    await rig.put(200, "key")
    again = rig.reloaded()
    rig.disk.cold = True
    with pytest.raises(Cold):
        again.find("key")
    assert await again.service.select_cold(TOPIC, "key", 0, FAR, 10) == [200, 100]


async def test_keys_that_wait_are_put_before_a_query() -> None:
    rig = Rig()
    await rig.put(100, "key")
    rig.service.put(TOPIC, ("key",), 200, NOW)
    assert rig.find("key") == [200, 100]
    assert not rig.service.pending


# -- space


async def test_the_service_puts_what_waits(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.service.run)
        rig.service.put(TOPIC, ("key",), 100, NOW)
        with pytest.raises(Cold):
            rig.find("key")  # no file exists yet
        await trio.sleep(1)
        assert not rig.service.pending
        assert rig.find("key") == [100]
        nursery.cancel_scope.cancel()


async def test_an_idle_service_wakes_seldom(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    ticks: list[float] = []
    flush = rig.service.flush_pending

    async def flush_pending() -> bool:
        ticks.append(trio.current_time())
        return await flush()

    rig.service.flush_pending = flush_pending  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.service.run)
        await trio.sleep(60)
        assert len(ticks) < 45
        rig.service.put(TOPIC, ("key",), 100, NOW)
        await trio.sleep(2)
        assert not rig.service.pending
        ticks.clear()
        for phy in range(200, 210):  # ten keys, one each 0.1 s
            rig.service.put(TOPIC, ("key",), phy, NOW)
            await trio.sleep(0.1)
        assert len(ticks) >= 5, "keys that keep coming are put at every short tick"
        nursery.cancel_scope.cancel()


async def test_a_full_disk_is_no_loss_and_heals(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(SimDisk(capacity=4096), slots=8, entries=300)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.service.run)
        rig.service.put(TOPIC, ("key",), 100, NOW)
        await trio.sleep(5)
        assert "no space for the index" in rig.flags.reason
        assert await rig.service.select_cold(TOPIC, "key", 0, FAR, 10) == [100]
        assert rig.disk.list("/store/index") == []
        rig.disk.capacity = 1 << 20
        await trio.sleep(5)
        assert rig.flags.writable
        assert rig.find("key") == [100]
        nursery.cancel_scope.cancel()


async def test_keys_are_put_a_slice_at_a_time() -> None:
    rig = Rig(slots=8, entries=1000)
    await rig.put(0, "first")
    rig.service.pending.extend(
        (TOPIC, tuple(f"m{at}k{key}" for key in range(at % 5)), 100 * at, NOW) for at in range(20)
    )
    counts = []
    while rig.service.pending:
        assert rig.service.apply(6)
        counts.append(rig.service.files[0].count)
    assert [after - before for before, after in zip([2, *counts], counts, strict=False)] == [6, 7, 7, 6, 7, 7]
    assert rig.find("m19k3") == [1900]


class HashedKeys:
    """Hashed keys in plain Python."""

    def __init__(self, rows: list[tuple[int, int, int]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[tuple[int, int, int]]:
        return self._rows

    def split(self, count: int) -> "tuple[HashedKeys, HashedKeys]":
        return HashedKeys(self._rows[:count]), HashedKeys(self._rows[count:])


def run_of(messages: list[Message]) -> Keys:
    """Hashed keys of messages with one store time, made by the extension if it is on."""
    rows = [(key_hash(topic, key), phy, time) for topic, keys, phy, time in messages for key in keys]
    if NATIVE.extension is None:
        return HashedKeys(rows)
    hashes, phys, times = zip(*rows, strict=True)
    assert len(set(times)) == 1
    return NATIVE.extension.Keys(list(hashes), list(phys), times[0])


def messages_of(count: int, *widths: int, begin: int = 0, step: int = 100, topic: str = TOPIC) -> list[Message]:
    """Messages, each with one key for every width: its number, padded with zeros."""
    return [
        (topic, tuple(f"{at % 10**width:0{width}d}" for width in widths), at * step, NOW)
        for at in range(begin, begin + count)
    ]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("widths", [(32,), (8, 3), (1, 2, 300)])
async def test_hashed_keys_are_indexed_as_the_messages_are(batch: Batch, widths: tuple[int, ...]) -> None:
    one, other = Rig(batch=batch, slots=50, entries=90), Rig(batch=batch, slots=50, entries=90)
    for begin in range(0, 60, 20):
        messages = messages_of(10, *widths, begin=begin)
        for rig in (one, other):
            rig.service.put(TOPIC, ("between",), begin * 100 - 50, NOW)
            if rig is one:
                rig.service.put_run(run_of(messages))
            else:
                rig.service.put_all(messages)
            rig.service.put(TOPIC, ("behind",), begin * 100 + 1010, NOW)
    waiting = [entry for entry in one.service.pending if not isinstance(entry, tuple)]
    assert [len(run) for run in waiting] == [10 * len(widths)] * 3
    for rig in (one, other):
        assert await rig.service.flush_pending()
    for number in range(len(one.disk.list("/store/index"))):
        assert one.image(number) == other.image(number)


def test_hashed_keys_are_what_they_are_made_of() -> None:
    rows = [(key_hash(TOPIC, f"ä{at}"), 100 * at, NOW) for at in range(5)]
    for run in (HashedKeys(rows), run_of([(TOPIC, (f"ä{at}",), 100 * at, NOW) for at in range(5)])):
        first, second = run.split(2)
        assert (run.rows(), first.rows(), second.rows()) == (rows, rows[:2], rows[2:])
        assert (len(run), len(first), len(second)) == (5, 2, 3)


async def test_a_long_chain_is_not_walked_in_the_event_loop() -> None:
    """All messages of a tag form one chain: a query that has to follow a long one is answered in a thread."""
    rig = Rig(slots=8, entries=200_000)
    await rig.put(0, "rare")
    rig.service.put_run(run_of([(TOPIC, keys, phy + 100, time) for _, keys, phy, time in messages_of(80_000, 5)]))
    assert await rig.service.flush_pending()
    assert rig.find("79999", limit=1) == [8_000_000]
    with pytest.raises(Cold):
        rig.find("rare")
    assert await rig.service.select_cold(TOPIC, "rare", 0, FAR, 10) == [0]


async def test_a_run_is_put_a_slice_at_a_time() -> None:
    rig = Rig(slots=8, entries=1000)
    await rig.put(0, "first")
    rig.service.put_run(run_of([(TOPIC, keys, phy + 100, time) for _, keys, phy, time in messages_of(10, 4, 3)]))
    rig.service.put(TOPIC, ("last",), 1100, NOW)
    counts = []
    while rig.service.pending:
        assert rig.service.apply(8)
        counts.append(rig.service.files[0].count)
    assert counts == [10, 18, 23]
    assert rig.find("0007") == rig.find("007") == [800]
    assert rig.find("last") == [1100]


async def test_many_small_runs_are_one_slice() -> None:
    """A slice of few keys costs nearly as much as one of many: the index would fall behind the log."""
    rig = Rig(slots=50, entries=10_000)
    await rig.put(0, "first")
    for number in range(20):
        widths = (8,) if number % 3 else (8, 2)
        topic = TOPIC if number % 2 else "Other"
        rig.service.put_run(run_of(messages_of(10, *widths, begin=number * 10, topic=topic)))
        rig.service.put(TOPIC, (f"single{number}",), number * 1000 + 950, NOW + number)
    assert rig.service.apply(1000)
    assert not rig.service.pending
    assert rig.service.apply(), "no keys wait, and no run is counted as waiting"
    assert rig.service.files[0].count == 2 + 20 + 200 + 70
    assert rig.find("single19") == [19_950]
    assert rig.find("00000117") == [11_700]
    assert rig.service.select("Other", "00000127", 0, FAR, 10) == [12_700]


@pytest.mark.parametrize("singles", [0, 1023])
async def test_runs_wake_the_service(singles: int) -> None:
    rig = Rig()
    woken: list[bool] = []
    rig.service.wake = lambda: woken.append(True)  # type: ignore[method-assign]
    rig.service.pending.extend((TOPIC, ("key",), at, NOW) for at in range(singles))
    for number in range(16):
        assert not woken
        rig.service.put_run(run_of(messages_of(64, 8, begin=number * 64, step=1)))
        if singles:
            break
    assert woken == [True]


async def test_a_run_whose_keys_find_no_space_waits_and_can_be_found(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(SimDisk(capacity=4096), slots=8, entries=300)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.service.run)
        rig.service.put_run(run_of(messages_of(1200, 4)))
        await trio.sleep(5)
        assert "no space for the index" in rig.flags.reason
        assert await rig.service.select_cold(TOPIC, "0777", 0, FAR, 10) == [77_700]
        rig.disk.capacity = 1 << 20
        await trio.sleep(5)
        assert not rig.service.pending
        assert rig.find("0777") == [77_700]
        assert rig.find("1199") == [119_900]
        nursery.cancel_scope.cancel()


async def test_entries_are_only_written_where_there_is_space() -> None:
    rig = Rig(slots=800, entries=200_000)
    disk = rig.disk
    for number in range(70):
        rig.service.pending.extend(
            (TOPIC, (f"a{at}", f"b{at}"), at * 100, NOW) for at in range(number * 1000, 1000 * (number + 1))
        )
        assert await rig.service.flush_pending()
    disk.check_mapped_stores()
    assert rig.service.files[0].count == 140_001
    assert rig.find("b69999") == [6_999_900]


async def test_a_start_goes_on_in_the_newest_file() -> None:
    rig = Rig()
    for number in range(4):
        await rig.put(100 * number, "key", f"u{number}")
    again = rig.reloaded()
    await again.put(400, "key")
    assert again.find("key") == [400, 300, 200, 100, 0]
    assert again.find("u2") == [200]
    rig.disk.check_mapped_stores()
    assert len(rig.disk.list("/store/index")) == 1


async def test_a_file_made_ahead_and_not_used_is_deleted() -> None:
    rig = Rig(entries=10)
    for number in range(8):
        await rig.put(100 * number, "key")
    assert len(rig.disk.list("/store/index")) == 2
    again = rig.reloaded()
    assert len(rig.disk.list("/store/index")) == 1
    await rig.service.close()
    assert again.find("key") == [100 * number for number in reversed(range(8))]
    await again.service.close()
    assert len(rig.disk.list("/store/index")) == 1
    assert rig.disk.open_files() == 0


async def test_sync_is_of_what_was_put() -> None:
    rig = Rig()
    await rig.put(100, "key")
    await rig.service.sync()
    path = f"/store/index/{rig.disk.list('/store/index')[0]}"
    assert rig.disk.durable_content(path) == rig.disk.content(path)
    calls = rig.disk.calls
    await rig.service.sync()
    assert rig.disk.calls == calls
    await rig.put(200, "key")
    rig.disk.fail("data_sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        await rig.service.sync()


# -- expiry and recovery


async def test_files_of_messages_that_are_gone_are_deleted() -> None:
    rig = Rig(slots=4, entries=5)
    for number in range(14):
        await rig.put(100 * number, f"k{number}")
    assert [file.end_phy for file in rig.service.files] == [300, 700, 1100, 1300]
    assert await rig.service.delete_expired(700) == 1
    assert await rig.service.delete_expired(701) == 1
    assert await rig.service.delete_expired(1 << 40) == 1
    assert rig.find("k13") == [1300]
    assert rig.find("k1") == []
    assert len(rig.disk.list("/store/index")) == 1


@given(st.integers(0, 40), st.integers(0, 40), st.booleans())
@settings(max_examples=40)
def test_a_cut_index_is_the_one_that_was_there_then(count: int, more: int, tear: bool) -> None:
    async def run() -> None:
        rig = Rig(slots=3, entries=12)
        for number in range(count):
            await rig.put(100 * number, f"k{number % 5}", time=NOW + number * 1000)
        mark = rig.service.mark()
        assert mark is not None
        for number in range(count, count + more):
            await rig.put(100 * number, f"k{number % 5}", time=NOW + number * 1000)
        again = rig.reloaded()
        if mark.files:
            file = again.service.files[mark.files - 1]
            if tear:
                for number in range(mark.entries, file.count, 2):
                    file.view[entry_at(3, number) : entry_at(3, number + 1)] = bytes(20)
            again.service.cut(mark.files - 1, mark.entries, NOW + max(count - 1, 0) * 1000)
        else:
            again.service.clear()
        for key in range(5):
            expected = [100 * number for number in reversed(range(count)) if number % 5 == key]
            assert again.find(f"k{key}") == expected
        for number in range(count, count + 5):
            await again.put(100 * number, f"k{number % 5}", time=NOW + number * 1000)
        assert again.find(f"k{count % 5}")[:1] == [100 * count]
        images = {name: rig.disk.content(f"/store/index/{name}") for name in rig.disk.list("/store/index")}
        for file in again.service.files:
            assert file.link(again.service.batch), "nothing was to be repaired"
        assert images == {name: rig.disk.content(f"/store/index/{name}") for name in rig.disk.list("/store/index")}

    trio.run(run)


@pytest.mark.parametrize("batch", BATCHES)
async def test_lost_slots_and_chains_are_made_anew(batch: Batch) -> None:
    rig = Rig(slots=5, entries=40, batch=batch)
    for number in range(30):
        await rig.put(100 * number, f"k{number % 7}")
    whole = rig.image()
    file = rig.service.files[0]
    file.view[slot_at(1) : slot_at(4)] = b"\xff" * 12
    for number in itertools.islice(range(1, 30), 0, None, 3):
        file.view[entry_at(5, number) + 16 : entry_at(5, number) + 20] = bytes(4)
    assert not file.link(batch)
    assert rig.image() == whole


async def test_files_of_another_size_and_damaged_headers_are_not_taken() -> None:
    rig = Rig(slots=4, entries=5)
    for number in range(12):
        await rig.put(100 * number, "key")
    await rig.service.close()
    names = rig.disk.list("/store/index")
    fd = rig.disk.open(f"/store/index/{names[0]}")
    rig.disk.truncate(fd, 50)
    fd = rig.disk.open(f"/store/index/{names[1]}")
    rig.disk.pwrite(fd, (6).to_bytes(4, "big"), 36)
    rig.disk.create("/store/index/notes.txt", 3)
    again = Rig(rig.disk, slots=4, entries=5)
    assert again.service.load() == 2
    assert [file.begin_phy for file in again.service.files] == [800]
    assert "notes.txt" in rig.disk.list("/store/index")


def test_a_file_that_a_crash_left_without_blocks_is_not_stored_into() -> None:
    """On a full disk such a store raises SIGBUS, which ends the process."""
    rig = Rig()
    rig.disk.make_directory("/store/index")
    fd = rig.disk.create(f"/store/index/{NOW:017d}", rig.service.shape.file_size)
    rig.disk.close(fd)
    again = rig.reloaded()
    again.service.cut(0, 1, 0)
    again.disk.check_mapped_stores()
    assert again.find("any") == []
