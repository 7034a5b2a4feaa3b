"""The partition that Spark passes from the planning of a read to its tasks."""

from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

if TYPE_CHECKING:
    from trimq.pipeline.topics.planning import Range


class RangePartition(InputPartition):
    """The range that one task reads."""

    def __init__(self, span: "Range") -> None:
        super().__init__(span)
        self.span = span
