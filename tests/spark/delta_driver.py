"""A program that archives stores as Delta tables, one after the other, and prints the content of the archive.

Arguments: JARS (separated by commas) DIRECTORY TARGET STORE... It is a separate program because a session loads its
jars and extensions when it starts, and the other tests' session has none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.spark.session import spark_session
from trimq.pipeline.jobs.archive import ArchiveOptions, archive, read

SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "1",
}


def main() -> None:
    jars, directory, target, *stores = sys.argv[1:]
    with spark_session(Path(directory), **{"spark.jars": jars, **SETTINGS}) as spark:
        done = [archive(spark, store, target, ArchiveOptions(format="delta", file_size=1000)) for store in stores]
        rows = read(spark, target).orderBy("commitLogOffset").select("topic", "day", "body").collect()
    print(  # noqa: T201 - for the test
        json.dumps(
            {
                "rows": [batch and batch.rows for batch in done],
                "tables": [name for batch in done if batch for name in batch.files],
                "bodies": [bytes(row.body).decode() for row in rows],
                "places": sorted({(row.topic, row.day) for row in rows}),
            }
        )
    )


if __name__ == "__main__":
    main()
