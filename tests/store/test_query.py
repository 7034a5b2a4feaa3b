import pytest
import trio
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from tests.store.stores import FAR, TOPIC, by_key, fill, opened, put, settings
from trimq.broker.store.disk.page_cache import CHUNK
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.read.key_match import HEAD_SIZE, Matches, matches
from trimq.broker.store.read.query import MessageFinder, _without_waiting, store_timestamp_of
from trimq.protocol.message import decode_message
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT
from trimq.remoting.runtime.clock import ManualClock

NOW = 1_700_000_000_000
BIG = settings(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000)


async def test_a_message_is_found_by_each_of_its_keys() -> None:
    async with opened(SimDisk()) as store:
        await put(store, b"one", unique="U1", keys="order1 order2", tag="red")
        await put(store, b"two", unique="U2", keys="order2")
        await put(store, b"other", unique="U1", topic="Other")
        for key, bodies in {
            "U1": [b"one"],
            "order1": [b"one"],
            "order2": [b"one", b"two"],
            "U2": [b"two"],
            "order": [],
            "red": [],
            "": [],
        }.items():
            assert [found.body for found in await by_key(store, key)] == bodies, key


async def test_a_message_is_found_by_its_tag() -> None:
    """Under the key that RocketMQ's index uses for tags; an equal hash by chance is no match."""
    for tags in (True, False):
        disk = SimDisk()
        async with opened(disk, settings(index_tag_enable=tags)) as store:
            assert store.indexes_tags is tags
            await put(store, b"one", unique="U1", tag="Aa")
            await put(store, b"two", tag="BB")
            disk_only = await put(store, b"half", tag="Aa", sys_flag=4)
            await put(store, b"rolled back", tag="Aa", sys_flag=12)
            await put(store, b"other", tag="Aa", topic="Other")
            found = [one.body for one in await by_key(store, "T#Aa")]
            assert found == ([b"one", b"half"] if tags else [])
            assert [one.body for one in await by_key(store, "T#BB")] == ([b"two"] if tags else [])
            assert disk_only.ok


async def test_a_hash_that_is_the_same_by_chance_is_no_match() -> None:
    async with opened(SimDisk()) as store:
        # "Aa" and "BB" have the same hash
        await put(store, b"one", unique="Aa")
        await put(store, b"two", unique="BB")
        assert [found.body for found in await by_key(store, "Aa")] == [b"one"]
        assert [found.body for found in await by_key(store, "BB")] == [b"two"]


async def test_a_damaged_record_is_found_neither_by_key_nor_by_its_offset() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        whole = await put(store, b"whole", keys="key")
        damaged = await put(store, b"damaged", keys="key")
        body_at = disk.content(f"/store/commitlog/{0:020d}").index(b"damaged")
        disk.flip(f"/store/commitlog/{0:020d}", body_at)
        for result, found in ((whole, True), (damaged, False)):
            assert bool(store.look_message(result.physical_offset)) is found
    async with opened(disk) as store:  # a process checks its own records once, when they are put
        assert [found.body for found in await by_key(store, "key")] == [b"whole"]
        for result, found in ((whole, True), (damaged, False)):
            assert bool(store.look_message(result.physical_offset)) is found
            assert bool(await store.look_message_cold(result.physical_offset)) is found


async def test_the_newest_are_taken_and_given_in_order() -> None:
    clock = ManualClock()
    async with opened(SimDisk(), settings(max_msgs_num_batch=5), clock) as store:
        for number in range(12):
            await put(store, bytes([number]), keys="key")
            clock.advance(1)
        for wanted, expected in ((3, [9, 10, 11]), (100, [7, 8, 9, 10, 11]), (0, [])):
            result = await store.query_message_cold(TOPIC, "key", wanted, 0, FAR)
            assert [decode_message(data).body[0] for data in result.buffers] == expected
            assert result.count == len(expected)
            assert result.size == sum(map(len, result.buffers))
            result.release()
        last = store.max_phy_offset
        result = await store.query_message_cold(TOPIC, "key", 1, 0, FAR)
        assert result.last_update_timestamp == NOW + 11_000
        assert last > result.last_update_physical_offset > 0
        result.release()


