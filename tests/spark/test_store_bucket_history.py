"""What a bucket's manifest names: overlapping stretches, and what an archive may miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the spark extra: pip install 'trimq[spark]'")

from hypothesis import given
from hypothesis import strategies as st

from tests.interop.harness.object_server import ObjectServer
from tests.spark.buckets import BROKER, Place, new_place, parsed, rows, run, upload
from tests.store.stores import TOPIC, fill
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.stretch_table import StretchTable
from trimq.pipeline.jobs.archive_bucket import BucketBounds, bucket_bounds
from trimq.pipeline.store.bucket_plan import plan_history
from trimq.pipeline.store.history import _history, shown
from trimq.pipeline.store.options import parse
from trimq.protocol.bucket_manifest import Entry, Root, StoredObject, Stretch, StretchRows

pytestmark = pytest.mark.one_pyspark


@pytest.fixture
def place(object_server: ObjectServer, tmp_path: Path) -> Place:
    return new_place(object_server, tmp_path)


# -- overlaps


@st.composite
def stretches(draw: st.DrawFn) -> list[tuple[StoredObject, Stretch]]:
    found = []
    for number in range(draw(st.integers(1, 9))):
        stored = StoredObject(
            draw(st.integers(0, 3)), 9, draw(st.integers(0, 2)), draw(st.integers(1, 2)), number, 100, 50
        )
        begin, count = draw(st.integers(0, 30)), draw(st.integers(0, 12))
        queue = draw(st.integers(0, 1))
        found.append((stored, Stretch("T", queue, 1, begin, count, 1, number, 0, 1, 0, 1)))
    return found


@given(stretches())
def test_overlaps_show_what_a_broker_shows(given_stretches: list[tuple[StoredObject, Stretch]]) -> None:
    root = Root("C", "b", 1, "o")
    page = [Entry(stored, StretchRows.of([stretch])) for stored, stretch in given_stretches]
    history = _history("b", "", root, [page])
    found = shown(history)
    actual = {}
    for row, begin, end in zip(found.rows, found.begins.tolist(), found.ends.tolist(), strict=True):
        for offset in range(begin, end):
            key = int(row["queue_id"]), offset
            assert key not in actual
            actual[key] = history.objects[int(row["object"])]
    expected = {}
    for queue in range(2):
        table = StretchTable()
        for stored, stretch in given_stretches:
            if stretch.queue_id == queue and stretch.messages:
                table.add(stored, stretch)
        for offset in range(50):
            part = table.at(offset, "T", queue)
            if part is not None:
                expected[queue, offset] = part.stored
    assert actual == expected


def test_stretches_of_an_object_may_stand_in_several_pages() -> None:
    stored = StoredObject(0, 9, 1, 1, 0, 100, 50)
    pages = [[Entry(stored, [Stretch(topic, 0, 1, 0, 2, 1, at, 0, 1, 0, 1)])] for at, topic in enumerate("TUT")]
    pages[2][0].stretches[0] = pages[2][0].stretches[0]._replace(queue_id=1)  # type: ignore[index]
    history = _history("b", "", Root("C", "b", 1, "o"), pages)
    (part,) = plan_history(history, parse({"path": "s3://b", "cluster": "C"}))
    (piece,) = part.pieces
    assert [piece.topics[int(row["topic"])] for row in piece.stretches.rows] == ["T", "U", "T"]


# -- what an archive may miss


def test_an_archive_that_may_miss_messages_is_recognised(place: Place) -> None:
    ends: list[int] = []

    async def script(store: BucketMessageStore) -> None:
        for number in range(4):
            await fill(store, 5, first=5 * number)
            await fill(store, 5, topic="Other", first=5 * number)
            store.clock.advance(1.0)  # type: ignore[attr-defined]
            await upload(store)
            ends.append(store.manifest.end)

    run(place, script)

    def bounds(begin: int | None, **options: Any) -> BucketBounds:
        return bucket_bounds(parsed(place, broker=BROKER, **options), begin)

    assert bounds(None) == (0, ends[3], "")
    assert bounds(0) == bounds(ends[0] - 1) == bounds(ends[3]) == (0, ends[3], "")

    async def first_gone(store: BucketMessageStore) -> None:
        await store.bucket_queues.replace(store.manifest.entries[:1], [])
        await store.uploads.save()

    run(place, first_gone)
    start = ends[0]
    assert bounds(None) == (start, ends[3], "")
    assert bounds(ends[0]) == (start, ends[3], "")
    assert bounds(ends[0] - 1).why == f"the bucket begins at {start}, the archive ends at {start - 1}"

    async def one_segment_gone(store: BucketMessageStore) -> None:
        """Of the oldest window one queue's messages are gone: as if they had been in a segment of their own."""
        oldest = store.manifest.entries[0]
        kept = Entry(oldest.object, [one for one in oldest.stretches if one.topic == "Other"])
        store.manifest.change([oldest.object], [kept])
        await store.uploads.save()

    run(place, one_segment_gone)
    assert bounds(ends[1]) == (start, ends[3], "")
    assert bounds(ends[1] - 1).why == f"1 queues (as {TOPIC}/0) begin later"
    assert bounds(ends[1] - 1, topics="Other").why == ""

    async def all_gone(store: BucketMessageStore) -> None:
        await store.bucket_queues.expire(1 << 60)

    run(place, all_gone)
    assert bounds(None) == (ends[3], ends[3], "")
    assert bounds(ends[3]) == (ends[3], ends[3], "")
    assert bounds(ends[2]).why == f"the bucket begins at {ends[3]}, the archive ends at {ends[2]}"

    async def more(store: BucketMessageStore) -> None:
        await fill(store, 1, topic="New")
        await upload(store)

    run(place, more)
    # The queues have ended at the tombstones, all of which the archive has.
    assert bounds(ends[3]).why == ""


