"""The module by which Spark finds the data source ``rocketmq``: it imports every top-level ``pyspark_*`` module.

Spark registers the class that the module calls ``DefaultSource``. ``register(spark)`` registers both sources by hand,
for a session that was started before the package was installed.
"""

from typing import TYPE_CHECKING

from trimq.pipeline.topics.source import TopicDataSource as DefaultSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DefaultSource", "register"]


def register(spark: "SparkSession") -> None:
    """Registers ``format("rocketmq")`` and ``format("rocketmq-store")`` with a running session."""
    from trimq.pipeline.registration import make_known  # noqa: PLC0415 - Spark's workers do not need it
    from trimq.pipeline.store.source import RocketMQStoreDataSource  # noqa: PLC0415 - they need only one of the two

    make_known(spark, DefaultSource)
    make_known(spark, RocketMQStoreDataSource)
