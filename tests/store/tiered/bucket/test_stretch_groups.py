"""Stretches grouped by queue with numpy: as if each was added to its queue."""

from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill
from tests.store.tiered.bucket.stores import Objects, opened, uploaded
from trimq.broker.store.tiered.bucket.stretch_groups import Run, StretchGroups
from trimq.broker.store.tiered.bucket.stretch_table import StretchTable
from trimq.protocol.bucket_manifest import Entry, StoredObject, Stretch, StretchRows

STRETCHES = st.tuples(
    st.sampled_from(["a", "b", "c"]), st.integers(-1, 2), st.integers(0, 30), st.integers(0, 9), st.integers(0, 1000)
)


def entry(number: int, stretches: list[Stretch], generation: int = 0) -> Entry:
    return Entry(StoredObject(number, number + 1, generation, 1, number, 100, 50), StretchRows.of(stretches))


@given(st.lists(st.lists(STRETCHES, max_size=6), max_size=6))
def test_tables_are_those_of_single_additions(objects: list[list[tuple[str, int, int, int, int]]]) -> None:
    entries = [
        entry(
            number,
            sorted(
                Stretch(topic, queue_id, 1, offset, messages, 7, 64, physical, physical + messages, offset, offset)
                for topic, queue_id, offset, messages, physical in rows
            ),
        )
        for number, rows in enumerate(objects)
    ]
    groups = StretchGroups(entries)
    tables: dict[tuple[str, int], StretchTable] = {}
    ends: dict[tuple[str, int], int] = {}
    for one in entries:
        for stretch in one.stretches:
            key = stretch.topic, stretch.queue_id
            ends[key] = max(ends.get(key, 0), stretch.end)
            table = tables.setdefault(key, StretchTable())
            if stretch.messages:
                table.add(one.object, stretch)
    assert dict(zip(groups.queues, groups.ends, strict=True)) == ends
    for number, key in enumerate(groups.queues):
        found = groups.table(number)
        assert list(found.items(*key)) == list(tables[key].items(*key))
        assert [found.at(offset, *key) for offset in range(40)] == [tables[key].at(at, *key) for at in range(40)]


def test_stretches_that_follow_each_other_are_one_run() -> None:
    def stretch(queue_id: int, offset: int, physical: int, messages: int = 2) -> Stretch:
        return Stretch("t", queue_id, 1, offset, messages, 10, 64, physical, physical + 5, 0, 0)

    entries = [
        entry(0, [stretch(0, 0, 0), stretch(1, 0, 10)]),
        entry(1, [stretch(0, 2, 20), stretch(1, 3, 30)]),
        entry(2, [stretch(0, 4, 15), stretch(1, 5, 40), stretch(1, 7, 50, 0)]),
    ]
    assert StretchGroups(entries).runs() == [
        Run("t", 0, 0, 4, 20, 0, 25),
        Run("t", 0, 4, 2, 10, 15, 20),  # its log offsets are lower: it does not follow
        Run("t", 1, 0, 2, 10, 10, 15),
        Run("t", 1, 3, 4, 20, 30, 45),
    ]
    assert StretchGroups([]).runs() == []


async def test_the_loop_has_turns_while_many_queues_change() -> None:
    async with opened(SimDisk(), Objects()) as store:
        await fill(store, 1)
        await uploaded(store)
        queues = store.bucket_queues
        begin = queues.end

        def many(at: int, generation: int = 0) -> Entry:
            rows = [Stretch("Many", number, 1, at, 1, 10, 64, begin + at, begin + at, 0, 1) for number in range(500)]
            stored = StoredObject(begin + at, begin + at + 1, generation, 1, 0, 100, 50)
            return Entry(stored, StretchRows.of(rows))

        await _with_turns(queues.add, many(0))
        await _with_turns(queues.add, many(1))
        assert [queue.commit_offset for queue in queues.of_topic("Many")] == [2] * 500
        await _with_turns(queues._take)
        assert [(queue.min_offset, queue.commit_offset) for queue in queues.of_topic("Many")] == [(0, 2)] * 500
        old = queues.manifest.entries[-2:]
        stretches = [one._replace(messages=2) for one in old[0].stretches]
        joined = Entry(old[0].object._replace(end=begin + 2, generation=1), StretchRows.of(stretches))
        await _with_turns(queues.replace, old, [joined])
        assert [(queue.min_offset, queue.commit_offset) for queue in queues.of_topic("Many")] == [(0, 2)] * 500
        assert not await queues.replace(old, [joined])  # they are not there any more
        await _with_turns(queues.expire, 2)
        assert [(queue.min_offset, queue.commit_offset) for queue in queues.of_topic("Many")] == [(2, 2)] * 500


async def _with_turns(change: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
    """Change queues; another task has several turns."""
    turns = 0
    finished = False

    async def count() -> None:
        nonlocal turns
        while not finished:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await change(*arguments)
        finished = True
    assert turns > 500 // 100


async def test_a_deletion_and_an_addition_wait_for_each_other() -> None:
    async with opened(SimDisk(), Objects()) as store:
        await fill(store, 1)
        await uploaded(store)
        queues = store.bucket_queues
        begin = queues.end
        rows = [Stretch("Many", number, 1, 0, 1, 10, 64, begin, begin, 0, 1) for number in range(500)]
        new = Entry(StoredObject(begin, begin + 1, 0, 1, 0, 100, 50), StretchRows.of(rows))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queues.add, new)
            while queues.find("Many", 100) is None:
                await trio.lowlevel.checkpoint()
            await queues.destroy_topic("Many")
        assert not queues.of_topic("Many")
        assert {stretch.topic for one in queues.manifest.entries for stretch in one.stretches} == {TOPIC}
        assert all(first.object < second.object for first, second in pairwise(queues.manifest.entries))
