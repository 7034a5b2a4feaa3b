"""The stream reader.

What Spark does and does not promise decides how it is made:

- It may be asked for the initial offset as often as Spark likes, and answers the same each time (see offsets).
- Before 4.2 nothing says where a batch starts, but a query that is started again first calls ``partitions`` with the
  last offset of its checkpoint as both ends, which plans nothing (``setLatestSeenOffset``, made for PySpark's simple
  readers). So ``latestOffset`` on a reader that has heard of no offset begins a new query. Only Spark's own wrapper for
  Trigger.AvailableNow, off by default, asks for the end before that: refused before Spark writes the end down.
- ``commit`` comes only when the next batch is planned, never for the last one of a run; the start of a batch is what is
  committed before it, so that both show progress.
- ``stop`` is never called: there is nothing that would have to be closed.
- An exception in the constructor hides itself behind another one: wrong options are kept and raised by the first call.
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
"""PySpark 4.2 and later tell a source where a batch starts, and how much it may have."""
_WRAPPER: Final = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"
_BLIND: Final = "then asks for a batch's end before it says where a query goes on that is started again"


class TopicStreamReader(DataSourceStreamReader):
    """Reads topics batch by batch, for PySpark 4.0 and 4.1: each batch has all that is there."""

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
        """The offset before all others. Raises OptionError for what could not be said before."""
        self._check()
        return dict(INITIAL)

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override,unused-ignore] # noqa: N802 - Spark's name, the signature before 4.2
        """The end of what is there."""
        progress = self._check()
        self._is_new = self._is_new or self._end is None
        start = self._end or StreamOffset.of(INITIAL)
        self._end = progress.end_after(start, None)
        progress.remember(self._end)
        return self._end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """A task for each queue with messages between the offsets, more where minPartitions asks for it.

        Raises OptionError for a query that goes on, and was asked for its next end before it was told so.
        """
        progress = self._check()
        begin, stop = StreamOffset.of(start), StreamOffset.of(end)
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
            f"PySpark 4.2 or later; {pyspark.__version__} does not tell a source where a batch starts",
        )
    return settings


def stream_reader(options: Options, columns: Mapping[str, bool]) -> DataSourceStreamReader:
    """The reader that fits the PySpark that is running."""
    if HAS_ADMISSION_CONTROL:
        from trimq.pipeline.topics.admission import AdmittingStreamReader  # noqa: PLC0415 - its names are new in PySpark 4.2

        return AdmittingStreamReader(options, columns)
    return TopicStreamReader(options, columns)
