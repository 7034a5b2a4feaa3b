"""Topics as Spark tables: ``spark.read / readStream / write / writeStream .format("rocketmq")``."""
