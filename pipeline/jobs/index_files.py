"""Writes index files from entries in log order, and reads them for the audit. Layout: trimq.protocol.index_layout."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from trimq.pipeline.jobs.job_support import Target, groups
from trimq.pipeline.store.files import DataFile, StoreFiles
from trimq.protocol.index_batch import Batch, make_batch, seconds_since
from trimq.protocol.index_layout import HEADER, HEADER_SIZE, entry_at, file_size, slot_at

INDEX_SCHEMA: Final = "file bigint, path string, entries bigint, begin bigint, end bigint"
_ARROW: Final = pa.schema(
    [
        ("file", pa.int64()),
        ("path", pa.string()),
        ("entries", pa.int64()),
        ("begin", pa.int64()),
        ("end", pa.int64()),
    ]
)
_STEP: Final = 1 << 16


def write_index_files(
    target: Target, slots: int, entries: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write a file for each group of entries, which come sorted by file and number; yields a row for each file.

    The files get temporary names. Their final names are made of their first times and have to ascend, which only the
    driver can ensure, with the rows of all files.
    """
    for (number,), table in groups(batches, ("file",)):
        path = target.join("index", f".part-{number}")
        target.make_directory(target.join("index"))
        with tempfile.NamedTemporaryFile(dir=target.join("index") if target.is_local else None, delete=False) as file:
            file.truncate(file_size(slots, entries))
            with mmap.mmap(file.fileno(), 0) as mapped:
                begin, end, count = _fill(memoryview(mapped), slots, entries, number, table)
            os.fsync(file.fileno())
        if target.is_local:
            os.replace(file.name, path)  # noqa: PTH105 - fsspec's paths are strings
        else:
            target.fs.put_file(file.name, path)
            os.unlink(file.name)  # noqa: PTH108 - as above
        values: tuple[Any, ...] = (number, path, count, begin, end)
        arrays = [pa.array([value], kind.type) for value, kind in zip(values, _ARROW, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_ARROW)


def _fill(view: memoryview, slots: int, entries: int, number: int, table: pa.Table) -> tuple[int, int, int]:
    """Write the entries and the header; returns the begin and end time, and the number of entries.

    In every file but the first, the first row is the last entry of the previous file. It is not written.
    """
    batch: Batch = make_batch()
    before = 0
    # RocketMQ creates a file with the previous file's end time as its begin: the first entry's seconds count from that.
    if number and table["number"][0].as_py() < number * (entries - 1):
        before = table["storeTime"][0].as_py()
        table = table.slice(1)
    count, used, begin, begin_phy, end, end_phy = 1, 0, before, 0, 0, 0
    try:
        for piece in table.to_batches(max_chunksize=_STEP):
            hashes, phys, times = (piece[name].to_pylist() for name in ("hash", "phy", "storeTime"))
            seconds = []
            for phy, time in zip(phys, times, strict=True):
                # Before the first entry sets ``begin``: its own seconds are relative to the previous file's end.
                seconds.append(seconds_since(begin, time))
                if count == 1 and len(seconds) == 1:
                    begin, begin_phy = time, phy
            used += batch.put(view, slots, count, hashes, phys, seconds)
            count += len(hashes)
            end, end_phy = times[-1], phys[-1]
        HEADER.pack_into(view, 0, begin, end, begin_phy, end_phy, used, count)
    finally:
        view.release()
    return begin, end, count - 1


_ENTRY: Final = np.dtype([("hash", ">i4"), ("phy", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_READ_ARROW: Final = pa.schema(
    [("hash", pa.int32()), ("phy", pa.int64()), ("kind", pa.string()), ("example", pa.string())]
)


def read_index_file(files: StoreFiles, slots: int, entries: int, _: int, file: DataFile) -> Iterator[pa.RecordBatch]:
    """The entries of a file that a query can reach, as hash and log offset, and the faults of its slots and chains."""
    with files.opened(file) as source:
        header = HEADER.unpack(source.read(0, HEADER_SIZE))
        count = max(header[5], 1)
        if file.size != file_size(slots, entries) or count > entries:
            expected = f"with maxHashSlotNum={slots} and maxIndexNum={entries} it has {file_size(slots, entries)} bytes"
            yield _wrong("index file", f"{file.path} has {file.size} bytes and {count} entries: {expected}")
            return
        heads = np.frombuffer(source.read(HEADER_SIZE, slot_at(slots)), ">i4")
        held = np.frombuffer(source.read(entry_at(slots, 0), entry_at(slots, count)), _ENTRY)[:count]
        slot = (held["hash"].astype(np.int64) & 0xFFFFFFFF) % slots
        slot[:1] = slots  # entry 0 is never used: it gets a slot of its own behind the real ones
        # What the chains should be: each entry points to the one before it in the same slot, the slot to the last one.
        order = np.argsort(slot, kind="stable")
        chain = np.zeros(count, dtype=np.int64)
        same = slot[order][1:] == slot[order][:-1]
        chain[order[1:][same]] = order[:-1][same]
        broken = np.flatnonzero(held["previous"][1:] != chain[1:]) + 1
        newest = np.zeros(slots + 1, dtype=np.int64)
        np.maximum.at(newest, slot, np.arange(count))
        wrong_slots = np.flatnonzero((heads != newest[:slots]) & ((heads > 0) | (newest[:slots] > 0)))
        for number in broken[:20].tolist():
            yield _wrong(
                "index chain",
                f"{file.path}: entry {number} points to {int(held['previous'][number])}, not {chain[number]}",
            )
        for number in wrong_slots[:20].tolist():
            yield _wrong(
                "index slot", f"{file.path}: slot {number} points to {int(heads[number])}, not {newest[number]}"
            )
        # A query may miss any entry of a chain with a fault: all of them count as unreachable.
        lost = np.isin(slot, slot[broken]) | np.isin(slot, wrong_slots)
        lost[:1] = True
        reached = held[~lost]
        nulls = pa.nulls(len(reached), pa.string())
        hashes = pa.array(reached["hash"].astype(np.int32))
        yield pa.RecordBatch.from_arrays(
            [hashes, pa.array(reached["phy"].astype(np.int64)), nulls, nulls], schema=_READ_ARROW
        )


def _wrong(kind: str, example: str) -> pa.RecordBatch:
    row = {"hash": 0, "phy": 0, "kind": kind, "example": example}
    return pa.RecordBatch.from_pylist([row], schema=_READ_ARROW)
