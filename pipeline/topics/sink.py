"""Writing rows into topics: what Spark asks of a writer, for batch and stream.

At least once: a row is acknowledged by its broker before its task ends, and what is not certain is sent again.
``idempotent=true`` adds that a task which runs again asks first (see delivery). A written row cannot be taken back, so
that ``abort`` has nothing to do.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import pyarrow as pa
import pyspark.sql.datasource
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.topics.delivery import Identity, WriteSettings, deliver
from trimq.pipeline.topics.settings import no_path
from trimq.pipeline.topics.sink_rows import check_columns

_ROWS_AT_ONCE: Final = 2000
_ARROW_TYPES: Final = {
    "string": pa.string(),
    "binary": pa.binary(),
    "array<string>": pa.list_(pa.string()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "smallint": pa.int16(),
    "tinyint": pa.int8(),
}
"""Those of the columns that a sink takes, by the names that Spark has for them."""


@dataclass
class Written(WriterCommitMessage):
    """What a task has done: rows sent, and rows that an earlier run of it had stored already."""

    sent: int = 0
    found: int = 0


def _write(batches: Iterator[pa.RecordBatch], settings: WriteSettings, write_id: str | None) -> Written:
    """Sends all rows of a task. Raises RocketMQError, and ValueError for a row that no broker takes."""
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("rows are written by Spark's tasks")
    query = write_id or context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId") if write_id is None else "0"
    if settings.idempotent and (not query or batch is None):
        raise RuntimeError("Spark does not say which query and batch this task belongs to: idempotent=true cannot work")
    identity = Identity(f"{query}/{batch}/{context.partitionId()}", again=context.attemptNumber() > 0)
    return Written(*deliver(batches, settings, identity))


class TopicWriter(DataSourceArrowWriter):
    """A batch write. ``writeId`` names it across runs of the program; without, each is a new one."""

    def __init__(self, settings: WriteSettings, write_id: str | None) -> None:
        self._settings = settings
        self._write_id = write_id or secrets.token_hex(16)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Sends a task's rows."""
        return _write(iterator, self._settings, self._write_id)


class TopicRowStreamWriter(DataSourceStreamWriter):
    """A stream write for PySpark 4.0, which hands over rows one by one."""

    def __init__(self, settings: WriteSettings, schema: Any) -> None:
        self._settings = settings
        self._schema = schema

    def write(self, iterator: Iterator[Any]) -> Written:
        """Sends a task's rows of one batch."""
        return _write(as_batches(iterator, self._schema), self._settings, None)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Nothing is left to do: brokers have acknowledged every row."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Nothing can be done: what is stored is stored, and Spark runs the batch again."""


def as_batches(rows: Iterable[Any], schema: Any) -> Iterator[pa.RecordBatch]:
    """Spark's rows as the Arrow batches that later versions hand over."""
    kinds = {field.name: _ARROW_TYPES[field.dataType.simpleString()] for field in schema.fields}
    rows = iter(rows)
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        columns = zip(*some, strict=True)
        arrays = [pa.array(map(_plain, column), kind) for column, kind in zip(columns, kinds.values(), strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, list(kinds))


def _plain(value: Any) -> Any:
    """A map comes as a dictionary, which not every pyarrow takes for one."""
    return list(value.items()) if isinstance(value, Mapping) else value


HAS_ARROW_STREAM = hasattr(pyspark.sql.datasource, "DataSourceStreamArrowWriter")
"""PySpark 4.1 and later hand a stream's rows over as Arrow batches."""

if HAS_ARROW_STREAM:

    class TopicStreamWriter(pyspark.sql.datasource.DataSourceStreamArrowWriter):  # type: ignore[name-defined,unused-ignore]
        """A stream write."""

        def __init__(self, settings: WriteSettings) -> None:
            self._settings = settings

        def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
            """Sends a task's rows of one batch."""
            return _write(iterator, self._settings, None)

        def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
            """Nothing is left to do: brokers have acknowledged every row."""

        def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
            """Nothing can be done: what is stored is stored, and Spark runs the batch again."""


def _settings(options: Options, schema: Any, method: str) -> WriteSettings:
    settings = WriteSettings.of(options)
    no_path(options, method)
    check_columns(schema, settings)
    return settings


def batch_writer(options: Options, schema: Any, *, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of a batch. Raises OptionError for options and columns that cannot be used."""
    if overwrite:
        raise OptionError("mode", "overwrite", 'append, as in .mode("append"): messages cannot be taken back')
    settings = _settings(options, schema, "save")
    return TopicWriter(settings, options.text("writeId"))


def stream_writer(options: Options, schema: Any, *, overwrite: bool) -> Any:
    """The writer of a stream. Raises OptionError for options and columns that cannot be used."""
    if overwrite:
        raise OptionError("outputMode", "complete", "append or update: messages cannot be taken back")
    settings = _settings(options, schema, "start")
    if options.has("writeId"):
        raise OptionError("writeId", options.text("writeId"), "to be given for a batch write only: a stream has an id")
    if HAS_ARROW_STREAM:
        return TopicStreamWriter(settings)
    return TopicRowStreamWriter(settings, schema)
