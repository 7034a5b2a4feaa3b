"""Real Spark at a broker with users over mutual TLS: each user may do exactly what reading or writing needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyspark_rocketmq import register
from tests.canary import permit
from tests.interop.harness.drivers import unique
from tests.interop.harness.security import allow, create_user, secured
from tests.interop.harness.servers import Cluster, running_cluster
from tests.tls_certificates import Certificates

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.one_pyspark

COUNT = 50
SECRET = "canary-of-a-user"


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


def test_spark_writes_and_reads_over_tls_as_a_user(
    spark: SparkSession,
    guarded: Cluster,
    certificates: Certificates,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    register(spark)
    topic = guarded.create_topic(unique("Guarded"))
    tls = {
        "namesrv": guarded.namesrv,
        "tls": "true",
        "tlsCaFile": str(certificates.ca),
        "tlsCertFile": str(certificates.client.cert),
        "tlsKeyFile": str(certificates.client.key),
    }
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
