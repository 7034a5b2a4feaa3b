"""Archives as Delta tables, a table format with a log of its own, where there is a release of it for this Spark."""

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
    """A first batch, nothing new, and a batch of another day; each table has a log that Delta wrote."""
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
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["rows"] == [60, None, 8]
    assert told["bodies"] == [one.body.decode() for one in writer.sent]
    assert ["T1", "2023-11-15"] in told["places"]
    assert len(told["tables"]) == 2
    for name in told["tables"]:
        assert list((target / name / "_delta_log").glob("*.json")), name