async def test_only_messages_of_the_time_asked_for() -> None:
    clock = ManualClock()
    async with opened(SimDisk(), None, clock) as store:
        times = []
        for _ in range(30):
            times.append((await put(store, b"x", keys="key")).store_timestamp)
            clock.advance(0.4)
        for begin, end in ((0, 29), (3, 3), (3, 10), (11, 28), (29, 29)):
            result = await store.query_message_cold(TOPIC, "key", 64, times[begin], times[end])
            assert [decode_message(data).store_timestamp for data in result.buffers] == times[begin : end + 1]
            result.release()
        assert (await store.query_message_cold(TOPIC, "key", 64, 0, times[0] - 1)).count == 0
        assert (await store.query_message_cold(TOPIC, "key", 64, times[-1] + 1, FAR)).count == 0


async def test_what_is_not_in_memory_is_waited_for() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 40)
        offsets = {number: (await by_key(store, f"u{TOPIC}0-{number}"))[0].commit_log_offset for number in (0, 39)}
    async with opened(disk) as store:
        disk.cold = True
        for number, offset in offsets.items():
            assert store.query_message(TOPIC, f"u{TOPIC}0-{number}", 32, 0, FAR) is None
            assert [found.commit_log_offset for found in await by_key(store, f"u{TOPIC}0-{number}")] == [offset]
            assert store.look_message(offset) is None
            assert decode_message(await store.look_message_cold(offset)).queue_offset == number
            assert await store.message_store_time(TOPIC, 0, number) == NOW
        assert len(await by_key(store, "k3")) == len([number for number in range(40) if number % 7 == 3])


async def test_views_of_large_answers_hold_their_files_until_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimq.broker.store.read.query._COPIED", 1000)
    async with opened(SimDisk()) as store:
        await fill(store, 60)
        await by_key(store, "k3")
        held = store.query_message(TOPIC, "k3", 64, 0, FAR)
        assert held is not None
        assert sum(file.is_held for file in store.files.files) > 1
        held.release()
        held.release()
        assert not any(file.is_held for file in store.files.files)


async def test_usual_matches_in_several_files_are_found_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SimDisk()) as store:
        await fill(store, 60)
        expected = [found.commit_log_offset for found in await by_key(store, "k3")]

        def refuse(*_: object) -> None:
            raise AssertionError("a candidate was decoded")

        monkeypatch.setattr(MessageFinder, "_match", refuse)
        for limit in (64, 3, 1):
            found = store.query_message(TOPIC, "k3", limit, 0, FAR)
            assert found is not None
            assert [decode_message(data).commit_log_offset for data in found.buffers] == expected[-limit:]
            assert found.size == sum(map(len, found.buffers))
            assert not any(file.is_held for file in store.files.files)


async def test_without_an_index_nothing_is_found() -> None:
    async with opened(SimDisk(), settings(message_index_enable=False)) as store:
        await put(store, b"one", unique="U1")
        assert await by_key(store, "U1") == []
        assert (await store.query_message_cold(TOPIC, "U1", 5, 0, FAR)).count == 0


async def test_looking_at_offsets_where_no_record_begins() -> None:
    async with opened(SimDisk(), BIG) as store:
        result = await put(store, bytes(5000 - 1000))
        end = store.max_phy_offset
        for offset in (-1, 1, 50, end - 1, end, end + 1, 1 << 50):
            assert store.look_message(offset) == b"", offset
            assert await store.look_message_cold(offset) == b""
        data = store.look_message(result.physical_offset)
        assert data is not None
        assert len(data) == result.size == end


