"""Making a data source known to a session that runs already."""

from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource


def make_known(spark: "SparkSession", source: "type[DataSource]") -> None:
    """Registers it. PySpark 4.0 refuses one that it has found by its module's name: then nothing is left to do."""
    try:
        spark.dataSource.register(source)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
