import pytest
import trio
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, drain, fill, opened, put, settings
from trimq.broker.filters.tag import TagFilter
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.read.get_message import MessageGetter
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, MessageFilter
from trimq.protocol.hashing import tags_code
from trimq.protocol.message import decode_messages
from trimq.protocol.property_text import decode_properties
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT

S = GetMessageStatus
BIG = settings(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000)


class Tags:
    needs_properties = False
    terms = 0

    def __init__(self, *tags: str) -> None:
        self._codes = {tags_code(tag) for tag in tags}

    def match_tags(self, code: int) -> bool:
        return code in self._codes

    def match_record(self, properties: bytes) -> bool:
        raise AssertionError(properties)


class Properties(Tags):
    needs_properties = True
    terms = 1

    def match_tags(self, code: int) -> bool:
        return True

    def match_record(self, properties: bytes) -> bool:
        return decode_properties(properties.decode()).get("KEYS") in {"k1", "k3"}


def _get(
    store: MessageStore, offset: int, count: int = 32, size: int = 1 << 20, filter: Tags | None = None
) -> GetMessageResult:
    result = store.get_message(TOPIC, 0, offset, count, size, filter)
    assert result is not None
    result.release()
    return result


def _offsets(result: GetMessageResult) -> list[int]:
    return [one.queue_offset for data in result.buffers for one in decode_messages(bytes(data))]


async def test_statuses_and_next_offsets() -> None:
    async with opened(SimDisk()) as store:
        assert _get(store, 7).status is S.NO_MATCHED_LOGIC_QUEUE
        store.create_queues(TOPIC, 1)
        nothing = _get(store, 7)
        assert (nothing.status, nothing.next_begin_offset, nothing.max_offset) == (S.NO_MESSAGE_IN_QUEUE, 0, 0)
        await fill(store, 10)
        queue = store.queues.find(TOPIC, 0)
        assert queue is not None
        queue.min_offset = 3
        cases = {
            2: (S.OFFSET_TOO_SMALL, 3),
            -1: (S.OFFSET_TOO_SMALL, 3),
            10: (S.OFFSET_OVERFLOW_ONE, 10),
            11: (S.OFFSET_OVERFLOW_BADLY, 10),
            1 << 60: (S.OFFSET_OVERFLOW_BADLY, 10),
        }
        for offset, (status, following) in cases.items():
            result = _get(store, offset)
            assert (result.status, result.next_begin_offset) == (status, following), offset
            assert (result.min_offset, result.max_offset, result.count, result.buffers) == (3, 10, 0, [])
        found = _get(store, 4, 3)
        assert (found.status, found.next_begin_offset, found.count) == (S.FOUND, 7, 3)
        assert _offsets(found) == [4, 5, 6]
        assert found.size == sum(map(len, found.buffers))


async def test_adjacent_records_are_one_view() -> None:
    async with opened(SimDisk(), BIG) as store:
        await fill(store, 5)
        await fill(store, 1, topic="Other")
        await fill(store, 5, first=5)
        result = _get(store, 0)
        assert len(result.buffers) == 2
        assert all(isinstance(data, memoryview) for data in result.buffers)
        assert _offsets(result) == list(range(10))


async def test_limits_in_memory() -> None:
    small = settings(
        mapped_file_size_commit_log=1 << 20,
        max_transfer_count_on_message_in_memory=6,
        max_transfer_bytes_on_message_in_memory=1200,
    )
    async with opened(SimDisk(), small) as store:
        for number in range(10):
            await put(store, bytes(209 - number % 2 * 9))  # records of 309 or 300 bytes
        size = store.max_phy_offset // 10
        assert _get(store, 0).count == 1200 // size
        assert _get(store, 0, 2).count == 2
        assert _get(store, 0, 32, 700).count == 2
        assert _get(store, 0, 32, 1).count == 1, "one message always fits"
        await put(store, bytes(2000))
        big = _get(store, 10)
        assert (big.count, big.size > 1200) == (1, True)
        assert _get(store, 9).next_begin_offset == 10


async def test_limits_and_advice_where_messages_are_on_disk_only() -> None:
    few = settings(mapped_file_size_commit_log=1 << 20, max_transfer_count_on_message_in_disk=3)
    disk = SimDisk()
    async with opened(disk, few) as store:
        await fill(store, 20)
        border = (await drain(store))[10].commit_log_offset
        getter = MessageGetter(store.commit_log, store.queues, store.stats, store.config, 1 << 40)
        getter.limits.memory = store.max_phy_offset - border
        known = getter.get(TOPIC, 0, 0, 32, 1 << 20, None)
        assert known is not None
        assert (known.count, known.suggest_slave) == (20, False), "far behind the end, but in memory"
        known.release()
        store.files.files[0].in_memory_from = store.files.size
        disk.cold = True
        store.files.page_cache.forget(store.files.files[0], 0, store.files.size)
        assert getter.get(TOPIC, 0, 0, 32, 1 << 20, None) is None
        result = await getter.get_cold(TOPIC, 0, 0, 32, 1 << 20, None)
        assert (result.count, result.suggest_slave) == (3, True)
        later = await getter.get_cold(TOPIC, 0, 8, 32, 1 << 20, None)
        assert (later.count, later.suggest_slave) == (12, False)
        result.release()
        later.release()


