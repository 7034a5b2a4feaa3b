"""PySpark: topics as Spark sources and sinks, store directories as tables, and jobs over commit logs."""

if __name__ != "trimq.pipeline":  # imported under two names, each class would exist twice and isinstance would fail
    raise ImportError(f"this package is trimq.pipeline: import it by that name, not as {__name__}")