def test_a_queue_whose_last_messages_have_expired_unarchived(place: Place) -> None:
    begin: list[int] = []

    async def script(store: BucketMessageStore) -> None:
        await fill(store, 3)
        await upload(store)
        begin.append(store.manifest.end)
        await fill(store, 3, topic="Gone")
        await fill(store, 3, first=3)
        await upload(store)
        entry = store.manifest.entries[1]
        kept, gone = (
            Entry(entry.object, [one for one in entry.stretches if (one.topic == "Gone") is is_gone])
            for is_gone in (False, True)
        )
        end = gone.stretches[0]._replace(offset=3, messages=0, size=0, blocks=0, position=0)
        expired = Entry(entry.object._replace(length=0, directory=0, number=1), [end])
        store.manifest.change([entry.object], [kept, expired])
        await store.uploads.save()

    run(place, script)
    options = parsed(place, broker=BROKER)
    assert bucket_bounds(options, begin[0]).why == "the last messages of 1 queues (as Gone/0) have expired"
    assert bucket_bounds(parsed(place, broker=BROKER, topics=TOPIC), begin[0]).why == ""
    assert len(rows(place)) == 6


def test_a_queue_that_ended_before_the_archive_and_goes_on(place: Place) -> None:
    begin: list[int] = []

    async def script(store: BucketMessageStore) -> None:
        await fill(store, 3)
        await upload(store)
        await store.bucket_queues.expire(1 << 60)
        begin.append(store.manifest.end)
        await fill(store, 3, topic="Other")
        await upload(store)
        await fill(store, 3, first=3)
        await upload(store)

    run(place, script)
    assert bucket_bounds(parsed(place, broker=BROKER), begin[0]) == (begin[0], log_end(place), "")


def log_end(place: Place) -> int:
    ends: list[int] = []

    async def script(store: BucketMessageStore) -> None:
        ends.append(store.manifest.end)

    run(place, script)
    return ends[0]
