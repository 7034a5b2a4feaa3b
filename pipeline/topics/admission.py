"""The stream reader for PySpark 4.2 and later, which pass a batch's start and its maximum size."""

from typing import Any

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from trimq.pipeline.topics.offsets import StreamOffset
from trimq.pipeline.topics.stream import TopicStreamReader


class AdmittingStreamReader(TopicStreamReader, SupportsTriggerAvailableNow):
    """A TopicStreamReader with maxOffsetsPerTrigger and Trigger.AvailableNow."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The limit by maxOffsetsPerTrigger, if given."""
        self._check()
        most = self._settings.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # type: ignore[override] # noqa: N802 - Spark's name, the signature of 4.2
        """The end of the batch that begins at ``start``. Spark has committed everything before ``start``."""
        progress = self._check()
        begin = StreamOffset.of(start)
        # Before the end is chosen: after a restart this is the first that the reader learns of the checkpoint.
        progress.remember(begin)
        progress.show(begin.ends)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return progress.end_after(begin, most).to_json()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The present ends of all queues, for Spark's progress reports."""
        return StreamOffset({queue: bounds.end for queue, bounds in self._check().bounds().items()}).to_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Limits this run to the messages that exist when its first batch is planned."""
        self._check().pin_target()
