"""Filters of properties in memory: they agree with the full path, and do no more at once than the loop can spare."""

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.store.builders import HOST_V6, Answers, message
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, opened, put, settings
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.protocol.message import decode_messages
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT, UNIT_SIZE
from trimq.protocol.sql92.cost import AT_ONCE
from trimq.protocol.sysflag import BORN_HOST_V6

BIG = settings(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=20_000)
S = GetMessageStatus
LONG = "%RETRY%" + "g" * 200


class Has:
    """Accepts messages whose properties contain a text, of those whose tags code has a parity. Counts evaluations."""

    needs_properties = True

    def __init__(self, text: bytes, parity: int | None = None, terms: int = 1) -> None:
        self.text = text
        self.terms = terms
        self.parity = parity
        self.evaluated = 0

    def match_tags(self, tags_code: int) -> bool:
        return self.parity is None or tags_code % 2 == self.parity

    def match_record(self, properties: bytes) -> bool:
        self.evaluated += 1
        return self.text in properties


def _queue(store: MessageStore, topic: str = TOPIC) -> ConsumeQueue:
    queue = store.queues.find(topic, 0)
    assert queue is not None
    return queue


def _offsets(result: GetMessageResult) -> list[int]:
    return [one.queue_offset for data in result.buffers for one in decode_messages(bytes(data))]


def _in_memory(
    store: MessageStore, offset: int, accept: Has, count: int = 32, size: int = 1 << 20
) -> tuple[list[int], int] | None:
    """Offsets found by the fast path and the next one; None if it leaves the pull to the full path."""
    found = store.get_in_memory(_queue(store), offset, count, size, accept)
    if found is None:
        return None
    _, (buffers, number, length), following = found
    offsets = [one.queue_offset for data in buffers for one in decode_messages(bytes(data))]
    assert (len(offsets), sum(map(len, buffers))) == (number, length)
    return offsets, following


async def _full(
    store: MessageStore, offset: int, accept: Has, count: int = 32, size: int = 1 << 20
) -> GetMessageResult:
    result = await store.get_message_cold(TOPIC, 0, offset, count, size, accept)
    result.release()
    return result


@given(
    messages=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 700), st.booleans()), max_size=90),
    pulls=st.lists(
        st.tuples(st.integers(0, 90), st.integers(0, 40), st.integers(1, 12_000), st.sampled_from([None, 0, 1])),
        min_size=1,
        max_size=5,
    ),
)
@examples(max_examples=80, deadline=None)
def test_both_paths_find_the_same(
    messages: list[tuple[int, int, int, bool]], pulls: list[tuple[int, int, int, int | None]]
) -> None:
    async def run() -> None:
        async with opened(SimDisk(), settings(mapped_file_size_commit_log=1 << 15)) as store:
            count = 0
            for queue_id, value, body, v6 in messages:
                if v6:
                    await _put_v6(store, bytes(body), queue_id, f"n\x01{value}\x02".encode())
                else:
                    await put(store, bytes(body), queue_id=queue_id, more=f"n\x01{value}\x02")
                count += not queue_id
            if not count:
                return
            for start, most, limit, parity in pulls:
                offset, accept = start % count, Has(b"n\x011\x02", parity)
                found = _in_memory(store, offset, accept, most, limit)
                full = await _full(store, offset, accept, most, limit)
                if found is not None:
                    assert (_offsets(full), full.next_begin_offset) == found
                got = store.get_message(TOPIC, 0, offset, most, limit, accept)
                assert (got is None) is (found is None)
                if got is not None:
                    got.release()
                    assert (got.status, got.count, got.size, got.min_offset, got.max_offset) == (
                        full.status, full.count, full.size, full.min_offset, full.max_offset,
                    )  # fmt: skip
            assert not any(file.is_held for file in store.files.files)

    trio.run(run)


async def _put_v6(store: MessageStore, body: bytes, queue_id: int, properties: bytes) -> None:
    inner = message(body, TOPIC, queue_id, properties=properties, born_host=HOST_V6, sys_flag=BORN_HOST_V6)
    answers = Answers()
    if store.put_message(inner, answers.later) is None:
        await answers.changed.wait()


async def test_few_records_are_looked_at_at_once() -> None:
    async with opened(SimDisk(), BIG) as store:
        for number in range(3 * AT_ONCE):
            await put(store, b"x", more=f"n\x01{number % 2}\x02")
        nothing = Has(b"n\x013\x02")
        assert _in_memory(store, 0, nothing) is None, "too few: a task goes on, with pauses"
        assert nothing.evaluated == AT_ONCE
        every = Has(b"n")
        assert _in_memory(store, 0, every) == (list(range(32)), 32), "what a pull may get"
        assert _in_memory(store, 0, Has(b"n\x010\x02")) == (list(range(0, AT_ONCE, 2)), AT_ONCE - 1)
        assert _in_memory(store, 2 * AT_ONCE + 1, nothing) == ([], 3 * AT_ONCE), "the end of the queue"
        result = store.get_message(TOPIC, 0, 2 * AT_ONCE + 1, 32, 1 << 20, nothing)
        assert result is not None
        assert (result.status, result.next_begin_offset) == (S.NO_MATCHED_MESSAGE, 3 * AT_ONCE)
        assert _in_memory(store, 0, every, 0) is None


