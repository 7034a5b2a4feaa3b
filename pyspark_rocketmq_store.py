"""The module by which Spark finds the data source ``rocketmq-store``; Spark expects one module for each source."""

from trimq.pipeline.store.source import RocketMQStoreDataSource as DefaultSource

__all__ = ["DefaultSource"]
