"""The columns of a message: what ``rocketmq`` and ``rocketmq-store`` tables have, and in which Arrow types they travel.

Both sources have the same columns in the same order, so that a query over a topic runs unchanged over a store. Spark
takes Arrow batches as they are: types must be the ones that it would have chosen itself (timestamps in microseconds
with a time zone, 32-bit offsets for text and binary), which ``ARROW_SCHEMA`` spells out and a test holds together with
``SPARK_SCHEMA``.
"""

from typing import Final

import pyarrow as pa

SPARK_SCHEMA: Final = (
    "topic string not null, "
    "brokerName string, "
    "queueId int not null, "
    "queueOffset bigint not null, "
    "body binary not null, "
    "tags string, "
    "keys array<string> not null, "
    "msgId string not null, "
    "uniqId string, "
    "bornTimestamp timestamp not null, "
    "storeTimestamp timestamp not null, "
    "bornHost string not null, "
    "storeHost string not null, "
    "commitLogOffset bigint not null, "
    "reconsumeTimes int not null, "
    "flag int not null, "
    "sysFlag int not null, "
    "properties map<string,string> not null"
)
"""The schema as Spark reads it (DDL).

``topic`` is where the record is stored (a group's retry topic for a message that is tried again), ``brokerName`` is
null where nobody knows it (a store directory without a name), ``body`` is decompressed. ``keys`` are the words of KEYS,
none for a message without. ``msgId`` tells the record's place (address of the broker and commit-log offset, RocketMQ's
offsetMsgId), ``uniqId`` is the producer's own id (UNIQ_KEY). ``bornHost`` and ``storeHost`` are ``address:port``, with
an IPv6 address in brackets. ``properties`` holds all properties, RocketMQ's own included (PropertyName); the column is
left out with ``includeProperties=false``.
"""

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
"""The same columns in Arrow's types."""

COLUMNS: Final = tuple(ARROW_SCHEMA.names)
"""Names of the columns, in order."""


def spark_schema(*, properties: bool = True) -> str:
    """The DDL schema; ``properties`` False leaves the last column out.

    >>> spark_schema(properties=False).endswith("sysFlag int not null")
    True
    """
    return SPARK_SCHEMA if properties else SPARK_SCHEMA.rpartition(", ")[0]


def arrow_schema(*, properties: bool = True) -> pa.Schema:
    """The Arrow schema that goes with ``spark_schema``.

    >>> len(arrow_schema(properties=False)), arrow_schema(properties=False).names[-1]
    (17, 'sysFlag')
    """
    return ARROW_SCHEMA if properties else ARROW_SCHEMA.remove(len(ARROW_SCHEMA) - 1)
