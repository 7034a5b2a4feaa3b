"""The examples of docs/pipeline-jobs.md, with values for STORE, TARGET, TOPIC and HOST:9876."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from click.testing import CliRunner

from tests.docs.examples import examples
from tests.spark.buckets import CLUSTER, new_place, run
from tests.spark.logs import START, LogWriter
from tests.spark.stores import some
from tests.spark.test_store_bucket_core import COUNT as IN_BUCKET
from tests.spark.test_store_bucket_core import HOURS
from tests.spark.test_store_bucket_core import write as in_bucket
from tests.spark.test_store_tier import ALL, write
from trimq.pipeline.__main__ import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.interop.harness.object_server import ObjectServer
    from tests.interop.harness.servers import Cluster
    from trimq.client.sync import Admin

pytestmark = pytest.mark.one_pyspark


def example(begin: str) -> str:
    [found] = [text for text in examples("docs/pipeline-jobs.md") if text.startswith(begin)]
    return found


def test_the_table_of_the_page(spark: SparkSession, tmp_path: Path) -> None:
    root = LogWriter(tmp_path / "store").put_all(some(20)).write()
    expression = example('spark.read.format("rocketmq-store").load').replace("/var/lib/rocketmq/store", str(root))
    assert str(root) in expression
    assert eval(expression, {"spark": spark}).count() == 20


def test_the_tier_of_the_page(spark: SparkSession, tmp_path: Path) -> None:
    trio.run(write, tmp_path)
    expression = example('spark.read.format("rocketmq-store").option("tiered').replace(
        "/var/lib/rocketmq", str(tmp_path)
    )
    assert expression.count(str(tmp_path)) == 2
    assert eval(expression, {"spark": spark}).count() == len(ALL)


def test_the_bucket_of_the_page(
    spark: SparkSession, object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = new_place(object_server, tmp_path)
    run(place, in_bucket)

    def given(text: str) -> str:
        for name, value in {"s3://bucket/prefix": place.url, "DefaultCluster": CLUSTER}.items():
            assert name in text
            text = text.replace(name, value)
        return text

    expression = given(example('spark.read.format("rocketmq-store").option("cluster"'))
    expression = expression.replace(".load(", f'.option("endpoint", "{object_server.endpoint}").load(')
    assert eval(expression, {"spark": spark}).count() == 3 * HOURS * IN_BUCKET
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    outputs = []
    for line in given(example("python -m trimq.pipeline audit s3")).splitlines():
        python, m, module, *arguments = shlex.split(line.replace("TARGET", str(tmp_path / "archive")))
        assert (python, m, module) == ("python", "-m", "trimq.pipeline")
        done = CliRunner().invoke(main, [*arguments, "--endpoint", object_server.endpoint])
        assert done.exit_code == 0, (line, done.output, done.exception)
        outputs.append(done.output)
    assert outputs[0].endswith("the store is sound\n")
    assert outputs[1].startswith(f"batch 0: {3 * HOURS * IN_BUCKET} rows")


def test_the_commands_of_the_page(
    spark: SparkSession, cluster: Cluster, admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    monkeypatch.chdir(tmp_path)
    prices = some(4, topic="Prices", properties={"KEYS": "k", "UNIQ_KEY": "U"}, time=START + 1000)
    messages = [*some(40, topic="Orders"), *prices]
    root = str(LogWriter(tmp_path / "store").put_all(messages).write())
    admin.create_topic("FromThePage", queues=2)
    # Rebuild into the store itself, as the page allows, so that audit finds the queues and index.
    given = {
        "rebuild": {"TARGET": root},
        "archive": {"TARGET": str(tmp_path / "archive")},
        "compact": {"TARGET": str(tmp_path / "compact")},
        "replay": {"HOST:9876": cluster.namesrv, "TOPIC": "FromThePage"},
    }
    outputs = {}
    for line in example("python -m trimq.pipeline rebuild").splitlines():
        python, m, module, job, *arguments = shlex.split(line)
        assert (python, m, module) == ("python", "-m", "trimq.pipeline")
        values = {"STORE": root, **given.get(job, {})}
        done = CliRunner().invoke(main, [job, *(values.get(argument, argument) for argument in arguments)])
        assert done.exit_code == 0, (line, done.output, done.exception)
        outputs[job] = done.output
    assert set(outputs) == set(main.commands)
    assert outputs["rebuild"].startswith("44 records read")
    assert outputs["replay"] == "40 messages sent\n"
    assert outputs["compact"] == "1 keys\n"
    assert "44 rows" in outputs["archive"]
    assert (tmp_path / "audit.html").exists()
    assert (tmp_path / "stats.html").exists()
