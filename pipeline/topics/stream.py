"""The stream reader.

Its design follows from what Spark guarantees:

- Spark may request the initial offset any number of times; it must always be the same (see offsets).
- Before 4.2 Spark does not pass a batch's start. But a query that is started again first calls ``partitions`` with the
  last offset of its checkpoint as both ends, which plans nothing (``setLatestSeenOffset``, made for PySpark's simple
  readers). So ``latestOffset`` on a reader that has got no offset yet starts a new query. The only exception is Spark's
  own wrapper for Trigger.AvailableNow, off by default, which requests the end first. This is refused before Spark
  writes the end into the checkpoint.
- ``commit`` is called only when the next batch is planned, and never for the last batch of a run. The start of a batch
  is what was committed before it, so both are used to show progress.
- ``stop`` is never called: the reader must not hold anything that has to be closed.
- Spark hides an exception of the constructor behind another one: an OptionError is stored and raised by the first call.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final

import pyarrow as pa
import pyspark
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.topics.offsets import INITIAL, StreamOffset
from trimq.pipeline.topics.partition import RangePartition
from trimq.pipeline.topics.progress import Progress
from trimq.pipeline.topics.rows import read_range
from trimq.pipeline.topics.settings import ReadSettings

HAS_ADMISSION_CONTROL: Final = find_spec("pyspark.sql.streaming.datasource") is not None
"""PySpark 4.2 and later pass a batch's start and its maximum size to a source."""
_WRAPPER: Final = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"
_BLIND: Final = "then requests a batch's end before it passes the offset at which a restarted query continues"


class TopicStreamReader(DataSourceStreamReader):
    """Reads topics batch by batch, for PySpark 4.0 and 4.1: each batch has all messages that exist."""

    def __init__(self, options: Options, columns: Mapping[str, bool]) -> None:
        self._error: OptionError | None = None
        try:
            self._settings = _settings(options, columns)
            self._progress = Progress(self._settings)
        except OptionError as error:
            self._error = error
        self._end: StreamOffset | None = None
        self._is_new = False

    def _check(self) -> Progress:
        if self._error is not None:
            raise self._error
        return self._progress

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The offset before all others. Raises the OptionError that the constructor stored."""
        self._check()
        return dict(INITIAL)

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override,unused-ignore] # noqa: N802 - Spark's name, the signature before 4.2
        """The end of the next batch: the present ends of all queues."""
        progress = self._check()
        # Without a known offset this is a new query, or Spark's wrapper is on; ``partitions`` finds out which.
        self._is_new = self._is_new or self._end is None
        start = self._end or StreamOffset.of(INITIAL)
        self._end = progress.end_after(start, None)
        progress.remember(self._end)
        return self._end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """A task for each queue with messages between the offsets, or more with minPartitions.

        Raises OptionError if a query continues, but Spark requested its next end before it passed its last offset.
        """
        progress = self._check()
        begin, stop = StreamOffset.of(start), StreamOffset.of(end)
        # Equal offsets from the checkpoint, after an end was already chosen as for a new query: the wrapper is on, and
        # that end would skip or repeat messages.
        if self._is_new and begin == stop and not begin.is_initial:
            raise OptionError(_WRAPPER, "true", f"false: PySpark {pyspark.__version__} {_BLIND}")
        self._is_new = False
        progress.remember(stop)
        self._end = self._end or stop
        progress.show(begin.ends)
        return [RangePartition(span) for span in progress.ranges(begin, stop)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a range."""
        if isinstance(partition, RangePartition):
            yield from read_range(partition.span, self._settings, commit=False)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has committed everything before ``end``."""
        progress = self._check()
        self._is_new = False
        progress.show(StreamOffset.of(end).ends)


def _settings(options: Options, columns: Mapping[str, bool]) -> ReadSettings:
    settings = ReadSettings.of(options, columns, stream=True)
    if settings.max_offsets is not None and not HAS_ADMISSION_CONTROL:
        raise OptionError(
            "maxOffsetsPerTrigger",
            options.text("maxOffsetsPerTrigger"),
            f"PySpark 4.2 or later; {pyspark.__version__} does not pass a batch's start to a source",
        )
    return settings


def stream_reader(options: Options, columns: Mapping[str, bool]) -> DataSourceStreamReader:
    """The reader for the running version of PySpark."""
    if HAS_ADMISSION_CONTROL:
        from trimq.pipeline.topics.admission import AdmittingStreamReader  # noqa: PLC0415 - its names are new in PySpark 4.2

        return AdmittingStreamReader(options, columns)
    return TopicStreamReader(options, columns)
