"""Real Spark at a broker with users over mutual TLS: each user may do exactly what reading or writing needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyspark
import pytest
from click.testing import CliRunner

from pyspark_rocketmq import register
from tests.canary import permit
from tests.interop.harness import probe
from tests.interop.harness.drivers import unique
from tests.interop.harness.security import allow, create_user, secured
from tests.interop.harness.servers import Cluster, running_cluster
from tests.spark.guarded_driver import EXECUTORS, Found, Plan
from tests.spark.logs import LogWriter, Sent
from tests.tls_certificates import Certificates
from trimq.pipeline.__main__ import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.one_pyspark

COUNT = 50
SECRET = "canary-of-a-user"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Cluster]:
    # The environments of PySpark do not have trimq[security].
    security = replace(secured(certificates, "mutual", access_control=True), in_clear=True)
    with running_cluster(tmp_path_factory.mktemp("guarded"), security=security) as running:
        yield running


def user(cluster: Cluster, directory: Path, resources: dict[str, list[str]]) -> dict[str, str]:
    """The option with the credentials of a new user, who may do this much."""
    name = create_user(cluster.broker.address, unique("spark"), SECRET).access_key
    for resource, actions in resources.items():
        allow(cluster.broker.address, name, resource, actions)
    path = directory / f"{name}.yml"
    permit(path)
    path.touch(mode=0o600)
    path.write_text(f"accessKey: {name}\nsecretKey: {SECRET}\n", encoding="ascii")
    return {"credentialsFile": str(path)}


def options_of(cluster: Cluster, certificates: Certificates) -> dict[str, str]:
    return {
        "namesrv": cluster.namesrv,
        "tls": "true",
        "tlsCaFile": str(certificates.ca),
        "tlsCertFile": str(certificates.client.cert),
        "tlsKeyFile": str(certificates.client.key),
    }


def a_store(directory: Path) -> str:
    writer = LogWriter(directory)
    for number in range(COUNT):
        writer.put(Sent(body=b"%d" % number, properties={"KEYS": f"k{number % 5}"}))
    return str(writer.write())


def stored(cluster: Cluster, topic: str) -> int:
    ends = (probe.ask(cluster.broker.address, 30, {"topic": topic, "queueId": str(queue)}) for queue in range(4))
    return sum(int(one.ext["offset"]) for one in ends)


def test_spark_writes_and_reads_over_tls_as_a_user(
    spark: SparkSession,
    guarded: Cluster,
    certificates: Certificates,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    register(spark)
    topic = guarded.create_topic(unique("Guarded"))
    tls = options_of(guarded, certificates)
    writes = user(guarded, tmp_path, {f"Topic:{topic}": ["Pub"]})
    reads = user(guarded, tmp_path, {f"Topic:{topic}": ["Sub", "Get"], "Group:spark-rocketmq": ["Sub"]})
    frame = spark.range(COUNT).selectExpr(f"'{topic}' AS topic", "CAST(id AS STRING) AS body")
    frame.write.format("rocketmq").options(**tls, **writes).mode("append").save()
    table = spark.read.format("rocketmq").options(topics=topic, startingOffsets="earliest", **tls, **reads).load()
    assert sorted(int(row["body"]) for row in table.select("body").collect()) == list(range(COUNT))
    table.explain(extended=True)
    assert SECRET not in "".join(capfd.readouterr())
    refused = spark.read.format("rocketmq").options(topics=topic, startingOffsets="earliest", **tls, **writes).load()
    with pytest.raises(Exception, match="has no permission to access"):
        refused.collect()


def spark_home(directory: Path) -> Path:
    """A folder for the executors' files, which Spark puts beside its own."""
    home = directory / "spark"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


@pytest.mark.timeout(400, func_only=True)
def test_executors_in_processes_of_their_own(guarded: Cluster, certificates: Certificates, tmp_path: Path) -> None:
    """Tables, a stream in both directions and replay: driver and executors have TLS and the user, each for itself."""
    source, sink, replayed = (guarded.create_topic(unique(name)) for name in ("Source", "Sink", "Replayed"))
    writes = {f"Topic:{topic}": ["Pub"] for topic in (source, sink, replayed)}
    reads = {f"Topic:{topic}": ["Sub", "Get"] for topic in (source, sink)} | {"Group:spark-rocketmq": ["Sub"]}
    plan = Plan(
        options=options_of(guarded, certificates),
        source=source,
        sink=sink,
        replayed=replayed,
        store=a_store(tmp_path / "store"),
        writes=user(guarded, tmp_path, writes)["credentialsFile"],
        reads=user(guarded, tmp_path, reads)["credentialsFile"],
        count=COUNT,
    )
    home = spark_home(tmp_path)
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.guarded_driver", tmp_path / "plan.json", tmp_path / "files"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "SPARK_HOME": str(home)},
        capture_output=True,
        check=False,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found = msgspec.json.decode(done.stdout, type=Found)
    assert found.processes == EXECUTORS + 1
    assert (found.streamed, found.replayed) == (list(range(COUNT)), COUNT)
    assert [stored(guarded, topic) for topic in (source, sink, replayed)] == [COUNT] * 3
    assert len(found.refused) == 3, found.refused
    assert all("has no permission to access" in text for text in found.refused)
    # No log or checkpoint has a secret: neither the driver's nor those of the executors.
    assert list((home / "work").rglob("stderr"))
    written = [path for folder in (home / "work", tmp_path / "files") for path in folder.rglob("*") if path.is_file()]
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    assert SECRET.encode() not in done.stderr


def test_the_command_replay_sends_as_a_user(
    spark: SparkSession,
    guarded: Cluster,
    certificates: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    topic, store = guarded.create_topic(unique("Again")), a_store(tmp_path / "store")
    client = certificates.client
    tls = ["--tls-ca", str(certificates.ca), "--tls-cert", str(client.cert), "--tls-key", str(client.key)]
    command = ["replay", store, "--namesrv", guarded.namesrv, "--to", topic, *tls, "--credentials-file"]
    sends = user(guarded, tmp_path, {f"Topic:{topic}": ["Pub"]})["credentialsFile"]
    done = CliRunner().invoke(main, [*command, sends])
    assert (done.exit_code, done.output) == (0, f"{COUNT} messages sent\n"), done.exception
    assert stored(guarded, topic) == COUNT
    other = user(guarded, tmp_path, {})["credentialsFile"]
    done = CliRunner().invoke(main, [*command, other])
    assert done.exit_code != 0
    assert "has no permission to access" in f"{done.output}{done.exception}"
    assert stored(guarded, topic) == COUNT
