"""The writers of the sink, for batch and stream, as Spark's data source API requires them.

Delivery is at least once: a task ends when brokers have acknowledged all of its rows, and rows that may not have been
stored are sent again. With ``idempotent=true`` a task that runs again first queries what is stored (see delivery).
Messages cannot be withdrawn, so that ``abort`` does nothing.
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
"""The Arrow types of the columns that a sink takes, by Spark's names of the types."""


@dataclass
class Written(WriterCommitMessage):
    """The result of a task: rows sent, and rows that an earlier attempt had already stored."""

    sent: int = 0
    found: int = 0


def _write(batches: Iterator[pa.RecordBatch], settings: WriteSettings, write_id: str | None) -> Written:
    """Send all rows of a task. Raises RocketMQError, and ValueError for a row that no broker accepts."""
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("rows can be written only in a task of Spark")
    query = write_id or context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId") if write_id is None else "0"
    if settings.idempotent and (not query or batch is None):
        raise RuntimeError("Spark does not report the query and batch of this task: idempotent=true cannot work")
    identity = Identity(f"{query}/{batch}/{context.partitionId()}", again=context.attemptNumber() > 0)
    return Written(*deliver(batches, settings, identity))


class TopicWriter(DataSourceArrowWriter):
    """A batch write. ``writeId`` identifies it when the program runs again; without, each write is a new one."""

    def __init__(self, settings: WriteSettings, write_id: str | None) -> None:
        self._settings = settings
        self._write_id = write_id or secrets.token_hex(16)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Send a task's rows."""
        return _write(iterator, self._settings, self._write_id)


class TopicRowStreamWriter(DataSourceStreamWriter):
    """A stream write for PySpark 4.0, which passes rows one by one."""

    def __init__(self, settings: WriteSettings, schema: Any) -> None:
        self._settings = settings
        self._schema = schema

    def write(self, iterator: Iterator[Any]) -> Written:
        """Send a task's rows of one batch."""
        return _write(as_batches(iterator, self._schema), self._settings, None)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Does nothing: brokers have acknowledged every row."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Does nothing: stored messages cannot be withdrawn, and Spark runs the batch again."""


def as_batches(rows: Iterable[Any], schema: Any) -> Iterator[pa.RecordBatch]:
    """Spark's rows as Arrow batches, as later versions pass them."""
    kinds = {field.name: _ARROW_TYPES[field.dataType.simpleString()] for field in schema.fields}
    rows = iter(rows)
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        columns = zip(*some, strict=True)
        arrays = [pa.array(map(_plain, column), kind) for column, kind in zip(columns, kinds.values(), strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, list(kinds))


def _plain(value: Any) -> Any:
    """A map as a list of pairs: Spark passes a dictionary, which not every version of pyarrow accepts for a map."""
    return list(value.items()) if isinstance(value, Mapping) else value


HAS_ARROW_STREAM = hasattr(pyspark.sql.datasource, "DataSourceStreamArrowWriter")
"""Whether PySpark passes a stream's rows as Arrow batches: 4.1 and later do."""

if HAS_ARROW_STREAM:

    class TopicStreamWriter(pyspark.sql.datasource.DataSourceStreamArrowWriter):  # type: ignore[name-defined,unused-ignore]
        """A stream write."""

        def __init__(self, settings: WriteSettings) -> None:
            self._settings = settings

        def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
            """Send a task's rows of one batch."""
            return _write(iterator, self._settings, None)

        def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
            """Does nothing: brokers have acknowledged every row."""

        def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
            """Does nothing: stored messages cannot be withdrawn, and Spark runs the batch again."""


def _settings(options: Options, schema: Any, method: str) -> WriteSettings:
    settings = WriteSettings.of(options)
    no_path(options, method)
    check_columns(schema, settings)
    return settings


def batch_writer(options: Options, schema: Any, *, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of a batch. Raises OptionError for options and columns that cannot be used."""
    if overwrite:
        raise OptionError("mode", "overwrite", 'append, as in .mode("append"): messages cannot be withdrawn')
    settings = _settings(options, schema, "save")
    return TopicWriter(settings, options.text("writeId"))


def stream_writer(options: Options, schema: Any, *, overwrite: bool) -> Any:
    """The writer of a stream. Raises OptionError for options and columns that cannot be used."""
    if overwrite:
        raise OptionError("outputMode", "complete", "append or update: messages cannot be withdrawn")
    settings = _settings(options, schema, "start")
    if options.has("writeId"):
        raise OptionError("writeId", options.text("writeId"), "to be given for a batch write only: a stream has an id")
    if HAS_ARROW_STREAM:
        return TopicStreamWriter(settings)
    return TopicRowStreamWriter(settings, schema)
