"""PySpark: topics as Spark sources and sinks, jobs over commit logs."""
