"""The Arrow types are exactly those that Spark derives from the schema: it compares them from 4.2 on."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from trimq.pipeline.schema import arrow_schema, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_arrow_schema_is_the_one_that_spark_makes_of_the_columns(spark: SparkSession) -> None:
    parameters = signature(to_arrow_schema).parameters  # the time zone is an argument since 4.2
    for properties in (True, False):
        columns = StructType.fromDDL(spark_schema(properties=properties))
        assert isinstance(columns, StructType)
        zone: Any = {"timezone": "UTC"} if "timezone" in parameters else {}
        expected = to_arrow_schema(columns, **zone)
        assert arrow_schema(properties=properties).equals(expected)
