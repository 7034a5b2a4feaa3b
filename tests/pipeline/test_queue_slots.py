"""A rebuild gives records with irregular offsets the same units as the broker, whose consume queue is the reference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from trimq.broker.store.queue.consume_queue import ConsumeQueue, QueueShape
from trimq.pipeline.jobs.queue_slots import QueueImage
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.record import OVERHEAD_V1

steps = st.tuples(st.integers(-3, 12), st.integers(0, 3000))


@examples(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.lists(steps, max_size=40))
def test_odd_offsets_get_the_units_that_the_broker_gives_them(first: int, moves: list[tuple[int, int]]) -> None:
    """For offsets that jump, go back or start late, units and first file are the broker's."""
    queue = ConsumeQueue("T", 0, "/q", QueueShape(10, 4096), lambda _: None)
    image = QueueImage(10, 4096)
    files: dict[int, bytes] = {}
    offset, phy = first, 0
    for leap, gap in [(0, 0), *moves]:
        offset = max(0, offset + leap)
        phy += gap
        queue.put(phy, 100, 7, offset)
        image.put(phy, 100, 7, offset)
        files |= image.take_files()
        assert len(image.units) < 10 * UNIT_SIZE
        offset, phy = offset + 1, phy + 100
    files |= image.take_files(to_the_end=True)
    assert (min(files), image.next) == (queue.first_offset, queue.next_offset)
    assert list(files) == list(range(min(files), image.next, 10))
    assert b"".join(files.values()) == queue.tail_units(queue.tail_offset, queue.unwritten())


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_lost_records_get_fillers_if_the_hole_has_space_for_them(spare: int) -> None:
    """If the hole is one byte smaller, the offsets were skipped by an otherwise continuous queue and get no fillers."""
    queue = ConsumeQueue("T", 0, "/q", QueueShape(10, 4096), lambda _: None)
    image = QueueImage(10, 4096)
    for phy, offset in ((0, 0), (100 + 2 * OVERHEAD_V1 + spare, 3)):
        queue.put(phy, 100, 7, offset)
        image.put(phy, 100, 7, offset)
    assert image.next == queue.next_offset == (4 if spare >= 0 else 2)
    assert bytes(image.units) == queue.tail_units(queue.tail_offset, queue.unwritten())