# -- by time


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(-2, 40), st.integers(0, 10))
@examples(max_examples=60)
def test_an_offset_by_time_is_a_bisection(gaps: list[int], moment: int, expired: int) -> None:
    async def run() -> None:
        clock = ManualClock()
        async with opened(SimDisk(), settings(mapped_file_size_consume_queue=100), clock) as store:
            times = []
            for gap in gaps:
                clock.advance(gap / 1000)
                times.append((await put(store)).store_timestamp - NOW)
            await store.flush_queues.write()
            queue = store.queues.find(TOPIC, 0)
            assert queue is not None
            queue.forget_written(0)
            low = queue.min_offset = min(expired, len(times))
            lower = next((at for at in range(low, len(times)) if times[at] >= moment), len(times))
            assert await store.offset_by_time(TOPIC, 0, NOW + moment) == lower
            older = [at for at in range(low, len(times)) if times[at] <= moment]
            upper = older[-1] if older else low
            assert await store.offset_by_time(TOPIC, 0, NOW + moment, upper=True) == upper

    trio.run(run)


async def test_times_of_messages() -> None:
    clock = ManualClock()
    async with opened(SimDisk(), None, clock) as store:
        assert await store.offset_by_time(TOPIC, 0, NOW) == 0
        assert await store.earliest_store_time(TOPIC, 0) == -1
        await fill(store, 3)
        clock.advance(1)
        await fill(store, 3, first=3)
        assert await store.earliest_store_time(TOPIC, 0) == NOW
        assert await store.message_store_time(TOPIC, 0, 3) == NOW + 1000
        for offset in (-1, 6, 1 << 60):
            assert await store.message_store_time(TOPIC, 0, offset) == -1
        queue = store.queues.find(TOPIC, 0)
        assert queue is not None
        queue.tail[60:80] = UNIT.pack(0, FILLER_SIZE, 0)
        assert await store.message_store_time(TOPIC, 0, 3) == -1
        assert await store.offset_by_time(TOPIC, 0, NOW + 1000) in (3, 4)
        assert await store.offset_by_time(TOPIC, 0, NOW + 1001) == 6


def test_the_time_of_what_is_no_record() -> None:
    assert store_timestamp_of(b"", 0) == -1
    assert store_timestamp_of(bytes(100), 0) == -1


WORDS = st.sampled_from(["a", "b", "a b", "b a", "", "T#a", "\u00e4", "a\x02KEYS\x01b"])


@given(
    st.lists(
        st.tuples(WORDS, WORDS, st.sampled_from(["", "PAD\x01a\x02", "KEYS\x01b\x02", "UNIQ_KEY\x01b\x02"])), max_size=8
    ),
    WORDS,
    st.integers(1, 9),
    st.sampled_from([(0, FAR), (NOW, NOW + 3), (FAR, FAR + 1)]),
)
@examples(max_examples=40, deadline=None)
def test_the_fast_path_finds_what_the_full_one_does(
    messages: list[tuple[str, str, str]], key: str, limit: int, times: tuple[int, int]
) -> None:
    async def run() -> None:
        clock = ManualClock()
        async with opened(SimDisk(), BIG, clock) as store:
            places = []
            for unique, keys, more in messages:
                put_result = await put(store, b"x", unique=unique, keys=keys, more=more)
                places.append(put_result.physical_offset)
                clock.advance(0.001)
            finder = store._finder
            places.reverse()
            short = matches(store.files, places, TOPIC, key, limit, times, 1 << 30)
            general = _without_waiting(finder._match(places, TOPIC, key, limit, *times))
            assert general is not None
            if short is not None:
                assert [bytes(data) for data in short[0]] == [bytes(data) for data in general.buffers]
            general.release()
            assert not any(file.is_held for file in store.files.files)

    trio.run(run)


