"""What all jobs share: a session, tasks over the parts of a store, and files that are written atomically."""

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
"""Files and directories that are synced concurrently."""


def session(name: str) -> SparkSession:
    """The program's session, or a new local one. Its time zone is UTC."""
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    if "--master" not in arguments or "--master local" in arguments:
        # Local workers run this interpreter, even if its virtual environment is not the active one.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.appName(f"trimq {name}").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    make_known(spark, RocketMQStoreDataSource)
    return spark


def on_parts(
    spark: SparkSession, parts: Sequence[P], work: Callable[[int, P], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """The batches that ``work(number, part)`` yields for each part, as a table; each part is one task."""
    if not parts:
        return spark.createDataFrame([], schema)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(number, parts[number])

    # One number in each partition: Spark schedules the parts as separate tasks.
    table = spark.range(0, len(parts), 1, len(parts))
    return table.mapInArrow(run, schema)  # type: ignore[arg-type] # PySpark 4.0 declares Iterable, but passes an iterator


def groups(batches: Iterator[pa.RecordBatch], columns: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """The rows of sorted batches, grouped: a key and a table for each distinct value of ``columns``."""
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
    """Consecutive slices of a batch in each of which ``columns`` are constant, with their values."""
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
    """An output directory, on a local disk or any fsspec file system."""

    def __init__(self, path: str) -> None:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - as in store.files

        self.path = path
        self.fs, root = url_to_fs(path)
        self.root = root.rstrip("/")
        protocol = self.fs.protocol
        self.is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def __reduce__(self) -> tuple[type["Target"], tuple[str]]:
        """Pickled as its path; an executor opens its own file system."""
        return Target, (self.path,)

    def join(self, *names: str) -> str:
        """A path below the directory."""
        return posixpath.join(self.root, *names)

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents."""
        self.fs.makedirs(path, exist_ok=True)

    def write(self, path: str, data: Any, *, at: int = 0, size: int | None = None) -> None:
        """Write a file of ``size`` bytes with ``data`` at offset ``at`` and zeros elsewhere, atomically.

        On a local disk the file is synced before it gets its name, and sparse: only the pages of ``data`` take space.
        """
        size = at + len(data) if size is None else size
        self.make_directory(posixpath.dirname(path))
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        if self.is_local:
            with open(temporary, "wb") as file:  # noqa: PTH123 - fsspec's paths are strings
                file.truncate(size)
                file.seek(at)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)  # noqa: PTH105 - as above
            return
        self.fs.pipe_file(path, bytes(at) + bytes(data) + bytes(size - at - len(data)))

    def move(self, source: str, target: str) -> None:
        """Rename a file, replacing ``target``; makes the directory of ``target``."""
        if self.is_local:
            os.makedirs(posixpath.dirname(target), exist_ok=True)  # noqa: PTH103 - as above
            os.replace(source, target)  # noqa: PTH105 - as above
        else:
            self.fs.makedirs(posixpath.dirname(target), exist_ok=True)
            self.fs.mv(source, target)

    def sync(self, *paths: str) -> None:
        """Make files, and directories with all of their contents, durable. Does nothing on a remote file system."""
        if not self.is_local or not paths:
            return
        # A new file is durable only if its directory is synced too, and that one's parents if they are new.
        found = set(paths)
        for path in paths:
            for above, _, names in os.walk(path):
                found.update({above}, (posixpath.join(above, name) for name in names))
        parents = {parent for path in found for parent in PurePosixPath(path).parents}
        directories = {str(parent) for parent in parents if parent.is_relative_to(self.root)}
        with ThreadPoolExecutor(_SYNCS) as pool:
            list(pool.map(_sync, found | directories))
        with suppress(PermissionError):  # the parent may belong to another user; it has only this directory's entry
            _sync(posixpath.dirname(self.root))

    def remove(self, path: str) -> None:
        """Delete a file, or a directory with its contents; does nothing if it does not exist."""
        if self.fs.exists(path):
            self.fs.rm(path, recursive=True)

    def names(self, *below: str) -> list[str]:
        """The names in a subdirectory, sorted; empty if it does not exist."""
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