async def test_a_filter_passes_over_what_is_not_wanted() -> None:
    async with opened(SimDisk(), BIG) as store:
        for number in range(30):
            await put(store, b"x", tag="a" if number % 10 == 0 else "b", keys=f"k{number % 5}")
        result = _get(store, 1, filter=Tags("a"))
        assert (_offsets(result), result.next_begin_offset) == ([10, 20], 30)
        nothing = _get(store, 1, filter=Tags("c"))
        assert (nothing.status, nothing.next_begin_offset) == (S.NO_MATCHED_MESSAGE, 30)
        some = _get(store, 0, 4, filter=Tags("a", "b"))
        assert _offsets(some) == [0, 1, 2, 3]
        by_property = _get(store, 0, 5, filter=Properties())
        assert (_offsets(by_property), by_property.next_begin_offset) == ([1, 3, 6, 8, 11], 12)


async def test_a_filtered_pull_ends_after_800_units() -> None:
    async with opened(SimDisk(), BIG) as store:
        queue = store.queues.find_or_create(TOPIC, 0)
        await put(store, b"x")
        for number in range(1000):
            queue.put(store.max_phy_offset + number, 1, 5, 1 + number)
        result = _get(store, 1, filter=Tags("no"))
        assert (result.status, result.next_begin_offset) == (S.NO_MATCHED_MESSAGE, 801)
        more = _get(store, 1, 900, filter=Tags("no"))
        assert more.next_begin_offset == 901


async def test_units_of_messages_that_are_gone_are_passed_over() -> None:
    async with opened(SimDisk(), BIG) as store:
        await fill(store, 3)
        queue = store.queues.find(TOPIC, 0)
        assert queue is not None
        end = store.max_phy_offset
        units = [UNIT.pack(0, FILLER_SIZE, 0), UNIT.pack(end + 5000, 100, 0)]
        queue.tail += b"".join(units)
        queue.next_offset += 2
        queue.max_phy = end
        store.commit_log.queue(TOPIC, 0).next_offset = 5
        await fill(store, 2, first=5)
        assert _offsets(_get(store, 0)) == [0, 1, 2, 5, 6]
        only = _get(store, 3, 1)
        assert (only.status, only.next_begin_offset, only.count) == (S.MESSAGE_WAS_REMOVING, 4, 0)
        wrong = _get(store, 4, 1)
        assert (wrong.status, wrong.next_begin_offset, wrong.count) == (S.MESSAGE_WAS_REMOVING, 5, 0)


async def test_a_unit_that_points_beside_its_record_delivers_nothing_else() -> None:
    async with opened(SimDisk(), BIG) as store:
        await fill(store, 6)
        queue = store.queues.find(TOPIC, 0)
        assert queue is not None
        queue.known_from = (
            queue.next_offset
        )  # as if they had been found in a file: units that the broker put itself are not checked
        phy, size, tag = UNIT.unpack_from(queue.tail, 40)
        for wrong in ((phy + 1, size), (phy, size + 7), (phy, size - 7), (phy - 30, size + 30)):
            queue.tail[40:60] = UNIT.pack(*wrong, tag)
            assert _offsets(_get(store, 0)) == [0, 1, 3, 4, 5]


async def test_cold_messages_are_waited_for() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 60)
    async with opened(disk) as store:
        disk.cold = True
        for wanted in (None, Tags(""), Properties()):
            assert store.get_message(TOPIC, 0, 0, 32, 1 << 20, wanted) is None
            result = await store.get_message_cold(TOPIC, 0, 0, 32, 1 << 20, wanted)
            assert result.status is S.FOUND
            found = _offsets(result)
            result.release()
            assert found == [
                at for at in range(found[-1] + 1) if not isinstance(wanted, Properties) or at % 7 in (1, 3)
            ]
        for offset, status in ((60, S.OFFSET_OVERFLOW_ONE), (99, S.OFFSET_OVERFLOW_BADLY)):
            assert (await store.get_message_cold(TOPIC, 0, offset, 32, 100, None)).status is status
        assert (await store.get_message_cold("No", 0, 0, 32, 100, None)).status is S.NO_MATCHED_LOGIC_QUEUE
        assert [one.queue_offset for one in await drain(store)] == list(range(60))


async def test_a_queue_file_that_is_gone() -> None:
    disk = SimDisk()
    async with opened(disk) as store:
        await fill(store, 40)
        assert await store.flush_queues.write()
        queue = store.queues.find(TOPIC, 0)
        assert queue is not None
        queue.forget_written(0)
        disk.delete(queue.path_of(10))
        result = await store.get_message_cold(TOPIC, 0, 13, 32, 1 << 20, None)
        assert (result.status, result.next_begin_offset) == (S.OFFSET_FOUND_NULL, 20)


