"""The table of a tier in a bucket, without Spark: it equals the log, whatever was joined; nothing else is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="needs the spark extra: pip install 'trimq[spark]'")
pytest.importorskip("obstore", reason="needs the s3 extra: pip install 'trimq[s3]'")

from tests.interop.harness.object_server import ObjectServer
from tests.spark import test_store_core as local
from tests.spark.buckets import BROKER, Place, damaged, join, new_place, parsed, place_of, rows, run, upload
from tests.store.stores import TOPIC, fill
from trimq.broker.store.tiered.bucket import joiner, uploader
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.pipeline.store.plan import plan_of

pytestmark = pytest.mark.one_pyspark

HOURS, COUNT = 3, 30
"""Messages of each queue in each hour."""


async def write(store: BucketMessageStore) -> None:
    """Messages of two topics in three hours; four uploads in each hour."""
    for hour in range(HOURS):
        for number in range(COUNT):
            for queue in range(2):
                await fill(store, 1, queue_id=queue, first=hour * COUNT + number)
            await fill(store, 1, topic="Other", first=hour * COUNT + number)
            store.clock.advance(1.0)  # type: ignore[attr-defined]
            if number % 8 == 7:
                await upload(store)
        await upload(store)
        store.clock.advance(3600.0)  # type: ignore[attr-defined]


@pytest.fixture
def place(object_server: ObjectServer, tmp_path: Path) -> Place:
    return new_place(object_server, tmp_path)


@pytest.fixture
def small_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    monkeypatch.setattr(joiner, "JOIN_SEGMENTS", 2)


def log_rows(place: Place) -> list[dict[str, Any]]:
    """What the log has, which keeps everything."""
    return sorted((row | {"brokerName": BROKER} for row in local.rows(place.store)), key=place_of)


SPLITS: list[dict[str, Any]] = [{}, {"splitSize": 600}, {"splitSize": 0}, {"splitSize": "8k"}, {"checkCrc": False}]


def test_the_table_equals_the_log_before_and_after_joins(place: Place, small_joins: None) -> None:
    run(place, write)
    expected = log_rows(place)
    assert len(expected) == 3 * HOURS * COUNT
    for options in SPLITS:
        assert rows(place, **options) == expected
    joins = []

    async def script(store: BucketMessageStore) -> None:
        joins.append(await join(store))

    run(place, script)
    assert joins[0] > 3
    assert any((place.objects / "segments").iterdir())
    for options in SPLITS:
        assert rows(place, **options) == expected
    assert damaged(place) == []
