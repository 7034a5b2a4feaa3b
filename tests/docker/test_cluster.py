"""Two name servers and two brokers: start order, kills, an upgrade, and a PySpark job.

The tests of this module share the cluster and depend on their order.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.daemon import ADDRESS, MAKE_SECONDS, PATIENCE, Docker, Remarks, flood, java_round_trip, job
from tests.interop.harness.drivers import java_client
from tests.interop.harness.waiting import wait_until

pytestmark = [pytest.mark.partners, pytest.mark.timeout(1800, func_only=True)]

OUTSIDE, INSIDE = f"{ADDRESS}:9876;{ADDRESS}:9886", "namesrv-a:9876;namesrv-b:9876"
NAMESRVS, BROKERS = ("namesrv-a", "namesrv-b"), ("broker-a", "broker-b")
SHOW = "import json, sys, pyarrow.parquet as p; json.dump(p.read_table(sys.argv[1]).to_pylist(), sys.stdout)"


@pytest.fixture(scope="module")
def cluster(image: Docker, remarks: Remarks) -> Iterator[Docker]:
    # The image must differ from the one that the upgrade builds.
    image.run("sh", "-c", "printf 'FROM trimq\\nLABEL old=1\\n' | docker build --quiet --tag trimq -")
    began = time.time()
    try:
        image.compose("cluster", "up", "-d")
        image.wait_healthy(*NAMESRVS, *BROKERS)
        remarks(f"profile cluster is healthy after {time.time() - began:.1f} s")
        health_orders_the_start(image.events(began))
        yield image
    finally:
        print(image.compose("pipeline", "logs", "--tail=60"))
        image.compose("pipeline", "down", "-v")


def health_orders_the_start(happened: list[str]) -> None:
    for name in BROKERS:
        before = happened[: happened.index(f"{name} start")]
        assert {f"{namesrv} health_status: healthy" for namesrv in NAMESRVS} <= set(before)


def test_the_java_client_on_the_host(cluster: Docker, tmp_path: Path) -> None:
    with java_client("5.5.0", "ROCKETMQ", tmp_path) as java:
        java_round_trip(java, OUTSIDE, "Java", 40)


def test_a_killed_name_server_and_a_killed_broker(cluster: Docker) -> None:
    # A topic that its first message creates has queues on that message's broker only, until it is sent to others.
    create = ("mqadmin", "updateTopic", "-n", INSIDE, "-c", "DefaultCluster", "-t", "Both")
    cluster.run("docker", "exec", cluster.container("broker-a"), *create)
    with flood(OUTSIDE, "Both") as sender:
        sender.send(300)
        cluster.run("docker", "kill", cluster.container("namesrv-a"))
        cluster.run("docker", "kill", cluster.container("broker-b"))
        sender.send(100)  # broker-a still accepts messages
        cluster.run("docker", "start", cluster.container("broker-b"))
        cluster.wait_healthy(*BROKERS)  # one name server is enough
        acknowledged = sender.end()
    assert acknowledged <= set(job("read", f"{ADDRESS}:9886", "Both").split())
    assert acknowledged <= set(cluster.job_in("trimq", "read", "namesrv-b:9876", "Both").split())
    cluster.run("docker", "start", cluster.container("namesrv-a"))
    cluster.wait_healthy(*NAMESRVS)


def test_an_upgrade_loses_nothing(cluster: Docker, tmp_path: Path) -> None:
    before = {cluster.container(name) for name in BROKERS}
    with flood(OUTSIDE, "Upgrade") as sender:
        sender.send(50)
        cluster.type_in("operate upgrade", tmp_path, timeout=MAKE_SECONDS)
        sender.send(1)
        acknowledged = sender.end()
    assert not before & {cluster.container(name) for name in BROKERS}
    cluster.wait_healthy(*NAMESRVS, *BROKERS)
    each = OUTSIDE.split(";")  # the name servers may have swapped addresses
    wait_until(lambda: all(tuple(job("brokers", at).split()) == BROKERS for at in each), "both know both brokers")
    assert acknowledged <= set(job("read", OUTSIDE, "Upgrade").split())


def table(docker: Docker, path: str) -> dict[str | None, int]:
    """Read the Parquet files without Spark."""
    rows = docker.run(
        *("docker", "run", "--rm", "-v", "trimqtest_tables:/tables:ro", "--entrypoint", "python3"),
        *("trimq-pipeline", "-c", SHOW, path),
    )
    return {row["tags"]: row["count"] for row in json.loads(rows)}


@pytest.mark.usefixtures("pipeline_image")
def test_the_job_counts_what_was_sent(cluster: Docker, tmp_path: Path) -> None:
    """The job runs at the start and on request; its Parquet files contain the input."""
    job("send", OUTSIDE, "orders", 100)
    job("send", OUTSIDE, "payments", 10)
    cluster.type_in("operate pipeline", tmp_path, timeout=MAKE_SECONDS)
    assert table(cluster, "/tables/payments_by_tag") == {"third": 4, "other": 6}
    wait_until(lambda: cluster.state("pipeline")["Status"] == "exited", "the first run has ended", PATIENCE)
    assert cluster.state("pipeline")["ExitCode"] == 0
    assert table(cluster, "/tables/orders_by_tag") == {"third": 34, "other": 66}