async def test_views_hold_their_files_until_they_are_released() -> None:
    async with opened(SimDisk()) as store:
        await fill(store, 60)
        held = store.get_message(TOPIC, 0, 25, 32, 1 << 20, None)
        assert held is not None
        files = [file for file in store.files.files if file.is_held]
        assert len(files) > 1
        held.release()
        assert not any(file.is_held for file in store.files.files)
        disk = store.disk
        assert isinstance(disk, SimDisk)
        store.files.files[-1].in_memory_from = store.files.size
        disk.cold = True
        assert store.get_message(TOPIC, 0, 25, 32, 1 << 20, None) is None
        assert not any(file.is_held for file in store.files.files), "released where the answer has to wait"


async def test_gets_are_counted() -> None:
    async with opened(SimDisk()) as store:
        await fill(store, 5)
        _get(store, 0)
        _get(store, 5)
        stats = store.stats
        assert (stats.found_times_total, stats.missed_times_total, stats.transferred_messages_total) == (1, 1, 5)


def _filter(*tags: str) -> TagFilter:
    return TagFilter(frozenset(map(tags_code, tags)))


async def _compare(
    store: MessageStore,
    queue: ConsumeQueue,
    result: GetMessageResult,
    offset: int,
    count: int,
    size: int,
    filter: MessageFilter | None,
) -> None:
    """Check that the fast paths return the same as the full path, which reads every unit and record."""
    known, queue.known_from = queue.known_from, queue.next_offset
    try:
        general = await store.get_message_cold(TOPIC, 0, offset, count, size, filter)
    finally:
        queue.known_from = known
    general.release()
    assert b"".join(general.buffers) == b"".join(result.buffers)
    for name in ("status", "next_begin_offset", "min_offset", "max_offset", "count", "size", "suggest_slave"):
        assert getattr(general, name) == getattr(result, name), name


async def test_a_tag_code_that_is_no_hash_matches_by_its_lower_half() -> None:
    async with opened(SimDisk(), BIG) as store:
        await fill(store, 50)
        queue = store.queues.find(TOPIC, 0)
        assert queue is not None
        for number in range(0, 50, 3):
            phy, size, _ = UNIT.unpack_from(queue.tail, number * UNIT.size)
            UNIT.pack_into(queue.tail, number * UNIT.size, phy, size, (7 << 32) + tags_code("t") % (1 << 32))
        result = store.get_message(TOPIC, 0, 0, 32, 1 << 20, _filter("t"))
        assert result is not None
        result.release()
        assert _offsets(result) == list(range(0, 50, 3))


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 900)), max_size=60),
    st.integers(1, 40),
    st.integers(1, 4000),
    st.sampled_from([None, Tags("t0"), Tags("t1", "t2"), Properties(), _filter("t0"), _filter("t1", "t2")]),
)
@examples(max_examples=60)
def test_pulling_gives_every_wanted_message_once(
    messages: list[tuple[int, int, int]], count: int, size: int, filter: MessageFilter | None
) -> None:
    async def run() -> None:
        async with opened(SimDisk(), settings(mapped_file_size_consume_queue=400)) as store:
            wanted = []
            at = 0
            for queue_id, tag, length in messages:
                await put(store, bytes(length), queue_id=queue_id, tag=f"t{tag}", keys=f"k{tag}")
                if queue_id == 0:
                    if isinstance(filter, Properties):
                        match = tag in (1, 3)
                    else:
                        match = filter is None or filter.match_tags(tags_code(f"t{tag}"))
                    if match:
                        wanted.append(at)
                    at += 1
            await store.flush_queues.write()
            queue = store.queues.find(TOPIC, 0)
            if queue is not None:
                queue.forget_written(5)
            offset, found = 0, []
            while True:
                result = store.get_message(TOPIC, 0, offset, count, size, filter)
                if result is None:
                    result = await store.get_message_cold(TOPIC, 0, offset, count, size, filter)
                if queue is not None:
                    await _compare(store, queue, result, offset, count, size, filter)
                if result.status not in (S.FOUND, S.NO_MATCHED_MESSAGE):
                    break
                assert result.next_begin_offset > offset
                assert result.count <= count
                assert result.size <= max(size, 100) or result.count == 1
                got = _offsets(result)
                assert len(got) == result.count
                found += got
                result.release()
                offset = result.next_begin_offset
            assert found == wanted
            assert offset == at

    trio.run(run)


@pytest.mark.parametrize("pattern", ["0011", "01010101", "0100110001", "00000111110000", "010001"])
async def test_records_that_lie_side_by_side_may_be_one_view(pattern: str) -> None:
    async with opened(SimDisk(), settings(mapped_file_size_commit_log=1 << 20)) as store:
        queues = [int(letter) for letter in pattern]
        for number, queue_id in enumerate(queues):
            await put(store, b"%d" % number, queue_id=queue_id)
        for queue_id in (0, 1):
            result = store.get_message(TOPIC, queue_id, 0, 32, 1 << 20, None)
            assert result is not None
            bodies = [one.body for data in result.buffers for one in decode_messages(bytes(data))]
            assert bodies == [b"%d" % number for number, wanted in enumerate(queues) if wanted == queue_id]
            assert result.count == len(bodies)
            assert len(result.buffers) <= result.count
            result.release()
