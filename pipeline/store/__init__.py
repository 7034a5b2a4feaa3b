"""Store directories as Spark tables: ``spark.read.format("rocketmq-store").load(path)``."""
