"""PySpark: topics as Spark sources and sinks, jobs over commit logs."""

if __name__ != "trimq.pipeline":  # a second copy, whose classes would not be those of the first
    raise ImportError(f"this package is trimq.pipeline: import it by that name, not as {__name__}")
