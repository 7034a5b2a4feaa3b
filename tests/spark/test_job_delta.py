"""Archives as Delta tables, a table format with its own log, if a release for this version of Spark exists."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.harness.partners import delta_jars
from tests.spark.conftest import demand_spark
from tests.spark.logs import START, LogWriter, Sent
from tests.spark.stores import some

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.oldest_pyspark
@pytest.mark.timeout(600, func_only=True)
def test_batches_are_delta_tables(tmp_path: Path) -> None:
    """Runs a first batch, one without new records, and one of another day; each table has a log written by Delta."""
    demand_spark()
    jars = delta_jars()
    writer = LogWriter(tmp_path / "first").put_all(some(60))
    first = writer.write()
    writer.root = tmp_path / "second"
    second = writer.put_all([Sent(topic="T1", body=b"%d" % n, time=START + 86_400_000 + n) for n in range(8)]).write()
    target = tmp_path / "archive"
    command = [sys.executable, "-m", "tests.spark.delta_driver", ",".join(map(str, jars)), str(tmp_path / "spark")]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(target), str(first), str(first), str(second)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        timeout=500,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["rows"] == [60, None, 8]
    assert result["bodies"] == [one.body.decode() for one in writer.sent]
    assert ["T1", "2023-11-15"] in result["places"]
    assert len(result["tables"]) == 2
    for name in result["tables"]:
        assert list((target / name / "_delta_log").glob("*.json")), name
