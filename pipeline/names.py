"""The columns of a message by name, and as Spark's DDL: what can be said without Arrow, which is heavy to import."""

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

``topic`` is where the record is stored (a group's retry topic for a message that is tried again), ``brokerName`` is
null where nobody knows it (a store directory without a name), ``body`` is decompressed. ``keys`` are the words of KEYS,
none for a message without. ``msgId`` tells the record's place (address of the broker and commit-log offset, RocketMQ's
offsetMsgId), ``uniqId`` is the producer's own id (UNIQ_KEY). ``bornHost`` and ``storeHost`` are ``address:port``, with
an IPv6 address in brackets. ``properties`` holds all properties, RocketMQ's own included; the column is left out with
``includeProperties=false``.
"""

COLUMNS: Final = tuple(column.split(" ")[0] for column in SPARK_SCHEMA.split(", "))
"""Names of the columns, in order."""


def spark_schema(*, properties: bool = True) -> str:
    """The DDL schema; ``properties`` False leaves the last column out.

    >>> spark_schema(properties=False).endswith("sysFlag int not null")
    True
    """
    return SPARK_SCHEMA if properties else SPARK_SCHEMA.rpartition(", ")[0]
