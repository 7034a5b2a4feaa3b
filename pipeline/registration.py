"""Registers a data source with a running session."""

from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


def make_known(spark: "SparkSession", source: "type[DataSource]") -> None:
    """Registers ``source``. PySpark 4.0 refuses a source that it has already found by its module's name."""
    try:
        spark.dataSource.register(source)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