async def test_usual_keys_take_the_fast_path() -> None:
    async with opened(SimDisk(), BIG) as store:
        first = await put(store, b"x", unique="U1", keys="k1")
        second = await put(store, b"x", unique="U2", keys="k1")
        places = [second.physical_offset, first.physical_offset]
        (file,) = store.files.files
        found = _short(store, places)
        assert found is not None
        assert [len(data) for data in found[0]] == [first.size, second.size]
        assert found[1] == first.size + second.size
        assert matches(store.files, places[1:], TOPIC, "U1", 5, (FAR, FAR), 1 << 30) == ([], 0)
        assert _short(store, places[::-1]) is None, "not from the newest on"
        begin, end = second.physical_offset, second.physical_offset + second.size
        copy = bytes(file.view[first.physical_offset : first.physical_offset + first.size])
        kept = bytes(file.view[begin:end])
        file.buffer[begin:end] = copy  # a record whose own place is elsewhere
        assert _short(store, places) is None
        file.buffer[begin:end] = kept


async def test_a_damaged_body_that_was_found_in_a_file_is_no_usual_one() -> None:
    disk = SimDisk()
    async with opened(disk, BIG) as store:
        first = await put(store, b"x", unique="U1", keys="k1")
        second = await put(store, b"x", unique="U2", keys="k1")
    async with opened(disk, BIG) as store:
        third = await put(store, b"x", unique="U3", keys="k1")
        places = [third.physical_offset, second.physical_offset, first.physical_offset]
        whole = _short(store, places)
        assert whole is not None
        assert len(whole[0]) == 3
        (file,) = store.files.files
        file.buffer[second.physical_offset + HEAD_SIZE] ^= 1
        assert _short(store, places) is None
        assert [found.unique_id for found in await by_key(store, "k1")] == ["U1", "U3"]


async def test_one_of_several_words_is_found_on_the_fast_path() -> None:
    async with opened(SimDisk(), BIG) as store:
        places = [(await put(store, b"x", unique=f"U{number}", keys="a k1 b")).physical_offset for number in range(2)]
        found = _short(store, places[::-1])
        assert found is not None
        assert [decode_message(data).unique_id for data in found[0]] == ["U0", "U1"]
        assert matches(store.files, places[1:], TOPIC, "k", 5, (0, FAR), 1 << 30) is None


@pytest.mark.parametrize("unique", ["", "U1"])
async def test_of_two_keys_properties_the_last_counts(unique: str) -> None:
    async with opened(SimDisk(), BIG) as store:
        phy = (await put(store, b"x", unique=unique, keys="k1", more="KEYS\x01other\x02")).physical_offset
        assert _short(store, [phy]) is None
        assert await by_key(store, "k1") == []


async def test_the_fast_path_gives_up_where_the_answer_is_large() -> None:
    async with opened(SimDisk(), BIG) as store:
        sizes = [(await put(store, b"x", unique=f"U{number}", keys="k1")).size for number in range(2)]
        places = [sizes[0], 0]
        assert matches(store.files, places, TOPIC, "k1", 5, (0, FAR), sum(sizes)) is not None
        assert matches(store.files, places, TOPIC, "k1", 5, (0, FAR), sum(sizes) - 1) is None


async def test_a_head_that_ends_in_a_part_that_is_not_in_memory_is_not_looked_at() -> None:
    disk = SimDisk()
    async with opened(disk, settings(mapped_file_size_commit_log=4 * CHUNK, max_message_size=CHUNK)) as store:
        filler = await put(store, b"")
        await put(store, bytes(CHUNK - 20 - 2 * filler.size))
        phy = (await put(store, b"x", keys="k1")).physical_offset
        assert phy == CHUNK - 20
        (file,) = store.files.files
        file.in_memory_from = file.size
        store.files.page_cache.chunks_of(file)[0] = store.files.page_cache.tick() + 1000
        disk.cold = True
        assert matches(store.files, [phy], TOPIC, "k1", 5, (0, 1), 1 << 30) is None


def _short(store: MessageStore, places: list[int]) -> Matches | None:
    return matches(store.files, places, TOPIC, "k1", 5, (0, FAR), 1 << 30)
