"""Spark finds the data source ``rocketmq-store`` under this name: one module for each source is its convention."""

from trimq.pipeline.store.source import RocketMQStoreDataSource as DefaultSource

__all__ = ["DefaultSource"]
