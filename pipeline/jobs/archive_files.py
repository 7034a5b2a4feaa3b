"""Writes the Parquet files of an archive."""

import posixpath
import uuid
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from trimq.pipeline.jobs.job_support import Target, groups

FILES_SCHEMA: Final = "topic string, day string, path string, rows bigint, bytes bigint"
_ARROW: Final = pa.schema(
    [("topic", pa.string()), ("day", pa.string()), ("path", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64())]
)
_ROW_GROUP: Final = 16 << 20


class _Files:
    """The files of one topic and day. A file that has reached ``file_size`` is closed; the next row opens another."""

    def __init__(self, out: Target, directory: str, topic: str, day: str, file_size: int, compression: str) -> None:
        self._out = out
        self._directory = directory
        self._place = topic, day
        self._file_size = file_size
        self._compression = compression
        self._writer: Any = None
        self._stream: Any = None
        self._path = ""
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
        """Add rows; yields a row of ``_ARROW`` for each file that is full."""
        import pyarrow.parquet as pq  # noqa: PLC0415 - only tasks that write need it

        step = max(1, int(_ROW_GROUP // max(1, batch.nbytes / max(1, batch.num_rows))))
        for at in range(0, batch.num_rows, step):
            if self._writer is None:
                self._path = posixpath.join(self._directory, f"{uuid.uuid4().hex}.parquet")
                self._out.make_directory(self._directory)
                self._stream = self._out.fs.open(self._path, "wb")
                self._writer = pq.ParquetWriter(self._stream, batch.schema, compression=self._compression)
                self._rows = 0
            piece = batch.slice(at, step)
            self._writer.write_batch(piece)
            self._rows += piece.num_rows
            if self._stream.tell() >= self._file_size:
                yield self.end()

    def end(self) -> tuple[Any, ...]:
        """Close the file; returns its row of ``_ARROW``."""
        self._writer.close()
        size = self._stream.tell()
        self._stream.close()
        self._writer = None
        return (*self._place, self._path, self._rows, size)

    @property
    def is_open(self) -> bool:
        """Whether a file has been begun and not been closed."""
        return self._writer is not None


def write_files(
    out: Target, staging: str, file_size: int, compression: str, found: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write rows, sorted by topic and day; yields a row for each file, as FILES_SCHEMA says."""
    files: _Files | None = None
    key: tuple[Any, ...] = ()
    written: list[tuple[Any, ...]] = []
    for batch in found:
        for place, table in groups(iter([batch]), ("topic", "day")):
            if place != key:
                # Rows are sorted by topic and day: no row of the previous pair follows.
                if files is not None and files.is_open:
                    written.append(files.end())
                key, files = place, _Files(out, staging, place[0], place[1], file_size, compression)
            assert files is not None
            for piece in table.drop_columns(["topic", "day"]).combine_chunks().to_batches():
                written += files.write(piece)
    if files is not None and files.is_open:
        written.append(files.end())
    # The names are returned only when all files are closed: the driver sees none of a task that failed.
    yield pa.RecordBatch.from_pylist([dict(zip(_ARROW.names, row, strict=True)) for row in written], schema=_ARROW)
