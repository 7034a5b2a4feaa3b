"""The columns of a message: their names and Spark's DDL. Without Arrow, which is slow to import."""

from typing import Final

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

``topic`` is the topic under which the record is stored (for a message that is retried, the group's retry topic).
``brokerName`` is null if it is not known (a store directory without the option). ``body`` is decompressed. ``keys`` are
the words of KEYS, an empty array for a message without. ``msgId`` is RocketMQ's offsetMsgId (address of the broker and
commit-log offset), ``uniqId`` the producer's id (UNIQ_KEY). ``bornHost`` and ``storeHost`` are ``address:port``, with
an IPv6 address in brackets. ``properties`` holds all properties, RocketMQ's own included;
``includeProperties=false`` leaves the column out.
"""

COLUMNS: Final = tuple(column.split(" ")[0] for column in SPARK_SCHEMA.split(", "))
"""The names of the columns, in order."""


def spark_schema(*, properties: bool = True) -> str:
    """The DDL schema; ``properties`` False leaves the last column out.

    >>> spark_schema(properties=False).endswith("sysFlag int not null")
    True
    """
    return SPARK_SCHEMA if properties else SPARK_SCHEMA.rpartition(", ")[0]
