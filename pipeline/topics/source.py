"""The data source ``rocketmq``, as Spark's data source API requires it, and the batch reader.

Options are validated here, where Spark shows errors unchanged. Spark imports this module in several processes before
the first row is read; other modules are therefore imported only in the functions that need them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)

from trimq.pipeline.options import Options
from trimq.pipeline.schema import spark_schema
from trimq.pipeline.topics.partition import RangePartition

if TYPE_CHECKING:
    import pyarrow as pa

    from trimq.pipeline.topics.settings import ReadSettings

NAME = "rocketmq"


class TopicDataSource(DataSource):
    """Topics of RocketMQ as a table."""

    @classmethod
    def name(cls) -> str:
        """The name in ``format("rocketmq")``."""
        return NAME

    def schema(self) -> str:
        """The columns. Raises OptionError for an option that no kind of read takes."""
        return spark_schema(properties=Options(self.options).flag("includeProperties", default=True))

    def reader(self, schema: Any) -> DataSourceReader:
        """A batch read of all columns, or of those in a schema that the user gave. Raises OptionError."""
        from trimq.pipeline.topics.settings import ReadSettings  # noqa: PLC0415 - see above

        return TopicReader(ReadSettings.of(Options(self.options), _columns(schema)))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark passes the schema by this name
        """A stream read. Wrong options are raised by its first call, see stream."""
        from trimq.pipeline.topics.stream import stream_reader  # noqa: PLC0415 - see above

        return stream_reader(Options(self.options), _columns(schema))

    def writer(self, schema: Any, overwrite: bool) -> DataSourceWriter:
        """A batch write. Raises OptionError."""
        from trimq.pipeline.topics.sink import batch_writer  # noqa: PLC0415 - see above

        return batch_writer(Options(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """A stream write. Raises OptionError."""
        from trimq.pipeline.topics.sink import stream_writer  # noqa: PLC0415 - see above

        writer: DataSourceStreamWriter = stream_writer(Options(self.options), schema, overwrite=overwrite)
        return writer


def _columns(schema: Any) -> dict[str, bool]:
    return {field.name: field.nullable for field in schema.fields}


class TopicReader(DataSourceReader):
    """A batch read. Its ranges are fixed when the query is planned."""

    def __init__(self, settings: "ReadSettings") -> None:
        self._settings = settings

    def partitions(self) -> list[InputPartition]:
        """A task for each queue with messages, or more with minPartitions."""
        from trimq.pipeline.topics import planning, session  # noqa: PLC0415 - see above

        settings = self._settings
        ranges = session.ask(settings.servers, lambda client: planning.batch_ranges(client, settings))
        return [RangePartition(span) for span in planning.split(ranges, settings.min_partitions)]

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """The rows of a range; none for the partition that Spark invents if there is nothing to read."""
        from trimq.pipeline.topics.rows import read_range  # noqa: PLC0415 - see above

        if isinstance(partition, RangePartition):
            yield from read_range(partition.span, self._settings, commit=True)
