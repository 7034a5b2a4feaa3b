"""What all jobs share: a session, work on the parts of a store at the same time, files written whole or not at all."""

import os
import posixpath
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute
from pyspark.sql import DataFrame, SparkSession

from trimq.pipeline.registration import make_known
from trimq.pipeline.store.source import RocketMQStoreDataSource

P = TypeVar("P")

_SYNCS: Final = 8
"""Files and directories that are synced at the same time."""


def session(name: str) -> SparkSession:
    """The session of the program, or a local one; times are in UTC, as the store's are."""
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    if "--master" not in arguments or "--master local" in arguments:
        # workers on this machine run what runs here, also where its environment is not the active one
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.appName(f"trimq {name}").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    make_known(spark, RocketMQStoreDataSource)
    return spark


def on_parts(
    spark: SparkSession, parts: Sequence[P], work: Callable[[int, P], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """What ``work`` makes of each part, given with its number: a task for each."""
    if not parts:
        return spark.createDataFrame([], schema)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(number, parts[number])

    table = spark.range(0, len(parts), 1, len(parts))
    return table.mapInArrow(run, schema)  # type: ignore[arg-type] # PySpark 4.0 says Iterable, and gives an iterator


def groups(batches: Iterator[pa.RecordBatch], columns: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """Rows that are sorted by some columns, as a table for each value of those."""
    key: tuple[Any, ...] | None = None
    held: list[pa.RecordBatch] = []
    for batch in batches:
        for found, piece in runs(batch, columns):
            if found != key:
                if held and key is not None:
                    yield key, pa.Table.from_batches(held)
                key, held = found, []
            held.append(piece)
    if held and key is not None:
        yield key, pa.Table.from_batches(held)


def runs(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """The stretches of a batch in which the columns do not change."""
    if not batch.num_rows:
        return
    arrays = [batch.column(batch.schema.get_field_index(name)) for name in columns]
    cuts = {0}
    for array in arrays:
        changed = pa.compute.not_equal(array.slice(1), array.slice(0, len(array) - 1))
        cuts.update(index + 1 for index in pa.compute.indices_nonzero(changed).to_pylist())
    starts = sorted(cuts)
    for begin, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        yield tuple(array[begin].as_py() for array in arrays), batch.slice(begin, end - begin)


class Target:
    """A directory that files are written into, on a local disk or behind fsspec."""

    def __init__(self, path: str) -> None:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - as in store.files

        self.path = path
        self.fs, root = url_to_fs(path)
        self.root = root.rstrip("/")
        protocol = self.fs.protocol
        self.is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def __reduce__(self) -> tuple[type["Target"], tuple[str]]:
        """Travels to an executor as its path."""
        return Target, (self.path,)

    def join(self, *names: str) -> str:
        """A path below it."""
        return posixpath.join(self.root, *names)

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it."""
        self.fs.makedirs(path, exist_ok=True)

    def write(self, path: str, data: Any, *, at: int = 0, size: int | None = None) -> None:
        """A whole file of ``size`` bytes with ``data`` at a place of it and zeros elsewhere: there or not, never half.

        On a local disk it is synced, and only the pages of ``data`` take room.
        """
        size = at + len(data) if size is None else size
        self.make_directory(posixpath.dirname(path))
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        if self.is_local:
            with open(temporary, "wb") as file:  # noqa: PTH123 - fsspec speaks of paths as text
                file.truncate(size)
                file.seek(at)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)  # noqa: PTH105 - as above
            return
        self.fs.pipe_file(path, bytes(at) + bytes(data) + bytes(size - at - len(data)))

    def move(self, source: str, target: str) -> None:
        """Give a file another name; the old one may be gone already, if the new one is there."""
        if self.is_local:
            os.makedirs(posixpath.dirname(target), exist_ok=True)  # noqa: PTH103 - as above
            os.replace(source, target)  # noqa: PTH105 - as above
        else:
            self.fs.makedirs(posixpath.dirname(target), exist_ok=True)
            self.fs.mv(source, target)

    def sync(self, *paths: str) -> None:
        """Files, and directories with all that is in them: they outlast a power cut then. On a local disk only."""
        if not self.is_local or not paths:
            return
        found = set(paths)
        for path in paths:
            for above, _, names in os.walk(path):
                found.update({above}, (posixpath.join(above, name) for name in names))
        parents = {parent for path in found for parent in PurePosixPath(path).parents}
        directories = {str(parent) for parent in parents if parent.is_relative_to(self.root)}
        with ThreadPoolExecutor(_SYNCS) as pool:
            list(pool.map(_sync, found | directories))
        with suppress(PermissionError):  # that may be anybody's, and has only this directory's name
            _sync(posixpath.dirname(self.root))

    def remove(self, path: str) -> None:
        """Delete a file or a directory with all that is in it; fine where it is not there."""
        if self.fs.exists(path):
            self.fs.rm(path, recursive=True)

    def names(self, *below: str) -> list[str]:
        """Names in a directory below it; none where it is not there."""
        path = self.join(*below)
        if not self.fs.exists(path):
            return []
        return sorted(posixpath.basename(found.rstrip("/")) for found in self.fs.ls(path, detail=False))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
