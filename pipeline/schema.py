"""The columns of ``rocketmq`` and ``rocketmq-store`` tables, and the Arrow types in which they reach Spark.

Both sources have the same columns in the same order, so that a query over a topic runs unchanged over a store. Spark
takes Arrow batches without converting them: types must be exactly those that Spark would choose (timestamps in
microseconds with a time zone, 32-bit offsets for text and binary). ``ARROW_SCHEMA`` lists them, and a test compares it
with ``SPARK_SCHEMA``.
"""

from typing import Final

import pyarrow as pa

from trimq.pipeline.names import COLUMNS, SPARK_SCHEMA, spark_schema

__all__ = ["ARROW_SCHEMA", "COLUMNS", "SPARK_SCHEMA", "arrow_schema", "spark_schema"]

_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

ARROW_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("brokerName", pa.string()),
        pa.field("queueId", pa.int32(), nullable=False),
        pa.field("queueOffset", pa.int64(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("tags", pa.string()),
        pa.field("keys", pa.list_(pa.field("element", pa.string())), nullable=False),
        pa.field("msgId", pa.string(), nullable=False),
        pa.field("uniqId", pa.string()),
        pa.field("bornTimestamp", _TIMESTAMP, nullable=False),
        pa.field("storeTimestamp", _TIMESTAMP, nullable=False),
        pa.field("bornHost", pa.string(), nullable=False),
        pa.field("storeHost", pa.string(), nullable=False),
        pa.field("commitLogOffset", pa.int64(), nullable=False),
        pa.field("reconsumeTimes", pa.int32(), nullable=False),
        pa.field("flag", pa.int32(), nullable=False),
        pa.field("sysFlag", pa.int32(), nullable=False),
        pa.field("properties", pa.map_(pa.string(), pa.string()), nullable=False),
    ]
)
"""The same columns as Arrow types."""


def arrow_schema(*, properties: bool = True) -> pa.Schema:
    """The Arrow schema that matches ``spark_schema``.

    >>> len(arrow_schema(properties=False)), arrow_schema(properties=False).names[-1]
    (17, 'sysFlag')
    """
    return ARROW_SCHEMA if properties else ARROW_SCHEMA.remove(len(ARROW_SCHEMA) - 1)
