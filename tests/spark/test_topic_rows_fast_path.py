"""Rows without properties of their own are encoded in whole requests, with the same content as one by one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tests.interop.harness.servers import Cluster
from tests.spark.tables import read, write
from trimq.pipeline.topics.rows_fast_path import fits_fast_path, requests_of
from trimq.pipeline.topics.sink_rows import RowError, rows_of
from trimq.protocol.batch import decode_batch
from trimq.protocol.message_id import UniqueIdGenerator
from trimq.protocol.property_text import decode_properties

pytestmark = pytest.mark.one_pyspark

ADDRESS = b"\x0a\x00\x00\x01"
SCHEMA = pa.schema([("body", pa.binary()), ("tags", pa.string())])


def batch_of(count: int) -> pa.RecordBatch:
    rows = [{"body": b"%d" % n * (n % 40 + 1), "tags": (None, "paid", "é", "")[n % 4]} for n in range(count)]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def sent(batch: pa.RecordBatch, batch_bytes: int = 3000) -> list[tuple[bytes, dict[str, str]]]:
    found = []
    for request in requests_of(batch, "T", batch_bytes, UniqueIdGenerator(ADDRESS)):
        prepared = request.prepared(bytes(request.body))
        items = decode_batch(prepared.body)
        assert len(items) == request.rows
        if request.rows > 1:
            assert len(prepared.body) - len(items[-1].body) - len(items[-1].properties) - 22 < batch_bytes
        found += [(bytes(item.body), decode_properties(item.properties.decode())) for item in items]
        assert prepared.message_ids == (decode_properties(items[0].properties.decode())["UNIQ_KEY"],)
    return found


@pytest.mark.parametrize("batch", [batch_of(500), batch_of(500).slice(17, 401), batch_of(500).slice(333)])
def test_rows_are_what_they_are_one_by_one(batch: pa.RecordBatch) -> None:
    assert fits_fast_path(batch)
    found = sent(batch)
    ids = [properties.pop("UNIQ_KEY") for _, properties in found]
    assert len(set(ids)) == batch.num_rows
    assert {len(one) for one in ids} == {32}
    assert found == [(row.body, decode_properties(row.properties)) for row in rows_of(batch, "T")]


def test_text_bodies_and_no_tags() -> None:
    texts = [f"é{number}" for number in range(200)]
    found = sent(pa.RecordBatch.from_arrays([pa.array(texts)], ["body"]), batch_bytes=1)
    assert [body.decode() for body, _ in found] == texts
    assert {tuple(properties) for _, properties in found} == {("UNIQ_KEY",)}


@pytest.mark.parametrize("missing", [None, b""])
def test_a_row_without_a_body_is_reported(missing: bytes | None) -> None:
    bodies = [b"x"] * 150
    batch = pa.RecordBatch.from_arrays([pa.array([*bodies, missing, *bodies], pa.binary())], ["body"])
    with pytest.raises(RowError, match="null or empty"):
        sent(batch)
    with pytest.raises(RowError, match="a property"):
        sent(pa.RecordBatch.from_arrays([pa.array(bodies), pa.array(["a\x01b"] * 150)], ["body", "tags"]))


def test_what_needs_a_look_at_each_row_does_not_fit_the_fast_path() -> None:
    rows: list[dict[str, Any]] = [{"body": b"x", "keys": ["k"]}] * 200
    assert not fits_fast_path(pa.RecordBatch.from_pylist(rows))
    assert not fits_fast_path(batch_of(20)), "few rows wait for others"


def test_ids_differ_whatever_is_taken_at_once() -> None:
    ids = UniqueIdGenerator(ADDRESS)
    found = set()
    for count in (1, 5, 30_000, 30_000):
        prefix, numbers = ids.several(count)
        found |= {b"%b%04X" % (prefix, number & 0xFFFF) for number in numbers}
        found.add(ids.next().encode())
    assert len(found) == 60_010


def test_brokers_take_them(cluster: Cluster) -> None:
    topic = cluster.create_topic("SparkFastPath", 2)
    rows = [{"body": b"%04d" % n * 50, "tags": f"t{n % 3}"} for n in range(1500)]
    assert write(cluster, rows, topic=topic, batchBytes=20_000) == (1500, 0)
    found = read(cluster, topics=topic)
    assert sorted((row["body"], row["tags"]) for row in found) == [(row["body"], row["tags"]) for row in rows]
    assert len({row["uniqId"] for row in found}) == 1500