async def test_other_tasks_run_while_many_records_are_looked_at() -> None:
    async with opened(SimDisk(), BIG) as store:
        for _ in range(1000):
            await put(store, b"x", more="n\x011\x02")
        accept = Has(b"n\x013\x02")
        longest = last = 0

        async def watch() -> None:
            nonlocal longest, last
            while True:
                longest, last = max(longest, accept.evaluated - last), accept.evaluated
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            result = await store.get_message_cold(TOPIC, 0, 0, 32, 1 << 20, accept)
            nursery.cancel_scope.cancel()
        assert (result.status, result.next_begin_offset) == (S.NO_MATCHED_MESSAGE, 800), "maxFilterMessageSize"
        assert accept.evaluated == 800
        assert longest <= 2 * AT_ONCE, "trio runs the tasks of a turn in any order"


@pytest.mark.parametrize(
    ("terms", "length", "expected"), [(256, 0, 32), (256, 1000, 2), (1, 30_000, 2), (256, 30_000, 1)]
)
async def test_fewer_records_are_looked_at_at_once_where_that_takes_long(
    terms: int, length: int, expected: int
) -> None:
    """Long properties, and expressions with many conditions: at least one record, and a task goes on after a pause."""
    async with opened(SimDisk(), BIG) as store:
        count = 3 * expected + 30
        for _ in range(count):
            await put(store, b"x", more=f"n\x01{'1' * max(1, length)}\x02")
        nothing = Has(b"n\x013\x02", terms=terms)
        assert _in_memory(store, 0, nothing) is None
        assert nothing.evaluated <= expected
        most = nothing.evaluated
        last, longest = most, 0

        async def watch() -> None:
            nonlocal longest, last
            while True:
                longest, last = max(longest, nothing.evaluated - last), nothing.evaluated
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            result = await store.get_message_cold(TOPIC, 0, 0, 32, 1 << 20, nothing)
            nursery.cancel_scope.cancel()
        assert (result.next_begin_offset, nothing.evaluated) == (count, most + count)
        assert longest <= 2 * expected, "trio runs the tasks of a turn in any order"
        every = Has(b"n\x01", terms=terms)
        found = _in_memory(store, 0, every, 1)
        assert found == ([0], 1), "a slice has one record at least"


async def test_records_between_others_are_merged_where_they_are_adjacent() -> None:
    async with opened(SimDisk(), BIG) as store:
        for number in range(9):
            await put(store, b"x", more=f"n\x01{int(number % 4 < 2)}\x02")
        accept = Has(b"n\x011\x02")
        found = store.get_in_memory(_queue(store), 0, 32, 1 << 20, accept)
        assert found is not None
        _, (buffers, count, _), _ = found
        assert [len(decode_messages(bytes(data))) for data in buffers] == [2, 2, 1]
        assert count == 5


async def test_what_is_unusual_is_left_to_the_full_path() -> None:
    disk = SimDisk()
    async with opened(disk, BIG) as store:
        await fill(store, 6)
        queue, every = _queue(store), Has(b"")
        (file,) = store.files.files
        whole = bytes(queue.tail)
        phy, size, code = UNIT.unpack_from(queue.tail, 2 * UNIT_SIZE)
        for unit in ((phy, FILLER_SIZE), (phy, 90), (phy - 1, size), (-5, size), (phy, 1 << 20), (phy, size - 1)):
            queue.tail[2 * UNIT_SIZE : 3 * UNIT_SIZE] = UNIT.pack(*unit, code)
            assert _in_memory(store, 0, every) is None, unit
            assert _in_memory(store, 3, every) == ([3, 4, 5], 6)
            full = _offsets(await _full(store, 0, every))
            assert full == ([0, 1] if unit[1] == 1 << 20 else [0, 1, 3, 4, 5])  # too large for one answer
        queue.tail[:] = whole
        assert _in_memory(store, 0, every) == (list(range(6)), 6)
        file.in_memory_from = file.size
        assert _in_memory(store, 0, every) == (list(range(6)), 6), "the kernel reports it in memory"
        store.files.page_cache.forget(file, 0, file.size)
        disk.cold = True
        evaluated = every.evaluated
        assert _in_memory(store, 0, every) is None
        assert every.evaluated == evaluated, "cold data is not touched in the loop"
        assert _offsets(await _full(store, 0, every)) == list(range(6))


async def test_the_properties_of_one_message() -> None:
    disk = SimDisk()
    async with opened(disk, BIG) as store:
        await put(store, b"x", more="n\x011\x02")
        await put(store, b"", topic=LONG, more="n\x012\x02")
        await _put_v6(store, b"y", 0, b"n\x013")
        look = store.look_properties
        assert [look(TOPIC, 0, 0), look(LONG, 0, 0), look(TOPIC, 0, 1)] == [b"n\x011\x02", b"n\x012\x02", b"n\x013"]
        assert [look(TOPIC, 0, 2), look(TOPIC, 0, -1), look(TOPIC, 1, 0), look("No", 0, 0)] == [None] * 4
        queue = _queue(store)
        phy, size, code = UNIT.unpack_from(queue.tail)
        queue.tail[:UNIT_SIZE] = UNIT.pack(phy, size - 1, code)
        assert look(TOPIC, 0, 0) is None
        (file,) = store.files.files
        file.in_memory_from = file.size
        store.files.page_cache.forget(file, 0, file.size)
        disk.cold = True
        assert look(TOPIC, 0, 1) is None
